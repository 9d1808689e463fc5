"""Memory as a cache of the home tiers: what stays, what it spares, and what is never written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from core_helpers import World, noise

from zinf_core.runtime.events import EventKind
from zinf_core.runtime.page import Page
from zinf_core.runtime.residency import Residency
from zinf_core.testing import DeferredTier, DictTier

P = 4096
A, B, C, D = (noise(P, seed) for seed in range(4))


def world_of(device_pages: int, host_pages: int, *, reads_ahead: bool = False) -> World:
    world = World(DeferredTier(DictTier()), device_pages=device_pages, host_pages=host_pages)
    if not reads_ahead:
        world.read_nothing_ahead()
    return world


def stored_pages(world: World, num: int) -> list[Page]:
    """Return pages at home, with the accesses that gave them their values behind them."""
    pages = [world.stored(f"p{i}", noise(P, i)) for i in range(num)]
    world.pager.end_iteration()
    world.log()
    return pages


def count(world: World, kind: EventKind) -> int:
    return len(world.log(kind))


def expect_budgets(world: World) -> None:
    for pool in (world.device_pool, world.host_pool):
        usage = pool.usage()
        assert usage.tracked_nbytes <= usage.peak_nbytes <= usage.budget_nbytes


# -- from one memory to the other ------------------------------------------------------------


def test_a_page_that_gives_way_waits_in_host_memory() -> None:
    """Catches a read of bytes that were in host memory, and one that is copied there and back."""
    world = world_of(1, 4)
    a, b = world.stored("a", A), world.stored("b", B)
    view = world.pager.pin(a)
    address = view.ctypes.data
    world.pager.unpin(a)
    del view
    assert world.bytes_of(b) == B
    assert (world.log(), world.leased_pages()) == (
        ["demand_fetch a", "read a", "demand_fetch b", "read b"],
        (1, 1),
    )
    with world.pager.pinned(a) as view:
        assert (view.tobytes(), view.ctypes.data) == (A, address)
    assert (world.log(), world.leased_pages()) == ([], (1, 1))
    expect_budgets(world)


def test_a_dirty_page_waits_unwritten_and_is_written_once() -> None:
    """Catches bytes written home each time a page gives way on the device, and bytes that are
    forgotten between the two memories."""
    world = world_of(1, 4)
    a, b = world.stored("a", A), world.stored("b", B)
    for data in (C, D):
        world.edit(a, data)
        world.bytes_of(b)
    assert count(world, EventKind.WRITE) == 0
    assert a.residency is Residency.DIRTY
    assert world.bytes_of(a) == D
    world.pager.evict_all()
    assert world.log() == ["evict b", "evict a", "write a"]
    assert world.bytes_of(a) == D


@pytest.mark.parametrize("told", [False, True])
def test_an_edit_the_client_noticed_is_not_lost_on_the_way(told: bool) -> None:
    """Catches a page demoted as clean although its client knows of a write through the view."""
    world = world_of(1, 4)
    a, b = world.stored("a", A), world.stored("b", B)
    with world.pager.pinned(a) as view:
        view[:] = np.frombuffer(C, np.uint8)
        a.client.written = True
        if told:
            world.pager.mark_dirty(a)
    del view
    world.bytes_of(b)
    assert a.residency is Residency.DIRTY
    world.pager.evict_all()
    assert world.bytes_of(a) == C


def test_host_memory_keeps_an_eighth_free() -> None:
    """Catches a cache that fills up: what comes next would wait for a write first. Pages go from
    it in the order of their use."""
    world = world_of(1, 8)
    pages = [world.stored(f"p{i}", noise(P, i)) for i in range(10)]
    world.log()
    for page in pages:
        world.edit(page, noise(P, 50))
        world.pager.settle()
    assert world.leased_pages() == (1, 7)
    assert world.log(EventKind.EVICT) == ["evict p0", "evict p1"]
    expect_budgets(world)


def test_a_page_at_home_in_host_memory_is_not_kept_twice() -> None:
    """Catches host memory spent on a copy of host memory."""
    world = world_of(1, 4)
    a, b = world.stored("a", A, home="host"), world.stored("b", B)
    world.bytes_of(a)
    world.bytes_of(b)
    assert world.log() == ["demand_fetch a", "read a", "evict a", "demand_fetch b", "read b"]
    assert world.leased_pages() == (1, 1)


def test_working_memory_displaces_what_is_only_cached() -> None:
    """Catches a refusal, or a wait for ever, while host memory holds pages nobody uses."""
    world = world_of(1, 4)
    for seed in range(5):
        world.edit(world.stored(f"p{seed}", noise(P, seed)), noise(P, 10 + seed))
    for name in ("p1", "p2", "p3", "p4"):
        world.bytes_of(world.pages[name])
    assert world.leased_pages()[1] > 0
    assert world.pager.idle_host_nbytes() == world.leased_pages()[1] * P
    lease = world.pager.lease_host(4 * P)
    assert (world.leased_pages()[1], world.pager.idle_host_nbytes()) == (4, 0)
    lease.release()
    for seed in range(5):
        assert world.bytes_of(world.pages[f"p{seed}"]) == noise(P, 10 + seed)
    expect_budgets(world)


def test_a_held_page_stays_where_it_is() -> None:
    """Catches memory taken away under a pin, a view that is looked at, or a borrower."""
    world = world_of(3, 2)
    pages = [world.stored(f"p{i}", noise(P, i)) for i in range(6)]
    pinned, looked_at, lent = pages[:3]
    view = world.pager.pin(pinned)
    other_view = world.pager.pin(looked_at)
    world.pager.unpin(looked_at)
    loan = world.desk.borrow(lent)
    world.desk.wait(loan)
    for page in pages[3:]:
        world.bytes_of(page)
    world.pager.evict_all()
    assert world.leased_pages() == (2, 1)
    assert (view.tobytes(), other_view.tobytes()) == (noise(P, 0), noise(P, 1))
    assert loan.buffer.array.tobytes() == noise(P, 2)
    world.desk.give_back(loan, written=False)
    world.pager.unpin(pinned)
    del view, other_view
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)


# -- what it spares --------------------------------------------------------------------------

NUM = 40
DEVICE = 4


def reads_of_scans(world: World, pages: Sequence[Page], num_scans: int) -> list[int]:
    """Use all pages in order, iteration by iteration; return the reads of each."""
    reads = []
    for _ in range(num_scans):
        for page in pages:
            assert world.bytes_of(page) == noise(P, int(page.key.name[1:]))
        world.pager.end_iteration()
        reads.append(count(world, EventKind.READ))
    expect_budgets(world)
    return reads


@pytest.mark.parametrize("percent", [0, 20, 40, 60, 80])
def test_memory_for_a_part_of_a_scan_spares_that_part_of_the_reads(percent: int) -> None:
    """Catches least recent use across iterations, where memory for anything less than all pages
    spares nothing; and memory of either kind left unused. One page is in use at a time, an eighth
    of the host stays free."""
    host = NUM * percent // 100
    world = world_of(DEVICE, host)
    reads = reads_of_scans(world, stored_pages(world, NUM), 5)
    kept = DEVICE + host - -(-host // 8) - 1
    assert reads == [NUM] + [NUM - kept] * 4


@pytest.mark.parametrize("percent", [0, 20, 40, 60, 80])
def test_reading_ahead_takes_no_more_memory_than_its_window(percent: int) -> None:
    """Catches reads ahead that displace what the iteration needs sooner, until all is read twice:
    of the memory, at most the window of a quarter is not there for what stays."""
    host = NUM * percent // 100
    world = world_of(DEVICE, host, reads_ahead=True)
    reads = reads_of_scans(world, stored_pages(world, NUM), 5)
    kept = (DEVICE + host) * 3 // 4 - -(-host // 8) - 1
    assert all(num <= NUM - kept for num in reads[2:]), reads


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_what_fits_is_read_once(reads_ahead: bool) -> None:
    """Catches pages given up at the end of an iteration, or read ahead over themselves."""
    world = world_of(DEVICE, NUM + 5, reads_ahead=reads_ahead)
    assert reads_of_scans(world, stored_pages(world, NUM), 4) == [NUM, 0, 0, 0]


def test_a_scan_back_and_forth_keeps_its_turning_points() -> None:
    """Catches a cursor that takes each key for its first use: forward and backward passes use
    each page twice, and the pages at the turn are still there."""
    world = world_of(2, 8)
    pages = stored_pages(world, 20)
    reads = []
    for _ in range(4):
        for page in (*pages, *reversed(pages)):
            world.bytes_of(page)
        world.pager.end_iteration()
        reads.append(count(world, EventKind.READ))
    # Of 20 pages 8 are kept at each turn; the first iteration knows of no turn.
    assert all(num <= 2 * (20 - 8) for num in reads[1:]), reads


def test_dirty_pages_that_stay_are_not_written_every_iteration() -> None:
    """Catches states that are updated in place in memory and yet written home every time."""
    world = world_of(1, 16)
    pages = stored_pages(world, 12)
    for turn in range(4):
        for page in pages:
            with world.desk.lent(page, write=True) as buffer:
                buffer.array[:] += 1
            del buffer
        world.pager.end_iteration()
        assert count(world, EventKind.WRITE) == 0, turn
    for seed, page in enumerate(pages):
        expected = np.frombuffer(noise(P, seed), np.uint8) + np.uint8(4)
        assert world.bytes_of(page) == expected.tobytes()
    world.log()
    world.pager.evict_all()
    assert count(world, EventKind.WRITE) == 12


def test_of_a_cycle_of_updates_larger_than_memory_part_is_not_written() -> None:
    """Catches writes of every page at every step, of which memory could spare its share."""
    world = world_of(1, 8)
    pages = stored_pages(world, 16)
    writes = []
    for _ in range(5):
        for page in pages:
            with world.desk.lent(page, write=True) as buffer:
                buffer.array[:] += 1
            del buffer
        world.pager.end_iteration()
        writes.append(count(world, EventKind.WRITE))
    assert all(num <= 16 - 6 for num in writes[1:]), writes
    for seed, page in enumerate(pages):
        expected = np.frombuffer(noise(P, seed), np.uint8) + np.uint8(5)
        assert world.bytes_of(page) == expected.tobytes()


# -- what is dropped -------------------------------------------------------------------------


def test_what_is_made_and_dropped_within_an_iteration_is_never_written() -> None:
    """Catches gradients written home while there is room for them until they are dropped, and
    those of the next iteration read although they are made anew."""
    world = world_of(2, 16, reads_ahead=True)
    pages = stored_pages(world, 6)
    grads = [world.add(f"g{i}") for i in range(6)]
    for _ in range(4):
        for page, grad in zip(pages, grads, strict=True):
            world.bytes_of(page)
            world.fill(grad, A)
        for grad in grads:
            with world.desk.lent(grad) as buffer:
                assert buffer.array.tobytes() == A
            del buffer
        for grad in grads:
            world.pager.drop(grad)
        world.pager.end_iteration()
    events = world.log(EventKind.WRITE, EventKind.READ)
    assert events == [f"read p{i}" for i in range(6)]
    assert world.slow.usage().num_keys == 12


def test_pages_that_will_be_overwritten_go_last_while_they_are_dirty() -> None:
    """Catches a write that nobody needs, when a clean page could give way instead."""
    world = world_of(2, 0)
    a, g, b = world.stored("a", A), world.add("g"), world.stored("b", B)
    world.pager.end_iteration()
    for _ in range(2):
        world.fill(g, C)
        world.bytes_of(a)
        world.log()
        world.bytes_of(b)
        seen = world.log()
        world.pager.drop(g)
        world.pager.end_iteration()
    assert seen == ["evict a", "demand_fetch b", "read b"]


def test_a_clean_page_that_will_be_overwritten_goes_first() -> None:
    """Catches memory kept for bytes that are replaced before they are read."""
    world = world_of(2, 0)
    a, b, c = world.stored("a", A), world.stored("b", B), world.stored("c", C)
    world.pager.end_iteration()
    seen = []
    for _ in range(2):
        world.fill(a, A)
        world.bytes_of(b)
        world.pager.evict_all()
        world.bytes_of(a)
        world.bytes_of(b)
        world.log()
        world.bytes_of(c)
        seen.append(world.log(EventKind.EVICT))
        world.pager.end_iteration()
    assert seen == [["evict a"], ["evict a"]]
