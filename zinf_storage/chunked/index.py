"""Index: which chunks hold which bytes of which keys, as of one commit. Pure.

Stored as a record (see `zinf_core.runtime.record`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.runtime.record import RecordFormat, number, sequence, text
from zinf_core.units import PAGE_NBYTES
from zinf_storage.chunked.names import MARK_LENGTH
from zinf_storage.chunked.shuffle import WIDTHS

INDEX_VERSION: Final = 1
"""Layout written by this module; larger numbers are refused."""

_FORMAT: Final = RecordFormat(b"zinf-ix\n", INDEX_VERSION)
_MARK: Final = re.compile(rf"[0-9a-f]{{{MARK_LENGTH}}}")
_FIELDS: Final = frozenset(
    {"number", "mark", "scheme", "chunk_nbytes", "num_inner", "next_generation", "entries"}
)


@dataclass(frozen=True, slots=True)
class Content:
    """What was written to a chunk's room, and how to read it."""

    stored_nbytes: int
    checksum: int | None = None
    """xxh3-64 of the stored bytes; None if the tier keeps no checksums."""
    codec: str = ""
    """Name of the codec; empty for the plain bytes."""
    width: int = 1
    """Bytes per element that the codec was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChunk:
    """One chunk of one key."""

    inner: int
    """Number of the inner tier."""
    generation: int
    room_nbytes: int
    """Bytes reserved on the inner tier."""
    content: Content | None
    """None if it was never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """One key."""

    key: TensorKey
    nbytes: int
    chunks: tuple[IndexChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything a tier held at one commit."""

    number: int
    """Number of the commit, from 1."""
    mark: str
    """Mark of the tier; see `ChunkName`."""
    scheme: str
    chunk_nbytes: int
    num_inner: int
    next_generation: int
    """No chunk of this commit has this generation or a later one."""
    entries: tuple[IndexEntry, ...] = ()


def serialize(index: Index) -> bytes:
    """Return the bytes of `index`."""
    body = {
        "number": index.number,
        "mark": index.mark,
        "scheme": index.scheme,
        "chunk_nbytes": index.chunk_nbytes,
        "num_inner": index.num_inner,
        "next_generation": index.next_generation,
        "entries": [_packed(entry) for entry in index.entries],
    }
    return _FORMAT.seal(body)


def parse(data: bytes, *, where: str) -> Index:
    """Return the index in `data`; `where` names the tier in messages.

    Raises CorruptDataError if anything about it is not what `serialize` writes: length, digest,
    version, types, numbers out of range, chunks that do not make up their key.
    """
    try:
        index = _decode(_FORMAT.unseal(data))
        _check(index)
    except ValueError as exc:
        raise CorruptDataError(
            f"{where}: the index cannot be read: {exc}; restore the inner tiers from a copy, or "
            "empty all of them to start anew"
        ) from exc
    return index


def _packed(entry: IndexEntry) -> list[object]:
    key = entry.key
    return [
        [key.name, key.kind_value, key.part],
        entry.nbytes,
        [_packed_chunk(chunk) for chunk in entry.chunks],
    ]


def _packed_chunk(chunk: IndexChunk) -> list[object]:
    where: list[object] = [chunk.inner, chunk.generation, chunk.room_nbytes]
    content = chunk.content
    if content is None:
        return where
    return [*where, content.stored_nbytes, content.checksum, content.codec, content.width]


def _decode(raw: object) -> Index:
    if not isinstance(raw, dict) or set(raw) != _FIELDS:
        raise ValueError(f"has other fields than {', '.join(sorted(_FIELDS))}")
    return Index(
        number=number(raw["number"], "number", low=1),
        mark=text(raw["mark"], "mark"),
        scheme=text(raw["scheme"], "scheme"),
        chunk_nbytes=number(raw["chunk_nbytes"], "chunk size", low=PAGE_NBYTES),
        num_inner=number(raw["num_inner"], "count of inner tiers", low=1),
        next_generation=number(raw["next_generation"], "next generation"),
        entries=tuple(_decoded_entry(item) for item in sequence(raw["entries"], "entries")),
    )


def _decoded_entry(item: object) -> IndexEntry:
    raw_key, nbytes, raw_chunks = sequence(item, "entry", lengths=(3,))
    name, kind_value, part = (text(x, "key") for x in sequence(raw_key, "key", lengths=(3,)))
    return IndexEntry(
        key=TensorKey(name, kind_value, part),
        nbytes=number(nbytes, "key size"),
        chunks=tuple(_decoded_chunk(raw) for raw in sequence(raw_chunks, "chunk list")),
    )


def _decoded_chunk(item: object) -> IndexChunk:
    fields = sequence(item, "chunk", lengths=(3, 7))
    inner, generation, room_nbytes = (number(field, "chunk field") for field in fields[:3])
    content = None
    if len(fields) == 7:
        stored_nbytes, checksum, codec, width = fields[3:]
        content = Content(
            stored_nbytes=number(stored_nbytes, "stored size"),
            checksum=None if checksum is None else number(checksum, "checksum"),
            codec=text(codec, "codec"),
            width=number(width, "width"),
        )
    return IndexChunk(inner=inner, generation=generation, room_nbytes=room_nbytes, content=content)


def _check(index: Index) -> None:
    if index.chunk_nbytes % PAGE_NBYTES or not _MARK.fullmatch(index.mark):
        raise ValueError(f"has mark {index.mark!r} and chunks of {index.chunk_nbytes} bytes")
    for entry in index.entries:
        _check_entry(entry, index)
    if len({entry.key for entry in index.entries}) != len(index.entries):
        raise ValueError("names a key twice")


def _check_entry(entry: IndexEntry, index: Index) -> None:
    if len(entry.chunks) != -(-entry.nbytes // index.chunk_nbytes):
        raise ValueError(f"has {len(entry.chunks)} chunks for {entry.key} of {entry.nbytes} bytes")
    for place, chunk in enumerate(entry.chunks):
        nbytes = min(index.chunk_nbytes, entry.nbytes - place * index.chunk_nbytes)
        if chunk.inner >= index.num_inner or chunk.generation >= index.next_generation:
            raise ValueError(
                f"has generation {chunk.generation} on inner tier {chunk.inner} for chunk {place} "
                f"of {entry.key}, which cannot be"
            )
        if chunk.room_nbytes > nbytes or (chunk.content is None and chunk.room_nbytes < nbytes):
            raise ValueError(f"has {chunk.room_nbytes} bytes for {nbytes} of {entry.key}")
        if chunk.content is not None:
            _check_content(chunk.content, chunk, nbytes, entry.key)


def _check_content(content: Content, chunk: IndexChunk, nbytes: int, key: TensorKey) -> None:
    plain = content.stored_nbytes == nbytes
    coded = content.stored_nbytes < nbytes and content.checksum is not None
    fits = 0 < content.stored_nbytes <= chunk.room_nbytes
    if not fits or not (coded if content.codec else plain) or content.width not in WIDTHS:
        raise ValueError(
            f"has {content.stored_nbytes} stored bytes ({content.codec or 'plain'}, width "
            f"{content.width}) in {chunk.room_nbytes} for {nbytes} of {key}"
        )
