"""SimulatedDevice: each mistake that hardware forgives most of the time raises or shows here."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from zinf_core.buffers import HostBuffer
from zinf_core.device import Device
from zinf_core.errors import (
    BudgetError,
    InternalError,
    RangeError,
    TransferError,
    TransferTimeoutError,
    UnsupportedBufferError,
    UnsupportedError,
)
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import host_buffer, latest, seeded_order
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.testing.simulated_memory import POISON, SimulatedBuffer
from zinf_core.units import KiB, MiB

N = 5000


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as device:
        yield device


def host_of(value: int, nbytes: int = N) -> HostBuffer:
    buffer = host_buffer(nbytes)
    buffer.array[:] = value
    return buffer


def device_of(device: SimulatedDevice, value: int, nbytes: int = N) -> SimulatedBuffer:
    buffer = device.allocate(nbytes)
    device.view(buffer)[:] = value
    return buffer


def values(device: SimulatedDevice, buffer: SimulatedBuffer) -> set[int]:
    return set(device.view(buffer).tolist())


def test_it_is_a_device(device: SimulatedDevice) -> None:
    """Catches a method renamed away from the protocol."""
    assert isinstance(device, Device)
    buffer = device.allocate(N)
    assert (buffer.nbytes, buffer.capacity_nbytes, buffer.address % 4096) == (N, 8192, 0)
    assert values(device, buffer) == {POISON}
    nothing = device.allocate(0)
    assert (nothing.nbytes, nothing.capacity_nbytes, nothing.address) == (0, 0, 0)
    assert device.view(nothing).nbytes == 0


CPU_USES: list[Callable[[SimulatedBuffer], object]] = [
    lambda b: np.asarray(b.array),
    lambda b: np.copyto(b.array, 0),
    lambda b: np.copyto(np.empty(N, np.uint8), b.array),
    lambda b: b.array.__setitem__(slice(None), 0),
    lambda b: b.array[0],
    lambda b: bytes(b.array),
    lambda b: memoryview(b.array),
    lambda b: list(b.array),
]


@pytest.mark.parametrize("use", CPU_USES)
def test_the_cpu_cannot_touch_device_memory(
    device: SimulatedDevice, use: Callable[[SimulatedBuffer], object]
) -> None:
    """Catches device memory that storage code can use as if it were numpy's."""
    with pytest.raises((UnsupportedError, TypeError)):
        use(device_of(device, 1))


def test_a_copy_is_late_and_reads_its_source_late(device: SimulatedDevice) -> None:
    """Catches a source captured at submit, which hides that it is used again too early."""
    src, dst = host_of(1), device.allocate(N)
    copy = device.copy(dst, src)
    assert device.num_pending == 1
    src.array[:] = 2
    copy.wait()
    assert values(device, dst) == {2}
    assert device.num_pending == 0


def test_a_destination_is_poison_until_its_copy(device: SimulatedDevice) -> None:
    """Catches a destination that keeps plausible bytes while its copy is pending."""
    dst = host_of(7)
    copy = device.copy(dst, device_of(device, 1))
    assert set(dst.array.tolist()) == {POISON}
    copy.wait()
    assert set(dst.array.tolist()) == {1}


@pytest.mark.parametrize("is_source", [False, True])
def test_a_view_before_the_event_raises(device: SimulatedDevice, *, is_source: bool) -> None:
    """Catches compute that starts before the copy it needs, or on memory still being read."""
    buffer, other = device_of(device, 1), host_of(2)
    copy = device.copy(other, buffer) if is_source else device.copy(buffer, other)
    with pytest.raises(InternalError, match=r"copy 1 of 5000 bytes.*wait for its completion"):
        device.view(buffer.resized(8192).part(N - 1, 1))
    copy.wait()
    device.view(buffer)


def test_a_view_beside_a_pending_copy_is_fine(device: SimulatedDevice) -> None:
    """Catches a check by buffer where it must be by byte."""
    buffer = device_of(device, 1)
    copy = device.copy(buffer.part(0, 100), host_of(2, 100))
    assert values(device, buffer.part(100, 100)) == {1}
    copy.wait()
    assert device.view(buffer)[99:101].tolist() == [2, 1]


def test_polling_does_not_hurry_and_does_not_hang() -> None:
    """Catches `done` that performs the copy at once, and callers that poll for ever."""
    with SimulatedDevice(polls_until_done=3) as device:
        copy = device.copy(device.allocate(N), host_of(1))
        assert not copy.done()
        assert not copy.done()
        assert device.num_pending == 1
        while not copy.done():
            pass
        copy.wait(timeout_s=0)


