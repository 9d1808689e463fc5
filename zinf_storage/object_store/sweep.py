"""Sweeper: deletes the objects that nobody needs any more."""

from __future__ import annotations

import threading
from typing import Final

from zinf_core.errors import TierError
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.pages import PageTable

_MUCH_GARBAGE: Final = 256
"""Objects that are deleted without waiting for a flush."""


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
        self.is_running = False
        """A worker sweeps; a commit waits for it, it may need the room."""
        self.is_urgent = False
        """A write failed; what it put may be what there was no room for."""

    def is_due(self) -> bool:
        """Return whether a worker should sweep now. Call with the lock held."""
        if self.is_running or self._refused:
            return False
        return len(self._table.garbage) >= (1 if self.is_urgent else _MUCH_GARBAGE)

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
