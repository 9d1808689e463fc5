"""The memory of transfers: the caller's buffer while it is ours, and the workers' bounce pages."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.units import KiB, align_up
from zinf_storage.allocators import PageAlignedAllocator

BOUNCE_NBYTES: Final = 256 * KiB
"""Bytes that each worker can hold of what does not go straight to or from the caller's memory."""


class TransferMemory:
    """The caller's buffer during one transfer; dropped when the transfer is done (law 6)."""

    __slots__ = ("_array", "_buffer")

    def __init__(self, buffer: Buffer) -> None:
        """Refer to `buffer` and to its memory."""
        self._buffer = buffer
        self._array = buffer.array

    def view(self, start: int, nbytes: int) -> memoryview:
        """Return `nbytes` of the buffer's bytes from `start`."""
        view: memoryview = self._array.data[start : start + nbytes]
        return view

    def padded_view(self, start: int, nbytes: int) -> memoryview | None:
        """Return `view` extended to whole pages, None if that memory is not the buffer's."""
        whole = align_up(nbytes)
        if start + whole > self._buffer.capacity_nbytes:
            return None
        raw = _RawMemory(self._buffer.address + start, whole)
        return np.asarray(raw).data


class BouncePages:
    """One page-aligned scratch area per worker, allocated once."""

    def __init__(self, num_threads: int) -> None:
        """Allocate `num_threads` areas. Raises BudgetError."""
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        allocator = PageAlignedAllocator()
        for _ in range(num_threads):
            self._free.put(allocator.allocate(BOUNCE_NBYTES).memory.data)

    @contextmanager
    def lease(self) -> Iterator[memoryview]:
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
