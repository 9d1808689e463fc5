"""Completion: the promise that a submitted transfer will have happened."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Completion(Protocol):
    """Handle of one submitted transfer. Whoever submitted it must wait for it."""

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once. Never blocks, never raises."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the transfer is complete. Repeatable: the same result every time.

        Raises what the transfer failed with (TransferError, TierFullError, CorruptDataError), or
        TransferTimeoutError if `timeout_s` seconds passed first; the transfer then goes on.
        """
        ...


class CompletedTransfer:
    """A transfer that was complete, or had failed, when submit returned."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception | None = None) -> None:
        """Hold the error that `wait` raises, or None for success."""
        self._error = error

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once, or raise the error. `timeout_s` is not needed and ignored."""
        del timeout_s
        if self._error is not None:
            raise self._error.with_traceback(None)
