"""BufferPool: every byte of one memory space, under one budget."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from zinf_core.buffers import Buffer, BufferAllocator
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import InternalError, PoolExhaustedError
from zinf_core.units import align_up, format_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Bytes of a pool at one moment."""

    budget_nbytes: int
    leased_nbytes: int
    """Leased, or released but still referenced by a view someone holds."""
    cached_nbytes: int
    """Free buffers kept for the next lease of their size."""
    peak_nbytes: int
    """Largest `tracked_nbytes` so far."""

    @property
    def tracked_nbytes(self) -> int:
        """Bytes counted against the budget."""
        return self.leased_nbytes + self.cached_nbytes


class Lease:
    """The right to use one buffer until `release`. Made by `BufferPool` only."""

    __slots__ = ("_buffer", "_pool")

    def __init__(self, pool: BufferPool, buffer: Buffer) -> None:
        """Tie `buffer` to the pool that counts it."""
        self._pool = pool
        self._buffer: Buffer | None = buffer

    @property
    def buffer(self) -> Buffer:
        """The leased buffer. Raises InternalError after `release`."""
        if self._buffer is None:
            raise InternalError(f"lease of pool {self._pool.name} used after release")
        return self._buffer

    @property
    def pool(self) -> BufferPool:
        """The pool that counts the buffer."""
        return self._pool

    @property
    def nbytes(self) -> int:
        """Bytes counted for it: whole pages. Raises InternalError after `release`."""
        return self.buffer.capacity_nbytes

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._buffer is None

    def release(self) -> None:
        """Give the buffer back; a second call does nothing. Never blocks.

        If views of the memory are still held somewhere they stay valid, and their bytes stay
        counted until the last of them dies.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._pool._take_back(buffer)  # noqa: SLF001 - the two classes are one unit


class BufferPool:
    """Leases buffers of any size so that tracked bytes never exceed the budget.

    Sizes are rounded up to whole pages, nothing more. Freed buffers are kept for the next lease
    of the same size, and dropped when another size needs the room. Thread-safe: one lock guards
    all counters and lists.
    """

    def __init__(self, name: str, *, budget_nbytes: int, allocator: BufferAllocator) -> None:
        """Create an empty pool; no memory is taken before the first lease."""
        self.name = name
        self.budget_nbytes = budget_nbytes
        self._allocator = allocator
        self._lock = threading.Lock()
        self._free: dict[int, list[Buffer]] = {}
        self._lingering: list[Buffer] = []
        self._leased_nbytes = 0
        self._cached_nbytes = 0
        self._peak_nbytes = 0

    @property
    def space(self) -> MemorySpace:
        """Memory space of every lease."""
        return self._allocator.space

    def lease_nowait(self, nbytes: int) -> Lease:
        """Return a lease of exactly `nbytes` (>= 1). Never waits.

        Raises PoolExhaustedError if the budget has no room for it now.
        """
        capacity = align_up(max(nbytes, 1))
        with self._lock:
            self._collect_lingering()
            buffer = self._pop_free(capacity)
            if buffer is None:
                self._make_room(nbytes, capacity)
            self._leased_nbytes += capacity
            self._peak_nbytes = max(self._peak_nbytes, self._leased_nbytes + self._cached_nbytes)
        if buffer is None:
            try:
                buffer = self._allocator.allocate(nbytes)
            except BaseException:
                with self._lock:
                    self._leased_nbytes -= capacity
                raise
        return Lease(self, _fitted(buffer, nbytes))

    def adopt(self, lease: Lease) -> None:
        """Count `lease`, which another pool of the same memory space counted so far, here. Nothing
        is copied; a free buffer of its size goes the other way, so that both keep what they had.

        Raises PoolExhaustedError, changing nothing, if the budget has no room for it now.
        """
        capacity, other = lease.nbytes, lease.pool
        if other is self:
            raise InternalError(f"pool {self.name} was to adopt a lease of its own")
        with self._lock:
            self._collect_lingering()
            free = self._pop_free(capacity)
            if free is None:
                self._make_room(capacity, capacity)
            self._leased_nbytes += capacity
            self._peak_nbytes = max(self._peak_nbytes, self._leased_nbytes + self._cached_nbytes)
        other._give_up(capacity, free)  # noqa: SLF001 - another of us
        lease._pool = self  # noqa: SLF001 - the two classes are one unit

    def usage(self) -> PoolUsage:
        """Return the bytes counted now. Never blocks on transfers."""
        with self._lock:
            self._collect_lingering()
            return PoolUsage(
                budget_nbytes=self.budget_nbytes,
                leased_nbytes=self._leased_nbytes,
                cached_nbytes=self._cached_nbytes,
                peak_nbytes=self._peak_nbytes,
            )

    def trim(self) -> None:
        """Free every cached buffer."""
        with self._lock:
            self._free.clear()
            self._cached_nbytes = 0

    def _pop_free(self, capacity: int) -> Buffer | None:
        buffers = self._free.get(capacity)
        if not buffers:
            return None
        self._cached_nbytes -= capacity
        return buffers.pop()

    def _make_room(self, nbytes: int, capacity: int) -> None:
        room = self.budget_nbytes - self._leased_nbytes
        if capacity > room:
            asked = format_nbytes(nbytes)
            if capacity != nbytes:
                asked += f" ({capacity} bytes in whole pages)"
            raise PoolExhaustedError(
                f"pool {self.name}: {asked} asked, "
                f"{format_nbytes(max(room, 0))} of {format_nbytes(self.budget_nbytes)} not leased"
            )
        for size in sorted(self._free, reverse=True):
            buffers = self._free[size]
            while buffers and self._cached_nbytes > room - capacity:
                buffers.pop()
                self._cached_nbytes -= size

    def _take_back(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer.is_shared():
                self._lingering.append(buffer)
            else:
                self._cache(buffer)

    def _give_up(self, capacity: int, free: Buffer | None) -> None:
        """Count a lease of `capacity` no longer; take `free` of the same size in exchange."""
        with self._lock:
            self._leased_nbytes -= capacity
            if free is not None:
                self._cached_nbytes += capacity
                self._free.setdefault(capacity, []).append(free)

    def _cache(self, buffer: Buffer) -> None:
        capacity = buffer.capacity_nbytes
        self._leased_nbytes -= capacity
        self._cached_nbytes += capacity
        self._free.setdefault(capacity, []).append(buffer)

    def _collect_lingering(self) -> None:
        if not self._lingering:
            return
        still_held = []
        for buffer in self._lingering:
            if buffer.is_shared():
                still_held.append(buffer)
            else:
                self._cache(buffer)
        self._lingering = still_held


def _fitted(buffer: Buffer, nbytes: int) -> Buffer:
    return buffer if buffer.nbytes == nbytes else buffer.resized(nbytes)
