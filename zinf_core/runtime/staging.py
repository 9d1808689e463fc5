"""Staging: a transfer of two hops, through host memory, between a tier and device memory."""

from __future__ import annotations

from collections.abc import Callable

from zinf_core.completion import Completion
from zinf_core.errors import TransferTimeoutError


class TwoHops:
    """Completion of a transfer whose second hop is submitted when the first one is done.

    Nothing happens on threads of its own: `done` and `wait` submit the second hop. Guarded by the
    lock of the pager.
    """

    __slots__ = ("_error", "_first", "_second", "_then")

    def __init__(self, first: Completion, then: Callable[[], Completion]) -> None:
        """Go on with `then`, called once, when `first` is done without an error."""
        self._first = first
        self._then = then
        self._second: Completion | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once; submit the second hop if it can
        be."""
        if self._is_waiting():
            if not self._first.done():
                return False
            self._go_on()
        return self._second is None or self._second.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when both hops are done, or raise what the first failing one failed with.

        `timeout_s` is for each hop.
        """
        if self._is_waiting():
            self._go_on(timeout_s)
        if self._second is None:
            if self._error is not None:
                raise self._error.with_traceback(None)
            return
        self._second.wait(timeout_s)

    def _is_waiting(self) -> bool:
        return self._second is None and self._error is None

    def _go_on(self, timeout_s: float | None = None) -> None:
        try:
            self._first.wait(timeout_s)
            self._second = self._then()
        except TransferTimeoutError:
            raise
        except Exception as exc:  # noqa: BLE001 - raised by every wait
            self._error = exc
