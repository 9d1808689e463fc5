"""Scratch: the fixed memory that workers merge, shuffle and code chunks in."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from zinf_core.buffers import HostBuffer
from zinf_storage.allocators import PageAlignedAllocator

WINDOW: Final = 2
"""Coded chunks that each worker has in flight or in the making."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Page-aligned areas of one chunk each, for one worker at a time."""

    merged: HostBuffer
    """A chunk of which a transfer covers a part."""
    shuffled: HostBuffer
    coded: deque[HostBuffer]
    """Free ones of `WINDOW`; none if the tier has no codec."""


class Scratch:
    """One bench per worker, allocated once: one chunk each, or two and `WINDOW` with a codec."""

    def __init__(self, *, num_benches: int, chunk_nbytes: int, has_codec: bool) -> None:
        """Allocate the benches. Raises BudgetError."""
        allocate = PageAlignedAllocator().allocate
        self._free: queue.SimpleQueue[Bench] = queue.SimpleQueue()
        for _ in range(num_benches):
            merged = allocate(chunk_nbytes)
            shuffled = allocate(chunk_nbytes) if has_codec else merged
            coded = deque(allocate(chunk_nbytes) for _ in range(WINDOW if has_codec else 0))
            self._free.put(Bench(merged=merged, shuffled=shuffled, coded=coded))

    @contextmanager
    def lease(self) -> Iterator[Bench]:
        """Lend a bench. Only workers call this, so one is always free."""
        bench = self._free.get()
        try:
            yield bench
        finally:
            self._free.put(bench)
