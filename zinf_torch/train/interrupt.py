"""Interrupt: Ctrl-C asks to stop after the current step; pressed again, it stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """While entered, whether Ctrl-C was pressed. The handler before is put back on leaving.

    Outside the main thread, where Python allows no signal handlers, nothing is ever requested.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        """Call `notify` (in the main thread, between two bytecodes) on the first Ctrl-C."""
        self._notify = notify
        self._handler: signal.Handlers | int | Callable[..., object] | None = None
        self._is_installed = False
        self.is_requested = False

    def __enter__(self) -> Self:
        """Watch for Ctrl-C."""
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._receive)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the handler back that was there."""
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGINT, self._handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle one Ctrl-C. Raises KeyboardInterrupt on the second."""
        del number, frame
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        self._notify()
