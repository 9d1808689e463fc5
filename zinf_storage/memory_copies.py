"""One key of a tier in memory, and the copies of it that a device is making."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from zinf_core.completion import Completion
from zinf_core.errors import CorruptDataError, KeyAbsentError, TransferTimeoutError
from zinf_core.runtime.pool import Lease


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """Memory of one key. `lock` guards the bytes and all other fields."""

    name: str
    """Tier and key, for messages."""
    nbytes: int
    lease: Lease | None
    """None for a key of 0 bytes, and once the key was discarded."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    copies: list[TrackedCopy] = field(default_factory=list)
    """Copies by the device that nobody has seen done, in the order of their submission."""
    num_writes: int = 0
    """Writes submitted so far; numbers them."""
    damaged_by: int = 0
    """Number of the last write that failed."""
    renewed_by: int = 0
    """Number of the last write of all bytes that did not."""

    @property
    def damaged(self) -> bool:
        """Whether a failed write left bytes that are neither old nor new (law 9)."""
        return self.damaged_by > self.renewed_by

    def require_lease(self) -> Lease:
        """Return the lease. Raises KeyAbsentError after `retire`."""
        if self.lease is None:
            raise KeyAbsentError(f"{self.name} was discarded meanwhile")
        return self.lease

    def disturbed(self, span: range, *, is_write: bool) -> tuple[TrackedCopy, ...]:
        """Return the copies in flight that a transfer of the bytes `span` must not overtake."""
        return tuple(
            copy
            for copy in self.copies
            if copy.span.start < span.stop
            and span.start < copy.span.stop
            and (is_write or copy.mark is not None)
        )

    def number_write(self, nbytes: int) -> WriteMark:
        """Count a write of `nbytes`."""
        self.num_writes += 1
        return WriteMark(number=self.num_writes, is_whole=nbytes == self.nbytes)

    def note_write(self, mark: WriteMark, *, failed: bool) -> None:
        """Remember how a write ended. Writes of the same bytes happen in their order."""
        if failed:
            self.damaged_by = max(self.damaged_by, mark.number)
        elif mark.is_whole:
            self.renewed_by = max(self.renewed_by, mark.number)

    def corruption(self) -> CorruptDataError:
        """Return what a read of damaged bytes raises."""
        return CorruptDataError(f"{self.name}: a write of it failed; write all of it again")

    def retire(self) -> None:
        """Let copies in flight end, and give the lease back. Blocks on them."""
        with self.lock:
            lease, self.lease = self.lease, None
            copies = tuple(self.copies)
        for copy in copies:
            copy.settle()
        if lease is not None:
            lease.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMark:
    """Which write of its key a write is."""

    number: int
    is_whole: bool


class TrackedCopy:
    """Completion of a copy that a device makes from or to one entry.

    It stays on the entry's list until someone finds it done, so that memory is not given back, or
    touched by the CPU, under it.
    """

    __slots__ = ("_behind", "_copy", "_entry", "_error", "_settled", "mark", "span")

    def __init__(
        self, entry: Entry, copy: Completion, *, span: range, mark: WriteMark | None
    ) -> None:
        """Put `copy` of the bytes `span` on the list of `entry`, whose lock is held.

        `mark` is None for a read.
        """
        self.span = span
        self.mark = mark
        self._entry = entry
        self._copy = copy
        self._behind = entry.disturbed(span, is_write=False) if mark is None else ()
        self._error: Exception | None = None
        self._settled = False
        entry.copies.append(self)

    def done(self) -> bool:
        """Return whether the copy is over. Never blocks."""
        if not self._settled:
            if not self._copy.done():
                return False
            self.settle()  # at once: a device keeps the order of copies that share memory
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the copy is over.

        Raises what it failed with, CorruptDataError if it read bytes of a write that failed, or
        TransferTimeoutError.
        """
        self.settle(timeout_s)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait, and keep the error for `wait`. Raises TransferTimeoutError only."""
        if self._settled:
            return
        error: Exception | None = None
        try:
            self._copy.wait(timeout_s)
        except TransferTimeoutError:
            raise
        except Exception as exc:  # noqa: BLE001 - raised by every wait
            error = exc
        for write in self._behind:
            write.settle(timeout_s)
        with self._entry.lock:
            self._note(error)

    def _note(self, error: Exception | None) -> None:
        if self._settled:
            return
        if error is None and any(write._error for write in self._behind):  # noqa: SLF001 - same class
            error = self._entry.corruption()
        if self.mark is not None:
            self._entry.note_write(self.mark, failed=error is not None)
        self._entry.copies.remove(self)
        self._behind = ()
        self._error = error
        self._settled = True


class AllSettled:
    """Completion of several copies; their errors are raised by their own `wait`."""

    __slots__ = ("_copies",)

    def __init__(self, copies: Sequence[TrackedCopy]) -> None:
        """Wait for `copies`."""
        self._copies = tuple(copies)

    def done(self) -> bool:
        """Return whether all are over."""
        return all(copy.done() for copy in self._copies)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all are over. Raises TransferTimeoutError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for copy in self._copies:
            copy.settle(None if end is None else max(end - time.monotonic(), 0.0))
