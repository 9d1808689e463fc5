"""Pools: what is leased, cached or still looked at never exceeds the budget."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

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
