"""Sources of page-aligned host memory."""

from __future__ import annotations

import mmap

import numpy as np

from zinf_core.buffers import HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import BudgetError
from zinf_core.units import MiB, align_up, format_nbytes

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
        return HostBuffer(np.frombuffer(memoryview(mapping), np.uint8), nbytes)


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # Kernels without transparent huge pages say EINVAL; small pages work as well.
        return
