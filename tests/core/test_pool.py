"""Pools: what is leased, cached or still looked at never exceeds the budget."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from core_helpers import pool_of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from zinf_core.buffers import HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import BudgetError, InternalError, PoolExhaustedError
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_storage.allocators import PageAlignedAllocator

P = 4096


class CountingAllocator:
    """Allocates as the real one and knows which of its memory is alive."""

    def __init__(self) -> None:
        self.num_allocations = 0
        self.alive: Counter[str] = Counter()
        self.fails = False

    @property
    def space(self) -> MemorySpace:
        return MemorySpace.HOST

    def allocate(self, nbytes: int) -> HostBuffer:
        if self.fails:
            raise BudgetError("the system has no memory")
        self.num_allocations += 1
        buffer = PageAlignedAllocator().allocate(nbytes)
        self.alive["nbytes"] += buffer.capacity_nbytes
        weakref.finalize(buffer.memory, self._died, buffer.capacity_nbytes)
        return buffer

    def _died(self, nbytes: int) -> None:
        self.alive["nbytes"] -= nbytes


def counting_pool(num_pages: int) -> tuple[BufferPool, CountingAllocator]:
    allocator = CountingAllocator()
    return BufferPool("host", budget_nbytes=num_pages * P, allocator=allocator), allocator


@given(st.integers(1, 20 * P))
def test_a_lease_is_exact_and_rounds_to_pages(nbytes: int) -> None:
    """Catches rounding to more than a page, such as to a power of two, and to less."""
    pool = pool_of(100)
    lease = pool.lease_nowait(nbytes)
    pages = len(range(0, nbytes, P))
    assert (lease.buffer.nbytes, lease.buffer.capacity_nbytes) == (nbytes, pages * P)
    assert lease.buffer.address % P == 0
    assert pool.usage().leased_nbytes == pages * P
    assert lease.pool is pool


def test_no_memory_is_taken_before_the_first_lease() -> None:
    """Catches a pool that allocates its budget up front."""
    pool, allocator = counting_pool(1 << 40)
    assert (allocator.num_allocations, pool.usage().tracked_nbytes) == (0, 0)


@pytest.mark.parametrize("asked", [1, P, 3 * P])
def test_the_budget_is_a_wall(asked: int) -> None:
    """Catches one byte over the budget, and a refusal that changes the counters."""
    pool = pool_of(3)
    full = [pool.lease_nowait(P) for _ in range(3)]
    before = pool.usage()
    with pytest.raises(PoolExhaustedError, match=r"pool device: .* asked, 0 B of 12.00 KiB"):
        pool.lease_nowait(asked)
    assert pool.usage() == before
    full.pop().release()
    full.append(pool.lease_nowait(1))
    assert pool.usage().leased_nbytes == 3 * P


def test_a_budget_that_is_not_whole_pages_is_not_exceeded() -> None:
    """Catches a last page that is only partly inside the budget."""
    pool = BufferPool("host", budget_nbytes=2 * P - 1, allocator=PageAlignedAllocator())
    pool.lease_nowait(1)
    with pytest.raises(PoolExhaustedError):
        pool.lease_nowait(1)


def test_freed_memory_serves_the_next_lease_of_its_size() -> None:
    """Catches allocating anew each time; and a cached buffer with the size of its last use."""
    pool, allocator = counting_pool(8)
    pool.lease_nowait(2 * P).release()
    lease = pool.lease_nowait(P + 1)
    assert allocator.num_allocations == 1
    assert (lease.buffer.nbytes, lease.buffer.array.nbytes) == (P + 1, P + 1)


def test_cached_memory_gives_way_to_other_sizes() -> None:
    """Catches a budget that fills up with free buffers of sizes nobody asks for."""
    pool, allocator = counting_pool(4)
    for lease in [pool.lease_nowait(P) for _ in range(4)]:
        lease.release()
    assert pool.usage().cached_nbytes == 4 * P
    big = pool.lease_nowait(3 * P)
    assert allocator.alive["nbytes"] == pool.usage().tracked_nbytes == 4 * P
    big.release()
    bigger = pool.lease_nowait(4 * P)
    assert bigger.buffer.nbytes == 4 * P
    assert allocator.alive["nbytes"] == 4 * P


def test_cached_memory_is_kept_while_there_is_room() -> None:
    """Catches dropping everything cached whenever another size is asked for."""
    pool, allocator = counting_pool(4)
    pool.lease_nowait(P).release()
    pool.lease_nowait(2 * P)
    pool.lease_nowait(P)
    assert allocator.num_allocations == 2


def test_trim_frees_what_is_cached_only() -> None:
    """Catches freeing what is leased, and keeping memory that is not."""
    pool, allocator = counting_pool(4)
    lease = pool.lease_nowait(P)
    pool.lease_nowait(2 * P).release()
    pool.trim()
    assert (pool.usage().leased_nbytes, pool.usage().cached_nbytes) == (P, 0)
    assert allocator.alive["nbytes"] == P
    assert lease.buffer.nbytes == P


def test_a_view_stays_valid_and_counted_until_it_dies() -> None:
    """Catches memory handed to the next lease while user code still looks at it."""
    pool = pool_of(2)
    lease = pool.lease_nowait(P)
    lease.buffer.array[:] = 7
    view = lease.buffer.array[:8].view(np.float32)
    lease.release()
    assert pool.usage().leased_nbytes == P
    other = pool.lease_nowait(P)
    other.buffer.array[:] = 9
    assert bytes(view.tobytes()) == b"\7" * 8
    with pytest.raises(PoolExhaustedError):
        pool.lease_nowait(P)
    del view
    assert (pool.usage().leased_nbytes, pool.usage().cached_nbytes) == (P, P)
    pool.lease_nowait(P)


def test_a_release_counts_once() -> None:
    """Catches a second release that frees another lease's bytes, and use after release."""
    pool = pool_of(2)
    lease, other = pool.lease_nowait(P), pool.lease_nowait(P)
    lease.release()
    lease.release()
    assert lease.released
    assert not other.released
    assert (pool.usage().leased_nbytes, pool.usage().cached_nbytes) == (P, P)
    with pytest.raises(InternalError, match="pool device used after release"):
        lease.buffer  # noqa: B018 - the property raises


