"""Manifest: what is stored where, as of one commit.

On disk it is a record (see `zinf_core.runtime.record`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.runtime.record import RecordFormat, number, sequence, text
from zinf_core.units import PAGE_NBYTES, GiB

MANIFEST_VERSION: Final = 1
"""Layout written by this module; larger numbers are refused."""

_FORMAT: Final = RecordFormat(b"zinf-mf\n", MANIFEST_VERSION)
_MAX_NBYTES: Final = 1 << 62
_MAX_BLOCK_NBYTES: Final = GiB
_HEAD: Final = 5
"""Most bytes that msgpack puts before a list or a text."""
_NUMBER: Final = 9
"""Most bytes of a number."""
_FRAME_NBYTES: Final = 256
_SEGMENT_NBYTES: Final = 64
_MAX_REGIONS: Final = 8
"""Pieces of an extent that room is kept for; extents are in one, unless the drive is full."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Region:
    """A page-aligned byte range of one segment file; an extent is one of them, rarely several."""

    segment: int
    """Number of the segment."""
    offset: int
    """First byte within the segment file."""
    nbytes: int

    @property
    def end(self) -> int:
        """First byte behind the range."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSegment:
    """One segment file."""

    number: int
    name: str
    """File name inside the folder of the manifest; never a path."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One key and where its bytes lie."""

    key: TensorKey
    nbytes: int
    """Logical bytes."""
    block_nbytes: int
    """Logical bytes covered by each checksum; the last block may be shorter."""
    regions: tuple[Region, ...]
    """End to end they hold the bytes, rounded up to pages."""
    checksums: tuple[int | None, ...]
    """xxh3-64 of each block; None if there is none: never written, or from device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a tier held at one commit."""

    generation: int
    """Number of the commit, from 1."""
    segments: tuple[ManifestSegment, ...]
    entries: tuple[ManifestEntry, ...]


class FileCalls(Protocol):
    """The system calls an atomic write makes, so that tests can fail each of them."""

    @property
    def open(self) -> Callable[..., int]:
        """As `os.open`."""
        ...

    @property
    def write(self) -> Callable[..., int]:
        """As `os.write`."""
        ...

    @property
    def fsync(self) -> Callable[..., None]:
        """As `os.fsync`."""
        ...

    @property
    def ftruncate(self) -> Callable[..., None]:
        """As `os.ftruncate`."""
        ...

    @property
    def replace(self) -> Callable[..., None]:
        """As `os.replace`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFileCalls:
    """The real calls."""

    open: Callable[..., int] = os.open
    write: Callable[..., int] = os.write
    fsync: Callable[..., None] = os.fsync
    ftruncate: Callable[..., None] = os.ftruncate
    replace: Callable[..., None] = os.replace


def write_atomically(path: Path, data: bytes, *, calls: FileCalls | None = None) -> None:
    """Make `data` the durable content of `path`; after a crash it is the old or the new content.

    Blocks. Raises OSError; `path` then has its old content, or durably or not the new one if
    only the last sync failed.
    """
    publish(stage(path, data, calls=calls), path, calls=calls)


def stage(path: Path, data: bytes, *, calls: FileCalls | None = None) -> Path:
    """Write `data` durably to a file beside `path` and return that file's path. Blocks.

    Uses the blocks of that file if it is there. Raises OSError; `path` is never touched.
    """
    calls = calls or SystemFileCalls()
    beside = path.with_name(path.name + ".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = calls.open(beside, flags, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[calls.write(fd, rest) :]
        calls.ftruncate(fd, len(data))
        calls.fsync(fd)
    finally:
        os.close(fd)
    return beside


def publish(staged: Path, path: Path, *, calls: FileCalls | None = None) -> None:
    """Put a staged file in the place of `path` and sync the folder. Blocks.

    Raises OSError; it is then unknown which of the two contents a crash would leave.
    """
    calls = calls or SystemFileCalls()
    calls.replace(staged, path)
    sync_folder(path.parent, calls=calls)


def sync_folder(folder: Path, *, calls: FileCalls | None = None) -> None:
    """Make names created and replaced in `folder` durable. Blocks. Raises OSError."""
    calls = calls or SystemFileCalls()
    fd = calls.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        os.close(fd)


def serialize(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest`. Pure."""
    body = {
        "generation": manifest.generation,
        "segments": [[s.number, s.name, s.nbytes] for s in manifest.segments],
        "entries": [_packed_entry(entry) for entry in manifest.entries],
    }
    return _FORMAT.seal(body)


def parse(data: bytes, *, path: str) -> Manifest:
    """Return the manifest in `data`. Pure; `path` names the file in messages.

    Raises CorruptDataError if anything about it is not what `serialize` writes: length, digest,
    version, types, numbers out of range, extents that overlap or leave their segment.
    """
    try:
        manifest = _decode(_FORMAT.unseal(data))
        _check_segments(manifest.segments)
        _check_entries(manifest)
    except ValueError as exc:
        raise CorruptDataError(
            f"manifest {path}: {exc}; restore the file from a copy, or remove the folder to start "
            "empty"
        ) from exc
    return manifest


