"""The kit on HostTier: alone, deferred, and failing."""

from __future__ import annotations

from pathlib import Path

import pytest

from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import (
    DeferredTier,
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


def open_host(folder: Path) -> HostTier:
    allocator = PageAlignedAllocator()
    pool = BufferPool("host", budget_nbytes=16 * MiB, allocator=allocator)
    return HostTier(name=f"host {folder.name}", pool=pool)


class TestHostTier(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return open_host(folder)

    def peek(self, tier: HostTier, key: TensorKey) -> bytes:
        lease = tier._table.entries[key].lease
        return lease.buffer.array.tobytes() if lease else b""

    def poke(self, tier: HostTier, key: TensorKey, data: bytes) -> bool:
        lease = tier._table.entries[key].lease
        if lease:
            self.fill(lease.buffer, data)
        return True


class TestDeferredHostTier(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return DeferredTier(open_host(folder), order=seeded_order(1))


class TestFaultyHostTier(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return FaultyTier(open_host(folder))

    def fail_next(self, tier: FaultyTier, operation: Operation) -> bool:
        tier.fail_next(operation, damage=True)
        return True


TestHostMachine = pytest.mark.slow(machine_for(open_host).TestCase)
TestDeferredHostMachine = pytest.mark.slow(
    machine_for(lambda folder: DeferredTier(open_host(folder), order=seeded_order(2))).TestCase
)
