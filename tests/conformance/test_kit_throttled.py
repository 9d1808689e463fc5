"""The kit on ThrottledTier: over host memory, NVMe, and a tier that prefetches."""

from __future__ import annotations

from pathlib import Path

import pytest

from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    FaultyTier,
    Operation,
    TierSuite,
    machine_for,
    seeded_order,
)
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.host import HostTier
from zinf_storage.nvme import NvmeOptions, NvmeTier
from zinf_storage.throttled import Limits, throttled

FAST = Limits(read_bytes_per_s=8e9, write_bytes_per_s=4e9, latency_s=1e-5)
SHARED = Limits(read_bytes_per_s=8e9, write_bytes_per_s=8e9, is_shared=True)


def open_host(folder: Path) -> Tier:
    allocator = PageAlignedAllocator()
    pool = BufferPool("host", budget_nbytes=16 * MiB, allocator=allocator)
    return throttled(HostTier(name=f"host {folder.name}", pool=pool), FAST)


def open_nvme(folder: Path) -> Tier:
    options = NvmeOptions(segment_nbytes=MiB, capacity_nbytes=16 * MiB)
    return throttled(NvmeTier.open(folder, options=options), SHARED)


def open_prefetching(folder: Path) -> Tier:
    return throttled(DeferredTier(DictTier(folder.name), order=seeded_order(3)), FAST)


class TestThrottledHost(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return open_host(folder)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        return tier._inner.map(key).array.tobytes()

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        self.fill(tier._inner.map(key), data)
        return True


class TestThrottledNvme(TierSuite):
    num_kills = 2

    def open_tier(self, folder: Path) -> Tier:
        return open_nvme(folder)


class TestThrottledFaulty(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return throttled(FaultyTier(DictTier(folder.name)), FAST)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        tier._inner.fail_next(operation, damage=True)
        return True


class TestThrottledPrefetching(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return open_prefetching(folder)


class TestDeferredThrottled(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return DeferredTier(open_host(folder), order=seeded_order(4))


TestThrottledMachine = pytest.mark.slow(machine_for(open_host).TestCase)
TestThrottledNvmeMachine = pytest.mark.slow(machine_for(open_nvme).TestCase)
TestThrottledPrefetchingMachine = pytest.mark.slow(machine_for(open_prefetching).TestCase)
