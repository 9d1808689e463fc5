"""Traffic: bytes counted per tier, and only bytes that moved."""

from __future__ import annotations

import pytest
from core_helpers import key

from zinf_core.runtime.events import Event, EventKind, Traffic, TrafficCounter


def test_bytes_are_counted_per_tier_and_direction() -> None:
    """Catches reads counted as writes, and tiers that share their numbers."""
    counter = TrafficCounter()
    for kind, tier, nbytes in [
        (EventKind.READ, "nvme", 10),
        (EventKind.READ, "nvme", 5),
        (EventKind.WRITE, "nvme", 3),
        (EventKind.WRITE, "nvme", 4),
        (EventKind.READ, "host", 7),
    ]:
        counter(Event(kind, key("w"), tier, nbytes))
    assert counter.of("nvme") == Traffic(read_nbytes=15, written_nbytes=7)
    assert counter.of("host") == Traffic(read_nbytes=7, written_nbytes=0)
    assert counter.of("device") == Traffic()


@pytest.mark.parametrize(
    "kind", sorted(set(EventKind) - {EventKind.READ, EventKind.WRITE}, key=str)
)
def test_other_events_move_no_bytes(kind: EventKind) -> None:
    """Catches a fetch counted twice, as itself and as its read."""
    counter = TrafficCounter()
    counter(Event(kind, key("w"), "nvme", 10))
    assert counter.of("nvme") == Traffic()


def test_a_total_does_not_change_afterwards() -> None:
    """Catches a total that is a live view of the counter."""
    counter = TrafficCounter()
    before = counter.of("nvme")
    counter(Event(EventKind.WRITE, key("w"), "nvme", 4096))
    assert before == Traffic()
    assert counter.of("nvme").written_nbytes == 4096
