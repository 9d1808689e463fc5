"""Sources of host memory: alignment, exact size, and memory that dies with its last reference."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from nvme_helpers import buffer_of, key, noise

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import BudgetError
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator
from zinf_storage.host import HostTier


def resident_nbytes() -> int:
    """Return the physical memory of this process."""
    return int(psutil.Process().memory_info().rss)


def mapped_nbytes(address: int) -> int:
    """Return the bytes of the mapping at `address`, 0 if the kernel knows of none."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return end - start
    return 0


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * MiB + 5])
def test_buffers_are_page_aligned_and_whole_pages(nbytes: int) -> None:
    """Catches memory that direct I/O refuses, or a size rounded to a power of two."""
    buffer = PageAlignedAllocator().allocate(nbytes)
    assert buffer.nbytes == len(buffer.array) == nbytes
    assert buffer.capacity_nbytes == -(-nbytes // 4096) * 4096
    assert buffer.address % 4096 == 0
    assert buffer.space is MemorySpace.HOST
    buffer.memory[:] = 7
    assert not buffer.is_shared()


def test_memory_dies_with_the_last_view() -> None:
    """Catches a mapping kept for ever, and one torn from under a view that someone holds."""
    buffer = PageAlignedAllocator().allocate(64 * MiB)
    address = buffer.address + 32 * MiB
    view = buffer.array[5:10]
    assert buffer.is_shared()
    del buffer
    view[:] = 1
    assert mapped_nbytes(address)
    del view
    gc.collect()
    assert mapped_nbytes(address) < 64 * MiB


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 80])
def test_refused_memory_is_a_budget_error(nbytes: int) -> None:
    """Catches MemoryError or OverflowError from a library instead of the bytes and a remedy."""
    with pytest.raises(BudgetError, match=str(nbytes)):
        PageAlignedAllocator().allocate(nbytes)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as device:
        yield device


def test_pinned_memory_is_registered_exactly(device: SimulatedDevice) -> None:
    """Catches an arena of 33 MiB that pins 64 MiB (FAULTS P64), or a part of it only."""
    allocator = PinnedAllocator(device)
    buffer = allocator.allocate(33 * MiB + 5)
    assert buffer.space is allocator.space is MemorySpace.HOST_PINNED
    assert (buffer.nbytes, buffer.capacity_nbytes) == (33 * MiB + 5, 33 * MiB + 4096)
    assert buffer.address % 4096 == 0
    assert device.registered_nbytes == buffer.capacity_nbytes


def test_an_arena_costs_what_was_asked_for(device: SimulatedDevice) -> None:
    """Catches physical memory rounded up to a power of two (FAULTS P63, P64)."""
    before = resident_nbytes()
    buffer = PinnedAllocator(device).allocate(33 * MiB)
    assert resident_nbytes() - before < 4 * MiB
    buffer.memory[:] = 1
    assert resident_nbytes() - before < 1.2 * 33 * MiB


def test_pinned_memory_is_unregistered_before_it_is_unmapped(device: SimulatedDevice) -> None:
    """Catches a finalizer that comes after the mapping; the device would say so."""
    buffer = PinnedAllocator(device).allocate(8 * MiB)
    view = buffer.array[5:10]
    address = buffer.address
    del buffer
    assert device.registered_nbytes == 8 * MiB
    view[:] = 1
    del view
    gc.collect()
    assert device.registered_nbytes == 0
    assert mapped_nbytes(address) < 8 * MiB


def test_a_pool_returns_pinned_memory(device: SimulatedDevice) -> None:
    """Catches memory that stays pinned after the pool dropped it."""
    pool = BufferPool("host", budget_nbytes=4 * MiB, allocator=PinnedAllocator(device))
    leases = [pool.lease_nowait(MiB) for _ in range(4)]
    for lease in leases:
        lease.release()
    assert device.registered_nbytes == 4 * MiB
    lease = pool.lease_nowait(3 * MiB)
    assert device.registered_nbytes == 4 * MiB
    pool.trim()
    assert device.registered_nbytes == 3 * MiB
    lease.release()


def test_refused_pinning_falls_back_with_one_warning() -> None:
    """Catches a run that dies in a container, and one that is slow in silence (FAULTS P92)."""
    with SimulatedDevice(lockable_nbytes=MiB) as device:
        allocator = PinnedAllocator(device)
        first = allocator.allocate(MiB)
        with pytest.warns(UserWarning, match=r"1048576 bytes .*sim:0.*ulimit -l") as caught:
            buffers = [allocator.allocate(MiB) for _ in range(3)]
        assert len(caught) == 1
        assert first.space is MemorySpace.HOST_PINNED
        assert {buffer.space for buffer in (*buffers, allocator.allocate(5))} == {MemorySpace.HOST}
        assert allocator.space is MemorySpace.HOST
        assert device.registered_nbytes == MiB
        with pytest.warns(UserWarning, match="could not be pinned"):
            PinnedAllocator(device).allocate(2 * MiB)


class RefusingTogether(SimulatedDevice):
    """Refuses two threads at the same moment."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def register(self, address: int, nbytes: int) -> None:
        self._both.wait(timeout=5)
        raise BudgetError("refused")


def test_threads_refused_together_warn_once() -> None:
    """Catches a warning per thread of a loader."""
    with RefusingTogether() as device, ThreadPoolExecutor(2) as threads:
        allocator = PinnedAllocator(device)
        with pytest.warns(UserWarning, match="could not be pinned") as caught:
            buffers = list(threads.map(allocator.allocate, [MiB, MiB]))
        assert len(caught) == 1
        assert {buffer.space for buffer in buffers} == {MemorySpace.HOST}


def test_refused_pinning_changes_no_bytes() -> None:
    """Catches a fallback whose copies are wrong (FAULTS P92: same numbers)."""
    with SimulatedDevice(lockable_nbytes=0) as device:
        pool = BufferPool("host", budget_nbytes=MiB, allocator=PinnedAllocator(device))
        tier = HostTier("host", pool=pool, device=device)
        with pytest.warns(UserWarning, match="could not be pinned"):
            tier.reserve(key(0), 5000)
        page = device.allocate(5000)
        device.view(page)[:] = np.frombuffer(noise(5000), np.uint8)
        tier.write_from(key(0), page).wait()
        back = buffer_of(bytes(5000))
        tier.read_into(key(0), back).wait()
        assert back.array.tobytes() == noise(5000)
        assert tier.path_taken == "host"
        tier.close()


def test_pinned_memory_may_outlive_the_device() -> None:
    """Catches a finalizer that fails when a run ends in the other order."""
    device = SimulatedDevice()
    buffer = PinnedAllocator(device).allocate(MiB)
    device.close()
    assert device.registered_nbytes == MiB
    del buffer
    assert device.registered_nbytes == 0


def test_memory_of_no_pinned_buffer_is_lost_at_exit(device: SimulatedDevice) -> None:
    """Catches calls into a driver that is gone when the interpreter ends."""
    buffer = PinnedAllocator(device).allocate(4096)
    finalizers = weakref.finalize._registry.items()
    mine = [end for end, info in finalizers if info.args == (buffer.address,)]
    assert [end.atexit for end in mine] == [False]


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 80])
def test_refused_pinned_memory_is_a_budget_error(device: SimulatedDevice, nbytes: int) -> None:
    """Catches memory the system does not have taken for pinning refused."""
    with pytest.raises(BudgetError, match=str(nbytes)):
        PinnedAllocator(device).allocate(nbytes)
    assert device.registered_nbytes == 0
