"""Scratch: the fixed memory that workers merge, shuffle and code chunks in."""

from __future__ import annotations

import queue
import threading
from collections import deque
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
        benches = []
        for _ in range(num_benches):
            merged = allocate(chunk_nbytes)
            shuffled = allocate(chunk_nbytes) if has_codec else merged
            coded = deque(allocate(chunk_nbytes) for _ in range(WINDOW if has_codec else 0))
            benches.append(Bench(merged=merged, shuffled=shuffled, coded=coded))
        self.benches = tuple(benches)
        self._free: queue.SimpleQueue[Bench] = queue.SimpleQueue()
        for bench in benches:
            self._free.put(bench)
        self._local = threading.local()

    def of_this_worker(self) -> Bench:
        """Return the bench of the calling thread, every time the same one. Only workers call this,
        and each of them has chunks in flight only on its own bench."""
        bench: Bench | None = getattr(self._local, "bench", None)
        if bench is None:
            bench = self._local.bench = self._free.get_nowait()
        return bench
