"""Residency: where a page's current bytes are, and which changes are legal."""

from __future__ import annotations

import enum
from typing import Final

from zinf_core.errors import ResidencyError


class Residency(enum.Enum):
    """State of one page."""

    ABSENT = "absent"
    """The home tier has the only copy, or there is none yet."""
    FETCHING = "fetching"
    """Memory is leased and a read into it is in flight."""
    RESIDENT = "resident"
    """Memory holds the same bytes as the home tier."""
    DIRTY = "dirty"
    """Memory holds newer bytes than the home tier."""
    WRITING_BACK = "writing_back"
    """Memory holds newer bytes, and a write of them is in flight."""


LEGAL: Final = frozenset(
    {
        (Residency.ABSENT, Residency.FETCHING),  # demand fetch
        (Residency.ABSENT, Residency.DIRTY),  # created, nothing to read
        (Residency.FETCHING, Residency.RESIDENT),
        (Residency.FETCHING, Residency.ABSENT),  # the read failed
        (Residency.RESIDENT, Residency.DIRTY),  # edited
        (Residency.RESIDENT, Residency.ABSENT),  # evicted clean
        (Residency.DIRTY, Residency.WRITING_BACK),  # evicted dirty
        (Residency.DIRTY, Residency.RESIDENT),  # written back and kept
        (Residency.DIRTY, Residency.ABSENT),  # dropped on purpose
        (Residency.WRITING_BACK, Residency.RESIDENT),  # wanted again meanwhile
        (Residency.WRITING_BACK, Residency.ABSENT),
        (Residency.WRITING_BACK, Residency.DIRTY),  # the write failed: the bytes are kept
    }
)


def check_transition(what: object, old: Residency, new: Residency) -> None:
    """Raise ResidencyError unless a page may go from `old` to `new`."""
    if (old, new) not in LEGAL:
        raise ResidencyError(f"{what}: illegal transition {old.value} -> {new.value}")
