"""Memory that the CPU cannot look into, and a tier that takes no other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.completion import Completion
from zinf_core.keys import TensorKey
from zinf_core.testing import DictTier, host_buffer
from zinf_core.testing.buffers import ForeignBuffer
from zinf_core.units import MiB

DEVICE_ONLY = TierCapabilities(memory_spaces=frozenset({MemorySpace.DEVICE}))


class Chip:
    """What the array of a buffer in device memory is to the CPU: something it cannot look into."""

    def __init__(self, host: HostBuffer) -> None:
        self.host = host


class ChipBuffer:
    """A buffer whose bytes are reached by `fill_chip` and `chip_contents` alone."""

    space = MemorySpace.DEVICE

    def __init__(self, host: HostBuffer) -> None:
        self.array = Chip(host)
        self.address = host.address
        self.nbytes = host.nbytes
        self.capacity_nbytes = host.capacity_nbytes

    @classmethod
    def make(cls, nbytes: int) -> ChipBuffer:
        return cls(host_buffer(nbytes))

    def is_shared(self) -> bool:
        return self.array.host.is_shared()

    def resized(self, nbytes: int) -> ChipBuffer:
        return ChipBuffer(self.array.host.resized(nbytes))

    def part(self, start: int, nbytes: int) -> ChipBuffer:
        return ChipBuffer(self.array.host.part(start, nbytes))


def fill_chip(buffer: Buffer, data: bytes) -> None:
    buffer.array.host.array[:] = np.frombuffer(data, np.uint8)


def chip_contents(buffer: Buffer) -> bytes:
    return buffer.array.host.array.tobytes()


class ChipTier(DictTier):
    """A DictTier that takes memory of a chip and no other."""

    def __init__(self) -> None:
        super().__init__(capabilities=DEVICE_ONLY, capacity_nbytes=16 * MiB)

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self._validate(key, self.stat(key).nbytes, dst, offset)
        return self._on_host(super().read_into, key, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        self._validate(key, self.stat(key).nbytes, src, offset)
        return self._on_host(super().write_from, key, src, offset)

    def _on_host(
        self, submit: Callable[..., Completion], key: TensorKey, buffer: Buffer, offset: int
    ) -> Completion:
        return submit(key, ForeignBuffer(buffer.array.host, MemorySpace.DEVICE), offset=offset)
