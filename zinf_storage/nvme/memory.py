"""The memory of transfers: the caller's buffer while it is ours, and the workers' bounce pages."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.completion import Completion
from zinf_core.device import Device
from zinf_core.units import KiB, align_up
from zinf_storage.allocators import PageAlignedAllocator

BOUNCE_NBYTES: Final = 256 * KiB
"""Bytes that each worker can hold of what does not go straight to or from the caller's memory."""
_FENCE_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A run of bytes in device memory; cut like a memoryview."""

    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.buffer.nbytes

    def __getitem__(self, which: slice) -> DeviceSpan:
        start, stop, _ = which.indices(self.nbytes)
        return DeviceSpan(self.buffer.part(start, stop - start))


Span = memoryview | DeviceSpan
"""Contiguous bytes that one request moves."""


class HostMemory:
    """The caller's host buffer during one transfer; dropped when the transfer is done (law 6)."""

    __slots__ = ("_array", "_buffer")

    def __init__(self, buffer: Buffer) -> None:
        """Refer to `buffer` and to its memory."""
        self._buffer = buffer
        self._array = buffer.array

    def wait_ready(self) -> None:
        """Return at once: whoever submitted a host buffer has finished with it."""

    def span(self, start: int, nbytes: int) -> memoryview:
        """Return `nbytes` of the buffer's bytes from `start`."""
        view: memoryview = self._array.data[start : start + nbytes]
        return view

    def padded_span(self, start: int, nbytes: int) -> memoryview | None:
        """Return `span` extended to whole pages, None if that memory is not the buffer's."""
        whole = align_up(nbytes)
        if start + whole > self._buffer.capacity_nbytes:
            return None
        raw = _RawMemory(self._buffer.address + start, whole)
        return np.asarray(raw).data

    def put(self, start: int, src: HostBuffer) -> None:
        """Copy all of `src` to the buffer's bytes from `start`."""
        self.span(start, src.nbytes)[:] = src.array.data

    def take(self, start: int, dst: HostBuffer) -> None:
        """Copy the buffer's bytes from `start` to all of `dst`."""
        dst.array.data[:] = self.span(start, dst.nbytes)


class DeviceMemory:
    """The caller's device buffer during one transfer; dropped when the transfer is done (law 6)."""

    __slots__ = ("_buffer", "_device", "_fence")

    def __init__(self, buffer: Buffer, *, device: Device, fence: Completion) -> None:
        """Refer to `buffer`; what was submitted to `device` before is done with it by `fence`."""
        self._buffer = buffer
        self._device = device
        self._fence = fence

    def wait_ready(self) -> None:
        """Return when what computes on the device is done with the buffer. Blocks.

        Raises TransferError if the device failed.
        """
        self._fence.wait()

    def span(self, start: int, nbytes: int) -> DeviceSpan:
        """Return `nbytes` of the buffer's bytes from `start`."""
        return DeviceSpan(self._buffer.part(start, nbytes))

    def padded_span(self, start: int, nbytes: int) -> DeviceSpan | None:
        """Return `span` extended to whole pages, None if that memory is not the buffer's."""
        whole, capacity = align_up(nbytes), self._buffer.capacity_nbytes
        if start + whole > capacity:
            return None
        return DeviceSpan(self._buffer.resized(capacity).part(start, whole))

    def put(self, start: int, src: HostBuffer) -> None:
        """Copy all of `src` to the buffer's bytes from `start`. Blocks. Raises TransferError."""
        self._device.copy(self._buffer.part(start, src.nbytes), src).wait()

    def take(self, start: int, dst: HostBuffer) -> None:
        """Copy the buffer's bytes from `start` to all of `dst`. Blocks. Raises TransferError."""
        self._device.copy(dst, self._buffer.part(start, dst.nbytes)).wait()


TransferMemory = HostMemory | DeviceMemory


class ComputeFence:
    """Tells when what was submitted to a device for compute so far has ended.

    A kernel that writes the source of a transfer, or still reads its destination, need not have
    ended when the transfer is submitted, and kvikio waits for no stream. A copy does wait, for
    everything submitted before it; so a copy of one page that nobody reads serves as the fence.
    """

    def __init__(self, device: Device) -> None:
        """Allocate two pages of device memory. Raises BudgetError."""
        self._device = device
        pages = device.allocate(2 * _FENCE_NBYTES)
        self._dst, self._src = (pages.part(i * _FENCE_NBYTES, _FENCE_NBYTES) for i in range(2))

    def submit(self) -> Completion:
        """Return a completion of what was submitted before this call. Never blocks.

        Call it in the thread that submitted the compute: its current stream is the one meant.
        """
        return self._device.copy(self._dst, self._src)


class BouncePages:
    """One page-aligned scratch area per worker, allocated once."""

    def __init__(self, num_threads: int) -> None:
        """Allocate `num_threads` areas. Raises BudgetError."""
        self._free: queue.SimpleQueue[HostBuffer] = queue.SimpleQueue()
        allocator = PageAlignedAllocator()
        for _ in range(num_threads):
            self._free.put(allocator.allocate(BOUNCE_NBYTES))

    @contextmanager
    def lease(self) -> Iterator[HostBuffer]:
        """Lend one area. Only workers call this, so one is always free."""
        area = self._free.get()
        try:
            yield area
        finally:
            self._free.put(area)


class _RawMemory:
    """Memory by address, for numpy; whoever makes a view of it keeps the memory alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
