"""Streamed optimizer step: order, read-ahead within the budget, and nothing lost on any path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from core_helpers import InterruptibleTier, World, noise

from zinf_core.completion import Completion
from zinf_core.errors import BudgetExceededError, TransferError
from zinf_core.keys import TensorKey
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.loans import Loan
from zinf_core.runtime.optimizer_step import PageUse, SubGroup, Update, stream_sub_groups
from zinf_core.runtime.page import Page
from zinf_core.testing import DeferredTier, DictTier, FaultyTier, Operation, Phase

P = 4096


@pytest.fixture
def world() -> Iterator[World]:
    """Return a pager over a tier that defers, with room for four pages on the host."""
    world = World(DeferredTier(DictTier()))
    yield world
    usage = world.host_pool.usage()
    assert usage.peak_nbytes <= usage.budget_nbytes


def pages_of(world: World, num: int, home: str = "slow") -> list[Page]:
    pages = [world.stored(f"p{i}", noise(P, i), home=home) for i in range(num)]
    world.log()
    return pages


def group(*pages: Page, written: bool = True, complete: bool = True) -> SubGroup:
    return SubGroup(
        uses=tuple(PageUse(page=page, written=written) for page in pages),
        working_nbytes=len(pages) * P,
        is_complete=complete,
    )


def increment(index: int, loans: Sequence[Loan]) -> None:
    del index
    for loan in loans:
        loan.buffer.array[:] += 1


def after(seed: int, num_updates: int = 1) -> bytes:
    expected = np.frombuffer(noise(P, seed), np.uint8) + np.uint8(num_updates)
    data: bytes = expected.tobytes()
    return data


def stream(world: World, groups: Sequence[SubGroup], update: Update, num_pages: int = 4) -> None:
    stream_sub_groups(world.desk, groups, update, available_nbytes=num_pages * P)


def expect_nothing_held(world: World, pages: Sequence[Page]) -> None:
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert [page.pins for page in pages] == [0] * len(pages)


# -- order -----------------------------------------------------------------------------------


MOVES = (EventKind.READ, EventKind.WRITE)


def moves_of_a_step(world: World, groups: Sequence[SubGroup], num_pages: int) -> list[str]:
    """Run a step; return what moved from and to the tier, and the updates."""
    seen: list[str] = []

    def update(index: int, loans: Sequence[Loan]) -> None:
        increment(index, loans)
        seen.extend([*world.log(*MOVES), f"update p{index}"])

    stream(world, groups, update, num_pages)
    return [*seen, *world.log(*MOVES)]


def test_the_next_group_is_read_before_the_update_of_this_one() -> None:
    """Catches a step that reads, updates and writes one after the other. Two of three pages fit,
    and what a write leaves behind is free before the next one is asked for."""
    world = World(DeferredTier(DictTier()), host_pages=2)
    pages = pages_of(world, 3)
    assert moves_of_a_step(world, [group(page) for page in pages], 2) == [
        "read p0", "read p1", "update p0",
        "write p0", "read p2", "update p1",
        "write p1", "update p2",
    ]  # fmt: skip
    world.pager.evict_all()
    assert world.log(*MOVES) == ["write p2"]
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed)
    expect_nothing_held(world, pages)


def test_a_step_moves_nothing_that_memory_has_room_for(world: World) -> None:
    """Catches states written home at every step, and read again at the next, which stay in memory
    if that has room for them."""
    pages = pages_of(world, 3)
    groups = [group(page) for page in pages]
    assert moves_of_a_step(world, groups, 4) == [
        "read p0", "read p1", "update p0", "read p2", "update p1", "update p2",
    ]  # fmt: skip
    assert moves_of_a_step(world, groups, 4) == ["update p0", "update p1", "update p2"]
    world.pager.evict_all()
    assert world.log(*MOVES) == ["write p0", "write p1", "write p2"]
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, 2)
    expect_nothing_held(world, pages)


def test_a_step_larger_than_memory_keeps_part_of_it(world: World) -> None:
    """Catches the order of least recent use once the accesses are known: it moves every page of
    every step, where four pages of memory spare the moves of the pages that stay."""
    pages = pages_of(world, 8)
    groups = [group(page) for page in pages]
    world.pager.end_iteration()
    num_moves = []
    for _ in range(5):
        num_moves.append(len(moves_of_a_step(world, groups, 4)) - len(groups))
        world.pager.end_iteration()
        world.log()
    assert all(num <= 12 for num in num_moves[2:]), num_moves
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, 5)
    expect_nothing_held(world, pages)


@pytest.mark.parametrize(
    ("num_pages", "complete"), [(1, (True, True)), (4, (False, True)), (4, (True, False))]
)
@pytest.mark.parametrize("host_pages", [1, 4])
def test_nothing_is_read_ahead_that_may_not_fit(
    host_pages: int, num_pages: int, complete: tuple[bool, bool]
) -> None:
    """Catches reading ahead into memory that the running update will ask for."""
    world = World(DeferredTier(DictTier()), host_pages=host_pages)
    pages = pages_of(world, 2)
    groups = [group(page, complete=flag) for page, flag in zip(pages, complete, strict=True)]
    assert moves_of_a_step(world, groups, num_pages) == [
        "read p0", "update p0", *["write p0"] * (host_pages == 1), "read p1", "update p1",
        *["write p1"] * (host_pages == 1),
    ]  # fmt: skip


def test_two_groups_that_just_fit_are_both_in_memory(world: World) -> None:
    """Catches a limit taken as exclusive, which halves the speed of the largest groups."""
    pages = pages_of(world, 4)
    seen: list[int] = []

    def update(index: int, loans: Sequence[Loan]) -> None:
        seen.append(world.leased_pages()[1])
        increment(index, loans)

    stream(world, [group(*pages[:2]), group(*pages[2:])], update)
    assert seen == [4, 4]
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed)


def test_memory_in_use_elsewhere_only_costs_the_read_ahead(world: World) -> None:
    """Catches a step that fails although each group fits by itself."""
    pages = pages_of(world, 3)
    taken = [world.pager.lease_host(P) for _ in range(3)]
    stream(world, [group(page) for page in pages], increment)
    for lease in taken:
        lease.release()
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed)


def test_a_group_that_does_not_fit_is_an_error(world: World) -> None:
    """Catches a hang, and loans lost by the group that was refused."""
    pages = pages_of(world, 5)
    with pytest.raises(BudgetExceededError, match="host budget"):
        stream(world, [group(*pages)], increment)
    expect_nothing_held(world, pages)


@pytest.mark.parametrize("home", ["slow", "host", "device"])
def test_states_of_every_home_are_updated(home: str) -> None:
    """Catches updates in place that are lost, and copies that are not the page's bytes."""
    world = World(DeferredTier(DictTier()))
    pages = pages_of(world, 3, home)
    for _ in range(2):
        stream(world, [group(*pages[:2]), group(pages[2])], increment)
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, 2)


