"""DeviceTier: named bytes in the memory of a device, inside one pool's budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.device import Device
from zinf_core.errors import BudgetTooSmallError, ConfigError
from zinf_core.keys import Extent, TensorKey
from zinf_core.registry import TierUrl
from zinf_core.runtime.pool import BufferPool
from zinf_core.units import GiB, MiB, format_nbytes
from zinf_storage.cuda import CudaDevice, cuda_problem
from zinf_storage.memory_table import MemoryTable

RESERVE_NBYTES: Final = 2 * GiB
"""Free device memory that a tier without a capacity leaves alone, for contexts and kernels."""

_CAPABILITIES: Final = TierCapabilities(
    memory_spaces=frozenset(MemorySpace),
    preferred_io_nbytes=4 * MiB,
    max_in_flight=2,
    mappable=True,
)
_PATH: Final = re.compile(r"cuda(?::([0-9]{1,4}))?")


class DeviceTier:
    """Keeps each key in a lease of `pool`, which hands out memory of `device`; see `MemoryTable`.

    Every transfer is made by the device, so it is asynchronous if the other memory is pinned or
    on the device. Thread-safe; a forked child cannot use it. Takes no memory besides the leases.
    """

    def __init__(self, name: str, *, pool: BufferPool, device: Device) -> None:
        """Create an empty tier. Neither `pool` nor `device` is closed with it.

        Raises ConfigError if `pool` hands out anything but device memory.
        """
        if pool.space is not MemorySpace.DEVICE:
            raise ConfigError(f"{name}: pool {pool.name} has {pool.space.value} memory, not device")
        self._device = device
        self._table = MemoryTable(name, pool=pool, device=device, capabilities=_CAPABILITIES)

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._table.name

    @property
    def capabilities(self) -> TierCapabilities:
        """Memory of any space, any offset and length, mappable."""
        return self._table.capabilities

    @property
    def path_taken(self) -> str:
        """``"device cuda:0"``."""
        return f"device {self._device.name}"

    def usage(self) -> TierUsage:
        """Return what is stored now. The capacity is the pool's budget, shared with its users."""
        return self._table.usage()

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Lease room for `nbytes` under `key`.

        Raises KeyExistsError, RangeError, or TierFullError if the pool has no room.
        """
        return self._table.reserve(key, nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key`. Raises KeyAbsentError."""
        return self._table.stat(key)

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        return self._table.keys()

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Submit a copy of `dst.nbytes` bytes of `key` from `offset` into `dst`."""
        return self._table.read_into(key, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Submit a copy of the bytes of `src` to `key` at `offset`."""
        return self._table.write_from(key, src, offset)

    def map(self, key: TensorKey) -> Buffer:
        """Return the key's own device memory; it belongs to the tier until `discard` or
        `close`."""
        return self._table.map(key)

    def discard(self, key: TensorKey) -> None:
        """Forget `key` and release its lease, after the copies of it that are in flight. Raises
        KeyAbsentError."""
        self._table.discard(key)

    def flush(self) -> Completion:
        """Submit nothing: done when the copies in flight are."""
        return self._table.flush()

    def close(self) -> None:
        """Wait for copies in flight and release every lease; a second call does nothing."""
        self._table.close()


def open_device(url: TierUrl, *, capacity_nbytes: int | None) -> DeviceTier:
    """Open ``device://cuda:0``: memory of that device from cupy's pool, as keys need it.

    `capacity_nbytes` None: what is free on the device now, less RESERVE_NBYTES.

    Raises ConfigError for another path, any option, a device that is not there, or without cupy;
    BudgetTooSmallError if nothing is free.
    """
    url.refuse_unknown(frozenset())
    match = _PATH.fullmatch(url.path)
    if match is None:
        raise ConfigError(f"device://{url.path} names no device; write device://cuda:0")
    problem = cuda_problem()
    if problem is not None:
        raise ConfigError(f"device://{url.path} {problem}")
    device = CudaDevice(int(match[1] or 0))
    if capacity_nbytes is None:
        free_nbytes, _ = device.read_memory()
        capacity_nbytes = free_nbytes - RESERVE_NBYTES
        if capacity_nbytes <= 0:
            raise BudgetTooSmallError(
                f"device://{url.path}: {format_nbytes(free_nbytes)} are free, of which "
                f"{format_nbytes(RESERVE_NBYTES)} are left alone; free some, or name a capacity"
            )
    pool = BufferPool(device.name, budget_nbytes=capacity_nbytes, allocator=device)
    return DeviceTier(f"device {device.name}", pool=pool, device=device)
