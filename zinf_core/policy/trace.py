"""Trace: the accesses of one iteration, and where the running iteration stands in the last one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from zinf_core.keys import TensorKey

MAX_RECORDED: Final = 1 << 17
"""Accesses remembered of an iteration that does not end, such as a long generation: the last."""


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a key."""

    key: TensorKey
    overwrites: bool = False
    """All bytes are written and none are read: whatever they were before was of no use."""


@dataclass(frozen=True, slots=True, order=True)
class NextUse:
    """When a key is expected again."""

    step: int
    """Access step, counted from the start of the running iteration."""
    overwrites: bool


class Trace:
    """The accesses of one iteration, in order. Immutable once built."""

    __slots__ = ("_steps", "accesses")

    def __init__(self, accesses: Iterable[Access]) -> None:
        """Index `accesses`; the position of an access is its access step."""
        self.accesses = tuple(accesses)
        self._steps: dict[TensorKey, list[int]] = {}
        for step, access in enumerate(self.accesses):
            self._steps.setdefault(access.key, []).append(step)

    def __len__(self) -> int:
        """Return the number of accesses."""
        return len(self.accesses)

    def __contains__(self, key: TensorKey) -> bool:
        """Return whether the iteration uses `key`."""
        return key in self._steps

    def keys(self) -> Iterable[TensorKey]:
        """Return the keys that are used, each once."""
        return self._steps.keys()

    def next_step(self, key: TensorKey, after: int) -> int | None:
        """Return the first step > `after` that uses `key`, going round into the next iteration;
        None if the iteration does not use it."""
        steps = self._steps.get(key)
        if steps is None:
            return None
        index = bisect_right(steps, after)
        return steps[index] if index < len(steps) else steps[0] + len(self.accesses)

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

    __slots__ = ("_recording", "known", "num_returns", "step")

    def __init__(self) -> None:
        """Start without a known iteration."""
        self.known: Trace | None = None
        """The last iteration that ended."""
        self.step = -1
        """Where the running iteration stands in `known`."""
        self.num_returns = 0
        """How often `step` went back, which makes every `NextUse` given out before obsolete."""
        self._recording: deque[Access] = deque(maxlen=MAX_RECORDED)

    def advance(self, key: TensorKey, *, overwrites: bool = False) -> None:
        """Note that `key` is used now."""
        recording = self._recording
        if not recording or recording[-1].key != key:
            recording.append(Access(key, overwrites))
        if self.known is not None:
            found = self.known.locate(key, self.step)
            if found is not None:
                self.num_returns += found < self.step
                self.step = found

    def end_iteration(self) -> Trace | None:
        """Make what was recorded the known iteration and start anew; return it, or None if
        nothing was recorded."""
        if not self._recording:
            return None
        self.known = Trace(self._recording)
        self._recording.clear()
        self.step = -1
        self.num_returns += 1
        return self.known

    def next_use(self, key: TensorKey) -> NextUse | None:
        """Return when `key` is expected; None when unknown."""
        if self.known is None:
            return None
        step = self.known.next_step(key, self.step)
        if step is None:
            return None
        return NextUse(step, self.known.accesses[step % len(self.known)].overwrites)