def test_resident_pages_are_updated_in_place(world: World) -> None:
    """Catches an update of the home tier's bytes while newer ones are resident."""
    pages = pages_of(world, 2)
    world.edit(pages[0], noise(P, 7))
    world.log()
    stream(world, [group(page) for page in pages], increment)
    assert world.log(EventKind.READ) == ["read p1"]
    assert world.bytes_of(pages[0]) == after(7)
    world.pager.evict_all()
    assert world.bytes_of(pages[0]) == after(7)


def test_pages_that_are_only_read_are_not_written(world: World) -> None:
    """Catches gradients written home although the update left them alone."""
    pages = pages_of(world, 2)
    stream(world, [group(page, written=False) for page in pages], lambda _i, _l: None)
    assert world.log(EventKind.WRITE) == []
    expect_nothing_held(world, pages)


def test_an_update_may_give_back_early_and_borrow_more(world: World) -> None:
    """Catches a loan given back twice, and memory that stays taken until the group ends."""
    pages = pages_of(world, 4)
    extra = pages[3]

    def update(index: int, loans: Sequence[Loan]) -> None:
        increment(index, loans)
        world.desk.give_back(loans[0], written=True)
        with world.desk.lent(extra, write=True) as buffer:
            buffer.array[:] += 1

    stream(world, [group(page, complete=False) for page in pages[:3]], update, 1)
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, 3 if page is extra else 1)
    expect_nothing_held(world, pages)


