"""Ending: closes a tier once, and takes an interrupted close up again."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ending:
    """Runs what ends a tier. Thread-safe: later callers wait for the first, then do nothing."""

    def __init__(self) -> None:
        """Nothing has ended yet."""
        self._lock = threading.Lock()  # held while the end runs
        self._is_over = False

    def run(self, end: Callable[[], None]) -> None:
        """Call `end`, unless a call of it returned or raised an Exception before. Blocks.

        If it is interrupted (KeyboardInterrupt), the next caller calls it again: each step of it
        must be one that can be repeated.
        """
        with self._lock:
            if self._is_over:
                return
            try:
                end()
            except Exception:
                self._is_over = True
                raise
            self._is_over = True
