"""ChunkTable: which version of each key is the current one, and who still needs old ones.

[Note: versions] A version of a key is one chunk after the other, each a cell on an inner tier and
what was written to it; it never changes. A write makes another version, with new cells where it
wrote, and the table flips to that when all of it succeeded. A version is pinned by the table (the
current one), by every transfer that reads from it, by a commit under way, and by the committed
index. A cell is given back to its inner tier when the last version that has it lost its last pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zinf_core.errors import InternalError, KeyAbsentError, KeyExistsError
from zinf_core.keys import TensorKey
from zinf_storage.chunked.index import Content, Index, IndexChunk, IndexEntry
from zinf_storage.chunked.names import ChunkName


@dataclass(slots=True, kw_only=True, eq=False)
class Cell:
    """Room for one chunk on an inner tier."""

    inner: int
    """Number of the inner tier."""
    inner_key: TensorKey
    nbytes: int
    """Bytes reserved there."""
    generation: int
    num_versions: int = 0
    """Versions that have it; changed under the tier's lock only."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A cell and what was written to it, None if nothing was."""

    cell: Cell
    content: Content | None


@dataclass(slots=True, eq=False)
class KeyVersion:
    """All chunks of a key; `pins` is changed under the tier's lock only."""

    chunks: tuple[Chunk, ...]
    pins: int = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One reserved key. Changed under the tier's lock only."""

    key: TensorKey
    nbytes: int
    version: KeyVersion
    discarded: bool = False


class ChunkTable:
    """The keys of one tier. Not thread-safe: every call is made under the tier's lock."""

    def __init__(self, tier_name: str, *, chunk_nbytes: int) -> None:
        """Start empty."""
        self.chunk_nbytes = chunk_nbytes
        self.nbytes = 0
        self._tier_name = tier_name
        self._entries: dict[TensorKey, Entry] = {}
        self._reserving: set[TensorKey] = set()
        self._unused: list[Cell] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def entry(self, key: TensorKey) -> Entry:
        """Return the entry of `key`. Raises KeyAbsentError."""
        entry = self._entries.get(key)
        if entry is None:
            raise KeyAbsentError(f"{self._tier_name}: no key {key}")
        return entry

    def written_nbytes(self) -> tuple[int, int]:
        """Return the plain bytes of every chunk that was written, and what they are stored in."""
        plain = stored = 0
        for entry in self._entries.values():
            for index, chunk in enumerate(entry.version.chunks):
                if chunk.content is not None:
                    plain += min(self.chunk_nbytes, entry.nbytes - index * self.chunk_nbytes)
                    stored += chunk.content.stored_nbytes
        return plain, stored

    def begin_reserve(self, key: TensorKey) -> None:
        """Keep the name `key` for the caller, until `end_reserve`. Raises KeyExistsError."""
        if key in self._entries or key in self._reserving:
            raise KeyExistsError(f"{self._tier_name}: {key} is reserved already; discard it first")
        self._reserving.add(key)

    def end_reserve(self, key: TensorKey, nbytes: int, cells: Sequence[Cell] | None) -> None:
        """Add `key` with its cells, or give the name up if there are none."""
        self._reserving.discard(key)
        if cells is not None:
            self._add(key, nbytes, tuple(Chunk(cell, None) for cell in cells))

    def restore(self, index: Index) -> list[KeyVersion]:
        """Add every key of `index`; return their versions, pinned."""
        committed = []
        for entry in index.entries:
            chunks = tuple(
                Chunk(_cell_of(entry.key, number, chunk, index.mark), chunk.content)
                for number, chunk in enumerate(entry.chunks)
            )
            version = self._add(entry.key, entry.nbytes, chunks).version
            version.pins += 1
            committed.append(version)
        return committed

    def discard(self, key: TensorKey) -> None:
        """Forget `key`; its cells are unused with the last pin. Raises KeyAbsentError."""
        entry = self.entry(key)
        del self._entries[key]
        self.nbytes -= entry.nbytes
        entry.discarded = True
        self.unpin(entry.version)

    def derive(self, source: KeyVersion, written: Mapping[int, Chunk]) -> KeyVersion:
        """Return `source` with the `written` chunks in place of its own, pinned for the caller."""
        chunks = tuple(written.get(i, chunk) for i, chunk in enumerate(source.chunks))
        return self._version(chunks)

    def flip(self, entry: Entry, version: KeyVersion) -> None:
        """Make `version` the current one of `entry`, unless that was discarded meanwhile."""
        if not entry.discarded:
            old, entry.version = entry.version, version
            version.pins += 1
            self.unpin(old)

    def unpin(self, version: KeyVersion) -> None:
        """Drop one pin; cells that no version has any more are unused."""
        version.pins -= 1
        if version.pins > 0:
            return
        if version.pins < 0:
            raise InternalError(f"{self._tier_name}: a version was given up twice")
        for chunk in version.chunks:
            chunk.cell.num_versions -= 1
            if not chunk.cell.num_versions:
                self._unused.append(chunk.cell)

    def take_unused(self) -> list[Cell]:
        """Return the cells that became unused since the last call; the caller gives them back."""
        unused, self._unused = self._unused, []
        return unused

    def _add(self, key: TensorKey, nbytes: int, chunks: tuple[Chunk, ...]) -> Entry:
        entry = Entry(key=key, nbytes=nbytes, version=self._version(chunks))
        self._entries[key] = entry
        self.nbytes += nbytes
        return entry

    def _version(self, chunks: tuple[Chunk, ...]) -> KeyVersion:
        for chunk in chunks:
            chunk.cell.num_versions += 1
        return KeyVersion(chunks)


def entry_of(entry: Entry, version: KeyVersion) -> IndexEntry:
    """Return how an index names a version of `entry`."""
    return IndexEntry(
        key=entry.key,
        nbytes=entry.nbytes,
        chunks=tuple(
            IndexChunk(
                inner=chunk.cell.inner,
                generation=chunk.cell.generation,
                room_nbytes=chunk.cell.nbytes,
                content=chunk.content,
            )
            for chunk in version.chunks
        ),
    )


def _cell_of(key: TensorKey, number: int, chunk: IndexChunk, mark: str) -> Cell:
    name = ChunkName(key=key, index=number, generation=chunk.generation, mark=mark)
    return Cell(
        inner=chunk.inner,
        inner_key=name.inner_key,
        nbytes=chunk.room_nbytes,
        generation=chunk.generation,
    )
