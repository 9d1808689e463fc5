"""Pager when the tier fails or Ctrl-C comes: an error, no lost byte, and a retry that works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest
from core_helpers import InterruptibleTier, World, key, noise, pool_of

from zinf_core.errors import KeyAbsentError, TierError, TransferError
from zinf_core.runtime.events import Event, EventKind
from zinf_core.runtime.loans import Loan
from zinf_core.runtime.optimizer_step import PageUse, SubGroup, stream_sub_groups
from zinf_core.runtime.page import Page
from zinf_core.runtime.pool import BufferPool
from zinf_core.runtime.residency import Residency
from zinf_core.testing import DeferredTier, DictTier, FaultyTier, Operation, Phase, sweep_faults
from zinf_core.tier import Tier

P = 4096
A, B, C = (noise(P, seed) for seed in range(3))
BOTH = pytest.mark.parametrize("deferred", [False, True], ids=["prompt", "deferred"])


def world_of(deferred: bool, host_pages: int = 0) -> tuple[World, FaultyTier]:
    tier = FaultyTier(DictTier())
    slow = DeferredTier(tier) if deferred else tier
    return World(slow, device_pages=1, host_pages=host_pages), tier


# -- one failure at a time -------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("phase", Phase)
def test_a_fetch_that_fails_can_be_repeated(deferred: bool, phase: Phase) -> None:
    """Catches half-read bytes taken for a page, a lease lost, a page stuck in between."""
    world, tier = world_of(deferred)
    a = world.stored("a", A)
    tier.fail_next(Operation.READ, phase=phase)
    with pytest.raises(TransferError, match="planned failure"):
        world.pager.pin(a)
    assert (a.residency, a.pins, world.leased_pages()) == (Residency.ABSENT, 0, (0, 0))
    assert world.bytes_of(a) == A


@BOTH
@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("host_pages", [0, 1])
def test_a_write_back_that_fails_keeps_the_page(
    deferred: bool, phase: Phase, damage: bool, host_pages: int
) -> None:
    """Catches the only copy of a page thrown away because its write failed, and the failure
    itself swallowed: whoever needed the room is told."""
    world, tier = world_of(deferred, host_pages)
    a, b = world.stored("a", C), world.add("b")
    world.edit(a, A)
    tier.fail_next(Operation.WRITE, phase=phase, damage=damage)
    with pytest.raises(TransferError, match="planned failure"):  # noqa: PT012 - at either place
        world.fill(b, B)
        world.pager.settle()
    assert a.residency is Residency.DIRTY
    assert world.bytes_of(a) == A
    world.fill(b, B)
    assert world.bytes_of(a) == A
    assert world.bytes_of(b) == B


@BOTH
@pytest.mark.parametrize("phase", Phase)
def test_evict_all_goes_on_where_it_failed(deferred: bool, phase: Phase) -> None:
    """Catches dirty pages forgotten after one of them could not be written."""
    world, tier = world_of(deferred)
    world = World(world.slow, device_pages=3)
    pages = [world.add(name) for name in "abc"]
    for page, data in zip(pages, (A, B, C), strict=True):
        world.fill(page, data)
    tier.fail_next(Operation.WRITE, phase=phase)
    with pytest.raises(TransferError, match="planned failure"):
        world.pager.evict_all()
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert [world.bytes_of(page) for page in pages] == [A, B, C]


def test_a_failed_add_adds_nothing() -> None:
    """Catches a page known to the pager that has no room at home."""
    world, tier = world_of(deferred=False)
    tier.fail_next(Operation.RESERVE)
    with pytest.raises(TransferError, match="planned failure"):
        world.add("a")
    assert world.stored("a", A).stored


def test_a_failed_remove_can_be_repeated() -> None:
    """Catches room at home that nobody can free any more; a third remove says there is nothing."""
    world, tier = world_of(deferred=False)
    a = world.stored("a", A)
    tier.fail_next(Operation.DISCARD)
    with pytest.raises(TransferError, match="planned failure"):
        world.pager.remove(a)
    assert tier.usage().num_keys == 1
    world.pager.remove(a)
    assert tier.usage().num_keys == 0
    with pytest.raises(KeyAbsentError):
        world.pager.remove(a)
    world.fill(world.add("a"), B)


def test_dropping_during_a_write_that_fails_forgets_the_page() -> None:
    """Catches a page that comes back from the dead, and memory lost with it."""
    tier = InterruptibleTier(DeferredTier(FaultyTier(DictTier())))
    world = World(tier, device_pages=1, host_pages=0)
    a = world.add("a")
    world.fill(a, A)
    tier.interrupt_after(0)
    with pytest.raises(KeyboardInterrupt):
        world.fill(world.add("b"), B)
    assert a.residency is Residency.WRITING_BACK
    world.pager.drop(a)
    assert (a.has_bytes, world.leased_pages()) == (False, (0, 0))
    assert tier.num_pending == 0


def test_settle_finishes_everything_before_it_raises() -> None:
    """Catches transfers still in flight when the tiers are closed after an error."""
    tier = FaultyTier(DictTier())
    slow = InterruptibleTier(DeferredTier(tier))
    world = World(slow, host_pages=4)
    pages = [world.stored(name, A) for name in "abc"]
    for page in pages:
        with world.desk.lent(page, read=False, write=True) as buffer:
            buffer.array[:] = np.frombuffer(B, np.uint8)
    del buffer
    slow.interrupt_after(0)
    with pytest.raises(KeyboardInterrupt):
        world.pager.evict_all()
    assert [page.residency for page in pages] == [Residency.WRITING_BACK] * 3
    tier.fail_next(Operation.WRITE)
    with pytest.raises(TransferError, match="planned failure"):
        world.pager.settle()
    assert slow.num_pending == 0
    world.pager.settle()
    assert [page.residency for page in pages].count(Residency.DIRTY) == 1
    assert [world.bytes_of(page) for page in pages] == [B, B, B]


# -- Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(12))
def test_an_interrupt_at_any_wait_leaves_a_usable_pager(nth: int) -> None:
    """Catches Ctrl-C that loses a lease or a byte, or frees memory the tier still uses."""
    tier = InterruptibleTier(DeferredTier(DictTier()))
    world = World(tier, device_pages=2, host_pages=2)
    pages = [world.stored(f"p{seed}", noise(P, seed)) for seed in range(3)]
    expected = [noise(P, seed) for seed in range(3)]
    tier.interrupt_after(nth)
    done = 0
    with suppress(KeyboardInterrupt):
        for turn in range(6):
            done = turn
            world.edit(pages[turn % 3], noise(P, 10 + turn))
            expected[turn % 3] = noise(P, 10 + turn)
    tier.interrupt_never()
    assert done == 5 or nth < 12
    assert [world.bytes_of(page) for page in pages] == expected
    world.pager.evict_all()
    assert (world.leased_pages(), tier.num_pending) == ((0, 0), 0)
    assert [world.bytes_of(page) for page in pages] == expected


@pytest.mark.parametrize("again", ["pin", "drop", "create", "evict_all", "remove", "borrow"])
def test_an_interrupted_fetch_is_taken_up_by_whatever_comes_next(again: str) -> None:
    """Catches a read that nobody waits for, into memory that goes to the next page."""
    tier = InterruptibleTier(DeferredTier(DictTier()))
    world = World(tier)
    a = world.stored("a", A)
    tier.interrupt_after(0)
    with pytest.raises(KeyboardInterrupt):
        world.pager.pin(a)
    assert (a.residency, a.pins, world.leased_pages()) == (Residency.FETCHING, 0, (1, 0))
    if again == "pin":
        assert world.bytes_of(a) == A
    elif again == "create":
        world.fill(a, B)
        assert world.bytes_of(a) == B
    elif again == "borrow":
        with world.desk.lent(a) as buffer:
            assert buffer.array.tobytes() == A
        del buffer
    elif again == "evict_all":
        world.pager.evict_all()
    else:
        getattr(world.pager, again)(a)
    assert tier.num_pending == 0
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)


@pytest.mark.parametrize("kind", EventKind)
@pytest.mark.parametrize("host_pages", [0, 2])
def test_an_interrupt_in_an_observer_loses_no_transfer(kind: EventKind, host_pages: int) -> None:
    """Catches a transfer that was submitted and is forgotten, because Ctrl-C came while the event
    was handed out: its memory goes to the next page under it."""
    slow, fired = DeferredTier(DictTier()), list[Event]()
    armed = False

    def observe(event: Event) -> None:
        if armed and event.kind is kind and not fired:
            fired.append(event)
            raise KeyboardInterrupt

    world = World(slow, device_pages=4, host_pages=host_pages, observer=observe)
    a, b, c = (world.stored(name, data) for name, data in (("a", A), ("b", B), ("c", C)))
    others = [world.stored(f"other{i}", noise(P, i)) for i in range(6)]
    world.pager.end_iteration()
    for page in (a, c, *others):
        world.bytes_of(page)
    world.pager.end_iteration()
    armed = True
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at one of these places
        world.bytes_of(a)
        world.fill(b, C)
        world.bytes_of(c)
        for page in others:
            world.bytes_of(page)
        world.pager.evict_all()
        world.bytes_of(a)
    world.pager.evict_all()
    assert (world.leased_pages(), slow.num_pending) == ((0, 0), 0)
    world.pager.drop(b)
    assert (world.bytes_of(a), world.bytes_of(c)) == (A, C)
    world.fill(b, B)
    assert (world.bytes_of(a), world.bytes_of(b), world.bytes_of(c)) == (A, B, C)
    world.pager.evict_all()
    assert (world.leased_pages(), slow.num_pending) == ((0, 0), 0)


# -- every call fails once -------------------------------------------------------------------


class Stubborn:
    """Repeats what fails, once, and raises the first failure at its end."""

    def __init__(self) -> None:
        self.failure: TierError | None = None

    def do(self, act: Callable[[], object]) -> None:
        try:
            act()
        except TierError as exc:
            assert self.failure is None, "the retry failed, or a failure came twice"
            self.failure = exc.with_traceback(None)
            act()


def paging_workload(tier: Tier, device: BufferPool, host: BufferPool) -> int:
    """Edit, replace, lend, read ahead, drop and remove pages on a tight budget; check every
    byte. Return how many reads were made ahead."""
    world = World(tier, device_pool=device, host_pool=host)
    stubborn, expected = Stubborn(), dict[str, bytes]()

    def edit(name: str, seed: int) -> None:
        stubborn.do(lambda: world.edit(world.pages[name], noise(P, seed)))
        expected[name] = noise(P, seed)

    def lend(name: str, seed: int) -> None:
        stubborn.do(lambda: _write_lent(world, world.pages[name], noise(P, seed)))
        expected[name] = noise(P, seed)

    for seed, name in enumerate("abcd"):
        stubborn.do(lambda name=name: world.add(name))
        stubborn.do(lambda name=name, seed=seed: world.fill(world.pages[name], noise(P, seed)))
        expected[name] = noise(P, seed)
    for seed, act, name in [
        (10, edit, "a"), (11, lend, "c"), (12, edit, "c"), (13, lend, "b"), (14, lend, "a"),
        (15, edit, "b"), (16, edit, "a"), (17, lend, "c"), (18, edit, "c"),
    ]:  # fmt: skip
        act(name, seed)
    for turn in range(2):
        stubborn.do(world.pager.end_iteration)
        for name in "abcd":
            stubborn.do(lambda name=name: _expect(world, name, expected[name]))
        edit("b", 20 + turn)
    stubborn.do(lambda: world.pager.drop(world.pages["a"]))
    stubborn.do(lambda: world.fill(world.pages["a"], noise(P, 30)))
    expected["a"] = noise(P, 30)
    stubborn.do(world.pager.evict_all)
    for name, data in expected.items():
        stubborn.do(lambda name=name, data=data: _expect(world, name, data))
    for name in expected:
        stubborn.do(lambda name=name: world.pager.remove(world.pages[name]))
    if stubborn.failure is not None:
        raise stubborn.failure
    return len(world.log(EventKind.PREFETCH))


def _write_lent(world: World, page: Page, data: bytes) -> None:
    try:
        with world.desk.lent(page, write=True) as buffer:
            buffer.array[:] = np.frombuffer(data, np.uint8)
    finally:
        buffer = None


def _expect(world: World, name: str, data: bytes) -> None:
    assert world.bytes_of(world.pages[name]) == data


@BOTH
@pytest.mark.slow
def test_paging_survives_the_failure_of_every_call(deferred: bool) -> None:
    """Catches a byte, a lease or the pager itself lost at any call that fails, at submit or at
    wait, with and without damage: the same call again works, and all bytes are right. Nobody is
    told of a failed read ahead; every other failure is raised."""
    device, host = pool_of(2), pool_of(2, "host")

    num_ahead: list[int] = []

    def workload(tier: Tier) -> None:
        num_ahead.append(paging_workload(DeferredTier(tier) if deferred else tier, device, host))

    report = sweep_faults(workload, open_tier=DictTier, pools=(device, host))
    assert report.num_raised + 2 * num_ahead[0] == report.num_runs > 40
    assert num_ahead[0] > 2
    assert {Operation.READ, Operation.WRITE, Operation.DISCARD} < set(report.calls)
    for pool in (device, host):
        assert pool.usage().peak_nbytes <= pool.usage().budget_nbytes


def streaming_workload(tier: Tier, device: BufferPool, host: BufferPool) -> None:
    """Update states twice by streamed steps; repeat a step from the group that failed."""
    world = World(tier, device_pool=device, host_pool=host)
    stubborn, updates = Stubborn(), [0] * 4
    for seed in range(4):
        stubborn.do(lambda seed=seed: world.add(f"p{seed}"))
        stubborn.do(lambda seed=seed: world.fill(world.pages[f"p{seed}"], noise(P, seed)))
    pages = list(world.pages.values())
    stubborn.do(world.pager.evict_all)

    def update(index: int, loans: Sequence[Loan]) -> None:
        if updates[index] < goal:
            updates[index] += 1
            loans[0].buffer.array[:] += 1

    groups = [
        SubGroup(uses=(PageUse(page=page, written=True),), working_nbytes=P, is_complete=True)
        for page in pages
    ]
    for goal in (1, 2):  # noqa: B007 - read by update
        stubborn.do(lambda: stream_sub_groups(world.desk, groups, update, available_nbytes=2 * P))
    stubborn.do(world.pager.evict_all)
    for seed, page in enumerate(pages):
        data = (np.frombuffer(noise(P, seed), np.uint8) + np.uint8(2)).tobytes()
        stubborn.do(lambda page=page, data=data: _expect(world, page.key.name, data))
        stubborn.do(lambda page=page: world.pager.remove(page))
    if stubborn.failure is not None:
        raise stubborn.failure


@BOTH
@pytest.mark.slow
def test_streaming_survives_the_failure_of_every_call(deferred: bool) -> None:
    """Catches an update lost or made twice, a loan or pin lost, at any call that fails."""
    device, host = pool_of(2), pool_of(3, "host")

    def workload(tier: Tier) -> None:
        streaming_workload(DeferredTier(tier) if deferred else tier, device, host)

    report = sweep_faults(workload, open_tier=DictTier, pools=(device, host))
    assert report.num_raised == report.num_runs > 40


def test_a_full_home_tier_is_an_error_at_set_up() -> None:
    """Catches a run that finds out in the middle of training that its states have no room."""
    world = World(DictTier(capacity_nbytes=2 * P))
    world.add("a")
    world.add("b")
    with pytest.raises(TierError, match="no room"):
        world.add("c")
    with pytest.raises(KeyAbsentError):
        world.slow.stat(key("c"))
