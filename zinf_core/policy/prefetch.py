"""What to fetch ahead of its use: the accesses to come, as far as a window of bytes reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zinf_core.keys import TensorKey
from zinf_core.policy.trace import Access, Trace
from zinf_core.units import MiB

_MOST_AHEAD_NBYTES = 128 * MiB
_MOST_TRUST = 2
_DISAPPOINTMENT = 2


class Confidence:
    """Which keys of the known iteration can be expected in the running one.

    A key that was forecast and not used is not fetched ahead until it was used as forecast twice
    for every time it was not; so a branch taken at random costs late fetches rather than useless
    ones.
    """

    __slots__ = ("_scores",)

    def __init__(self) -> None:
        """Trust every key."""
        self._scores: dict[TensorKey, int] = {}

    def learn(self, forecast: Trace, happened: Trace) -> None:
        """Compare an iteration with the one it was forecast from."""
        for key in forecast.keys():  # noqa: SIM118 - a Trace is not a mapping
            score = self._scores.get(key, 0)
            if key in happened:
                self._scores[key] = min(score + 1, _MOST_TRUST)
            else:
                self._scores[key] = min(score, 0) - _DISAPPOINTMENT

    def trusts(self, key: TensorKey) -> bool:
        """Return whether a forecast use of `key` is worth a fetch."""
        return self._scores.get(key, 0) >= 0


class Lookahead:
    """Walks along the accesses to come, each once, as the running iteration goes on."""

    __slots__ = ("_next", "_seen")

    def __init__(self) -> None:
        """Stand at the beginning of an iteration."""
        self._seen = -1
        self._next = 0

    def coming(self, trace: Trace, step: int) -> Iterator[tuple[int, Access]]:
        """Iterate over the accesses after `step` that were not passed yet, with their steps, going
        round into the next iteration. Taking the next one passes the one before."""
        if step < self._seen or self._next <= step:
            self._next = step + 1
        self._seen = step
        while self._next <= step + len(trace):
            yield self._next, trace.accesses[self._next % len(trace)]
            self._next += 1

    def end_iteration(self) -> None:
        """Look at every access anew, from the start of the iteration that begins: what was in
        memory when it was passed need not be there any more, and the accesses may be others."""
        self._seen = -1
        self._next = 0


def window_nbytes(budgets: Iterable[int]) -> int:
    """Return how many bytes may be fetched and not used yet, given the budgets they compete for.

    An eighth, so that most of the memory keeps what is used again later; never more than a drive
    moves in a few dozens of milliseconds, which is as long as it must be kept busy ahead.
    """
    return min(sum(budgets) // 8, _MOST_AHEAD_NBYTES)
