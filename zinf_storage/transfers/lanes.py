"""Lanes: which of the blocks that wait is moved next. Pure.

[Note: lanes] Demand reads go before prefetch and write-back. Of every `SHARE` bytes moved while
there is demand, one byte is the background's all the same, so that nothing waits for ever.
Prefetch and write-back take turns by bytes while both wait. Neither saves up a claim while it has
nothing to do. A demand read thus waits for what the drive already has and one block at most.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from zinf_core.errors import InternalError

SHARE: Final = 8
"""While all lanes have work, one byte in so many is moved for prefetch or write-back."""


class Lane(enum.IntEnum):
    """Why a block is moved."""

    DEMAND = 0
    """Somebody waits for it."""
    PREFETCH = 1
    """Somebody will."""
    WRITE_BACK = 2
    """Somebody wants the memory back."""


@dataclass(frozen=True, slots=True)
class LaneState:
    """What earlier choices leave to even out."""

    demand_nbytes: int = 0
    """Moved by demand since prefetch or write-back had its share."""
    lead_nbytes: int = 0
    """By how much prefetch is ahead of write-back; negative if it is behind."""


FRESH: Final = LaneState()


def choose(
    state: LaneState, *, demand: int, prefetch: int, write_back: int
) -> tuple[Lane, LaneState]:
    """Return the lane to serve and the state afterwards.

    The arguments are the bytes of the block that is next in each lane, 0 where none waits. Raises
    InternalError if none waits at all.
    """
    if not prefetch and not write_back:
        if not demand:
            raise InternalError("no lane has a block to move")
        return Lane.DEMAND, FRESH
    both_wait = prefetch > 0 and write_back > 0
    lead = state.lead_nbytes if both_wait else 0
    is_prefetch = prefetch > 0 and lead <= 0
    nbytes = prefetch if is_prefetch else write_back
    due = (SHARE - 1) * nbytes
    if demand and state.demand_nbytes < due:
        return Lane.DEMAND, LaneState(state.demand_nbytes + demand, lead)
    rest = state.demand_nbytes - due if demand else 0
    if both_wait:
        lead += nbytes if is_prefetch else -nbytes
    return Lane.PREFETCH if is_prefetch else Lane.WRITE_BACK, LaneState(rest, lead)
