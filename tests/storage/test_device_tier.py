"""DeviceTier, and HostTier with a device: what the kit does not ask."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from nvme_helpers import buffer_of, key, noise

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import (
    ConfigError,
    CorruptDataError,
    KeyAbsentError,
    TierClosedError,
    TierFullError,
    TransferError,
    TransferTimeoutError,
    UnsupportedBufferError,
)
from zinf_core.registry import open_tier
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.tier import SupportsMap, Tier
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier

N = 5000
P = 4096


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as device:
        yield device


@pytest.fixture
def pool(device: SimulatedDevice) -> BufferPool:
    return BufferPool("device", budget_nbytes=8 * P, allocator=device)


@pytest.fixture
def tier(pool: BufferPool, device: SimulatedDevice) -> Iterator[DeviceTier]:
    tier = DeviceTier("device", pool=pool, device=device)
    yield tier
    tier.close()


@pytest.fixture
def host(device: SimulatedDevice) -> Iterator[HostTier]:
    pool = BufferPool("host", budget_nbytes=8 * P, allocator=PinnedAllocator(device))
    tier = HostTier("host", pool=pool, device=device)
    yield tier
    tier.close()


def on_device(device: SimulatedDevice, data: bytes) -> Buffer:
    buffer = device.allocate(len(data))
    device.view(buffer)[:] = np.frombuffer(data, np.uint8)
    return buffer


def blank(nbytes: int = N) -> HostBuffer:
    return buffer_of(bytes(nbytes))


def bytes_of(buffer: HostBuffer) -> bytes:
    return bytes(buffer.array.tobytes())


def test_they_are_tiers_that_map(tier: DeviceTier, host: HostTier) -> None:
    """Catches a method renamed away from the protocol, or a path nobody is told of."""
    for one in (tier, host):
        assert isinstance(one, Tier)
        assert isinstance(one, SupportsMap)
        assert all(one.capabilities.takes(space) for space in MemorySpace)
    assert (tier.path_taken, host.path_taken) == ("device sim:0", "host-pinned")


def test_a_host_tier_alone_takes_no_device_memory(device: SimulatedDevice) -> None:
    """Catches device memory taken by a tier that cannot copy it."""
    alone = HostTier(
        "host", pool=BufferPool("h", budget_nbytes=P, allocator=PageAlignedAllocator())
    )
    assert alone.path_taken == "host"
    alone.reserve(key(0), 4)
    with pytest.raises(UnsupportedBufferError):
        alone.read_into(key(0), device.allocate(4))
    alone.close()


def test_a_pool_of_host_memory_is_refused(device: SimulatedDevice) -> None:
    """Catches a device tier that fills host memory."""
    pool = BufferPool("host", budget_nbytes=P, allocator=PageAlignedAllocator())
    with pytest.raises(ConfigError, match="pool host has host memory, not device"):
        DeviceTier("device", pool=pool, device=device)


def test_bytes_are_counted_by_the_pool(tier: DeviceTier, pool: BufferPool) -> None:
    """Catches device memory outside the budget, or a lease lost on discard."""
    tier.reserve(key(0), P + 1)
    assert pool.usage().leased_nbytes == 2 * P
    usage = tier.usage()
    assert (usage.num_keys, usage.nbytes, usage.allocated_nbytes) == (1, P + 1, 2 * P)
    with pytest.raises(TierFullError, match=r"device: no room for layers\.1\.weight"):
        tier.reserve(key(1), 7 * P)
    tier.discard(key(0))
    assert pool.usage().leased_nbytes == 0


def test_an_empty_key_costs_nothing(
    tier: DeviceTier, pool: BufferPool, device: SimulatedDevice
) -> None:
    """Catches a page leased for a parameter of no elements, or a map of it in host memory."""
    tier.reserve(key(0), 0)
    assert pool.usage().leased_nbytes == 0
    tier.write_from(key(0), blank(0)).wait()
    tier.read_into(key(0), device.allocate(0)).wait()
    mapped = tier.map(key(0))
    assert (mapped.space, mapped.nbytes) == (MemorySpace.DEVICE, 0)
    assert device.num_pending == 0


def test_map_is_the_device_memory_itself(tier: DeviceTier, device: SimulatedDevice) -> None:
    """Catches a page shown from a copy, and one shown while its bytes are still on the way."""
    data = noise(N)
    tier.reserve(key(0), N)
    write = tier.write_from(key(0), buffer_of(data))
    with pytest.raises(Exception, match="wait for its completion first"):
        device.view(tier.map(key(0)))
    write.wait()
    view = device.view(tier.map(key(0)))
    assert view.tobytes() == data
    view[:] = 7
    back = blank()
    tier.read_into(key(0), back).wait()
    assert set(bytes_of(back)) == {7}


def test_a_map_outlives_its_key_in_the_count(
    tier: DeviceTier, pool: BufferPool, device: SimulatedDevice
) -> None:
    """Catches a page handed to the next key while a tensor still shows it."""
    tier.reserve(key(0), N)
    view = device.view(tier.map(key(0)))
    tier.discard(key(0))
    assert pool.usage().leased_nbytes == 2 * P
    del view
    assert pool.usage().leased_nbytes == 0


def test_the_cpu_waits_for_what_the_device_writes(host: HostTier, device: SimulatedDevice) -> None:
    """Catches a host read of a key that overtakes the write from the device before it."""
    host.reserve(key(0), N)
    data = noise(N)
    write = host.write_from(key(0), on_device(device, data))
    back = blank()
    host.read_into(key(0), back).wait()
    assert bytes_of(back) == data
    assert write.done()


def test_the_cpu_waits_for_what_the_device_reads(host: HostTier, device: SimulatedDevice) -> None:
    """Catches a host write into bytes that a copy to the device has still to read."""
    host.reserve(key(0), N)
    old, new = noise(N), bytes(N)
    host.write_from(key(0), buffer_of(old)).wait()
    page = device.allocate(N)
    read = host.read_into(key(0), page)
    host.write_from(key(0), buffer_of(new)).wait()
    read.wait()
    assert device.view(page).tobytes() == old


def test_the_cpu_reads_beside_a_read_of_the_device(host: HostTier, device: SimulatedDevice) -> None:
    """Catches a host read held up by a prefetch of the same page."""
    host.reserve(key(0), N)
    host.write_from(key(0), buffer_of(noise(N))).wait()
    read = host.read_into(key(0), device.allocate(N))
    host.read_into(key(0), blank()).wait()
    assert device.num_pending == 1
    read.wait()


def test_ranges_apart_do_not_wait_for_each_other(host: HostTier, device: SimulatedDevice) -> None:
    """Catches transfers of one half of a key held up by those of the other."""
    host.reserve(key(0), N)
    write = host.write_from(key(0), on_device(device, noise(1000)))
    read = host.read_into(key(0), device.allocate(1000), offset=1000)
    read.wait()
    assert read.done()
    host.read_into(key(0), blank(1000), offset=1000).wait()
    host.write_from(key(0), blank(1000), offset=1000).wait()
    assert device.num_pending == 1
    write.wait()


def test_discard_ends_the_copies_first(
    tier: DeviceTier, pool: BufferPool, device: SimulatedDevice
) -> None:
    """Catches a lease given back under a copy, and copies of other keys waited for."""
    for i in range(2):
        tier.reserve(key(i), P)
        tier.write_from(key(i), buffer_of(noise(P)))
    back = blank(P)
    read = tier.read_into(key(0), back)
    tier.discard(key(0))
    assert device.num_pending == 1
    assert read.done()
    assert bytes_of(back) == noise(P)
    assert pool.usage().leased_nbytes == P


def test_a_submit_to_a_discarded_key_is_refused(tier: DeviceTier) -> None:
    """Catches a copy into memory whose key went between lookup and submit."""
    tier.reserve(key(0), P)
    entry = tier._table.entries[key(0)]
    tier.discard(key(0))
    tier._table.entries[key(0)] = entry
    with pytest.raises(KeyAbsentError, match="discarded meanwhile"):
        tier.write_from(key(0), blank(P))
    del tier._table.entries[key(0)]


def test_flush_waits_for_writes(tier: DeviceTier, device: SimulatedDevice) -> None:
    """Catches a flush that promises what is still on the way; failures stay with their write."""
    tier.reserve(key(0), N)
    device.fail_next()
    write = tier.write_from(key(0), blank())
    flush = tier.flush()
    assert not flush.done()
    with pytest.raises(TransferTimeoutError):
        flush.wait(timeout_s=0)
    flush.wait()
    assert flush.done()
    assert device.num_pending == 0
    with pytest.raises(TransferError):
        write.wait()
    tier.flush().wait()


def test_close_ends_the_copies(tier: DeviceTier, pool: BufferPool, device: SimulatedDevice) -> None:
    """Catches memory given back under a copy at the end of a run."""
    tier.reserve(key(0), N)
    write = tier.write_from(key(0), blank())
    tier.close()
    tier.close()
    assert write.done()
    assert pool.usage().leased_nbytes == 0
    assert device.num_pending == 0
    with pytest.raises(TierClosedError):
        tier.usage()


def test_a_failed_write_damages_until_all_is_written(
    tier: DeviceTier, device: SimulatedDevice
) -> None:
    """Catches half-written bytes read as good ones, and a key that never recovers (law 9)."""
    tier.reserve(key(0), N)
    tier.write_from(key(0), buffer_of(noise(N))).wait()
    device.fail_next()
    write = tier.write_from(key(0), blank())
    read = tier.read_into(key(0), blank())
    with pytest.raises(TransferError):
        write.wait()
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=r"device: layers\.0\.weight/param"):
            read.wait()
    tier.write_from(key(0), blank(10)).wait()
    with pytest.raises(CorruptDataError):
        tier.read_into(key(0), blank(10), offset=100).wait()
    tier.write_from(key(0), buffer_of(noise(N))).wait()
    back = blank()
    tier.read_into(key(0), back).wait()
    assert bytes_of(back) == noise(N)


def test_a_read_finds_the_failure_of_a_write_nobody_waited_for(
    tier: DeviceTier, device: SimulatedDevice
) -> None:
    """Catches damage known only once someone has waited for the write."""
    tier.reserve(key(0), N)
    device.fail_next()
    write = tier.write_from(key(0), blank())
    read = tier.read_into(key(0), blank())
    while not read.done():
        pass
    with pytest.raises(CorruptDataError):
        read.wait()
    with pytest.raises(TransferError):
        write.wait()


def test_an_old_failure_does_not_damage_a_newer_write(
    tier: DeviceTier, device: SimulatedDevice
) -> None:
    """Catches writes judged in the order of their waits, not of their submission."""
    tier.reserve(key(0), N)
    device.fail_next()
    old = tier.write_from(key(0), blank())
    tier.write_from(key(0), buffer_of(noise(N))).wait()
    with pytest.raises(TransferError):
        old.wait()
    back = blank()
    tier.read_into(key(0), back).wait()
    assert bytes_of(back) == noise(N)


def test_the_cpu_repairs_a_damaged_key(host: HostTier, device: SimulatedDevice) -> None:
    """Catches damage that a write from host memory does not see or does not end."""
    host.reserve(key(0), N)
    device.fail_next()
    write = host.write_from(key(0), on_device(device, noise(N)))
    with pytest.raises(TransferError):
        write.wait()
    host.write_from(key(0), blank(10)).wait()
    with pytest.raises(CorruptDataError):
        host.read_into(key(0), blank()).wait()
    host.write_from(key(0), buffer_of(noise(N))).wait()
    host.read_into(key(0), blank()).wait()


def test_entries_forget_copies_that_are_done(tier: DeviceTier) -> None:
    """Catches completions, and with them buffers, kept for as long as the key."""
    tier.reserve(key(0), N)
    for _ in range(3):
        tier.write_from(key(0), blank()).wait()
        read = tier.read_into(key(0), blank())
        while not read.done():
            pass
    assert tier._table.entries[key(0)].copies == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("device://", r"device:// names no device; write device://cuda:0"),
        ("device://gpu", r"device://gpu names no device"),
        ("device://cuda:x", r"names no device"),
        ("device://cuda:0?pinned=1", r"device: unknown option 'pinned'"),
    ],
)
def test_bad_urls_are_refused(url: str, message: str) -> None:
    """Catches a setting that is ignored, or a device guessed."""
    with pytest.raises(ConfigError, match=message):
        open_tier(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError, or a hint that names the wrong extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'device://cuda:0 needs cupy; pip install "zinf\[cuda1'):
        open_tier("device://cuda:0", capacity_nbytes=P)
