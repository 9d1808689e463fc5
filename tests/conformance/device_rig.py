"""One simulated device and the ways the kit reaches memory on it."""

from __future__ import annotations

import itertools

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import TierSuite, host_buffer, seeded_order
from zinf_core.testing.faults import Operation
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.allocators import PinnedAllocator
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier


class DeviceRig:
    """A device, pools of its memory and of memory pinned for it, and tiers in them."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self._makers = itertools.cycle((device.allocate, host_buffer))

    @classmethod
    def drawn(cls, seed: int) -> DeviceRig:
        return cls(SimulatedDevice(order=seeded_order(seed)))

    def device_pool(self, nbytes: int = 16 * MiB) -> BufferPool:
        return BufferPool("device", budget_nbytes=nbytes, allocator=self.device)

    def pinned_pool(self, nbytes: int = 16 * MiB) -> BufferPool:
        return BufferPool("pinned", budget_nbytes=nbytes, allocator=PinnedAllocator(self.device))

    def device_tier(self) -> DeviceTier:
        return DeviceTier("device", pool=self.device_pool(), device=self.device)

    def host_tier(self) -> HostTier:
        return HostTier("host", pool=self.pinned_pool(), device=self.device)

    def make(self, nbytes: int) -> Buffer:
        return self.device.allocate(nbytes)

    def make_mixed(self, nbytes: int) -> Buffer:
        """Return device memory, then host memory, and so on."""
        return next(self._makers)(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        on_device = buffer.space is MemorySpace.DEVICE
        array = self.device.view(buffer) if on_device else buffer.array
        array[:] = np.frombuffer(data, np.uint8)

    def contents(self, buffer: Buffer) -> bytes:
        on_device = buffer.space is MemorySpace.DEVICE
        array = self.device.view(buffer) if on_device else buffer.array
        return bytes(array.tobytes())


class DeviceSuite(TierSuite):
    """Suite of a tier over a MemoryTable, with a device per tier; the back doors look into its
    leases."""

    rig: DeviceRig

    def new_rig(self) -> DeviceRig:
        return DeviceRig.drawn(1)

    def close(self, tier: Tier) -> None:
        tier.close()
        tier._table._device.close()

    def fill(self, buffer: Buffer, data: bytes) -> None:
        self.rig.fill(buffer, data)

    def contents(self, buffer: Buffer) -> bytes:
        return self.rig.contents(buffer)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        lease = tier._table.entries[key].lease
        return self.contents(lease.buffer) if lease else b""

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        lease = tier._table.entries[key].lease
        if lease:
            self.fill(lease.buffer, data)
        return True

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        self.rig.device.fail_next()
        return True