def test_a_timeout_of_zero_is_a_poll(device: SimulatedDevice) -> None:
    """Catches wait(0) that blocks or makes the copy happen."""
    copy = device.copy(device.allocate(N), host_of(1))
    with pytest.raises(TransferTimeoutError):
        copy.wait(timeout_s=0)
    assert device.num_pending == 1
    copy.wait(timeout_s=5)


def happening_order(seed: int | None) -> list[int]:
    """Return the order in which six independent copies happen when the last is waited for."""
    order = latest if seed is None else seeded_order(seed)
    seen: list[int] = []
    with SimulatedDevice(order=order) as device:
        copies = [device.copy(device.allocate(64), host_of(i, 64)) for i in range(6)]
        for _ in range(6):
            pending = [item.what for item in device._pending]
            copies[5 - len(seen)].wait() if seed is None else device._pending[-1].wait()
            left = [item.what for item in device._pending]
            seen += [int(what.split()[1]) for what in pending if what not in left]
            if not left:
                break
    return seen


def test_the_order_is_drawn_from_the_seed() -> None:
    """Catches copies that always happen in the order of their submission."""
    assert happening_order(None) == [6, 5, 4, 3, 2, 1]
    orders = {tuple(happening_order(seed)) for seed in range(8)}
    assert len(orders) > 1
    assert happening_order(3) == happening_order(3)


@pytest.mark.parametrize("seed", range(6))
def test_copies_that_share_memory_keep_their_order(seed: int) -> None:
    """Catches a device stricter than a stream: read after write, write after read, and again."""
    with SimulatedDevice(order=seeded_order(seed)) as device:
        stored, first, second = device_of(device, 1), host_of(0), host_of(0)
        copies = [
            device.copy(first, stored),
            device.copy(stored, host_of(2)),
            device.copy(second, stored),
            device.copy(stored, host_of(3)),
        ]
        copies[seed % 4].wait()
        for copy in copies:
            copy.wait()
        assert [set(b.array.tolist()) for b in (first, second)] == [{1}, {2}]
        assert values(device, stored) == {3}


def test_a_long_chain_of_copies_ends(device: SimulatedDevice) -> None:
    """Catches ordering whose cost doubles with each copy that waits."""
    stored = device_of(device, 0, 64)
    copies = [device.copy(stored, host_of(i, 64)) for i in range(60)]
    copies[-1].wait()
    assert values(device, stored) == {59}


def test_a_lease_released_under_a_copy_is_ruined(device: SimulatedDevice) -> None:
    """Catches a device that protects memory its user has given back."""
    pool = BufferPool("device", budget_nbytes=8192, allocator=device)
    lease = pool.lease_nowait(N)
    copy = device.copy(lease.buffer, host_of(1))
    lease.release()
    assert pool.usage().leased_nbytes == 0
    again = pool.lease_nowait(N).buffer
    with pytest.raises(InternalError, match="copy 1"):
        device.view(again)
    copy.wait()
    assert values(device, again) == {1}


def test_memory_stays_mapped_under_a_copy(device: SimulatedDevice) -> None:
    """Catches a late copy into memory that was unmapped: the process would die."""
    src, dst = host_of(1, 4 * MiB), device.allocate(4 * MiB)
    copy = device.copy(dst, src)
    del src, dst
    gc.collect()
    copy.wait()


def test_views_are_references(device: SimulatedDevice) -> None:
    """Catches a page evicted although a tensor still shows its memory."""
    buffer = device_of(device, 1)
    assert not buffer.is_shared()
    for make in (lambda: device.view(buffer)[3:5], lambda: buffer.array[3:5], lambda: buffer.array):
        held = make()
        assert buffer.is_shared()
        del held
        assert not buffer.is_shared()
    part = buffer.part(0, 10)
    assert buffer.is_shared()
    del part
    buffer = buffer.resized(8192)
    assert not buffer.is_shared()


