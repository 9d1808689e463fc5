"""Buffers for tests: page-aligned host memory, host memory between guards, foreign memory."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer, ByteArray, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.units import PAGE_NBYTES, align_up

GUARD: Final = 0x3C
"""Byte that surrounds a guarded buffer."""


def host_buffer(nbytes: int) -> HostBuffer:
    """Return a page-aligned buffer of `nbytes` (>= 0) on a private mapping of its own.

    Its capacity is whole pages, at least one. The memory is freed with the last reference.
    """
    return HostBuffer(_pages(align_up(max(nbytes, 1))), nbytes)


def fill_host(buffer: Buffer, data: bytes) -> None:
    """Make the bytes of a buffer in host memory `data`, of exactly its length."""
    buffer.array[:] = np.frombuffer(data, np.uint8)


def host_contents(buffer: Buffer) -> bytes:
    """Return the bytes of a buffer in host memory."""
    return bytes(buffer.array.tobytes())


def watch(buffer: Buffer, on_death: Callable[[], object]) -> None:
    """Have `on_death` called when the memory of `buffer`, or else the buffer, is dropped.

    Raises TypeError if neither can be watched: memory without weak references.
    """
    whole: Any = buffer.array
    base = getattr(whole, "base", None)
    for thing in (base, whole, buffer):
        if thing is not None and getattr(type(thing), "__weakrefoffset__", None):
            weakref.finalize(thing, on_death)
            return
    raise TypeError(f"{type(buffer).__name__} cannot be watched: it takes no weak reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferHooks:
    """How a test makes buffers and gets at their bytes, wherever they lie."""

    make: Callable[[int], Buffer] = host_buffer
    """Returns a new buffer of a number of bytes (>= 0)."""
    fill: Callable[[Buffer, bytes], None] = fill_host
    """Makes the buffer's bytes the given ones, of exactly its length."""
    contents: Callable[[Buffer], bytes] = host_contents
    """Returns the buffer's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedBuffer:
    """A buffer with no spare capacity, a page of guard bytes before it and one after it."""

    buffer: HostBuffer
    surroundings: ByteArray
    """The whole mapping: guard, buffer, guard."""

    @classmethod
    def of(cls, nbytes: int, *, shift: int = 0) -> GuardedBuffer:
        """Return a guarded buffer of `nbytes` at a page boundary plus `shift` bytes."""
        whole = _pages(align_up(nbytes + shift) + 2 * PAGE_NBYTES)
        whole[:] = GUARD
        start = PAGE_NBYTES + shift
        return cls(buffer=HostBuffer(whole[start : start + nbytes]), surroundings=whole)

    def is_intact(self) -> bool:
        """Return whether every guard byte is still there."""
        start = self.buffer.address - int(self.surroundings.ctypes.data)
        before = self.surroundings[:start]
        after = self.surroundings[start + self.buffer.nbytes :]
        return bool((before == GUARD).all() and (after == GUARD).all())


class ForeignBuffer:
    """A buffer that claims to lie in another memory space than it does."""

    def __init__(self, buffer: Buffer, space: MemorySpace) -> None:
        """Present `buffer` as memory of `space`."""
        self._buffer = buffer
        self._space = space

    @property
    def behind(self) -> Buffer:
        """The buffer as it is."""
        return self._buffer

    @property
    def space(self) -> MemorySpace:
        """The space claimed."""
        return self._space

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._buffer.address

    @property
    def nbytes(self) -> int:
        """Bytes a transfer moves."""
        return self._buffer.nbytes

    @property
    def capacity_nbytes(self) -> int:
        """Bytes that belong to the buffer."""
        return self._buffer.capacity_nbytes

    @property
    def array(self) -> Any:
        """The memory of the buffer behind."""
        return self._buffer.array

    def is_shared(self) -> bool:
        """Return what the buffer behind says."""
        return self._buffer.is_shared()

    def resized(self, nbytes: int) -> ForeignBuffer:
        """Return the same memory for another use."""
        return ForeignBuffer(self._buffer.resized(nbytes), self._space)

    def part(self, start: int, nbytes: int) -> ForeignBuffer:
        """Return a part of the same memory."""
        return ForeignBuffer(self._buffer.part(start, nbytes), self._space)


def _pages(nbytes: int) -> ByteArray:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype=np.uint8)
