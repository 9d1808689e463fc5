"""Faults of memory on every kind of tier: arenas, what tiers take besides, page cache (P63 to P65,
P71)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from faults.children import run_child
from faults.places import PLACES, cached_nbytes, opened
from faults.test_memory import GROWTH, LARGE, SLACK_NBYTES
from zinf_core.buffers import BufferAllocator, HostBuffer
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import open_tier
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.tier import Tier
from zinf_core.units import PAGE_NBYTES, KiB, MiB, align_up
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator
from zinf_storage.host import HostTier
from zinf_storage.probe import IoPath, probe_path

KEY = TensorKey.of("arena", StateKind.PARAM)


def _resident_nbytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return PAGE_NBYTES * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


@contextmanager
def _host_tier(tier: Tier, nbytes: int) -> Iterator[None]:
    """Store a key of `nbytes` on `tier`, a few pages at a time."""
    part = PageAlignedAllocator().allocate(MiB)
    part.array[:] = 1
    tier.reserve(KEY, nbytes)
    for start in range(0, nbytes, MiB):
        tier.write_from(KEY, part.part(0, min(MiB, nbytes - start)), offset=start).wait()
    try:
        yield
    finally:
        tier.close()


@contextmanager
def _pool(allocator: BufferAllocator, nbytes: int) -> Iterator[None]:
    """Lease a buffer of `nbytes` from a pool and use all of it."""
    pool = BufferPool("host", budget_nbytes=2 * align_up(nbytes), allocator=allocator)
    lease = pool.lease_nowait(nbytes)
    lease.buffer.array[:] = 1
    try:
        yield
    finally:
        assert pool.usage().peak_nbytes == align_up(nbytes)
        lease.release()
        pool.trim()


def _host_tier_over(allocator: BufferAllocator, nbytes: int) -> HostTier:
    pool = BufferPool("host", budget_nbytes=align_up(nbytes), allocator=allocator)
    return HostTier("host", pool=pool)


ARENAS: dict[str, Callable[[SimulatedDevice, int], contextmanager]] = {
    "pool": lambda _, n: _pool(PageAlignedAllocator(), n),
    "pinned pool": lambda device, n: _pool(PinnedAllocator(device), n),
    "host tier": lambda _, n: _host_tier(_host_tier_over(PageAlignedAllocator(), n), n),
    "pinned tier": lambda device, n: _host_tier(_host_tier_over(PinnedAllocator(device), n), n),
    "host://": lambda _, n: _host_tier(open_tier("host://"), n),
    "checksummed host://": lambda _, n: _host_tier(open_tier("checksummed://[host://]"), n),
}


@pytest.mark.slow
@pytest.mark.parametrize("arena", ARENAS)
def test_p64_an_arena_takes_what_was_asked_for(arena: str) -> None:
    """P64: 64 MB taken, or pinned, for an arena of 33 MB, by whatever hands out host memory; or
    not given back."""
    nbytes = 33_000_000
    with SimulatedDevice() as device:
        before = _resident_nbytes()
        with ARENAS[arena](device, nbytes):
            grown = _resident_nbytes() - before
            assert 0.95 * nbytes < grown < 1.2 * nbytes
            assert device.registered_nbytes == (align_up(nbytes) if "pinned" in arena else 0)
        assert device.registered_nbytes == 0
        assert _resident_nbytes() - before < 0.2 * nbytes


ON_A_DEVICE = """
from zinf_core.testing.simulated import SimulatedDevice

device = SimulatedDevice()
registered = []
HOMES = dict(
    compute=device,
    parameters=f"object://file://{folder}/o?part_nbytes=1MiB&num_threads=2",
    gradients=f"striped://[nvme://{folder}/a][nvme://{folder}/b]?shares=1,1",
    optimizer_states=f"compressed://[nvme://{folder}/c]?num_threads=2",
    observers=[lambda event: registered.append(device.registered_nbytes)],
)
"""


@pytest.mark.slow
def test_p63_p65_a_model_far_over_the_budget_on_a_device(tmp_path: Path) -> None:
    """P63, P65: full copies, or pinned memory beyond the host budget, where a device computes and
    each kind of state is on another kind of tier: 48 MiB of weights, 192 MiB of states."""
    script = LARGE.replace("Blocks(128, 512)", "Blocks(48, 512)").replace("NUM_STEPS", "1")
    script = script.replace("report(", "device.close()\n    report(registered=max(registered), ")
    facts = run_child(GROWTH + ON_A_DEVICE + script, tmp_path)
    assert facts["total"] == 48 * MiB
    assert facts["peaks"]["device"] <= 8 * MiB
    assert facts["registered"] == facts["peaks"]["host"] <= 8 * MiB
    for phase in ("built", "wrapped", "trained"):
        assert facts[phase] <= 16 * MiB + MiB + SLACK_NBYTES, (phase, facts)


def _swap(tier: Tier, buffer: HostBuffer, num_rounds: int) -> Iterator[None]:
    """Write and read back four keys of the size of `buffer` in every round."""
    keys = [TensorKey.of(f"layers.{index}.weight", StateKind.PARAM) for index in range(4)]
    noise = np.random.default_rng(0).integers(0, 255, buffer.nbytes, np.uint8)
    for key in keys:
        tier.reserve(key, buffer.nbytes)
    for round_ in range(num_rounds):
        for index, key in enumerate(keys):
            np.add(noise, 16 * round_ + index, out=buffer.array, casting="unsafe")
            tier.write_from(key, buffer).wait()
        for index, key in enumerate(keys):
            buffer.array[:] = 0
            tier.read_into(key, buffer).wait()
            assert np.array_equal(buffer.array - np.uint8(16 * round_ + index), noise)
        yield


LIVE_NBYTES = 16 * MiB
CACHED_NBYTES = {
    "object": 2 * LIVE_NBYTES,  # obstore knows no direct I/O: what is stored, and what was
    "nested": 2 * LIVE_NBYTES,
    "nvme buffered": 3 * LIVE_NBYTES,  # what was dropped may still be on its way to the drive
}
"""Bytes that may be in the page cache; none of the others'."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["nvme buffered", "object", "striped", "zstd", "checksummed", "nested"]
)
def test_p64_p71_swapping_takes_little_memory(tmp_path: Path, place: str) -> None:
    """P64, P71: traffic that pushes everything else out of the page cache, and scratch memory of
    the tier that grows with it. 128 MiB of traffic over 16 MiB of states."""
    drive = probe_path(tmp_path)
    if drive.filesystem == "tmpfs":
        pytest.skip("files on tmpfs are page cache and nothing else")
    url = PLACES[place].format(folder=tmp_path)
    buffer = PageAlignedAllocator().allocate(LIVE_NBYTES // 4)
    buffer.array[:] = 1
    with ExitStack() as stack:
        tier = stack.enter_context(opened(url))
        tier.reserve(KEY, PAGE_NBYTES)
        tier.write_from(KEY, buffer.part(0, PAGE_NBYTES)).wait()
        is_direct = drive.io_path is IoPath.POSIX_DIRECT
        allowed = CACHED_NBYTES.get(place, 0 if is_direct else 3 * LIVE_NBYTES)
        before = _resident_nbytes()
        for _ in _swap(tier, buffer, 4):
            assert cached_nbytes(tmp_path) <= allowed + 64 * KiB
            assert _resident_nbytes() - before < 8 * MiB
        tier.flush().wait()
        if not {"object", "nested"} & {place}:
            assert cached_nbytes(tmp_path) <= 256 * KiB, "clean pages were kept"
