"""Completions of what a tier's workers do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from zinf_core.errors import TransferTimeoutError


class TransferCompletion:
    """Completion of one transfer or commit that workers run. Thread-safe.

    The gate is held until the completion is done; whoever waits goes through it. An Event does
    the same and costs as much as all else that happens for a small key.
    """

    __slots__ = ("_error", "_gate", "_is_done", "_what")

    def __init__(self, what: str) -> None:
        """Start undone; `what` names the transfer in messages."""
        self._what = what
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_done = False
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done or raise what it failed with, the same every time.

        Raises TransferTimeoutError if `timeout_s` seconds passed first.
        """
        if not self._is_done:
            timeout = -1.0 if timeout_s is None else max(timeout_s, 0.0)
            if not self._gate.acquire(timeout=timeout):
                raise TransferTimeoutError(f"{self._what} was not done within {timeout_s} s")
            self._gate.release()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def settle(self, error: Exception | None) -> None:
        """Make the completion done. Called once, after all bookkeeping."""
        self._error = error
        self._is_done = True
        self._gate.release()


class PrefetchCompletion:
    """Completion of a read ahead of time. Thread-safe."""

    __slots__ = ("_cancel", "_inner", "_promote")

    def __init__(
        self,
        inner: TransferCompletion,
        *,
        cancel: Callable[[], bool],
        promote: Callable[[], None],
    ) -> None:
        """Complete with `inner`; the functions are the scheduler's and may be called any time."""
        self._inner = inner
        self._cancel = cancel
        self._promote = promote

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done or raise; see `Completion`. Promotes: it is waited for now.

        Raises TransferCancelledError if `cancel` gave the read up.
        """
        if not self._inner.done() and timeout_s != 0:
            self._promote()
        self._inner.wait(timeout_s)

    def cancel(self) -> bool:
        """Give the read up if no worker has begun it; return whether it is given up."""
        return self._cancel()

    def promote(self) -> None:
        """Serve the read like one of `read_into` from now on, behind those already waiting."""
        self._promote()


def prefetched(what: str) -> PrefetchCompletion:
    """Return a prefetch that was complete when it was submitted."""
    inner = TransferCompletion(what)
    inner.settle(None)
    return PrefetchCompletion(inner, cancel=lambda: False, promote=lambda: None)