def test_groups_of_nothing_are_updated_too(world: World) -> None:
    """Catches an empty group skipped, or one that takes the next group's loans."""
    pages = pages_of(world, 1)
    seen: list[tuple[int, int]] = []
    groups = [group(), group(*pages), group()]
    stream(world, groups, lambda index, loans: seen.append((index, len(loans))))
    assert seen == [(0, 0), (1, 1), (2, 0)]
    stream(world, [], increment)
    expect_nothing_held(world, pages)


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [1, 4], ids=["one at a time", "read ahead"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_update_that_raises_keeps_what_it_wrote(failing: int, num_pages: int) -> None:
    """Catches a half-done step that is undone, unlike the in-place updates of plain PyTorch, and
    the loans of the group read ahead lost."""
    world = World(DeferredTier(DictTier()))
    pages = pages_of(world, 3)

    def update(index: int, loans: Sequence[Loan]) -> None:
        increment(index, loans)
        if index == failing:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream(world, [group(page) for page in pages], update, num_pages)
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, int(seed <= failing))
    expect_nothing_held(world, pages)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_read_ahead_that_fails_gives_everything_back(nth: int, phase: Phase) -> None:
    """Catches the loans of the running group lost because the read of the next one failed; and an
    update with bytes that were not read."""
    tier = _FailsNthRead(DictTier())
    world = World(tier, host_pages=4)
    pages = pages_of(world, 4)
    world.bytes_of(pages[0])  # lent in place: pinned
    groups = [group(*pages[:2]), group(pages[2]), group(pages[3])]
    updated: list[int] = []

    def update(index: int, loans: Sequence[Loan]) -> None:
        updated.append(index)
        increment(index, loans)

    tier.arm(nth, phase)
    with pytest.raises(TransferError, match="planned failure"):
        stream(world, groups, update)
    expect_nothing_held(world, pages)
    ahead = nth if phase is Phase.WAIT else max(nth - 1, 0)
    assert updated == list(range(ahead))
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, updated.count(max(seed - 1, 0)))


class _FailsNthRead:
    """Wrapper whose n-th read after `arm` fails."""

    def __init__(self, inner: DictTier) -> None:
        self._faulty = FaultyTier(inner)
        self._left: int | None = None
        self._phase = Phase.WAIT

    def arm(self, nth: int, phase: Phase) -> None:
        self._left, self._phase = nth, phase

    def __getattr__(self, name: str) -> object:
        return getattr(self._faulty, name)

    def read_into(self, which: TensorKey, dst: object, *, offset: int = 0) -> Completion:
        if self._left is not None:
            if self._left == 0:
                self._faulty.fail_next(Operation.READ, phase=self._phase)
            self._left = self._left - 1 if self._left else None
        return self._faulty.read_into(which, dst, offset=offset)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("phase", Phase)
def test_a_write_that_fails_does_not_lose_the_other_loans(phase: Phase, deferred: bool) -> None:
    """Catches the loans after the failed one lost, with the updates in them."""
    tier = FaultyTier(DictTier())
    world = World(DeferredTier(tier) if deferred else tier, host_pages=2)
    pages = pages_of(world, 3)
    world.bytes_of(pages[2])  # lent where it is, on the device
    tier.fail_next(Operation.WRITE, phase=phase)
    with pytest.raises(TransferError, match="planned failure"):  # noqa: PT012 - at either place
        stream(world, [group(*pages)], increment)
        world.pager.settle()
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed)
    expect_nothing_held(world, pages)
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed)


@pytest.mark.parametrize("nth", range(6))
def test_an_interrupt_leaves_a_usable_pager(nth: int) -> None:
    """Catches Ctrl-C at any wait that loses a lease, a pin or an update that was made."""
    tier = InterruptibleTier(DeferredTier(DictTier()))
    world = World(tier, host_pages=2)
    pages = pages_of(world, 4)
    updated: list[int] = []

    def update(index: int, loans: Sequence[Loan]) -> None:
        increment(index, loans)
        updated.append(index)

    tier.interrupt_after(nth)
    try:
        stream(world, [group(page) for page in pages], update, 2)
    except KeyboardInterrupt:
        assert len(updated) < 4 or tier.interrupts == 0
    tier.interrupt_never()
    for seed, page in enumerate(pages):
        assert world.bytes_of(page) == after(seed, updated.count(seed))
    expect_nothing_held(world, pages)
