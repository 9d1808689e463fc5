"""Which block is next: the policy by its properties, the backlog by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.errors import InternalError
from zinf_storage.transfers.backlog import Backlog, Job
from zinf_storage.transfers.lanes import FRESH, SHARE, Lane, LaneState, choose

LARGEST = 100
_block = st.integers(1, LARGEST)
_maybe = st.one_of(st.just(0), _block)
Waiting = tuple[int, int, int]
"""Bytes of the next block in the lanes demand, prefetch, write-back."""


def served(waiting: list[Waiting], state: LaneState = FRESH) -> list[tuple[Lane, int]]:
    """Return lane and bytes of each choice."""
    choices = []
    for sizes in waiting:
        demand, prefetch, write_back = sizes
        lane, state = choose(state, demand=demand, prefetch=prefetch, write_back=write_back)
        choices.append((lane, sizes[lane]))
    return choices


def total(choices: list[tuple[Lane, int]], *lanes: Lane) -> int:
    return sum(nbytes for lane, nbytes in choices if lane in lanes)


@given(st.lists(st.tuples(_maybe, _maybe, _maybe).filter(any), max_size=60))
def test_a_lane_that_waits_is_chosen(waiting: list[Waiting]) -> None:
    """Catches an idle drive, or a block taken from an empty lane."""
    assert all(nbytes > 0 for _, nbytes in served(waiting))


def test_nothing_to_choose_is_a_bug() -> None:
    """Catches a lane named although none waits."""
    with pytest.raises(InternalError, match="no lane"):
        choose(FRESH, demand=0, prefetch=0, write_back=0)


@given(st.lists(st.tuples(_block, _maybe, _maybe), max_size=80))
def test_demand_goes_first(waiting: list[Waiting]) -> None:
    """Catches background work that takes more than its share while somebody waits."""
    for end in range(len(waiting) + 1):
        choices = served(waiting[:end])
        background = total(choices, Lane.PREFETCH, Lane.WRITE_BACK)
        assert (SHARE - 1) * background <= total(choices, Lane.DEMAND)


@given(
    prefix=st.lists(st.tuples(_maybe, _maybe, _maybe).filter(any), max_size=20),
    waiting=st.lists(
        st.tuples(_block, _maybe, _maybe).filter(lambda sizes: any(sizes[1:])), max_size=80
    ),
)
def test_endless_demand_starves_nobody(prefix: list[Waiting], waiting: list[Waiting]) -> None:
    """Catches prefetch or write-back that waits for ever, whatever happened before."""
    choices = served(prefix + waiting)[len(prefix) :]
    background = total(choices, Lane.PREFETCH, Lane.WRITE_BACK)
    assert total(choices, Lane.DEMAND) < (SHARE - 1) * (background + LARGEST) + LARGEST


@given(
    prefix=st.lists(st.tuples(_maybe, _maybe, _maybe).filter(any), max_size=20),
    waiting=st.lists(st.tuples(_maybe, _block, _block), max_size=80),
)
def test_prefetch_and_write_back_are_even(prefix: list[Waiting], waiting: list[Waiting]) -> None:
    """Catches turns by blocks instead of bytes, and a claim saved up while the other had nothing
    to do (the step in between, in which only prefetch waits)."""
    between = [(0, 1, 0)]
    choices = served(prefix + between + waiting)[len(prefix) + 1 :]
    for end in range(len(choices) + 1):
        lead = total(choices[:end], Lane.PREFETCH) - total(choices[:end], Lane.WRITE_BACK)
        assert abs(lead) <= LARGEST


def test_by_hand() -> None:
    """Catches a share or turns by blocks instead of bytes, and ties that go to write-back."""
    assert [lane for lane, _ in served([(0, 4, 4)] * 4)] == [
        Lane.PREFETCH, Lane.WRITE_BACK, Lane.PREFETCH, Lane.WRITE_BACK,
    ]  # fmt: skip
    lanes = [lane for lane, _ in served([(0, 1, 4)] * 12)]
    assert [number for number, lane in enumerate(lanes) if lane is Lane.WRITE_BACK] == [1, 6, 11]
    lanes = [lane for lane, _ in served([(4, 0, 8)] * 30)]
    assert [number for number, lane in enumerate(lanes) if lane is Lane.WRITE_BACK] == [14, 29]


@dataclass(frozen=True, eq=False)
class FakeTransfer:
    """A transfer of `num_blocks` blocks of one byte, from block `first` on."""

    name: str
    num_blocks: int
    first: int = 0

    def indices(self) -> range:
        return range(self.first, self.first + self.num_blocks)

    def block_nbytes(self, index: int) -> int:
        assert index in self.indices()
        return 1


def job(name: str, lane: Lane, num_blocks: int, first: int = 0) -> Job:
    transfer = FakeTransfer(name, num_blocks, first)
    return Job.of(transfer, lane, lambda transfer, error: None)  # type: ignore[arg-type]


def taken(backlog: Backlog) -> str:
    """Take and finish everything; return the names and indices in order."""
    found = []
    while (block := backlog.take()) is not None:
        found.append(f"{block[0].transfer.name}{block[1]}")  # type: ignore[union-attr]
        backlog.finish(block[0], None)
    assert (backlog.num_waiting, backlog.num_moving) == (0, 0)
    return " ".join(found)


def test_within_a_lane_the_first_comes_first() -> None:
    """Catches keys read in an order that makes the drive jump, or a block left out."""
    backlog = Backlog()
    for each in (job("a", Lane.DEMAND, 3, 5), job("b", Lane.DEMAND, 1), job("c", Lane.DEMAND, 2)):
        backlog.add(each)
    assert backlog.num_waiting == 6
    assert taken(backlog) == "a5 a6 a7 b0 c0 c1"


def test_a_job_ends_with_its_last_block() -> None:
    """Catches a completion while a worker still moves a block of it."""
    backlog, one = Backlog(), job("a", Lane.PREFETCH, 2)
    backlog.add(one)
    assert [backlog.take(), backlog.take(), backlog.take()] == [(one, 0), (one, 1), None]
    assert not backlog.finish(one, None)
    assert backlog.finish(one, None)


def test_a_failure_drops_what_waits() -> None:
    """Catches blocks moved for nothing, a later error that replaces the first, and an end before
    the other workers are through."""
    backlog, bad = Backlog(), job("a", Lane.WRITE_BACK, 9)
    backlog.add(bad)
    backlog.add(job("b", Lane.WRITE_BACK, 1))
    backlog.take()
    backlog.take()
    first = OSError("first")
    assert not backlog.finish(bad, first)
    assert backlog.num_waiting == 1
    assert backlog.finish(bad, OSError("second"))
    assert bad.error is first
    assert taken(backlog) == "b0"


def test_what_waits_of_a_promoted_job_goes_behind_demand() -> None:
    """Catches blocks lost, repeated, or left in the old lane, and demand overtaken by it."""
    backlog, late = Backlog(), job("p", Lane.PREFETCH, 4)
    backlog.add(late)
    assert backlog.take() == (late, 0)
    backlog.finish(late, None)
    backlog.add(job("d", Lane.DEMAND, 1))
    backlog.add(job("w", Lane.WRITE_BACK, 1))
    backlog.promote(late)
    backlog.promote(late)
    assert taken(backlog) == "d0 p1 p2 p3 w0"
    backlog.promote(late)
    assert taken(backlog) == ""


def test_only_what_has_not_begun_is_withdrawn() -> None:
    """Catches a withdrawal under a worker's hands, and one that is counted twice."""
    backlog = Backlog()
    begun, waiting = job("a", Lane.PREFETCH, 2), job("b", Lane.PREFETCH, 3)
    backlog.add(begun)
    backlog.add(waiting)
    assert backlog.take() == (begun, 0)
    assert not backlog.withdraw(begun)
    assert [backlog.withdraw(waiting), backlog.withdraw(waiting)] == [True, True]
    assert backlog.num_waiting == 1
    backlog.promote(waiting)
    backlog.finish(begun, None)
    assert taken(backlog) == "a1"
    assert not backlog.withdraw(begun)
