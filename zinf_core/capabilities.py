"""What a tier can do, as data that is constant after opening."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zinf_core.errors import ConfigError
from zinf_core.units import MiB


class MemorySpace(enum.Enum):
    """Where a buffer physically lies."""

    HOST = "host"
    """Host memory, read and written by the CPU."""
    HOST_PINNED = "host_pinned"
    """Host memory registered with the device driver, reachable by its DMA engine as well; a tier
    that takes HOST takes it too."""
    DEVICE = "device"
    """Memory of the device that computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapabilities:
    """Positive statements only: what is absent here is not possible."""

    memory_spaces: frozenset[MemorySpace]
    """Spaces the tier reads into and writes from without help; see `takes`."""
    offset_align: int = 1
    """Bytes; `offset` of a transfer must be a multiple."""
    length_align: int = 1
    """Bytes; the length must be a multiple, unless the transfer ends at the key's end."""
    address_align: int = 1
    """Bytes; the buffer's address must be a multiple."""
    preferred_io_nbytes: int = MiB
    """Bytes per request at which the tier is near its full rate."""
    max_in_flight: int = 1
    """Transfers that make progress at the same time; more may be submitted and queue."""
    persistent: bool = False
    """Flushed bytes survive `close` and are found by the next open."""
    mappable: bool = False
    """The tier implements `SupportsMap`."""

    def __post_init__(self) -> None:
        """Refuse numbers that no tier can mean."""
        for field in (
            "offset_align",
            "length_align",
            "address_align",
            "preferred_io_nbytes",
            "max_in_flight",
        ):
            if getattr(self, field) < 1:
                raise ConfigError(f"TierCapabilities.{field} must be at least 1")
        if not self.memory_spaces:
            raise ConfigError("TierCapabilities.memory_spaces must not be empty")

    def takes(self, space: MemorySpace) -> bool:
        """Return whether buffers of `space` can be transferred with directly."""
        spaces = self.memory_spaces
        return space in spaces or (space is MemorySpace.HOST_PINNED and MemorySpace.HOST in spaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """What a tier holds at one moment."""

    num_keys: int
    nbytes: int
    """Sum of the keys' logical bytes (law 7)."""
    allocated_nbytes: int
    """Bytes taken from the device or pool, padding and spare extents included."""
    capacity_nbytes: int | None = None
    """Bytes the tier could hold at most; None when unknown or unbounded."""
