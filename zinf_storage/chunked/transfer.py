"""Reads and writes of one key in flight, and the queue their workers take chunks from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import InternalError, TransferTimeoutError
from zinf_storage.chunked.table import Cell, Chunk, Entry, KeyVersion
from zinf_storage.nvme.blocks import ByteRange


class ChunkedCompletion:
    """Completion of one transfer or commit that workers run. Thread-safe."""

    __slots__ = ("_done", "_error", "_what")

    def __init__(self, what: str) -> None:
        """Start undone; `what` names the transfer in messages."""
        self._what = what
        self._done = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done or raise what it failed with, the same every time.

        Raises TransferTimeoutError if `timeout_s` seconds passed first.
        """
        if not self._done.wait(timeout_s):
            raise TransferTimeoutError(f"{self._what} was not done within {timeout_s} s")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def settle(self, error: Exception | None) -> None:
        """Make the completion done. Called once, after all bookkeeping."""
        self._error = error
        self._done.set()


class ChunkQueue:
    """The chunks of one transfer still to be moved, and the first failure. Thread-safe.

    The lock guards the three fields; runners take chunks until none is left or one failed.
    """

    def __init__(self, indices: Iterable[int], *, num_runners: int) -> None:
        """Queue `indices` for `num_runners` runners, each of which must `leave` in the end."""
        self._lock = threading.Lock()
        self._indices: Iterator[int] = iter(indices)
        self._num_runners = num_runners
        self.error: Exception | None = None

    def take(self) -> int | None:
        """Return the next chunk, None if there is nothing more to do."""
        with self._lock:
            return None if self.error else next(self._indices, None)

    def fail(self, error: Exception) -> None:
        """Remember the first error and stop handing out chunks."""
        with self._lock:
            if self.error is None:
                self.error = error

    def leave(self) -> bool:
        """Return whether the calling runner was the last one."""
        with self._lock:
            self._num_runners -= 1
            return self._num_runners == 0


@dataclass(slots=True, kw_only=True, eq=False)
class ReadTransfer:
    """A read in flight. Belongs to its runners until the last one left."""

    what: str
    completion: ChunkedCompletion
    buffer: Buffer | None
    """The caller's; None once the transfer is done (law 6)."""
    source: KeyVersion
    span: ByteRange


@dataclass(slots=True, kw_only=True, eq=False)
class WriteTransfer:
    """A write, queued or in flight. Belongs to its runners from `begin` until the last one left."""

    what: str
    completion: ChunkedCompletion
    buffer: Buffer | None
    """The caller's; None once the transfer is done (law 6)."""
    entry: Entry
    span: ByteRange
    source: KeyVersion | None = None
    """Version that the bytes outside the range come from."""
    written: dict[int, Chunk] = field(default_factory=dict)
    """The chunks stored so far."""
    fresh: list[Cell] = field(default_factory=list)
    """Cells reserved for this attempt; unused if it fails."""
    num_ended_before: int = 0
    """Transfers that had ended when this attempt began."""

    def begin(self, source: KeyVersion, *, num_ended: int) -> None:
        """Begin an attempt to write over `source`."""
        self.source = source
        self.written, self.fresh = {}, []
        self.num_ended_before = num_ended

    def old_chunk(self, index: int) -> Chunk:
        """Return the chunk that this write replaces."""
        if self.source is None:
            raise InternalError(f"{self.what} was not begun")
        return self.source.chunks[index]


class Step:
    """One chunk on its way: an inner transfer to wait for, and what is to be done after it."""

    __slots__ = ("_completion", "_conclude", "_release")

    def __init__(
        self,
        completion: Completion,
        conclude: Callable[[], None],
        release: Callable[[], None] | None = None,
    ) -> None:
        """Wait for `completion`, then `conclude`; `release` is called whatever happens."""
        self._completion = completion
        self._conclude = conclude
        self._release = release

    def finish(self) -> None:
        """Wait and conclude. Blocks. Raises what either does."""
        try:
            self._completion.wait()
            self._conclude()
        finally:
            if self._release is not None:
                self._release()


def buffer_of(transfer: ReadTransfer | WriteTransfer) -> Buffer:
    """Return the caller's buffer. Raises InternalError once the transfer is done."""
    if transfer.buffer is None:
        raise InternalError(f"{transfer.what} went on after it was done")
    return transfer.buffer
