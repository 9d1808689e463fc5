"""Events: what the runtime did, for observers that count, log or draw it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from zinf_core.keys import TensorKey


class EventKind(enum.Enum):
    """What happened to a page."""

    CREATE = "create"
    """Memory was leased for a page without reading it."""
    DEMAND_FETCH = "demand_fetch"
    """The page was read because an access needed it."""
    PREFETCH = "prefetch"
    """The page was read because an access was expected to need it."""
    EVICT = "evict"
    """The fast copy was given up; it was clean or is being written back."""
    READ = "read"
    """Bytes were read from a tier."""
    WRITE = "write"
    """Bytes were written to a tier."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    key: TensorKey
    tier: str
    nbytes: int


Observer = Callable[[Event], None]
"""Called with each event in the thread and under the lock of the pager: must be quick, must not
call back into it and must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes moved from and to one tier since the runtime began."""

    read_nbytes: int = 0
    written_nbytes: int = 0


class TrafficCounter:
    """Counts bytes per tier. Guarded by the lock of the pager that feeds it."""

    __slots__ = ("_read", "_written")

    def __init__(self) -> None:
        """Start at zero."""
        self._read: dict[str, int] = {}
        self._written: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.kind is EventKind.READ:
            self._read[event.tier] = self._read.get(event.tier, 0) + event.nbytes
        elif event.kind is EventKind.WRITE:
            self._written[event.tier] = self._written.get(event.tier, 0) + event.nbytes

    def of(self, tier: str) -> Traffic:
        """Return the totals of one tier."""
        return Traffic(
            read_nbytes=self._read.get(tier, 0), written_nbytes=self._written.get(tier, 0)
        )
