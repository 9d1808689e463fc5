"""PageAlignedAllocator: alignment, exact size, and memory that dies with its last reference."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import BudgetError
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator


def mapped_nbytes(address: int) -> int:
    """Return the bytes of the mapping at `address`, 0 if the kernel knows of none."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return end - start
    return 0


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * MiB + 5])
def test_buffers_are_page_aligned_and_whole_pages(nbytes: int) -> None:
    """Catches memory that direct I/O refuses, or a size rounded to a power of two."""
    buffer = PageAlignedAllocator().allocate(nbytes)
    assert buffer.nbytes == len(buffer.array) == nbytes
    assert buffer.capacity_nbytes == -(-nbytes // 4096) * 4096
    assert buffer.address % 4096 == 0
    assert buffer.space is MemorySpace.HOST
    buffer.memory[:] = 7
    assert not buffer.is_shared()


def test_memory_dies_with_the_last_view() -> None:
    """Catches a mapping kept for ever, and one torn from under a view that someone holds."""
    buffer = PageAlignedAllocator().allocate(64 * MiB)
    address = buffer.address + 32 * MiB
    view = buffer.array[5:10]
    assert buffer.is_shared()
    del buffer
    view[:] = 1
    assert mapped_nbytes(address)
    del view
    gc.collect()
    assert mapped_nbytes(address) < 64 * MiB


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 80])
def test_refused_memory_is_a_budget_error(nbytes: int) -> None:
    """Catches MemoryError or OverflowError from a library instead of the bytes and a remedy."""
    with pytest.raises(BudgetError, match=str(nbytes)):
        PageAlignedAllocator().allocate(nbytes)
