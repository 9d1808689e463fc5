"""Memory: the two budgets of a runtime and the tiers that live in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zinf_core.runtime.pool import BufferPool
from zinf_core.tier import Tier
from zinf_core.units import parse_nbytes
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier
from zinf_torch.compute import Compute
from zinf_torch.heap import return_freed_blocks
from zinf_torch.set_up import check_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Pools of the device and host budgets, and the tier in each."""

    device_pool: BufferPool
    host_pool: BufferPool
    tiers: Mapping[str, Tier]
    """``"device"`` and ``"host"``."""

    @classmethod
    def of(cls, compute: Compute, *, device: int | str, host: int | str) -> Memory:
        """Return the memory of `compute` under the budgets `device` and `host` (bytes or text), and
        have freed blocks of ordinary memory go back to the system.

        Raises ConfigError for text that is no size, BudgetTooSmallError if the machine has less.
        """
        device_nbytes = parse_nbytes(device, what="device")
        host_nbytes = parse_nbytes(host, what="host")
        if compute.device.type == "cpu":
            check_machine({"device": device_nbytes, "host": host_nbytes})
            return_freed_blocks(device_nbytes + host_nbytes)
        else:
            compute.check_room(device_nbytes)
            check_machine({"host": host_nbytes})
            return_freed_blocks(host_nbytes)
        host_pool = BufferPool(
            "host", budget_nbytes=host_nbytes, allocator=compute.host_allocator()
        )
        device_pool = BufferPool(
            "device", budget_nbytes=device_nbytes, allocator=compute.allocator()
        )
        on_device: Tier
        if compute.memory is None:
            on_device = HostTier("device", pool=device_pool)
        else:
            on_device = DeviceTier("device", pool=device_pool, device=compute.memory)
        host_tier = HostTier("host", pool=host_pool, device=compute.memory)
        return cls(
            device_pool=device_pool,
            host_pool=host_pool,
            tiers={"device": on_device, "host": host_tier},
        )
