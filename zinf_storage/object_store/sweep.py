"""Sweeper: deletes the objects that nobody needs any more."""

from __future__ import annotations

import contextlib
import threading
from typing import Final

from zinf_core.errors import TierError
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.pages import PageTable
from zinf_storage.transfers.transfer import Task

_MUCH_GARBAGE: Final = 16
"""Objects that are deleted without waiting for a flush: 128 MiB at the default part size."""


class Sweeper:
    """Knows when to delete, and deletes. The tier's lock, given to it, guards its fields."""

    def __init__(
        self, table: PageTable, bucket: Bucket, *, lock: threading.Lock, tier_name: str
    ) -> None:
        """Start with nothing to do."""
        self._table = table
        self._bucket = bucket
        self._lock = lock
        self._doing = f"{tier_name}: deleting old objects"
        self._refused = False
        """A sweep failed, and no later one succeeded yet."""
        self._is_running = False
        """A sweep between two commits runs, or is about to."""
        self.is_urgent = False
        """A write failed; what it put may be what there was no room for."""

    def due(self) -> Task | None:
        """Return the sweep that should be run now, if any. Call with the lock held.

        A commit waits for it: it may need the room.
        """
        num_names = 1 if self.is_urgent else _MUCH_GARBAGE
        if self._is_running or self._refused or len(self._table.garbage) < num_names:
            return None
        self._is_running = True
        return self._sweep_between

    def sweep(self) -> None:
        """Delete the garbage there is. Call without the lock. Blocks.

        Raises TransferError; the next sweep then tries again.
        """
        with self._lock:
            self.is_urgent = False
            names = self._table.take_garbage()
        try:
            self._bucket.delete(names, doing=self._doing)
        except TierError:
            with self._lock:
                self._table.garbage += names
                self._refused = True
            raise
        with self._lock:
            self._refused = False

    def _sweep_between(self) -> None:
        # After a failure the names are garbage again; the next flush tries once more and tells.
        with contextlib.suppress(TierError):
            self.sweep()
        with self._lock:
            self._is_running = False
