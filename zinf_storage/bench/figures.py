"""Figures: percentiles, spreads, and which of several settings to take. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from zinf_core.errors import ConfigError

K = TypeVar("K", bound=Hashable)

TOLERANCE: Final = 0.04
"""Rates that differ by less than this part of the best count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several measurements of one thing."""

    least: float
    median: float
    most: float
    num_samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value. Raises ConfigError for none."""
        return cls(
            least=percentile(values, 0.0),
            median=percentile(values, 0.5),
            most=percentile(values, 1.0),
            num_samples=len(values),
        )


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` (0 to 1) of `values` lie, interpolated linearly.

    Raises ConfigError for no values or a fraction outside 0 to 1.
    """
    if not values or not 0 <= fraction <= 1:
        raise ConfigError(f"no percentile {fraction} of {len(values)} values")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    weight = place - low
    return ordered[low] * (1 - weight) + ordered[high] * weight


def smallest_near_best(
    rates: Mapping[K, float], costs: Mapping[K, tuple[int, ...]], *, tolerance: float = TOLERANCE
) -> K:
    """Return the key of least cost whose rate is at most `tolerance` below the best one.

    Costs are compared from the first number on; of equal costs the higher rate wins. Raises
    ConfigError if there is no rate.
    """
    if not rates:
        raise ConfigError("nothing was measured, so there is nothing to choose from")
    floor = max(rates.values()) * (1 - tolerance)
    near = [key for key, rate in rates.items() if rate >= floor]
    return min(near, key=lambda key: (costs[key], -rates[key]))


def combined_rate(read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Return the rate at which equal numbers of bytes are read and written one after the other,
    which is what paging does with states that change."""
    if not read_bytes_per_s or not write_bytes_per_s:
        return 0.0
    return 2 / (1 / read_bytes_per_s + 1 / write_bytes_per_s)
