"""Buffers: memory a transfer reads into or writes from, owned by whoever leased it."""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import ConfigError, RangeError

ByteArray = npt.NDArray[np.uint8]


@runtime_checkable
class Buffer(Protocol):
    """A contiguous run of bytes in one memory space."""

    @property
    def space(self) -> MemorySpace:
        """Where the bytes physically lie."""
        ...

    @property
    def address(self) -> int:
        """Address of the first byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes a transfer moves."""
        ...

    @property
    def capacity_nbytes(self) -> int:
        """Bytes that belong to the buffer from `address` on; a tier may scribble on those past
        `nbytes` while a transfer is in flight (padding of direct I/O)."""
        ...

    @property
    def array(self) -> Any:
        """The memory as a one-dimensional byte array of `nbytes` (numpy in host spaces)."""
        ...

    def is_shared(self) -> bool:
        """Return whether anything besides this buffer still references its memory."""
        ...

    def resized(self, nbytes: int) -> Buffer:
        """Return a buffer over the same memory for another use of at most its capacity."""
        ...

    def part(self, start: int, nbytes: int) -> Buffer:
        """Return a buffer over `nbytes` from byte `start` on, without spare capacity unless it
        ends where this one does. It references the memory: drop it with the transfer."""
        ...


class BufferAllocator(Protocol):
    """Source of buffers of one memory space. The memory is freed when the last reference dies."""

    @property
    def space(self) -> MemorySpace:
        """Space of every buffer allocated here."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Return a buffer of exactly `nbytes` (>= 1), page aligned, its capacity rounded up to
        whole pages. Contents are unspecified. Raises BudgetError if the system has no memory."""
        ...


class HostBuffer:
    """Host memory behind one numpy byte array.

    `memory` must be the array that views and foreign tensors are made from, with a base that is
    not an array, so that each of them holds a reference to it and `is_shared` can see it.
    """

    __slots__ = ("_memory", "_nbytes", "array", "space")

    def __init__(
        self,
        memory: ByteArray,
        nbytes: int | None = None,
        *,
        space: MemorySpace = MemorySpace.HOST,
    ) -> None:
        """Take `memory` (uint8, one-dimensional, contiguous, writable) for `nbytes` of use.

        `space` is HOST or HOST_PINNED. Raises ConfigError if the array is anything else or
        shorter than `nbytes`.
        """
        nbytes = memory.nbytes if nbytes is None else nbytes
        flags = memory.flags
        if memory.dtype != np.uint8 or memory.ndim != 1 or not flags.c_contiguous:
            raise ConfigError("HostBuffer needs a contiguous one-dimensional uint8 array")
        if not flags.writeable:
            raise ConfigError("HostBuffer needs a writable array")
        if nbytes > memory.nbytes:
            raise ConfigError(f"{nbytes} bytes do not fit an array of {memory.nbytes}")
        self._memory = memory
        self._nbytes = nbytes
        self.space: MemorySpace = space
        self.array: ByteArray = memory[:nbytes]

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self._memory.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Bytes a transfer moves."""
        return self._nbytes

    @property
    def capacity_nbytes(self) -> int:
        """Bytes that belong to the buffer, padding included."""
        return self._memory.nbytes

    @property
    def memory(self) -> ByteArray:
        """All `capacity_nbytes` bytes; make foreign tensors from views of `array`."""
        return self._memory

    def resized(self, nbytes: int) -> HostBuffer:
        """Return a buffer over the same memory for another use of at most its capacity."""
        return HostBuffer(self._memory, nbytes, space=self.space)

    def part(self, start: int, nbytes: int) -> HostBuffer:
        """Return a buffer over `nbytes` from byte `start` on. Raises RangeError outside it."""
        end = start + nbytes
        if start < 0 or nbytes < 0 or end > self._nbytes:
            raise RangeError(f"bytes {start} to {end} lie outside a buffer of {self._nbytes}")
        last = self._memory.nbytes if end == self._nbytes else end
        return HostBuffer(self._memory[start:last], nbytes, space=self.space)

    def is_shared(self) -> bool:
        """Return whether a view or a foreign tensor still references the memory.

        Two references are ours to `array` (the attribute and the call's argument), three to the
        memory (attribute, argument, and `array`'s base).
        """
        return sys.getrefcount(self.array) > 2 or sys.getrefcount(self._memory) > 3
