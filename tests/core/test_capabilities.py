"""Capabilities: impossible statements are refused, absent ones mean no."""

from __future__ import annotations

import dataclasses

import pytest

from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.errors import ConfigError

HOST = frozenset({MemorySpace.HOST})


@pytest.mark.parametrize(
    "field",
    ["offset_align", "length_align", "address_align", "preferred_io_nbytes", "max_in_flight"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused(field: str, value: int) -> None:
    """Catches an alignment of zero, which would be a division by zero at the first transfer."""
    with pytest.raises(ConfigError, match=field):
        TierCapabilities(memory_spaces=HOST, **{field: value})


def test_every_number_is_checked() -> None:
    """Catches a new number that nobody checks."""
    numbers = [f.name for f in dataclasses.fields(TierCapabilities) if f.type == "int"]
    for name in numbers:
        with pytest.raises(ConfigError, match=name):
            TierCapabilities(memory_spaces=HOST, **{name: 0})
    assert len(numbers) == 5


def test_a_tier_reaches_some_memory() -> None:
    """Catches a tier that can transfer with nothing."""
    with pytest.raises(ConfigError, match="memory_spaces"):
        TierCapabilities(memory_spaces=frozenset())


def test_nothing_is_promised_by_default() -> None:
    """Catches a default that claims what a tier may not have."""
    capabilities = TierCapabilities(memory_spaces=HOST)
    assert not capabilities.persistent
    assert not capabilities.mappable
    assert capabilities.max_in_flight == 1
    aligns = (capabilities.offset_align, capabilities.length_align, capabilities.address_align)
    assert aligns == (1, 1, 1)


def test_capabilities_and_usage_are_constant() -> None:
    """Catches capabilities that change after opening."""
    usage = TierUsage(num_keys=0, nbytes=0, allocated_nbytes=0)
    assert usage.capacity_nbytes is None
    for thing in (TierCapabilities(memory_spaces=HOST), usage):
        for field in dataclasses.fields(thing):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(thing, field.name, 1)