def max_entry_nbytes(key: TensorKey, nbytes: int, block_nbytes: int) -> int:
    """Return the most bytes that an entry takes whose extent is in `_MAX_REGIONS` pieces. Pure."""
    texts = (key.name, key.kind_value, key.part)
    names = sum(_HEAD + len(text.encode(errors="surrogatepass")) for text in texts)
    regions = min(-(-nbytes // PAGE_NBYTES), _MAX_REGIONS) * (_HEAD + 3 * _NUMBER)
    checksums = -(-nbytes // block_nbytes) * _NUMBER
    return 4 * _HEAD + names + 2 * _NUMBER + regions + checksums


def max_manifest_nbytes(entries_nbytes: int, num_segments: int) -> int:
    """Return the most bytes that a manifest takes whose entries take `entries_nbytes`. Pure."""
    return _FRAME_NBYTES + num_segments * _SEGMENT_NBYTES + entries_nbytes


def _packed_entry(entry: ManifestEntry) -> list[object]:
    key = entry.key
    return [
        [key.name, key.kind_value, key.part],
        entry.nbytes,
        entry.block_nbytes,
        [[region.segment, region.offset, region.nbytes] for region in entry.regions],
        list(entry.checksums),
    ]


def _decode(raw: object) -> Manifest:
    if not isinstance(raw, dict) or set(raw) != {"generation", "segments", "entries"}:
        raise ValueError("has other fields than generation, segments and entries")
    return Manifest(
        generation=number(raw["generation"], "generation", low=1, high=_MAX_NBYTES),
        segments=tuple(_decoded_segment(item) for item in sequence(raw["segments"], "segments")),
        entries=tuple(_decoded_entry(item) for item in sequence(raw["entries"], "entries")),
    )


def _decoded_segment(item: object) -> ManifestSegment:
    raw_number, name, nbytes = sequence(item, "segment", lengths=(3,))
    return ManifestSegment(
        number=number(raw_number, "segment number", high=_MAX_NBYTES),
        name=text(name, "segment name"),
        nbytes=number(nbytes, "segment size", high=_MAX_NBYTES),
    )


def _decoded_entry(item: object) -> ManifestEntry:
    raw_key, nbytes, block_nbytes, raw_regions, raw_checksums = sequence(
        item, "entry", lengths=(5,)
    )
    name, kind_value, part = (text(x, "key") for x in sequence(raw_key, "key", lengths=(3,)))
    return ManifestEntry(
        key=TensorKey(name, kind_value, part),
        nbytes=number(nbytes, "key size", high=_MAX_NBYTES),
        block_nbytes=number(block_nbytes, "block size", low=1, high=_MAX_BLOCK_NBYTES),
        regions=tuple(_decoded_region(raw) for raw in sequence(raw_regions, "extent list")),
        checksums=tuple(
            None if raw is None else number(raw, "checksum")
            for raw in sequence(raw_checksums, "checksum list")
        ),
    )


def _decoded_region(item: object) -> Region:
    segment, offset, nbytes = sequence(item, "extent", lengths=(3,))
    return Region(
        segment=number(segment, "extent segment", high=_MAX_NBYTES),
        offset=number(offset, "extent offset", high=_MAX_NBYTES),
        nbytes=number(nbytes, "extent size", low=1, high=_MAX_NBYTES),
    )


def _check_segments(segments: tuple[ManifestSegment, ...]) -> None:
    for segment in segments:
        name = segment.name
        if not name or name in {".", ".."} or "/" in name or "\\" in name or "\0" in name:
            raise ValueError(f"segment name {name!r} is not a plain file name")
        if segment.nbytes % PAGE_NBYTES:
            raise ValueError(f"segment {name} of {segment.nbytes} bytes is not whole pages")
    for what in ({s.number for s in segments}, {s.name for s in segments}):
        if len(what) != len(segments):
            raise ValueError("names a segment twice")


def _check_entries(manifest: Manifest) -> None:
    sizes = {segment.number: segment.nbytes for segment in manifest.segments}
    for entry in manifest.entries:
        _check_entry(entry, sizes)
    if len({entry.key for entry in manifest.entries}) != len(manifest.entries):
        raise ValueError("names a key twice")
    regions = sorted(region for entry in manifest.entries for region in entry.regions)
    for before, after in pairwise(regions):
        if before.segment == after.segment and before.end > after.offset:
            raise ValueError(f"extents overlap at byte {after.offset} of segment {after.segment}")


def _check_entry(entry: ManifestEntry, sizes: dict[int, int]) -> None:
    for region in entry.regions:
        if region.offset % PAGE_NBYTES or region.nbytes % PAGE_NBYTES:
            raise ValueError(f"extent of {entry.key} at byte {region.offset} is not whole pages")
        if region.end > sizes.get(region.segment, 0):
            raise ValueError(
                f"extent of {entry.key} ends at byte {region.end} of segment {region.segment}, "
                f"which has {sizes.get(region.segment, 0)}"
            )
    if entry.block_nbytes % PAGE_NBYTES:
        raise ValueError(f"block size {entry.block_nbytes} of {entry.key} is not whole pages")
    stored = sum(region.nbytes for region in entry.regions)
    if stored != -(-entry.nbytes // PAGE_NBYTES) * PAGE_NBYTES:
        raise ValueError(f"extents of {entry.key} hold {stored} bytes for {entry.nbytes}")
    num_blocks = -(-entry.nbytes // entry.block_nbytes)
    if len(entry.checksums) != num_blocks:
        raise ValueError(
            f"{entry.key} has {len(entry.checksums)} checksums for {num_blocks} blocks"
        )
