"""Memory: what this process holds, and giving back what it no longer uses."""

from __future__ import annotations

import ctypes
import gc

import psutil


def rss_nbytes() -> int:
    """Return the physical memory this process holds now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def release_unused() -> None:
    """Collect garbage and hand freed pages back to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
