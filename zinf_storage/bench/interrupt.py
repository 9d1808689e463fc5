"""Interrupt: Ctrl-C ends a benchmark with what was measured so far; pressed again, at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Return a function that says whether Ctrl-C was pressed, or the process asked to end.

    The second Ctrl-C raises KeyboardInterrupt. The handlers before are put back on leaving.
    Outside the main thread, where Python allows no signal handlers, nothing is ever asked.
    """
    asked = threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        del number, frame
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, receive) for number in numbers]
    try:
        yield asked.is_set
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
