"""ObjectMaker: what the object tier's transfers and commits consist of."""

from __future__ import annotations

import contextlib
import threading

from zinf_core.buffers import Buffer
from zinf_core.errors import TierError
from zinf_storage.object_store.commit import Captured, Committer
from zinf_storage.object_store.pages import Page, PageTable
from zinf_storage.object_store.sweep import Sweeper
from zinf_storage.object_store.transfer import PartMover, ReadTransfer, WriteTransfer
from zinf_storage.transfers.completion import TransferCompletion


class ObjectMaker:
    """Makes reads, writes and commits of the keys in `table`; see `TransferMaker`."""

    def __init__(
        self, table: PageTable, *, mover: PartMover, committer: Committer, sweeper: Sweeper,
        lock: threading.Lock,
    ) -> None:  # fmt: skip
        """Guard `table` by `lock`."""
        self.lock = lock
        self._table = table
        self._mover = mover
        self._committer = committer
        self._sweeper = sweeper

    def read(self, page: Page, dst: Buffer, offset: int, *, what: str) -> ReadTransfer:
        """Return a read of the version that is current now."""
        return ReadTransfer(
            what=what,
            completion=TransferCompletion(what),
            buffer=dst,
            offset=offset,
            nbytes=dst.nbytes,
            source=self._table.pin(page.version),
            table=self._table,
            mover=self._mover,
        )

    def write(self, page: Page, src: Buffer, offset: int, *, what: str) -> WriteTransfer:
        """Return a write, not begun."""
        return WriteTransfer(
            what=what,
            completion=TransferCompletion(what),
            buffer=src,
            offset=offset,
            nbytes=src.nbytes,
            page=page,
            table=self._table,
            mover=self._mover,
            sweeper=self._sweeper,
        )

    def commit(self) -> ObjectCommit:
        """Return a commit of the versions that are current now."""
        return ObjectCommit(
            self._table, committer=self._committer, sweeper=self._sweeper, lock=self.lock
        )


class ObjectCommit:
    """Versions on their way into a manifest, pinned until it is known what became of it."""

    def __init__(
        self, table: PageTable, *, committer: Committer, sweeper: Sweeper, lock: threading.Lock
    ) -> None:
        """Pin the versions that are current now."""
        self._table = table
        self._committer = committer
        self._sweeper = sweeper
        self._lock = lock
        self._captured: Captured = {page: table.pin(page.version) for page in table}

    def include(self, write: WriteTransfer) -> None:
        """Hold what `write` has just made current."""
        if write.page in self._captured:
            self._table.unpin(self._captured[write.page])
            self._captured[write.page] = self._table.pin(write.versions()[1])

    def run(self) -> None:
        """Put the manifest, then delete what only the last one named. Blocks.

        Raises as `Committer.write` and, though the commit succeeded, as `Sweeper.sweep`.
        """
        # Makes room for the manifest. If it fails, so does the sweep below, which tells.
        with contextlib.suppress(TierError):
            self._sweeper.sweep()
        succeeded = False
        try:
            self._committer.write(self._captured)
            succeeded = True
        finally:
            with self._lock:
                self._conclude(succeeded=succeeded)
        self._sweeper.sweep()

    def abandon(self) -> None:
        """Drop the pins."""
        for version in self._captured.values():
            self._table.unpin(version)

    def _conclude(self, *, succeeded: bool) -> None:
        versions, names = self._committer.conclude(self._captured, succeeded=succeeded)
        self._table.garbage += names
        for version in versions:
            self._table.unpin(version)
