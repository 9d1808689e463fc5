"""Queues: what was submitted to a tier and did not end yet, and which write may begin."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zinf_core.errors import TierFullError
from zinf_storage.transfers.completion import TransferCompletion
from zinf_storage.transfers.transfer import Commit, Page, Transfer, Write


@dataclass(slots=True, kw_only=True, eq=False)
class Flush:
    """A commit, waiting or running."""

    commit: Commit
    """What it makes durable is final once `waits_for` is empty."""
    completion: TransferCompletion
    waits_for: set[Write]
    """Writes submitted before it that did not end yet."""


@dataclass(slots=True, kw_only=True, eq=False)
class Queues:
    """Guarded by the tier's lock."""

    writes: dict[Page, deque[Write]] = field(default_factory=dict)
    """Per page, in order of submission; only the first of each may run."""
    admission: deque[Write] = field(default_factory=deque)
    """Firsts of their page that do not run, in the order in which they may."""
    finds_room_late: bool
    """Whether writes look for room while they run, not when they begin."""
    began: dict[Write, int] = field(default_factory=dict)
    """If so, `num_ended` when each write that runs began."""
    starved: dict[Write, tuple[TierFullError, int]] = field(default_factory=dict)
    """Writes that ran and found no room: why, and `num_ended` when they began. They stay here while
    they run again."""
    flushes: deque[Flush] = field(default_factory=deque)
    is_flushing: bool = False
    """Whether the first of the flushes runs."""
    num_running: int = 0
    """Whatever may free room when it ends: reads, the writes and the commit that run, upkeep, and
    calls of other threads."""
    num_writing: int = 0
    """Writes among it."""
    num_ended: int = 0
    """Of all that since the beginning; writes that run again count when they end for good."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not (self.num_running or self.writes or self.flushes)

    def add(self, write: Write) -> bool:
        """Queue a write behind those of its page; return whether it is the first."""
        queued = self.writes.setdefault(write.page, deque())
        queued.append(write)
        is_first = len(queued) == 1
        if is_first:
            self.admission.append(write)
        return is_first

    def add_flush(self, commit: Commit, completion: TransferCompletion) -> None:
        """Queue a commit behind the writes and commits submitted before."""
        waits_for = {write for queued in self.writes.values() for write in queued}
        self.flushes.append(Flush(commit=commit, completion=completion, waits_for=waits_for))

    def include(self, write: Write) -> None:
        """Let the commits that wait for `write` hold what it left. Raises InternalError."""
        for flush in self.flushes:
            if write in flush.waits_for:
                flush.commit.include(write)

    def end_read(self, read: Transfer, error: Exception | None) -> None:
        """Settle a read."""
        self.num_running -= 1
        self.num_ended += 1
        read.release()
        read.completion.settle(error)

    def begin_write(self, write: Write) -> None:
        """Take the first write in `admission`, which runs now."""
        self.admission.popleft()
        self.num_running += 1
        self.num_writing += 1
        if self.finds_room_late:
            self.began[write] = self.num_ended

    def end_write(self, write: Write, error: Exception | None) -> None:
        """Retire a write that ran, or let it be the next one to run if all it lacked was room."""
        self.num_running -= 1
        self.num_writing -= 1
        if self.finds_room_late:
            num_ended = self.began.pop(write)
            if isinstance(error, TierFullError) and not write.page.discarded:
                self._put_back(write, error, num_ended)
                return
        self.retire(write, error)

    def retire(self, write: Write, error: Exception | None) -> None:
        """Settle the first write of its page, and make way for the next one."""
        self.num_ended += 1
        write.release()
        queued = self.writes[write.page]
        queued.popleft()
        if queued:
            self.admission.append(queued[0])
        else:
            del self.writes[write.page]
        self.starved.pop(write, None)
        for flush in self.flushes:
            flush.waits_for.discard(write)
        write.completion.settle(error)

    def retire_flush(self, error: Exception | None) -> None:
        """Settle the commit that ran."""
        self.num_running -= 1
        self.num_ended += 1
        self.is_flushing = False
        self.flushes.popleft().completion.settle(error)

    def refusal(self) -> TierFullError | None:
        """Return why the first write in `admission` must not begin yet, None if it may: one that
        found no room runs alone, and once something ended since it began."""
        if not self.starved:
            return None
        if self.num_writing:
            return next(iter(self.starved.values()))[0]
        error, num_ended = self.starved.get(self.admission[0], (None, 0))
        return None if self.num_ended > num_ended else error

    def _put_back(self, write: Write, error: TierFullError, num_ended: int) -> None:
        if write not in self.starved:
            # What it gave back may be the room that another one did not find.
            self.num_ended += 1
            num_ended += 1
        self.starved[write] = error, num_ended
        self.admission.appendleft(write)
