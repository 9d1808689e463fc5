"""Back doors of the chunked tiers: an index decoder, chunk decoders and a codec of their own.

Nothing here imports what it checks: layouts are written down a second time on purpose.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import blosc2
import lz4.block
import msgpack
import numpy as np
import xxhash
import zstandard

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.testing import DictTier, FaultyTier
from zinf_core.tier import Tier
from zinf_storage.nvme import NvmeTier

RawRead = Callable[[int, TensorKey], bytes]
"""Returns the bytes stored on an inner tier, by its number, under an inner key."""
RawWrite = Callable[[int, TensorKey, bytes], None]
"""Replaces them, from the first byte on."""

_INDEX = re.compile(r"[0-9]+")


def stored(tier: Tier, key: TensorKey) -> bytes:
    """Return what a dict or NVMe tier, wrapped or not, stores; not with its own reads."""
    if isinstance(tier, FaultyTier):
        return stored(tier._inner, key)
    if isinstance(tier, DictTier):
        return tier._stored[key]
    assert isinstance(tier, NvmeTier)
    extent = tier.stat(key)
    with _segment(tier, extent.segment).open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)


def replace_stored(tier: Tier, key: TensorKey, data: bytes) -> None:
    """Replace the first bytes of what a dict or NVMe tier stores; not with its own writes."""
    if isinstance(tier, FaultyTier):
        replace_stored(tier._inner, key, data)
    elif isinstance(tier, DictTier):
        tier._stored[key] = data + tier._stored[key][len(data) :]
    else:
        assert isinstance(tier, NvmeTier)
        extent = tier.stat(key)
        with _segment(tier, extent.segment).open("rb+") as file:
            file.seek(extent.offset)
            file.write(data)


def _segment(tier: NvmeTier, number: int) -> Path:
    return tier._parts.folder.path / f"segment-{number:05d}.zinf"


@dataclass(frozen=True)
class StoredChunk:
    """One chunk as the index on the first inner tier describes it."""

    inner: int
    inner_key: TensorKey
    nbytes: int
    stored_nbytes: int | None
    codec: str
    width: int


def index_of(first_keys: Iterator[TensorKey], read: RawRead) -> dict:
    """Return the newest index on the first inner tier, decoded by hand."""
    numbers = [
        int(key.part)
        for key in first_keys
        if key.name == "zinf.index" and _INDEX.fullmatch(key.part)
    ]
    raw = read(0, TensorKey("zinf.index", "param", str(max(numbers))))
    assert raw[:8] == b"zinf-ix\n"
    (body_nbytes,) = struct.unpack_from("<Q", raw, 12)
    body = msgpack.unpackb(raw[20 : 20 + body_nbytes])
    assert isinstance(body, dict)
    return body


def chunks_of(index: dict, key: TensorKey) -> list[StoredChunk]:
    """Return where the chunks of `key` lie."""
    name, kind, part = key.name, key.kind_value, key.part
    entries = {tuple(names): rest for names, *rest in index["entries"]}
    nbytes, chunks = entries[name, kind, part]
    found = []
    for number, (inner, generation, _room, *content) in enumerate(chunks):
        inner_part = f"{part}#{number}.{generation}.{index['mark']}"
        found.append(
            StoredChunk(
                inner=inner,
                inner_key=TensorKey(name, kind, inner_part),
                nbytes=min(index["chunk_nbytes"], nbytes - number * index["chunk_nbytes"]),
                stored_nbytes=content[0] if content else None,
                codec=content[2] if content else "",
                width=content[3] if content else 1,
            )
        )
    return found


def decoded(chunk: StoredChunk, raw: bytes, tokens: dict[bytes, bytes] | None = None) -> bytes:
    """Return the plain bytes of a chunk that is stored as `raw`."""
    coded = raw[: chunk.stored_nbytes]
    if chunk.codec == "token":
        assert tokens is not None
        return tokens[coded]
    if chunk.codec == "blosc2":
        return blosc2.decompress(coded)
    if chunk.codec == "zstd":
        return unshuffled(zstandard.ZstdDecompressor().decompress(coded), chunk.width)
    if chunk.codec == "lz4":
        plain = lz4.block.decompress(coded, uncompressed_size=chunk.nbytes)
        return unshuffled(plain, chunk.width)
    assert not chunk.codec
    return coded


def unshuffled(data: bytes, width: int) -> bytes:
    """Undo a byte shuffle: a transposition."""
    whole = len(data) // width * width
    planes = np.frombuffer(data[:whole], np.uint8).reshape(width, whole // width)
    return planes.T.tobytes() + data[whole:]


class TokenCodec:
    """A codec under which every chunk shrinks, noise too: to a token, with a ledger beside it."""

    name = "token"

    def __init__(self) -> None:
        self.ledger: dict[bytes, bytes] = {}

    def token(self, data: bytes) -> bytes:
        token = xxhash.xxh3_128_digest(data)
        self.ledger[token] = data
        return token

    def encode(self, src: np.ndarray, *, width: int, scratch: np.ndarray) -> bytes:
        assert scratch.nbytes == src.nbytes
        return self.token(src.tobytes())

    def decode(
        self, coded: np.ndarray, dst: np.ndarray, *, width: int, scratch: np.ndarray
    ) -> None:
        data = self.ledger.get(coded.tobytes())
        if data is None or len(data) != dst.nbytes:
            raise CorruptDataError("no such token")
        dst[:] = np.frombuffer(data, np.uint8)
