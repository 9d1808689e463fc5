"""Rates: how fast an inner tier reads and writes, from a short probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from zinf_core.errors import KeyAbsentError, TierFullError
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.chunked.names import PROBE_KEY

PROBE_NBYTES: Final = 4 * MiB
"""Bytes written and read for a probe, and memory it takes."""
SMALLEST_PROBED_NBYTES: Final = 16 * PROBE_NBYTES
"""A tier of less capacity is not probed."""

_MAX_ROUNDS: Final = 4
_MAX_S: Final = 0.25
"""Seconds after which no further round is begun."""


def measured_rate(tier: Tier, *, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Return the bytes per second of a round of write and read, the best of a few.

    Blocks for about a quarter of a second, or one round on a slow tier; nothing is left behind.
    None if there is no room to try. Raises TransferError.
    """
    capacity = tier.usage().capacity_nbytes
    if capacity is not None and capacity < SMALLEST_PROBED_NBYTES:
        return None
    with suppress(KeyAbsentError):
        tier.discard(PROBE_KEY)
    try:
        tier.reserve(PROBE_KEY, PROBE_NBYTES)
    except TierFullError:
        return None
    try:
        return _best_round(tier, clock)
    finally:
        tier.discard(PROBE_KEY)


def shares_of(rates: Sequence[float | None]) -> tuple[int, ...]:
    """Return parts in proportion to `rates`, in percent of the largest and at least 1; equal parts
    unless all are known. Pure."""
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return (1,) * len(rates)
    return tuple(max(1, round(100 * rate / max(known))) for rate in known)


def _best_round(tier: Tier, clock: Callable[[], float]) -> float:
    buffer = PageAlignedAllocator().allocate(PROBE_NBYTES)
    buffer.array[:] = np.random.default_rng(0).integers(0, 256, PROBE_NBYTES, dtype=np.uint8)
    begin = clock()
    best_s = None
    for _ in range(_MAX_ROUNDS):
        start = clock()
        tier.write_from(PROBE_KEY, buffer).wait()
        tier.read_into(PROBE_KEY, buffer).wait()
        end = clock()
        best_s = min(end - start, best_s or end - start)
        if end - begin > _MAX_S:
            break
    return 2 * PROBE_NBYTES / max(best_s or 0.0, 1e-9)
