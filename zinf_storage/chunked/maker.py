"""ChunkMaker: what a ChunkedTier's transfers and commits consist of."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from zinf_core.buffers import Buffer
from zinf_storage.chunked.commit import Captured, Committer
from zinf_storage.chunked.inners import InnerTiers
from zinf_storage.chunked.reading import ChunkReader
from zinf_storage.chunked.scratch import Scratch
from zinf_storage.chunked.table import Cell, ChunkTable, Entry
from zinf_storage.chunked.transfer import ReadTransfer, WriteTransfer
from zinf_storage.chunked.writing import ChunkWriter
from zinf_storage.transfers.blocks import ByteRange
from zinf_storage.transfers.completion import TransferCompletion
from zinf_storage.transfers.transfer import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What moves chunks, and knows where they are. The tier's lock guards the table."""

    table: ChunkTable
    inners: InnerTiers
    reader: ChunkReader
    writer: ChunkWriter
    committer: Committer
    scratch: Scratch

    def giving_back(self, cells: Iterable[Cell] = ()) -> Task:
        """Return how to give `cells` back to their tiers, and all others that became unused or
        were refused. Call with the lock held, and what is returned without: it may block."""
        return partial(self.inners.discard, [*self.table.take_unused(), *cells])


class ChunkMaker:
    """Makes reads, writes and commits of the keys in a table; see `TransferMaker`."""

    def __init__(self, machinery: Machinery) -> None:
        """Guard the table by a new lock."""
        self.lock = threading.Lock()
        self._machinery = machinery

    def read(self, page: Entry, dst: Buffer, offset: int, *, what: str) -> ReadTransfer:
        """Return a read of the version that is current now."""
        page.version.pins += 1
        return ReadTransfer(
            what=what,
            completion=TransferCompletion(what),
            buffer=dst,
            source=page.version,
            span=self._span(page, dst, offset),
            machinery=self._machinery,
        )

    def write(self, page: Entry, src: Buffer, offset: int, *, what: str) -> WriteTransfer:
        """Return a write, not begun."""
        return WriteTransfer(
            what=what,
            completion=TransferCompletion(what),
            buffer=src,
            page=page,
            span=self._span(page, src, offset),
            machinery=self._machinery,
        )

    def commit(self) -> ChunkCommit:
        """Return a commit of the versions that are current now."""
        return ChunkCommit(self._machinery, lock=self.lock)

    def _span(self, page: Entry, buffer: Buffer, offset: int) -> ByteRange:
        return ByteRange(
            key_nbytes=page.nbytes,
            block_nbytes=self._machinery.table.chunk_nbytes,
            start=offset,
            end=offset + buffer.nbytes,
        )


class ChunkCommit:
    """Versions on their way into an index, pinned until it is known what became of it."""

    def __init__(self, machinery: Machinery, *, lock: threading.Lock) -> None:
        """Pin the versions that are current now."""
        self._machinery = machinery
        self._lock = lock
        self._captured: Captured = {entry: entry.version for entry in machinery.table}
        for version in self._captured.values():
            version.pins += 1

    def include(self, write: WriteTransfer) -> None:
        """Hold what `write` has just made current."""
        if write.target is not None and write.page in self._captured:
            self._machinery.table.unpin(self._captured[write.page])
            self._captured[write.page] = write.target
            write.target.pins += 1

    def run(self) -> None:
        """Write the index, then give back what only the last one named. Blocks.

        Raises as `Committer.write` and, though the commit succeeded, as `Committer.tidy`.
        """
        committer, succeeded = self._machinery.committer, False
        try:
            committer.write(self._captured)
            succeeded = True
        finally:
            with self._lock:
                for version in committer.conclude(self._captured, succeeded=succeeded):
                    self._machinery.table.unpin(version)
                give_back = self._machinery.giving_back()
            give_back()
        committer.tidy()

    def abandon(self) -> None:
        """Drop the pins."""
        for version in self._captured.values():
            self._machinery.table.unpin(version)
