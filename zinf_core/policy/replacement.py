"""Which page in memory to evict: farthest next use where it is known, else least recently used.

Farthest next use is optimal for pages of one size (Belady); with sizes it stays a good rule, and
on a cycle larger than the memory it keeps the same part of it instead of thrashing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from zinf_core.keys import TensorKey
from zinf_core.policy.trace import NextUse

_SLACK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A page that may be evicted."""

    key: TensorKey
    last_use: int
    """Counter value of its last access; larger is more recent."""
    next_use: NextUse | None = None
    """When it is expected again; None when no iteration is known or it is not in it."""
    is_dirty: bool = False
    """Evicting it costs a write."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """The smaller, the sooner to be evicted.

        First what is not expected, least recently used first, and what will be overwritten
        before it is read; then the others, farthest next use first; last what will be
        overwritten or dropped anyway if it can stay until then, because evicting it now costs a
        write that nobody needs.
        """
        following = self.next_use
        if following is None:
            return (0, self.last_use, 0)
        if following.overwrites:
            return (2 if self.is_dirty else 0, self.last_use, 0)
        return (1, -following.step, self.last_use)

    def is_needed_later_than(self, step: int) -> bool:
        """Return whether room for a use at `step` is worth more than this page."""
        group, negated_step, _ = self.rank
        return group == 0 or (group == 1 and -negated_step > step)


@dataclass(order=True, slots=True)
class _Entry:
    rank: tuple[int, int, int]
    number: int
    candidate: Candidate = field(compare=False)


class EvictionQueue:
    """Candidates in the order in which to evict them. Logarithmic time per change."""

    __slots__ = ("_heap", "_live", "_number")

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[_Entry] = []
        self._live: dict[TensorKey, int] = {}
        self._number = 0

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self._live)

    def put(self, candidate: Candidate) -> None:
        """Add a candidate, or replace the one of the same key."""
        self._number += 1
        self._live[candidate.key] = self._number
        heapq.heappush(self._heap, _Entry(candidate.rank, self._number, candidate))
        if len(self._heap) > 4 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def discard(self, key: TensorKey) -> None:
        """Remove the candidate of `key`, if there is one."""
        self._live.pop(key, None)

    def best(self) -> Candidate | None:
        """Return the one to evict first, which stays; None if there is none."""
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0].candidate
            heapq.heappop(self._heap)
        return None

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(entry.candidate.key) == entry.number