def test_memory_the_system_refuses_is_not_counted() -> None:
    """Catches a budget that shrinks with every allocation that failed."""
    pool, allocator = counting_pool(1)
    allocator.fails = True
    for _ in range(3):
        with pytest.raises(BudgetError, match="system"):
            pool.lease_nowait(P)
    assert pool.usage().tracked_nbytes == 0
    allocator.fails = False
    pool.lease_nowait(P)


def test_the_peak_is_the_most_there_ever_was() -> None:
    """Catches a peak that counts leases without what is cached, or that falls again."""
    pool = pool_of(10)
    leases = [pool.lease_nowait(P), pool.lease_nowait(2 * P)]
    leases[0].release()
    leases.append(pool.lease_nowait(3 * P))
    for lease in leases:
        lease.release()
    pool.trim()
    assert (pool.usage().peak_nbytes, pool.usage().tracked_nbytes) == (6 * P, 0)


# -- from one pool to another ----------------------------------------------------------------


def test_adopting_moves_the_count_and_no_bytes() -> None:
    """Catches a copy, bytes counted twice or not at all, and a lease that goes back to the pool it
    came from."""
    (first, _), (second, allocator) = counting_pool(2), counting_pool(2)
    lease = first.lease_nowait(P + 1)
    lease.buffer.array[:] = 7
    address = lease.buffer.address
    second.adopt(lease)
    assert (lease.buffer.address, lease.buffer.nbytes, lease.pool) == (address, P + 1, second)
    assert (lease.buffer.array == 7).all()
    assert allocator.num_allocations == 0
    assert [pool.usage().tracked_nbytes for pool in (first, second)] == [0, 2 * P]
    assert second.usage().peak_nbytes == 2 * P
    lease.release()
    assert [pool.usage().cached_nbytes for pool in (first, second)] == [0, 2 * P]


def test_adopting_without_room_changes_nothing() -> None:
    """Catches a budget exceeded by what is not allocated, and a lease that is in neither pool."""
    first, second = pool_of(2), pool_of(2, "host")
    lease, held = first.lease_nowait(2 * P), second.lease_nowait(1)
    before = first.usage(), second.usage()
    with pytest.raises(PoolExhaustedError, match="pool host"):
        second.adopt(lease)
    assert (first.usage(), second.usage()) == before
    assert lease.pool is first
    held.release()
    second.adopt(lease)
    assert lease.pool is second


def test_a_free_buffer_goes_the_other_way() -> None:
    """Catches free memory given back to the system when the other pool needs just that: two pages
    that change places would be allocated anew each time."""
    (first, allocator), (second, _) = counting_pool(1), counting_pool(1)
    lease = first.lease_nowait(P)
    second.lease_nowait(P).release()
    for _ in range(3):
        second.adopt(lease)
        assert [pool.usage().cached_nbytes for pool in (first, second)] == [P, 0]
        first.adopt(lease)
        assert [pool.usage().cached_nbytes for pool in (first, second)] == [0, P]
    second.adopt(lease)
    assert first.lease_nowait(P).buffer.address != lease.buffer.address
    assert allocator.num_allocations == 1


def test_adopting_gives_up_free_buffers_of_other_sizes() -> None:
    """Catches a refusal while the budget is full of buffers that nobody has."""
    first, (second, allocator) = pool_of(4), counting_pool(4)
    for lease in [second.lease_nowait(P) for _ in range(4)]:
        lease.release()
    second.adopt(first.lease_nowait(3 * P))
    assert (second.usage().cached_nbytes, allocator.alive["nbytes"]) == (P, P)
    assert second.usage().peak_nbytes == 4 * P


