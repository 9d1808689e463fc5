"""Trace: the accesses of one iteration, and where the running iteration stands in the last one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final

from zinf_core.keys import TensorKey

MAX_RECORDED: Final = 1 << 17
"""Accesses remembered of an iteration that does not end, such as a long generation: the last."""


class Trace:
    """The keys one iteration used, in order. Immutable once built."""

    __slots__ = ("_steps", "keys")

    def __init__(self, keys: Iterable[TensorKey]) -> None:
        """Index `keys`; the position of a key in it is its access step."""
        self.keys = tuple(keys)
        self._steps: dict[TensorKey, list[int]] = {}
        for step, key in enumerate(self.keys):
            self._steps.setdefault(key, []).append(step)

    def next_step(self, key: TensorKey, after: int) -> int | None:
        """Return the first step > `after` that uses `key`, going round into the next iteration;
        None if the iteration does not use it."""
        steps = self._steps.get(key)
        if steps is None:
            return None
        index = bisect_right(steps, after)
        return steps[index] if index < len(steps) else steps[0] + len(self.keys)

    def locate(self, key: TensorKey, at_least: int) -> int | None:
        """Return the first step >= `at_least` that uses `key`, or the last one before it."""
        steps = self._steps.get(key)
        if steps is None:
            return None
        index = bisect_left(steps, at_least)
        return steps[index] if index < len(steps) else steps[-1]


class TraceCursor:
    """Follows the running iteration along the last one and records it as the next.

    A key that comes out of order moves the cursor to where the last iteration used it; a key
    that is new leaves it where it is. So one surprise costs nothing but itself.
    """

    __slots__ = ("_previous", "_recording", "_step")

    def __init__(self) -> None:
        """Start without a known iteration."""
        self._previous: Trace | None = None
        self._recording: deque[TensorKey] = deque(maxlen=MAX_RECORDED)
        self._step = -1

    def advance(self, key: TensorKey) -> None:
        """Note that `key` is used now."""
        if not self._recording or self._recording[-1] != key:
            self._recording.append(key)
        if self._previous is not None:
            found = self._previous.locate(key, self._step)
            if found is not None:
                self._step = found

    def end_iteration(self) -> None:
        """Make what was recorded the known iteration, if anything was, and start anew."""
        if self._recording:
            self._previous = Trace(self._recording)
            self._recording.clear()
            self._step = -1

    def next_use(self, key: TensorKey) -> int | None:
        """Return how many accesses ahead `key` is expected; None when unknown."""
        if self._previous is None:
            return None
        step = self._previous.next_step(key, self._step)
        return None if step is None else step - self._step
