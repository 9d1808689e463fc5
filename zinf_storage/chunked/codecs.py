"""Codecs: how the bytes of one chunk become fewer and come back exactly.

zstandard, lz4 and blosc2 (extra ``zinf[compress]``) are imported here only, each when it is first
asked for.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from zinf_core.buffers import ByteArray
from zinf_core.errors import ConfigError, CorruptDataError
from zinf_storage.chunked.shuffle import shuffle, unshuffle


class Codec(Protocol):
    """Compresses chunks. Thread-safe."""

    @property
    def name(self) -> str:
        """Name by which an index remembers it, at most 16 characters."""
        ...

    def encode(self, src: ByteArray, *, width: int, scratch: ByteArray) -> bytes:
        """Return the coded form of `src`, whose elements are `width` bytes wide.

        May use `scratch`, of the length of `src`. Holds the result and what the library needs.
        """
        ...

    def decode(self, coded: ByteArray, dst: ByteArray, *, width: int, scratch: ByteArray) -> None:
        """Fill `dst` with what was encoded.

        Raises CorruptDataError, without saying where, if `coded` is nothing of `dst`'s length.
        """
        ...


class ZstdCodec:
    """Byte shuffle, then Zstandard. One context per thread, a few MiB at the usual levels."""

    name = "zstd"

    def __init__(self, level: int | None = None) -> None:
        """Compress at `level` (default 1). Raises ConfigError without the package, or for a level
        that there is not."""
        self._zstd = _imported("zstandard", self.name)
        self._level = _checked_level(self.name, 1 if level is None else level, -50, 22)
        self._local = threading.local()

    def encode(self, src: ByteArray, *, width: int, scratch: ByteArray) -> bytes:
        """Return the coded form of `src`."""
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._zstd.ZstdCompressor(level=self._level, write_content_size=True)
            self._local.compressor = compressor
        coded: bytes = compressor.compress(shuffle(src, width, scratch))
        return coded

    def decode(self, coded: ByteArray, dst: ByteArray, *, width: int, scratch: ByteArray) -> None:
        """Fill `dst`, without another copy of it in memory."""
        target = dst if width == 1 else scratch
        try:
            with self._zstd.ZstdDecompressor().stream_reader(coded) as reader:
                filled = _filled(reader.readinto, target)
                surplus = reader.read(1)
        except self._zstd.ZstdError as exc:
            raise CorruptDataError(f"{self.name}: {exc}") from exc
        if filled != target.nbytes or surplus:
            raise CorruptDataError(f"{self.name}: not {target.nbytes} bytes")
        unshuffle(target, width, dst)


class Lz4Codec:
    """Byte shuffle, then one LZ4 block."""

    name = "lz4"

    def __init__(self, level: int | None = None) -> None:
        """Compress at `level`: 0 (the default) is fast, 1 to 12 are slower and smaller.

        Raises ConfigError without the package, or for a level that there is not.
        """
        self._block = _imported("lz4.block", self.name)
        level = _checked_level(self.name, 0 if level is None else level, 0, 12)
        self._mode: dict[str, Any] = {"mode": "fast"}
        if level:
            self._mode = {"mode": "high_compression", "compression": level}

    def encode(self, src: ByteArray, *, width: int, scratch: ByteArray) -> bytes:
        """Return the coded form of `src`."""
        shuffled = shuffle(src, width, scratch)
        coded: bytes = self._block.compress(shuffled, store_size=False, **self._mode)
        return coded

    def decode(self, coded: ByteArray, dst: ByteArray, *, width: int, scratch: ByteArray) -> None:
        """Fill `dst`; holds its bytes once more meanwhile."""
        try:
            raw = self._block.decompress(coded, uncompressed_size=dst.nbytes)
        except self._block.LZ4BlockError as exc:
            raise CorruptDataError(f"{self.name}: {exc}") from exc
        if len(raw) != dst.nbytes:
            raise CorruptDataError(f"{self.name}: {len(raw)} bytes instead of {dst.nbytes}")
        target = dst if width == 1 else scratch
        target.data[:] = memoryview(raw)
        unshuffle(target, width, dst)


class Blosc2Codec:
    """Blosc2 with its own shuffle and Zstandard inside, single-threaded."""

    name = "blosc2"

    def __init__(self, level: int | None = None) -> None:
        """Compress at `level` from 1 (the default) to 9.

        Raises ConfigError without the package, or for a level that there is not.
        """
        self._blosc2 = _imported("blosc2", self.name)
        self._level = _checked_level(self.name, 1 if level is None else level, 1, 9)

    def encode(self, src: ByteArray, *, width: int, scratch: ByteArray) -> bytes:
        """Return the coded form of `src`."""
        del scratch
        blosc2 = self._blosc2
        coded: bytes = blosc2.compress2(
            src,
            codec=blosc2.Codec.ZSTD,
            clevel=self._level,
            typesize=width,
            filters=[blosc2.Filter.SHUFFLE],
            filters_meta=[0],
            nthreads=1,
        )
        return coded

    def decode(self, coded: ByteArray, dst: ByteArray, *, width: int, scratch: ByteArray) -> None:
        """Fill `dst`, without another copy of it in memory."""
        del width, scratch
        try:
            sizes = self._blosc2.get_cbuffer_sizes(coded)
            if sizes[0] != dst.nbytes or sizes[1] != coded.nbytes:
                raise CorruptDataError(f"{self.name}: not {dst.nbytes} bytes")
            self._blosc2.decompress2(coded, dst=dst, nthreads=1)
        except (RuntimeError, ValueError) as exc:
            raise CorruptDataError(f"{self.name}: {exc}") from exc


_CODECS: Final[dict[str, Callable[[int | None], Codec]]] = {
    codec.name: codec for codec in (Blosc2Codec, Lz4Codec, ZstdCodec)
}


def codec_named(name: str, *, level: int | None = None) -> Codec:
    """Return the codec called `name`, at `level` or its default one.

    Raises ConfigError for another name or level, or if its package is missing.
    """
    if name not in _CODECS:
        raise ConfigError(f"codec = {name!r} is not one of {', '.join(_CODECS)}")
    return _CODECS[name](level)


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        raise ConfigError(
            f'codec {name} needs {package}; pip install "zinf[compress]" ({exc})'
        ) from exc


def _checked_level(name: str, level: int, low: int, high: int) -> int:
    if not low <= level <= high:
        raise ConfigError(f"codec {name}: level = {level} is not within {low} to {high}")
    return level


def _filled(readinto: Callable[[memoryview], int], dst: ByteArray) -> int:
    """Call `readinto` until `dst` is full or nothing comes; return the bytes that came."""
    filled = 0
    while filled < dst.nbytes:
        count = readinto(dst.data[filled:])
        if not count:
            break
        filled += count
    return filled
