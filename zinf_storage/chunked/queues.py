"""Queues: what was submitted to a ChunkedTier and did not end yet, and what may run next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zinf_core.errors import TierFullError
from zinf_storage.chunked.commit import Captured
from zinf_storage.chunked.table import Entry
from zinf_storage.chunked.transfer import ChunkedCompletion, WriteTransfer


@dataclass(slots=True, kw_only=True, eq=False)
class Commit:
    """A commit, waiting or running."""

    completion: ChunkedCompletion
    captured: Captured
    """What it makes durable; final once `waits_for` is empty."""
    waits_for: set[WriteTransfer]
    """Writes submitted before it that did not end yet."""


@dataclass(slots=True, kw_only=True, eq=False)
class Queues:
    """Not thread-safe: used under the tier's lock."""

    writes: dict[Entry, deque[WriteTransfer]] = field(default_factory=dict)
    """Per key, in order of submission; only the first of each may run."""
    ready: deque[WriteTransfer] = field(default_factory=deque)
    """Firsts of their key that did not run yet."""
    starved: deque[WriteTransfer] = field(default_factory=deque)
    """Writes that found no room."""
    commits: deque[Commit] = field(default_factory=deque)
    committing: bool = False
    num_running: int = 0
    """Everything workers have, and calls of other threads that must end before a close."""
    num_writing: int = 0
    """Writes among it."""
    num_ended: int = 0
    """Transfers that ended since the beginning, but for writes that are tried again."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not (self.num_running or self.writes or self.commits)

    def add_write(self, write: WriteTransfer) -> None:
        """Queue a write behind those of its key."""
        queued = self.writes.setdefault(write.entry, deque())
        queued.append(write)
        if len(queued) == 1:
            self.ready.append(write)

    def retire_write(self, write: WriteTransfer) -> None:
        """Take out the first write of its key, which ended, and make the next one ready."""
        for commit in self.commits:
            commit.waits_for.discard(write)
        queued = self.writes[write.entry]
        queued.popleft()
        if queued:
            self.ready.append(queued[0])
        else:
            del self.writes[write.entry]

    def may_find_room(self, write: WriteTransfer, error: Exception | None) -> bool:
        """Return whether a write that ended in `error` is worth another attempt: it found no room
        and something ended since it began, or still runs, that may free some."""
        has_moved = self.num_running > 0 or self.num_ended > write.num_ended_before
        return isinstance(error, TierFullError) and has_moved and not write.entry.discarded

    def next_write(self) -> WriteTransfer | None:
        """Take the write to begin now, None if none may. Starved ones run alone and first, each
        once something ended since its last attempt."""
        if not self.starved:
            return self.ready.popleft() if self.ready else None
        first = self.starved[0]
        if self.num_writing or (self.num_running and self.num_ended == first.num_ended_before):
            return None
        return self.starved.popleft()

    def next_commit(self) -> Commit | None:
        """Return the commit to begin now, None if none may; it stays the first until it ends."""
        if self.committing or not self.commits or self.commits[0].waits_for:
            return None
        return self.commits[0]
