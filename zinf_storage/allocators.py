"""Sources of page-aligned host memory."""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref

import numpy as np

from zinf_core.buffers import ByteArray, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.device import Device
from zinf_core.errors import BudgetError
from zinf_core.units import MiB, align_up, format_nbytes
from zinf_storage.machine import read_memory

_HUGE_PAGE_NBYTES = 2 * MiB


class PageAlignedAllocator:
    """Allocates private anonymous mappings: page aligned, exact, given back when unreferenced.

    Stateless, so thread-safe.
    """

    @property
    def space(self) -> MemorySpace:
        """MemorySpace.HOST."""
        return MemorySpace.HOST

    def allocate(self, nbytes: int) -> HostBuffer:
        """Return a zeroed buffer of exactly `nbytes` (>= 1), its capacity rounded up to pages.

        The mapping is undone when the last array, view or tensor over it dies. Raises
        BudgetError if the system refuses the memory.
        """
        return HostBuffer(_map_pages(nbytes), nbytes)


class PinnedAllocator:
    """Allocates as PageAlignedAllocator does, and registers each mapping with a device.

    The mapping is unregistered when the last array, view or tensor over it dies, before it is
    undone. If the system refuses to pin, as containers and WSL do, there is one warning, and
    memory is ordinary from then on: slower to copy, otherwise the same. Thread-safe.
    """

    def __init__(self, device: Device) -> None:
        """Register with `device`, which must outlive the memory."""
        self._device = device
        self._lock = threading.Lock()  # guards the flag, so that there is one warning
        self._refused = False

    @property
    def space(self) -> MemorySpace:
        """MemorySpace.HOST_PINNED; HOST once pinning was refused."""
        return MemorySpace.HOST if self._refused else MemorySpace.HOST_PINNED

    def allocate(self, nbytes: int) -> HostBuffer:
        """Return a zeroed buffer of exactly `nbytes` (>= 1), its capacity rounded up to pages.

        Slow: every page is touched; keep the buffer for many uses. Raises BudgetError if the
        system refuses the memory; refused pinning is a warning.
        """
        memory = _map_pages(nbytes)
        address = int(memory.ctypes.data)
        if not self._refused:
            try:
                self._device.register(address, memory.nbytes)
            except BudgetError as exc:
                self._give_up(memory.nbytes, exc)
            else:
                # The array dies before the mapping it holds; a mapping tells too late of its end.
                end = weakref.finalize(memory, self._device.unregister, address)
                end.atexit = False  # the driver may be gone by then, and the system cleans up
                return HostBuffer(memory, nbytes, space=MemorySpace.HOST_PINNED)
        return HostBuffer(memory, nbytes)

    def _give_up(self, nbytes: int, error: BudgetError) -> None:
        with self._lock:
            first, self._refused = not self._refused, True
        if not first:
            return
        limit = read_memory().lockable_nbytes
        text = "unlimited" if limit is None else f"{limit} bytes ({format_nbytes(limit)})"
        warnings.warn(
            f"{nbytes} bytes ({format_nbytes(nbytes)}) of host memory could not be pinned for "
            f"{self._device.name}: {error}. The limit of this process is {text}. Copies to the "
            "device will be slower; raise `ulimit -l` or the container's memory limit.",
            stacklevel=3,
        )


def _map_pages(nbytes: int) -> ByteArray:
    """Return at least `nbytes` of zeroed whole pages.

    Raises BudgetError if the system refuses them.
    """
    capacity = align_up(max(nbytes, 1))
    try:
        mapping = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as exc:
        raise BudgetError(
            f"the system refused {capacity} bytes ({format_nbytes(capacity)}) of host memory: "
            f"{exc}; lower the host budget or free memory"
        ) from exc
    if capacity >= _HUGE_PAGE_NBYTES:
        _advise_huge_pages(mapping)
    # A memoryview between mapping and array: the array's base must not be an array, and the
    # mapping must die with it (see HostBuffer).
    return np.frombuffer(memoryview(mapping), np.uint8)


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # Kernels without transparent huge pages say EINVAL; small pages work as well.
        return
