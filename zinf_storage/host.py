"""HostTier: named bytes in host memory, inside one pool's budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.device import Device
from zinf_core.keys import Extent, TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_storage.memory_table import MemoryTable

_ALONE: Final = TierCapabilities(memory_spaces=frozenset({MemorySpace.HOST}), mappable=True)
_WITH_DEVICE: Final = TierCapabilities(
    memory_spaces=frozenset({MemorySpace.HOST, MemorySpace.DEVICE}), mappable=True, max_in_flight=2
)


class HostTier:
    """Keeps each key in a lease of `pool`; see `MemoryTable`.

    Transfers with host memory are copies made at submit; those with the memory of `device` are
    made by it. Thread-safe; a forked child cannot use it. Takes no memory besides the leases.
    """

    def __init__(self, name: str, *, pool: BufferPool, device: Device | None = None) -> None:
        """Create an empty tier.

        `pool` must hand out host memory, pinned for `device` if copies with it are to be fast.
        Neither is closed with the tier.
        """
        self._pool = pool
        capabilities = _ALONE if device is None else _WITH_DEVICE
        self._table = MemoryTable(name, pool=pool, device=device, capabilities=capabilities)

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._table.name

    @property
    def capabilities(self) -> TierCapabilities:
        """Host memory, and device memory if there is a device; any offset and length, mappable."""
        return self._table.capabilities

    @property
    def path_taken(self) -> str:
        """``"host-pinned"`` if keys lie in memory the device reaches, otherwise ``"host"``."""
        return "host-pinned" if self._pool.space is MemorySpace.HOST_PINNED else "host"

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
        """Copy `dst.nbytes` bytes of `key` from `offset` into `dst`: before returning if it is
        host memory, else the device does."""
        return self._table.read_into(key, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Copy the bytes of `src` to `key` at `offset`: before returning if it is host memory,
        else the device does."""
        return self._table.write_from(key, src, offset)

    def map(self, key: TensorKey) -> Buffer:
        """Return the key's own buffer; it belongs to the tier until `discard` or `close`."""
        return self._table.map(key)

    def discard(self, key: TensorKey) -> None:
        """Forget `key` and release its lease, after copies of it that run. Raises
        KeyAbsentError."""
        self._table.discard(key)

    def flush(self) -> Completion:
        """Submit nothing: done when the copies in flight are. Memory is as durable as it gets."""
        return self._table.flush()

    def close(self) -> None:
        """Wait for copies in flight and release every lease; a second call does nothing."""
        self._table.close()