def test_what_is_still_looked_at_is_adopted_as_it_is() -> None:
    """Catches a view that another lease writes under, once its page changed pools."""
    first, second = pool_of(1), pool_of(1, "host")
    lease = first.lease_nowait(P)
    lease.buffer.array[:] = 7
    view = lease.buffer.array[:8]
    second.adopt(lease)
    first.lease_nowait(P).buffer.array[:] = 9
    lease.release()
    assert second.usage().leased_nbytes == P
    with pytest.raises(PoolExhaustedError):
        second.lease_nowait(P)
    assert view.tobytes() == b"\7" * 8
    del view
    second.lease_nowait(P)


def test_a_pool_does_not_adopt_its_own_or_what_is_released() -> None:
    """Catches bytes counted twice, and a buffer that is somebody else's by now."""
    first, second = pool_of(2), pool_of(2, "host")
    lease = first.lease_nowait(P)
    with pytest.raises(InternalError, match="adopt a lease of its own"):
        first.adopt(lease)
    lease.release()
    with pytest.raises(InternalError, match="used after release"):
        second.adopt(lease)
    assert [pool.usage().leased_nbytes for pool in (first, second)] == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * P)), max_size=30))
def test_leases_that_change_pools_keep_both_budgets(moves: list[tuple[int, int]]) -> None:
    """Catches any sequence of leases, moves and releases after which the two pools count other
    bytes than there are, or more than they may."""
    allocator = CountingAllocator()
    pools = [
        BufferPool(name, budget_nbytes=num * P, allocator=allocator)
        for name, num in (("device", 4), ("host", 6))
    ]
    held: list[Lease] = []
    for act, nbytes in moves:
        with suppress(PoolExhaustedError):
            if act < 2:
                held.append(pools[act].lease_nowait(nbytes))
            elif held and act == 2:
                held.pop(nbytes % len(held)).release()
            elif held:
                lease = held[nbytes % len(held)]
                pools[lease.pool is pools[0]].adopt(lease)
        for pool in pools:
            usage = pool.usage()
            assert usage.leased_nbytes == sum(each.nbytes for each in held if each.pool is pool)
            assert usage.tracked_nbytes <= usage.peak_nbytes <= usage.budget_nbytes
        assert allocator.alive["nbytes"] == sum(pool.usage().tracked_nbytes for pool in pools)


def test_threads_share_one_budget() -> None:
    """Catches counters updated without the lock, and one buffer leased twice at a time."""
    pool, _ = counting_pool(4)
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        start.wait()
        for turn in range(150):
            try:
                lease = pool.lease_nowait(P * (1 + (turn + mark) % 2))
            except PoolExhaustedError:
                continue
            lease.buffer.array[:] = mark
            if pool.usage().tracked_nbytes > 4 * P:
                wrong.append("over budget")
            if not (lease.buffer.array == mark).all():
                wrong.append("leased twice")
            lease.release()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.usage().leased_nbytes == 0
    assert pool.usage().peak_nbytes <= 4 * P


class PoolMachine(RuleBasedStateMachine):
    """Random leases, releases and views against sums kept by hand."""

    leases, views = Bundle("leases"), Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.allocator = counting_pool(6)
        self.held: dict[int, int] = {}
        """Pages by address of whatever is leased or looked at."""
        self.holders: Counter[int] = Counter()

    @rule(target=leases, nbytes=st.integers(1, 7 * P))
    def lease(self, nbytes: int) -> Lease | None:
        pages = len(range(0, nbytes, P))
        fits = sum(self.held.values()) + pages <= 6
        try:
            lease = self.pool.lease_nowait(nbytes)
        except PoolExhaustedError:
            assert not fits
            return None
        assert fits
        address = lease.buffer.address
        assert address not in self.held
        self.held[address] = pages
        self.holders[address] += 1
        return lease

    @rule(target=views, lease=leases)
    def look(self, lease: Lease | None) -> list[np.ndarray]:
        if lease is None or lease.released:
            return []
        self.holders[lease.buffer.address] += 1
        return [lease.buffer.array[:1]]

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is None or lease.released:
            return
        self._let_go(lease.buffer.address)
        lease.release()

    @rule(view=consumes(views))
    def look_away(self, view: list[np.ndarray]) -> None:
        while view:
            self._let_go(view.pop().ctypes.data)
        gc.collect(0)

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.pool.usage().cached_nbytes == 0

    def _let_go(self, address: int) -> None:
        self.holders[address] -= 1
        if not self.holders[address]:
            del self.held[address]

    @invariant()
    def counters_are_right(self) -> None:
        usage = self.pool.usage()
        assert usage.leased_nbytes == sum(self.held.values()) * P
        assert usage.tracked_nbytes == self.allocator.alive["nbytes"]
        assert usage.tracked_nbytes <= usage.peak_nbytes <= usage.budget_nbytes == 6 * P


TestPoolMachine = PoolMachine.TestCase
