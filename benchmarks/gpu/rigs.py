"""Tiers to be checked, each with buffers of one kind and with ways around its transfers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu.lab import Lab
from gpu.staged import Faults, StagedEngine

from zinf_core.buffers import Buffer
from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import host_buffer
from zinf_core.testing.faults import Operation
from zinf_core.tier import SupportsMap, Tier
from zinf_core.units import MiB
from zinf_storage.allocators import PinnedAllocator
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier
from zinf_storage.nvme import Engine, NvmeOptions, NvmeTier, SystemCalls

_ROOM = 16 * MiB
_POSIX = NvmeOptions(segment_nbytes=4 * MiB, capacity_nbytes=_ROOM, engine=Engine.POSIX)
_GDS = NvmeOptions(segment_nbytes=4 * MiB, capacity_nbytes=_ROOM, engine=Engine.GDS)

Make = Callable[[int], Buffer]
Open = Callable[[Path], Tier]


class BackDoor(Protocol):
    """A way to what a tier stores that does not go through its transfers."""

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        """Return what is stored under `key`, flushed before."""
        ...

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Replace what is stored under `key` by `data`, of its length."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rig:
    """One kind of tier with one kind of buffer."""

    name: str
    lab: Lab
    make: Make
    """Returns a buffer of a number of bytes (>= 0)."""
    open: Open
    """Opens the tier in a folder. Raises ConfigError if it cannot be used here."""
    door: BackDoor
    fail: Callable[[Operation], bool] = lambda operation: False
    """Has the next operation fail; False if that cannot be arranged."""
    needs_kvikio: bool = False


@dataclass(frozen=True)
class MappedDoor:
    """Looks into the memory that a tier in memory lends."""

    lab: Lab

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        """Return the bytes of the key's memory."""
        return self.lab.contents(_mapped(tier, key))

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Overwrite the key's memory."""
        self.lab.fill(_mapped(tier, key), data)
        return True


class FileDoor:
    """Looks into the segment file of an nvme tier that is named after its folder."""

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        """Return the bytes of the key in its file."""
        extent = tier.stat(key)
        if not extent.nbytes:
            return b""
        with self._segment(tier, key).open("rb") as file:
            return os.pread(file.fileno(), extent.nbytes, extent.offset or 0)

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Overwrite the bytes of the key in its file."""
        if data:
            with self._segment(tier, key).open("rb+") as file:
                os.pwrite(file.fileno(), data, tier.stat(key).offset or 0)
                os.fsync(file.fileno())
        return True

    def _segment(self, tier: Tier, key: TensorKey) -> Path:
        return Path(tier.name) / f"segment-{tier.stat(key).segment:05d}.zinf"


def rigs(lab: Lab) -> Iterator[Rig]:
    """Iterate over the tiers to check; those that may hang come last."""
    yield from _in_memory(lab)
    yield _posix(lab)
    yield _staged(lab)
    yield Rig(
        name="NvmeTier gds, device buffers",
        lab=lab,
        make=lab.device.allocate,
        open=lambda folder: NvmeTier.open(
            folder, name=str(folder), options=_GDS, device=lab.device
        ),
        door=FileDoor(),
        needs_kvikio=True,
    )


def _in_memory(lab: Lab) -> Iterator[Rig]:
    for name, make in _makers(lab).items():
        yield Rig(
            name=f"DeviceTier, {name} buffers",
            lab=lab,
            make=make,
            open=lambda folder: DeviceTier(
                f"device {folder.name}",
                pool=BufferPool("device", budget_nbytes=_ROOM, allocator=lab.device),
                device=lab.device,
            ),
            door=MappedDoor(lab),
            fail=lambda operation: lab.fail_next_copy(),
        )
    for name, make in (("device", lab.device.allocate), ("mixed", _mixed(lab))):
        yield Rig(
            name=f"HostTier over registered memory, {name} buffers",
            lab=lab,
            make=make,
            open=lambda folder: HostTier(
                f"host {folder.name}",
                pool=BufferPool(
                    "pinned", budget_nbytes=_ROOM, allocator=PinnedAllocator(lab.device)
                ),
                device=lab.device,
            ),
            door=MappedDoor(lab),
            fail=lambda operation, on=name: on == "device" and lab.fail_next_copy(),
        )


def _posix(lab: Lab) -> Rig:
    faults = Faults()

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        faults.check(Operation.READ)
        return os.preadv(fd, views, offset)

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        faults.check(Operation.WRITE)
        return os.pwritev(fd, views, offset)

    return Rig(
        name="NvmeTier posix, pinned buffers",
        lab=lab,
        make=lab.pinned,
        open=lambda folder: NvmeTier.open(
            folder,
            name=str(folder),
            options=_POSIX,
            calls=SystemCalls(preadv=preadv, pwritev=pwritev),
        ),
        door=FileDoor(),
        fail=faults.arm,
    )


def _staged(lab: Lab) -> Rig:
    faults = Faults()
    return Rig(
        name="NvmeTier over this script's engine, mixed buffers",
        lab=lab,
        make=_mixed(lab),
        open=lambda folder: NvmeTier.open(
            folder,
            name=str(folder),
            options=_POSIX,
            engine=StagedEngine(device=lab.device, faults=faults),
        ),
        door=FileDoor(),
        fail=faults.arm,
    )


def _makers(lab: Lab) -> dict[str, Make]:
    return {
        "host": host_buffer,
        "pinned": lab.pinned,
        "device": lab.device.allocate,
    }


def _mixed(lab: Lab) -> Make:
    """Return a source of device, host and pinned memory in turn."""
    turn = itertools.cycle(_makers(lab).values())

    def make(nbytes: int) -> Buffer:
        return next(turn)(nbytes)

    return make


def _mapped(tier: Tier, key: TensorKey) -> Buffer:
    if not isinstance(tier, SupportsMap):
        raise TypeError(f"{tier.name} lends no memory")
    return tier.map(key)
