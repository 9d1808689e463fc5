"""Which resident pages to evict: farthest next use where it is known, else least recently used.

Farthest next use is optimal for pages of one size (Belady); with sizes it stays a good rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zinf_core.keys import TensorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A resident page that may be evicted."""

    key: TensorKey
    nbytes: int
    last_use: int
    """Counter value of its last access; larger is more recent."""
    next_use: int | None
    """Accesses until it is expected again; None when no iteration is known or it is not in it."""


def eviction_order(candidates: Sequence[Candidate]) -> list[TensorKey]:
    """Return the keys in the order in which to evict them until there is room.

    Pages that the known iteration does not use go first, then by farthest next use; ties and
    everything unknown go by least recent use.
    """

    def rank(candidate: Candidate) -> tuple[int, int, int]:
        if candidate.next_use is None:
            return (0, 0, candidate.last_use)
        return (1, -candidate.next_use, candidate.last_use)

    return [candidate.key for candidate in sorted(candidates, key=rank)]
