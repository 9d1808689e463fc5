"""Copies in flight on a CUDA device, and the streams they are on. Knows cupy's objects only."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from zinf_core.buffers import Buffer
from zinf_core.errors import TransferError, TransferTimeoutError


class CudaCopy:
    """Completion of one copy; keeps both buffers alive until it is found done."""

    def __init__(
        self, dst: Buffer, src: Buffer, *, name: str, synchronize: Callable[[Any], None]
    ) -> None:
        """Stand for a copy on device `name`, whose `synchronize` blocks on an event."""
        spaces = f"{src.space.value} -> {dst.space.value}"
        self.what = f"{name}: copy of {dst.nbytes} bytes, {spaces}"
        self.nbytes = dst.nbytes
        self.dst_address = dst.address
        self.src_address = src.address
        self.event: Any = None  # of cupy; set by `CopyLane.submit`
        self._buffers: tuple[Buffer, Buffer] | None = (dst, src)
        self._block_on = synchronize
        self._lock = threading.Lock()  # guards the watcher
        self._watcher: threading.Thread | None = None
        self._error: Exception | None = None

    def conflicts(self, later: CudaCopy) -> bool:
        """Return whether `later` must not overtake this copy."""
        return (
            _overlap(self.dst_address, self.nbytes, later.dst_address, later.nbytes)
            or _overlap(self.dst_address, self.nbytes, later.src_address, later.nbytes)
            or _overlap(self.src_address, self.nbytes, later.dst_address, later.nbytes)
        )

    def failure(self, error: Exception) -> TransferError:
        """Return what `wait` raises for an error of CUDA."""
        failed = TransferError(errno.EIO, f"{self.what} failed: {error}")
        failed.__cause__ = error
        return failed

    def done(self) -> bool:
        """Return whether the copy is over. Never blocks, never raises."""
        if self._buffers is None:
            return True
        try:
            finished = bool(self.event.done)
        except RuntimeError as exc:
            self._settle(exc)
            return True
        if finished:
            self._settle(None)
        return finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the copy is over. Raises TransferError, or TransferTimeoutError."""
        if not self.done():
            if timeout_s is None:
                self._synchronize()
            elif timeout_s <= 0 or not self._watch(timeout_s):
                raise TransferTimeoutError(f"{self.what} is not done after {timeout_s} s")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _watch(self, timeout_s: float) -> bool:
        """Wait for a thread that waits; return whether the copy is over.

        CUDA cannot wait for a limited time, and asking again and again costs a core.
        """
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._synchronize, name="zinf-cuda-wait")
                self._watcher.start()
            watcher = self._watcher
        watcher.join(timeout_s)
        return not watcher.is_alive()

    def _synchronize(self) -> None:
        try:
            self._block_on(self.event)
        except Exception as exc:  # noqa: BLE001 - raised by every wait
            self._settle(exc)
        else:
            self._settle(None)

    def _settle(self, error: Exception | None) -> None:
        if error is not None:
            self._error = self.failure(error)
        self._buffers = None


class CopyLane:
    """One stream for copies, and those of its copies that may be in flight, oldest first."""

    def __init__(self, cupy: Any) -> None:
        """Make a stream on the current device."""
        self._cupy = cupy
        self._in_flight: deque[CudaCopy] = deque()
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)

    def follow(self, stream_address: int) -> None:
        """Let what is submitted from now on wait for what was submitted to another stream."""
        event = self._cupy.cuda.Event(disable_timing=True)
        self._cupy.cuda.runtime.eventRecord(event.ptr, stream_address)
        self.stream.wait_event(event)

    def follow_copies(self, other: CopyLane, copy: CudaCopy) -> None:
        """Let what is submitted from now on wait for copies of `other` that `copy` must not
        overtake."""
        for earlier in other.in_flight():
            if earlier.conflicts(copy):
                self.stream.wait_event(earlier.event)

    def in_flight(self) -> deque[CudaCopy]:
        """Return the copies that may be in flight."""
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        return self._in_flight

    def submit(self, copy: CudaCopy, kind: int) -> None:
        """Submit `copy` and make its event."""
        self.in_flight()
        copy.event = self._cupy.cuda.Event(block=True, disable_timing=True)
        self._cupy.cuda.runtime.memcpyAsync(
            copy.dst_address, copy.src_address, copy.nbytes, kind, self.stream.ptr
        )
        try:
            copy.event.record(self.stream)
        except RuntimeError:
            # Nobody can tell when the copy is over, and nobody keeps its buffers.
            self.stream.synchronize()
            raise
        self._in_flight.append(copy)


def _overlap(start: int, nbytes: int, other_start: int, other_nbytes: int) -> bool:
    return start < other_start + other_nbytes and other_start < start + nbytes
