"""Traces: where a key comes next, and a cursor that finds its place again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from core_helpers import key
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.policy.trace import Access, NextUse, Trace, TraceCursor

NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=10)


def trace_of(names: Iterable[str]) -> Trace:
    return Trace([Access(key(name)) for name in names])


def cursor_after(iteration: Iterable[str], since: Iterable[str] = ()) -> TraceCursor:
    """Return a cursor that knows `iteration` and has seen `since` of the next one."""
    cursor = TraceCursor()
    for name in iteration:
        cursor.advance(key(name))
    cursor.end_iteration()
    for name in since:
        cursor.advance(key(name))
    return cursor


def expected_order(cursor: TraceCursor, names: str) -> str:
    """Return `names` by how soon the cursor expects them."""
    steps = {name: step_of(cursor, name) for name in names}
    assert None not in steps.values()
    return "".join(sorted(names, key=lambda name: steps[name] or 0))


def step_of(cursor: TraceCursor, name: str) -> int | None:
    """Return the step at which the cursor expects `name`."""
    following = cursor.next_use(key(name))
    return None if following is None else following.step


@given(NAMES, st.integers(-1, 9), st.sampled_from("abcde"))
def test_next_step_is_the_next_use_or_that_of_the_next_round(
    names: list[str], after: int, name: str
) -> None:
    """Catches a use that is skipped, one taken for the next although it is now, and no round."""
    after = min(after, len(names) - 1)
    rounds = names + names
    expected = next((i for i in range(after + 1, len(rounds)) if rounds[i] == name), None)
    assert trace_of(names).next_step(key(name), after) == expected


@given(NAMES, st.integers(-1, 9), st.sampled_from("abcde"))
def test_locate_prefers_what_lies_ahead(names: list[str], at_least: int, name: str) -> None:
    """Catches a cursor that jumps back although the key comes again."""
    steps = [step for step, other in enumerate(names) if other == name]
    ahead = [step for step in steps if step >= at_least]
    expected = ahead[0] if ahead else steps[-1] if steps else None
    assert trace_of(names).locate(key(name), at_least) == expected


def test_a_trace_does_not_follow_its_source() -> None:
    """Catches a trace that shares the list it was built from."""
    accesses = [Access(key("a"))]
    trace = Trace(accesses)
    accesses.append(Access(key("b")))
    assert trace.accesses == (Access(key("a")),)
    assert (list(trace.keys()), key("a") in trace, key("b") in trace) == ([key("a")], True, False)
    assert trace.next_step(key("b"), -1) is None


def test_keys_are_told_once() -> None:
    """Catches a key counted per use, which would lose or gain trust several times an iteration."""
    assert list(trace_of("abcab").keys()) == [key("a"), key("b"), key("c")]


def test_nothing_is_known_in_the_first_iteration() -> None:
    """Catches a forecast made from an iteration that is not over."""
    cursor = TraceCursor()
    for name in "abab":
        cursor.advance(key(name))
        assert cursor.next_use(key("a")) is None


@given(NAMES)
def test_a_repeated_iteration_is_foreseen_exactly(names: list[str]) -> None:
    """Catches a cursor that drifts: a key used twice, two neighbours alike, the last access."""
    cursor = cursor_after(names)
    steps = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    for now, name in enumerate(steps):
        cursor.advance(key(name))
        rest = steps[now + 1 :] + steps
        for other in set(steps):
            assert step_of(cursor, other) == now + rest.index(other) + 1


def test_an_iteration_starts_at_its_beginning() -> None:
    """Catches a cursor that stays where the last iteration ended."""
    cursor = cursor_after("abc")
    assert [step_of(cursor, name) for name in "abc"] == [0, 1, 2]
    cursor.advance(key("a"))
    assert [step_of(cursor, name) for name in "abc"] == [3, 1, 2]


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("a", "bcdefa"),
        ("abx", "cdefab"),  # a new key leaves the cursor where it is
        ("abe", "fabcde"),  # three keys were left out
        ("abec", "defabc"),  # and the cursor comes back with the order
        ("abcb", "cdefab"),  # a repetition goes back
        ("fedcba", "bcdefa"),
        ("aaaa", "bcdefa"),
    ],
)
def test_surprises_cost_nothing_but_themselves(since: str, expected: str) -> None:
    """Catches a forecast that is lost, or shifted for good, after one access out of order."""
    cursor = cursor_after("abcdef", since)
    assert expected_order(cursor, "abcdef") == expected


@given(st.lists(st.sampled_from("abcdefxyz"), max_size=20))
def test_the_place_is_found_again_whatever_came_before(noise: list[str]) -> None:
    """Catches a cursor that some history leaves astray: as keys are unique, one access suffices."""
    cursor = cursor_after("abcdef", [*noise, "c"])
    assert expected_order(cursor, "abcdef") == "defabc"


def test_an_iteration_without_accesses_keeps_what_is_known() -> None:
    """Catches an optimizer step without a forward pass that forgets the iteration."""
    cursor = cursor_after("abc")
    cursor.end_iteration()
    cursor.end_iteration()
    assert expected_order(cursor, "abc") == "abc"


def test_the_latest_iteration_is_the_known_one() -> None:
    """Catches a model that changes and is forecast from its first iteration for ever."""
    cursor = cursor_after("abc", "xcb")
    cursor.end_iteration()
    assert expected_order(cursor, "xcb") == "xcb"
    assert cursor.next_use(key("a")) is None


def test_recording_is_bounded() -> None:
    """Catches memory that grows with every access while no optimizer step ends the iteration, as
    in generation; what is kept are the latest accesses."""
    cursor = TraceCursor()
    keys = [key(name) for name in "abcd"]
    for _ in range(1 << 15):
        for each in keys:
            cursor.advance(each)
    for each in reversed(keys):
        cursor.advance(each)
    assert len(cursor._recording) <= 1 << 17
    cursor.end_iteration()
    for name in "dcb":
        cursor.advance(key(name))
    assert cursor.next_use(key("a")) is not None


# -- what was written without being read -----------------------------------------------------


def test_a_use_that_overwrites_is_foreseen_as_such() -> None:
    """Catches a page kept or fetched for a use that replaces all of it, and one given up that the
    use after that reads: each use counts by itself, also round the end."""
    cursor = TraceCursor()
    for name, overwrites in [("a", True), ("b", False), ("a", False), ("c", False)]:
        cursor.advance(key(name), overwrites=overwrites)
    cursor.end_iteration()
    seen = []
    for name in "abac":
        seen.append(cursor.next_use(key("a")))
        cursor.advance(key(name))
    seen.append(cursor.next_use(key("a")))
    assert seen == [
        NextUse(0, True), NextUse(2, False), NextUse(2, False), NextUse(4, True), NextUse(4, True),
    ]  # fmt: skip


@pytest.mark.parametrize("first", [False, True])
def test_uses_in_a_row_count_as_the_first_of_them(first: bool) -> None:
    """Catches a page that is written whole and then read being fetched for the reading; and one
    that is read and then written whole not being fetched."""
    cursor = TraceCursor()
    for overwrites in (first, not first, False):
        cursor.advance(key("a"), overwrites=overwrites)
    trace = cursor.end_iteration()
    assert trace is not None
    assert trace.accesses == (Access(key("a"), first),)


# -- what earlier answers are worth ----------------------------------------------------------


@given(st.lists(st.sampled_from("abcdefx"), max_size=30))
def test_an_answer_holds_until_the_key_is_used_or_the_cursor_goes_back(names: list[str]) -> None:
    """Catches a cursor that goes back without saying so: whoever keeps pages in the order of
    their next use would keep them in an order that is no more."""
    cursor = cursor_after("abcdeafb")
    answers: dict[str, NextUse | None] = {}
    returns = cursor.num_returns
    for name in names:
        cursor.advance(key(name))
        if cursor.num_returns != returns:
            returns = cursor.num_returns
            answers.clear()
        for other in "abcdef":
            answer = cursor.next_use(key(other))
            kept = answers.get(other)
            if kept is not None and kept.step > cursor.step:
                assert answer == kept
            answers[other] = answer


@pytest.mark.parametrize(
    ("since", "returns"), [("abc", 0), ("axbxc", 0), ("ac", 0), ("aba", 1), ("cba", 2), ("aa", 0)]
)
def test_returns_are_counted(since: str, returns: int) -> None:
    """Catches ranks made anew at every step, which costs more than it saves."""
    cursor = cursor_after("abc")
    before = cursor.num_returns
    for name in since:
        cursor.advance(key(name))
    assert cursor.num_returns - before == returns
    cursor.end_iteration()
    assert cursor.num_returns - before == returns + 1
