"""Pager: what moves when, told as literal event lists, and whose bytes a view shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from core_helpers import ArrayClient, InterruptibleTier, World, key, noise

from zinf_core.errors import (
    BudgetExceededError,
    InternalError,
    KeyAbsentError,
    KeyExistsError,
    TierFullError,
)
from zinf_core.keys import StateKind
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.residency import Residency
from zinf_core.testing import DeferredTier, DictTier

P = 4096
A, B, C, D = (noise(P, seed) for seed in range(4))


@pytest.fixture
def world() -> Iterator[World]:
    """Return a pager with room for two pages on the device and none elsewhere, over a tier that
    defers."""
    yield from kept_in_budget(World(DeferredTier(DictTier()), device_pages=2, host_pages=0))


@pytest.fixture
def roomy() -> Iterator[World]:
    """Return a pager with room for two pages on the device and four on the host."""
    yield from kept_in_budget(World(DeferredTier(DictTier()), device_pages=2, host_pages=4))


def kept_in_budget(world: World) -> Iterator[World]:
    yield world
    for pool in (world.device_pool, world.host_pool):
        usage = pool.usage()
        assert usage.peak_nbytes <= usage.budget_nbytes


# -- what moves ------------------------------------------------------------------------------


def test_a_new_page_is_not_read_and_is_written_when_evicted(world: World) -> None:
    """Catches reading garbage for a page that is written whole, and losing it at eviction."""
    a = world.add("a")
    world.fill(a, A)
    assert world.log() == ["create a"]
    world.pager.evict_all()
    assert world.log() == ["evict a", "write a"]
    assert world.bytes_of(a) == A
    assert world.log() == ["demand_fetch a", "read a"]


def test_a_resident_page_costs_nothing(world: World) -> None:
    """Catches a fetch per access."""
    a = world.stored("a", A)
    for _ in range(3):
        assert world.bytes_of(a) == A
    assert world.log() == ["demand_fetch a", "read a"]


def test_a_clean_page_is_evicted_without_a_write(world: World) -> None:
    """Catches writing back what the home tier has already: wear and half of the bandwidth."""
    a, b, c = world.stored("a", A), world.stored("b", B), world.stored("c", C)
    world.log()
    for page in (a, b, c):
        world.bytes_of(page)
    assert world.log() == [
        "demand_fetch a", "read a", "demand_fetch b", "read b",
        "evict a", "demand_fetch c", "read c",
    ]  # fmt: skip


@pytest.mark.parametrize("told_by", ["client", "mark_dirty"])
def test_an_edit_is_written_back(world: World, told_by: str) -> None:
    """Catches an edit that is lost, told by whichever of the two ways."""
    a = world.stored("a", A)
    if told_by == "client":
        with world.pager.pinned(a) as view:
            view[:] = np.frombuffer(B, np.uint8)
            a.client.written = True
        del view
    else:
        world.edit(a, B)
    world.pager.evict_all()
    assert world.log() == ["demand_fetch a", "read a", "evict a", "write a"]
    assert world.bytes_of(a) == B


def test_an_edit_is_written_back_once(world: World) -> None:
    """Catches a page that stays dirty for ever after its first edit."""
    a = world.stored("a", A)
    world.edit(a, B)
    world.pager.evict_all()
    world.bytes_of(a)
    world.log()
    world.pager.evict_all()
    assert world.log() == ["evict a"]


def test_create_over_old_bytes_reads_nothing(world: World) -> None:
    """Catches fetching bytes that are about to be replaced, at home or in memory."""
    a = world.stored("a", A)
    world.fill(a, B)
    assert world.log() == ["create a"]
    world.fill(a, C)
    assert world.log() == []
    world.pager.evict_all()
    assert world.bytes_of(a) == C
    world.fill(a, A)
    world.pager.evict_all()
    assert world.bytes_of(a) == A


def test_a_lease_evicts_no_more_than_it_needs() -> None:
    """Catches evicting every dirty page while the write of the first is still in flight."""
    world = World(DeferredTier(DictTier()), device_pages=4, host_pages=0)
    for seed in range(4):
        world.fill(world.add(f"p{seed}"), noise(P, seed))
    world.log()
    world.fill(world.add("new"), A)
    assert world.log() == ["evict p0", "write p0", "create new"]
    world.fill(world.add("two", 2 * P), A + B)
    assert world.log() == ["evict p1", "write p1", "evict p2", "write p2", "create two"]


def test_a_page_wanted_during_its_write_is_kept() -> None:
    """Catches reading back a page whose bytes were in memory all the time."""
    tier = InterruptibleTier(DeferredTier(DictTier()))
    world = World(tier, device_pages=1, host_pages=0)
    a = world.add("a")
    world.fill(a, A)
    tier.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        world.fill(world.add("b"), B)
    assert a.residency is Residency.WRITING_BACK
    world.log()
    assert world.bytes_of(a) == A
    assert world.log() == []
    assert a.residency is Residency.RESIDENT
    world.pager.evict_all()
    assert world.log() == ["evict a"]


def test_dropping_moves_nothing(world: World) -> None:
    """Catches a write of bytes nobody wants; and a drop that forgets only one of the copies."""
    a = world.stored("a", A)
    world.edit(a, B)
    world.log()
    world.pager.drop(a)
    assert world.log() == []
    assert (a.has_bytes, world.leased_pages()) == (False, (0, 0))
    with pytest.raises(InternalError, match="a/param was used before it was given a value"):
        world.pager.pin(a)
    world.fill(a, C)
    world.pager.evict_all()
    assert world.bytes_of(a) == C


def test_removing_frees_memory_and_room_at_home(world: World) -> None:
    """Catches a tier that fills up with what was removed; the key can be used again."""
    for _ in range(3):
        a = world.add("a")
        world.fill(a, A)
        world.pager.evict_all()
        world.bytes_of(a)
        world.pager.remove(a)
        assert world.slow.usage().num_keys == 0
        assert world.leased_pages() == (0, 0)


def test_evict_all_gives_up_all_that_nobody_holds(world: World) -> None:
    """Catches a pinned page pulled away, and one left behind."""
    a, b = world.stored("a", A), world.stored("b", B)
    world.bytes_of(b)
    view = world.pager.pin(a)
    world.log()
    world.pager.evict_all()
    assert world.log() == ["evict b"]
    assert view.tobytes() == A
    world.pager.unpin(a)
    del view
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)


# -- which page goes -------------------------------------------------------------------------


def evicted(world: World, names: str) -> str:
    """Use the pages in order; return what is evicted."""
    world.log()
    for name in names:
        world.bytes_of(world.pages[name])
    return "".join(entry[-1] for entry in world.log(EventKind.EVICT))


def test_least_recently_used_goes_first_while_nothing_is_known(world: World) -> None:
    """Catches first-in first-out: a is older than b but was used later."""
    for name in "abc":
        world.stored(name, A)
    assert evicted(world, "abac") == "b"


def test_farthest_next_use_goes_first_once_an_iteration_is_known(world: World) -> None:
    """Catches least recently used on a loop, which misses every access."""
    for name in "abc":
        world.stored(name, A)
    evicted(world, "abcabc")
    world.pager.end_iteration()
    world.pager.evict_all()
    # At the first c, a comes next and b after it; at the second b, c comes next. Two evictions,
    # where least recently used makes four.
    assert evicted(world, "abcabc") == "ba"


def test_states_that_no_iteration_names_go_first(world: World) -> None:
    """Catches a gradient kept on the device at the price of a weight that is needed next."""
    a = world.stored("a", A)
    world.pager.end_iteration()  # that which gave it its value
    world.bytes_of(a)
    world.pager.end_iteration()
    world.bytes_of(a)
    grad = world.add("a", kind=StateKind.GRAD)
    world.fill(grad, B)
    world.log()
    world.fill(world.add("b"), C)
    assert world.log() == ["evict a", "write a", "create b"]
    assert grad.residency is not Residency.DIRTY
    assert a.residency is Residency.RESIDENT


# -- pages that are held ---------------------------------------------------------------------


def test_a_held_view_keeps_its_page_counted_and_coherent(world: World) -> None:
    """Catches a second copy beside the one user code looks at, and bytes that nobody counts."""
    a, b, c = world.stored("a", A), world.stored("b", B), world.stored("c", C)
    view = world.pager.pin(a)
    world.pager.unpin(a)
    world.log()
    world.bytes_of(b)
    world.bytes_of(c)
    world.pager.evict_all()
    assert world.log(EventKind.EVICT) == ["evict b", "evict c"]
    assert world.leased_pages() == (1, 0)
    view[:] = np.frombuffer(D, np.uint8)
    a.client.written = True
    assert world.bytes_of(a) == D
    del view
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert world.bytes_of(a) == D


def test_a_view_outlives_its_page(world: World) -> None:
    """Catches memory of a dropped page handed to the next one under a view of it."""
    a = world.stored("a", A)
    view = world.pager.pin(a)
    world.pager.unpin(a)
    world.pager.drop(a)
    b = world.add("b")
    world.fill(b, B)
    assert view.tobytes() == A
    assert world.leased_pages() == (2, 0)
    del view
    assert world.leased_pages() == (1, 0)


def test_pins_are_counted(world: World) -> None:
    """Catches a page released by the first of two users."""
    a = world.stored("a", A)
    world.pager.pin(a)
    world.pager.pin(a)
    world.pager.unpin(a)
    world.pager.evict_all()
    assert a.residency is Residency.RESIDENT
    world.pager.unpin(a)
    world.pager.evict_all()
    assert a.residency is Residency.ABSENT


def test_what_cannot_fit_is_refused_with_the_reasons(world: World) -> None:
    """Catches a hang, or an error that does not say what is in the way and what to change."""
    a, b = world.stored("a", A), world.stored("b", B)
    with world.pager.pinned(a), world.pager.pinned(b):
        with pytest.raises(BudgetExceededError) as caught:
            world.pager.create(world.add("c"))
        message = str(caught.value)
        assert "device budget of 8.00 KiB has no room for c/param (4.00 KiB)" in message
        assert "a/param (4.00 KiB), b/param (4.00 KiB)" in message
        assert "Raise the device budget by at least 4.00 KiB" in message
    assert world.bytes_of(a) == A
    assert world.leased_pages()[0] <= 2


def test_a_page_larger_than_the_budget_is_refused(world: World) -> None:
    """Catches waiting for room that there will never be."""
    big = world.add("big", 2 * P + 1)
    with pytest.raises(BudgetExceededError, match="big/param"):
        world.pager.create(big)
    assert not big.has_bytes


def test_views_in_reference_cycles_give_way(world: World) -> None:
    """Catches a refusal although only the garbage collector still holds the memory."""
    pages = [world.stored(name, A) for name in "abc"]
    for page in pages:
        with world.pager.pinned(page) as view:
            cycle: list[object] = [view]
            cycle.append(cycle)
        del view, cycle


def test_host_memory_can_be_leased_up_to_its_budget(roomy: World) -> None:
    """Catches working memory that is not counted, or that is refused while there is room."""
    leases = [roomy.pager.lease_host(P) for _ in range(4)]
    with pytest.raises(BudgetExceededError, match=r"host budget of 16\.00 KiB has no room"):
        roomy.pager.lease_host(1)
    leases.pop().release()
    assert roomy.pager.lease_host(1).buffer.nbytes == 1


# -- homes -----------------------------------------------------------------------------------


def test_a_page_at_home_on_the_device_is_used_in_place(world: World) -> None:
    """Catches a second copy of device memory, and transfers between a place and itself."""
    a = world.add("a", home="device")
    assert world.leased_pages() == (1, 0)
    world.fill(a, A)
    assert (world.bytes_of(a), world.log()) == (A, ["create a"])
    world.edit(a, B)
    world.pager.evict_all()
    assert (world.bytes_of(a), world.log()) == (B, [])
    assert world.leased_pages() == (1, 0)
    world.pager.remove(a)
    assert world.leased_pages() == (0, 0)


def test_a_page_at_home_on_the_host_is_copied(roomy: World) -> None:
    """Catches host memory used by an operation of the device."""
    a = roomy.stored("a", A, home="host")
    assert roomy.bytes_of(a) == A
    assert roomy.leased_pages() == (1, 1)
    roomy.edit(a, B)
    roomy.pager.evict_all()
    assert roomy.log() == ["demand_fetch a", "read a", "evict a", "write a"]
    assert roomy.bytes_of(a) == B


def test_a_home_that_is_full_or_unknown_is_refused(roomy: World) -> None:
    """Catches a page that is half added."""
    with pytest.raises(KeyAbsentError, match=r"no tier 'tape' for a/param; there are \['device'"):
        roomy.add("a", home="tape")
    with pytest.raises(TierFullError, match="host: no room"):
        roomy.add("a", 5 * P, home="host")
    assert roomy.stored("a", A, home="host").stored


def test_a_key_can_be_added_once(world: World) -> None:
    """Catches two pages of one name, of which the pager forgets one, with its memory."""
    world.add("a")
    for home in ("slow", "host", "device"):
        with pytest.raises(KeyExistsError, match="a/param"):
            world.add("a", home=home)
    assert world.leased_pages() == (0, 0)


def test_a_page_without_a_value_cannot_be_used(roomy: World) -> None:
    """Catches unspecified bytes taken for values."""
    for home in ("slow", "host", "device"):
        page = roomy.pager.add(key("w" + home), P, home, ArrayClient())
        with pytest.raises(InternalError, match="before it was given a value"):
            roomy.pager.pin(page)
        with pytest.raises(InternalError, match="nothing was written"):
            roomy.pager.mark_dirty(page)
    assert roomy.leased_pages() == (1, 1)
