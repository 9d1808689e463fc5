"""Placement: which inner tier gets the next bytes. Pure.

Bytes placed so far are remembered for ever, not only while they are stored: so the chunks of any
one key lie interleaved in the proportion of the shares, also after many keys came and went, and
keys of a single chunk are spread over the tiers one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placed:
    """Bytes that each inner tier was given so far."""

    nbytes: tuple[int, ...]

    @classmethod
    def nothing(cls, num_tiers: int) -> Placed:
        """Return the beginning."""
        return cls((0,) * num_tiers)

    def ranking(self, nbytes: int, shares: Sequence[int]) -> list[int]:
        """Return the tiers in the order in which they should be asked to take `nbytes` more.

        First the one that would be least ahead of its share; of equal ones the earlier. So no
        tier gets more than its share plus one chunk per other tier.
        """
        load = [
            (placed + nbytes) / share for placed, share in zip(self.nbytes, shares, strict=True)
        ]
        return sorted(range(len(load)), key=load.__getitem__)

    def after(self, tier: int, nbytes: int) -> Placed:
        """Return what is placed once `tier` took `nbytes`."""
        return Placed(tuple(placed + nbytes * (i == tier) for i, placed in enumerate(self.nbytes)))


def split(nbytes: int, shares: Sequence[int], *, unit: int) -> list[int]:
    """Return how many of `nbytes` each share gets, rounded down to multiples of `unit`."""
    total = sum(shares)
    return [nbytes * share // total // unit * unit for share in shares]
