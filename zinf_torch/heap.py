"""Heap: what the C library does with memory that torch has freed."""

from __future__ import annotations

import ctypes
from typing import Final

from zinf_core.units import KiB, MiB

_M_MMAP_THRESHOLD: Final = -3
"""glibc's mallopt: from how many bytes on a block is a mapping of its own."""


def return_freed_blocks(budget_nbytes: int) -> None:
    """Have the C library hand large blocks back to the system as soon as they are freed.

    For the whole process, from now on. glibc otherwise learns to keep blocks of up to 32 MiB in its
    heap, where what is left between them came to half a GiB in a training step. Elsewhere nothing
    changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, own_mapping_nbytes(budget_nbytes))


def own_mapping_nbytes(budget_nbytes: int) -> int:
    """Return from how many bytes on a block is handed back, given all memory budgets together.

    Mapping every activation anew costs more time than the heap would keep memory, so blocks that
    are small beside the budgets stay (docs/decisions/012).
    """
    return min(max(budget_nbytes // 512, 128 * KiB), 4 * MiB)
