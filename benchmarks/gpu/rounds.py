"""Contestants run in turn, round by round, so that what drifts drifts under all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of every round, by contestant; one round per index."""

    nbytes: int
    seconds: Mapping[str, list[float]]

    def text(self, name: str) -> str:
        """Return median (min-max) in GB/s."""
        rates = [self.nbytes / s / GB for s in self.seconds[name]]
        return f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f}) GB/s"

    def ratio(self, name: str, base: str) -> str:
        """Return the median of the rounds' ratios of rates."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return f"{statistics.median(b / a for a, b in pairs):.2f} x {base}"

    def data(self) -> dict[str, Any]:
        """Return everything, for the JSON."""
        return {"nbytes": self.nbytes, "seconds": dict(self.seconds)}


def measure(
    contestants: Mapping[str, Callable[[], None]],
    *,
    nbytes: int,
    rounds: int,
    has_time: Callable[[], bool] = lambda: True,
) -> Rates:
    """Run each contestant, which moves `nbytes`, once to warm up and `rounds` times for the
    record, the order rotating; after the first round only while `has_time` says so."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contestants[name]()
    for number in range(rounds):
        if number and not has_time():
            break
        start = number % len(names)
        for name in names[start:] + names[:start]:
            before = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - before)
    return Rates(nbytes=nbytes, seconds=seconds)