def test_bad_copies_are_refused(device: SimulatedDevice) -> None:
    """Catches arguments that CUDA takes and answers with garbage."""
    buffer = device.allocate(N)
    with pytest.raises(RangeError, match="5000 bytes into 5001"):
        device.copy(host_of(0, N + 1), buffer)
    with pytest.raises(UnsupportedBufferError):
        device.copy(host_of(0), host_of(0))
    with pytest.raises(RangeError, match="overlap"):
        device.copy(buffer.part(0, 10), buffer.part(9, 10))
    with SimulatedDevice() as other, pytest.raises(UnsupportedBufferError, match="another device"):
        other.copy(host_of(0), buffer)
    with SimulatedDevice() as other, pytest.raises(InternalError, match="not memory of this"):
        other.view(buffer)
    assert device.num_pending == 0
    device.copy(device.allocate(0), host_of(0, 0)).wait()


def test_a_failing_copy_leaves_a_mixture(device: SimulatedDevice) -> None:
    """Catches a failure after which the destination is accidentally right."""
    device.fail_next()
    dst = host_of(7)
    copy = device.copy(dst, device_of(device, 1))
    for _ in range(2):
        with pytest.raises(TransferError, match="copy 1 of 5000"):
            copy.wait()
    assert copy.done()
    assert set(dst.array.tolist()) == {1, POISON}


def test_close_settles_and_ends_the_thread() -> None:
    """Catches a thread or a waiter left behind."""
    before = set(threading.enumerate())
    device = SimulatedDevice(order=seeded_order(1))
    buffers = [device.allocate(N) for _ in range(5)]
    copies = [device.copy(buffer, host_of(i)) for i, buffer in enumerate(buffers)]
    device.close()
    device.close()
    assert set(threading.enumerate()) == before
    assert all(copy.done() for copy in copies)
    assert [values(device, buffer) for buffer in buffers] == [{i} for i in range(5)]
    with pytest.raises(InternalError, match="closed"):
        device.copy(buffers[0], host_of(1))


def test_threads_share_a_device() -> None:
    """Catches completions or counters that only work for one thread."""
    with SimulatedDevice(order=seeded_order(4)) as device, ThreadPoolExecutor(4) as threads:

        def work(value: int) -> set[int]:
            stored, back = device.allocate(KiB), host_of(0, KiB)
            device.copy(stored, host_of(value, KiB)).wait()
            device.copy(back, stored).wait()
            return set(back.array.tolist())

        assert list(threads.map(work, range(40))) == [{i} for i in range(40)]


def test_registered_memory_is_counted(device: SimulatedDevice) -> None:
    """Catches memory registered and never given back, which a test then cannot see."""
    buffer = host_of(0, 3 * 4096)
    device.register(buffer.address, buffer.nbytes)
    assert device.registered_nbytes == 3 * 4096
    device.unregister(buffer.address)
    assert device.registered_nbytes == 0


def test_registration_mistakes_raise(device: SimulatedDevice) -> None:
    """Catches what the driver answers with an error code, or not at all."""
    buffer = host_of(0, 2 * 4096)
    with pytest.raises(InternalError, match="starts on a page"):
        device.register(buffer.address + 1, 4096)
    with pytest.raises(InternalError, match="nothing is registered"):
        device.unregister(buffer.address)
    device.register(buffer.address, 8192)
    with pytest.raises(InternalError, match="registered already"):
        device.register(buffer.address + 4096, 4096)
    copy = device.copy(buffer, device.allocate(8192))
    with pytest.raises(InternalError, match="unregistered before copy 1"):
        device.unregister(buffer.address)
    copy.wait()
    device.unregister(buffer.address)


def unmapped_while_registered(device: SimulatedDevice) -> int:
    mapping = mmap.mmap(-1, 4 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    device.register(address, 4 * MiB)
    mapping.close()
    return int(address)


def test_unmapping_registered_memory_raises() -> None:
    """Catches memory given to the system while the device may still write to it."""
    with SimulatedDevice() as device:
        address = unmapped_while_registered(device)
        with pytest.raises(InternalError, match="unmapped before it was unregistered"):
            device.unregister(address)
    device = SimulatedDevice()
    unmapped_while_registered(device)
    with pytest.raises(InternalError, match="unmapped and is still registered"):
        device.close()


def test_locking_can_be_refused() -> None:
    """Catches a simulation in which the fallback for refused pinning is never run."""
    with SimulatedDevice(lockable_nbytes=8192) as device:
        first, second = host_of(0, 8192), host_of(0, 4096)
        device.register(first.address, 8192)
        with pytest.raises(BudgetError, match="4096 bytes more are not lockable, 8192 of 8192"):
            device.register(second.address, 4096)
        device.unregister(first.address)
        device.register(second.address, 4096)
        device.unregister(second.address)
