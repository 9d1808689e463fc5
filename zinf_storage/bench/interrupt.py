"""Interrupt: Ctrl-C ends a benchmark with what was measured so far; pressed again, at once.

So does being asked to end, and the loss of the terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Return a function that says whether Ctrl-C was pressed, or the process asked to end.

    The second Ctrl-C raises KeyboardInterrupt. Signals that the process was started to ignore
    (nohup) stay ignored. The handlers before are put back on leaving.
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
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, receive)
    try:
        yield asked.is_set
    finally:
        for number in heard:
            signal.signal(number, before[number])
