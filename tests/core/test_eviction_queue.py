"""EvictionQueue: a heap with entries that are no more, against sorting what is there."""

from __future__ import annotations

from core_helpers import key
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zinf_core.policy.replacement import Candidate, EvictionQueue
from zinf_core.policy.trace import NextUse

NAMES = st.sampled_from("abcdefgh")
NEXT_USES = st.none() | st.builds(NextUse, st.integers(0, 9), st.booleans())


def candidate(name: str, last_use: int, next_use: NextUse | None, is_dirty: bool) -> Candidate:
    return Candidate(key=key(name), last_use=last_use, next_use=next_use, is_dirty=is_dirty)


CANDIDATES = st.builds(candidate, NAMES, st.integers(0, 9), NEXT_USES, st.booleans())


def place(candidate: Candidate) -> tuple[int, int, int]:
    """Return where the rules put a candidate, written down as they are told in words."""
    following = candidate.next_use
    if following is None or (following.overwrites and not candidate.is_dirty):
        return 1, candidate.last_use, 0
    if following.overwrites:
        return 3, candidate.last_use, 0
    return 2, -following.step, candidate.last_use


def drained(queue: EvictionQueue) -> list[Candidate]:
    found = []
    while (best := queue.best()) is not None:
        assert queue.best() is best
        found.append(best)
        queue.discard(best.key)
        assert len(queue) + len(found) >= 1
    assert len(queue) == 0
    return found


@given(st.lists(CANDIDATES, max_size=12, unique_by=lambda each: each.key))
def test_the_order_is_that_of_sorting(candidates: list[Candidate]) -> None:
    """Catches a heap whose order is not kept when its top goes, and one that forgets."""
    queue = EvictionQueue()
    for each in candidates:
        queue.put(each)
    found = drained(queue)
    assert found == sorted(candidates, key=place)  # equal ranks: in the order they were put


class QueueMachine(RuleBasedStateMachine):
    """Candidates come, change and go in any order; the best is always that of those there are."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = EvictionQueue()
        self.there: dict[str, Candidate] = {}

    @rule(new=CANDIDATES)
    def put(self, new: Candidate) -> None:
        self.there.pop(new.key.name, None)
        self.there[new.key.name] = new
        self.queue.put(new)

    @rule(name=NAMES)
    def discard(self, name: str) -> None:
        self.there.pop(name, None)
        self.queue.discard(key(name))

    @rule(name=NAMES, num=st.integers(50, 80))
    def put_often(self, name: str, num: int) -> None:
        """Make most of the heap entries that are no more."""
        for last_use in range(num):
            self.put(candidate(name, last_use % 10, None, False))

    @invariant()
    def the_best_is_that_of_those_there_are(self) -> None:
        best = self.queue.best()
        assert len(self.queue) == len(self.there)
        if not self.there:
            assert best is None
        else:
            assert best is min(self.there.values(), key=place)


TestQueueMachine = QueueMachine.TestCase


def test_a_candidate_put_again_counts_once_as_it_is_now() -> None:
    """Catches the old entry of a page that was used since taken for the page."""
    queue = EvictionQueue()
    queue.put(candidate("a", 1, None, False))
    queue.put(candidate("b", 2, None, False))
    newer = candidate("a", 3, None, False)
    queue.put(newer)
    assert len(queue) == 2
    assert [each.last_use for each in drained(queue)] == [2, 3]


def test_what_was_discarded_and_put_again_has_no_old_entries() -> None:
    """Catches an entry of before the discard that comes alive again with its old rank."""
    queue = EvictionQueue()
    queue.put(candidate("a", 1, None, False))
    queue.put(candidate("b", 2, None, False))
    queue.discard(key("a"))
    queue.discard(key("a"))
    queue.put(candidate("a", 9, None, False))
    assert [each.key.name for each in drained(queue)] == ["b", "a"]


def test_dead_entries_do_not_pile_up() -> None:
    """Catches memory that grows with every use of a page, since nothing takes the old entries of
    pages that stay out of the middle of the heap."""
    queue = EvictionQueue()
    queue.put(candidate("least", -1, None, False))
    for turn in range(20_000):
        queue.put(candidate("abcd"[turn % 4], turn, None, False))
    assert len(queue) == 5
    assert len(queue._heap) <= 4 * 5 + 65
    assert [each.key.name for each in drained(queue)] == ["least", *"abcd"]
    assert queue._heap == []


def test_one_change_costs_no_look_at_all_the_others() -> None:
    """Catches sorting or searching at each change: of 20 000 candidates few are compared."""
    compared = 0

    class Counting(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) < int(other)

    queue = EvictionQueue()
    for turn in range(20_000):
        queue.put(candidate(f"k{turn}", Counting(turn * 7919 % 20_011), None, False))
    for turn in range(100):
        compared = 0
        queue.put(candidate(f"k{turn}", Counting(30_000 + turn), None, False))
        best = queue.best()
        assert best is not None
        queue.discard(best.key)
        assert compared <= 64
