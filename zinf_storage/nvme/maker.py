"""NvmeMaker: what the NVMe tier's transfers and commits consist of."""

from __future__ import annotations

import threading

from zinf_core.buffers import Buffer
from zinf_storage.nvme.commit import Captured, Committer
from zinf_storage.nvme.mover import BlockMover
from zinf_storage.nvme.options import NvmeOptions
from zinf_storage.nvme.pages import Page, PageTable
from zinf_storage.nvme.transfer import ReadTransfer, WriteTransfer
from zinf_storage.transfers.blocks import ByteRange
from zinf_storage.transfers.completion import TransferCompletion


class NvmeMaker:
    """Makes reads, writes and commits of the keys in `table`; see `TransferMaker`."""

    def __init__(
        self, table: PageTable, *, mover: BlockMover, committer: Committer, options: NvmeOptions
    ) -> None:
        """Guard `table` and the free extents by a new lock; segments are created under it."""
        self.lock = threading.Lock()
        self._table = table
        self._mover = mover
        self._committer = committer
        self._options = options

    def read(self, page: Page, dst: Buffer, offset: int, *, what: str) -> ReadTransfer:
        """Return a read of the version that is current now."""
        source = page.version
        source.pins += 1
        return ReadTransfer(
            what=what,
            completion=TransferCompletion(what),
            memory=self._mover.memory_of(dst),
            offset=offset,
            source=source,
            span=ByteRange(
                key_nbytes=source.nbytes,
                block_nbytes=source.block_nbytes,
                start=offset,
                end=offset + dst.nbytes,
            ),
            verify=self._options.verify_reads,
            table=self._table,
            mover=self._mover,
        )

    def write(self, page: Page, src: Buffer, offset: int, *, what: str) -> WriteTransfer:
        """Return a write, not begun."""
        return WriteTransfer(
            what=what,
            completion=TransferCompletion(what),
            memory=self._mover.memory_of(src),
            offset=offset,
            nbytes=src.nbytes,
            page=page,
            io_nbytes=self._options.io_nbytes,
            table=self._table,
            mover=self._mover,
        )

    def commit(self) -> NvmeCommit:
        """Return a commit of the versions that are current now."""
        return NvmeCommit(self._table, committer=self._committer, lock=self.lock)


class NvmeCommit:
    """Versions on their way into a manifest, pinned until it is known what became of it."""

    def __init__(self, table: PageTable, *, committer: Committer, lock: threading.Lock) -> None:
        """Pin the versions that are current now."""
        self._table = table
        self._committer = committer
        self._lock = lock
        self._captured: Captured = {page: table.snapshot(page.version) for page in table}

    def include(self, write: WriteTransfer) -> None:
        """Hold what `write` has just made current."""
        if write.page in self._captured:
            self._table.unpin(self._captured[write.page].version)
            self._captured[write.page] = self._table.snapshot(write.versions()[1])

    def run(self) -> None:
        """Write the manifest, then drop what only the last one named. Blocks.

        Raises as `Committer.write`.
        """
        succeeded = False
        try:
            self._committer.write(self._captured)
            succeeded = True
        finally:
            with self._lock:
                for snapshot in self._committer.conclude(self._captured, succeeded=succeeded):
                    self._table.unpin(snapshot.version)

    def abandon(self) -> None:
        """Drop the pins."""
        for snapshot in self._captured.values():
            self._table.unpin(snapshot.version)
