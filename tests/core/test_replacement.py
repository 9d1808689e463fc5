"""Eviction order: known and unknown next uses by hand, optimal misses by brute force."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from core_helpers import key
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.policy.replacement import Candidate, EvictionQueue
from zinf_core.policy.trace import NextUse, TraceCursor

TRACES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


def candidate(
    name: str,
    last_use: int = 0,
    step: int | None = None,
    *,
    overwrites: bool = False,
    is_dirty: bool = False,
) -> Candidate:
    next_use = None if step is None else NextUse(step, overwrites)
    return Candidate(key=key(name), last_use=last_use, next_use=next_use, is_dirty=is_dirty)


def order(*candidates: Candidate) -> str:
    queue = EvictionQueue()
    for each in candidates:
        queue.put(each)
    names = []
    while (best := queue.best()) is not None:
        queue.discard(best.key)
        names.append(best.key.name)
    return "".join(names)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([], ""),
        ([candidate("a", 3), candidate("b", 1), candidate("c", 2)], "bca"),
        ([candidate("a", 9, 1), candidate("b", 8, 7), candidate("c", 7, 3)], "bca"),
        ([candidate("a", 1, 100), candidate("b", 9, None)], "ba"),
        ([candidate("a", 1, None), candidate("b", 0, None), candidate("c", 0, 5)], "bac"),
        ([candidate("a", 2, 5), candidate("b", 1, 5)], "ba"),
        ([candidate("a", 1, 9), candidate("b", 2, 1, overwrites=True)], "ba"),
        ([candidate("a", 1, 1, overwrites=True), candidate("b", 2)], "ab"),
        ([candidate("a", 0, 1, overwrites=True, is_dirty=True), candidate("b", 1, 0)], "ba"),
        ([candidate("a", 0, 1, is_dirty=True), candidate("b", 1, 2)], "ba"),
        ([candidate("a", 0, is_dirty=True), candidate("b", 1)], "ab"),
    ],
    ids=[
        "none", "least recently used", "farthest", "never first", "never by recency", "ties",
        "overwritten clean first", "overwritten is not expected", "overwritten dirty last",
        "dirty counts for nothing else", "dirty and unknown",
    ],
)  # fmt: skip
def test_by_hand(candidates: list[Candidate], expected: str) -> None:
    """Catches a reversed rule, pages of unknown use kept before those that are expected, bytes
    kept that will be replaced, and bytes written that will be replaced."""
    assert order(*candidates) == expected


@pytest.mark.parametrize(
    ("held", "gives_way"),
    [
        (candidate("a", 1), True),
        (candidate("a", 1, is_dirty=True), True),
        (candidate("a", 1, 11), True),
        (candidate("a", 1, 10), False),
        (candidate("a", 1, 9), False),
        (candidate("a", 1, 1, overwrites=True), True),
        (candidate("a", 1, 99, overwrites=True, is_dirty=True), False),
    ],
    ids=[
        "unknown", "unknown dirty", "later", "at the same time", "sooner",
        "overwritten", "overwritten dirty",
    ],
)  # fmt: skip
def test_what_gives_way_to_a_use_at_step_ten(held: Candidate, gives_way: bool) -> None:
    """Catches a read ahead that displaces what is used before it, so that both are read twice."""
    assert held.is_needed_later_than(10) is gives_way


SOME = [
    candidate("a", 0, 3),
    candidate("b", 1, None),
    candidate("c", 2, 9),
    candidate("d", 3, None),
    candidate("e", 4, 1),
]


@given(st.permutations(SOME))
def test_the_order_does_not_depend_on_the_order_given(candidates: list[Candidate]) -> None:
    """Catches a result that follows a dict's order, which differs between ranks."""
    assert order(*candidates) == "bdcae"


def fewest_misses(trace: str, num_slots: int, start: frozenset[str]) -> int:
    """Return the misses of the best choices there are, found by trying every victim."""

    @cache
    def misses(step: int, held: frozenset[str]) -> int:
        if step == len(trace):
            return 0
        if trace[step] in held:
            return misses(step + 1, held)
        victims = held if len(held) == num_slots else [None]
        return 1 + min(misses(step + 1, held - {v} | {trace[step]}) for v in victims)

    return misses(0, start)


def misses_of_policy(trace: str, num_slots: int, cursor: TraceCursor) -> tuple[int, frozenset[str]]:
    """Replay `trace` from nothing resident; return the misses and what is resident at its end."""
    last_use: dict[str, int] = {}
    misses = 0
    for step, name in enumerate(trace):
        if name not in last_use:
            misses += 1
            if len(last_use) == num_slots:
                victims = [
                    Candidate(key=key(n), last_use=u, next_use=cursor.next_use(key(n)))
                    for n, u in last_use.items()
                ]
                del last_use[order(*victims)[0]]
        last_use[name] = step
        cursor.advance(key(name))
    return misses, frozenset(last_use)


@given(TRACES, st.integers(1, 4))
def test_a_known_iteration_is_fetched_optimally(names: list[str], num_slots: int) -> None:
    """Catches a next use that is off by one or from the wrong place, and any other victim."""
    trace = "".join(name for name, _ in itertools.groupby(names))
    cursor = TraceCursor()
    for name in trace:
        cursor.advance(key(name))
    cursor.end_iteration()
    misses, _ = misses_of_policy(trace, num_slots, cursor)
    assert misses == fewest_misses(trace, num_slots, frozenset())


@given(TRACES, st.integers(1, 4))
def test_an_unknown_iteration_goes_by_least_recent_use(names: list[str], num_slots: int) -> None:
    """Catches another rule than LRU while nothing is known, here against a list that LRU is."""
    recent: list[str] = []
    expected = 0
    for name in names:
        if name in recent:
            recent.remove(name)
        else:
            expected += 1
        recent = [*recent, name][-num_slots:]
    misses, held = misses_of_policy("".join(names), num_slots, TraceCursor())
    assert (misses, held) == (expected, frozenset(recent))


def test_a_loop_larger_than_the_budget_keeps_part_of_it() -> None:
    """Catches LRU on a cyclic trace, which misses every access: the reason to know the next use."""
    cursor = TraceCursor()
    for name in "abcd":
        cursor.advance(key(name))
    cursor.end_iteration()
    known, _ = misses_of_policy("abcd" * 3, 3, cursor)
    unknown, _ = misses_of_policy("abcd" * 3, 3, TraceCursor())
    assert (known, unknown) == (6, 12)
