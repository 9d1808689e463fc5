"""Memory: what this process holds, and giving back what it no longer uses."""

from __future__ import annotations

import ctypes
import gc
from typing import Final

import psutil

from zinf_core.units import KiB

_M_MMAP_THRESHOLD: Final = -3
"""glibc's mallopt: from how many bytes on a block is a mapping of its own."""
_OWN_MAPPING_NBYTES: Final = 128 * KiB


def rss_nbytes() -> int:
    """Return the physical memory this process holds now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def return_freed_blocks() -> None:
    """Have the C library hand large blocks back to the system as soon as they are freed.

    For the whole process, from now on. glibc otherwise learns to keep blocks of up to 32 MiB in its
    heap, where what is left between them came to half a GiB in a training step. Elsewhere nothing
    changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_NBYTES)


def release_unused() -> None:
    """Collect garbage and hand freed pages back to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
