"""Broken tiers on a device, one missing wait each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import TransferError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing import host_buffer
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.units import MiB
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier
from zinf_storage.memory_copies import Entry

SCRATCH_NBYTES = 2 * MiB


class PromptDevice(SimulatedDevice):
    """Each copy has happened when submit returns, as with memory that is not pinned."""

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        super().copy(dst, src).wait()
        return CompletedTransfer()


@contextmanager
def forgotten_copies(entries: list[Entry]) -> Iterator[None]:
    """Hide the copies in flight of `entries` from their tier."""
    hidden = [entry.copies for entry in entries]
    for entry in entries:
        entry.copies = []
    try:
        yield
    finally:
        for entry, copies in zip(entries, hidden, strict=True):
            entry.copies = copies


class Planted:
    """A sound tier; each class below breaks one thing of it."""

    in_host_memory = False
    """Whether the tier is a HostTier, which device and host memory are transferred with."""

    def __init__(self, inner: DeviceTier | HostTier, device: SimulatedDevice) -> None:
        self._inner = inner
        self._device = device
        self._table = inner._table

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def capabilities(self) -> TierCapabilities:
        return self._inner.capabilities

    def usage(self) -> TierUsage:
        return self._inner.usage()

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        return self._inner.reserve(key, nbytes)

    def stat(self, key: TensorKey) -> Extent:
        return self._inner.stat(key)

    def keys(self) -> Iterator[TensorKey]:
        return self._inner.keys()

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return self._inner.read_into(key, dst, offset=offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        return self._inner.write_from(key, src, offset=offset)

    def map(self, key: TensorKey) -> Buffer:
        return self._inner.map(key)

    def discard(self, key: TensorKey) -> None:
        self._inner.discard(key)

    def flush(self) -> Completion:
        return self._inner.flush()

    def close(self) -> None:
        self._inner.close()


class ForgetsToWait(Planted):
    """Law 6: a read is reported complete when its copy was submitted."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self._inner.read_into(key, dst, offset=offset)
        return CompletedTransfer()


class DoneTooEarly(Planted):
    """Law 6: `done` says so before the copy happened; `wait` is right."""

    class _Done:
        def __init__(self, inner: Completion) -> None:
            self.wait = inner.wait

        def done(self) -> bool:
            return True

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return self._Done(self._inner.read_into(key, dst, offset=offset))


class ReusesSource(Planted):
    """Law 6: writes go through one scratch buffer, filled again while a copy still reads it."""

    def __init__(self, inner: DeviceTier | HostTier, device: SimulatedDevice) -> None:
        super().__init__(inner, device)
        self._scratch = host_buffer(SCRATCH_NBYTES)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        staged = self._scratch.part(0, src.nbytes)
        staged.array[:] = src.array
        return self._inner.write_from(key, staged, offset=offset)


class ReadsScratchEarly(Planted):
    """Law 1: reads go through scratch memory that the CPU copies from before the device is done."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        scratch = host_buffer(dst.nbytes)
        completion = self._inner.read_into(key, scratch, offset=offset)
        np.copyto(dst.array, scratch.array)
        return completion


class FreesUnderCopy(Planted):
    """Discard: the lease goes back while a copy still reads it, and the CPU gets it next."""

    in_host_memory = True

    def discard(self, key: TensorKey) -> None:
        entries = [entry for k, entry in self._table.entries.items() if k == key]
        with forgotten_copies(entries):
            self._inner.discard(key)


class CloseForgets(Planted):
    """Law 12: close does not wait for copies in flight."""

    def close(self) -> None:
        with forgotten_copies(list(self._table.entries.values())):
            self._inner.close()


class CpuOvertakes(Planted):
    """Law 4: the CPU reads what the device has still to write."""

    in_host_memory = True

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        if dst.space is MemorySpace.DEVICE:
            return self._inner.read_into(key, dst, offset=offset)
        entries = [entry for k, entry in self._table.entries.items() if k == key]
        with forgotten_copies(entries):
            return self._inner.read_into(key, dst, offset=offset)


class DamageUnnoticed(Planted):
    """Law 9: after a failed write, half of the new bytes are read as if nothing had happened."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        entry = self._table.entries.get(key)
        if entry is not None:
            entry.damaged_by = 0
        return self._inner.read_into(key, dst, offset=offset)


class FailureSwallowed(Planted):
    """Law 10: `wait` returns although the copy failed."""

    class _Fine:
        def __init__(self, inner: Completion) -> None:
            self._inner = inner
            self.done = inner.done

        def wait(self, timeout_s: float | None = None) -> None:
            try:
                self._inner.wait(timeout_s)
            except TransferError:
                return

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return self._Fine(self._inner.read_into(key, dst, offset=offset))
