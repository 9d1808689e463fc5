"""Residency: the table of legal changes, against the story of a page told in words."""

from __future__ import annotations

import itertools

import pytest

from zinf_core.errors import ResidencyError
from zinf_core.runtime.residency import LEGAL, Residency, check_transition

TO = {
    "absent": {"fetching", "dirty"},
    "fetching": {"resident", "absent"},
    "resident": {"dirty", "absent"},
    "dirty": {"writing_back", "resident", "absent"},
    "writing_back": {"resident", "absent", "dirty"},
}


@pytest.mark.parametrize("pair", list(itertools.product(Residency, Residency)), ids=str)
def test_exactly_the_legal_changes_pass(pair: tuple[Residency, Residency]) -> None:
    """Catches a change that became legal by accident, such as writing back what is clean."""
    old, new = pair
    if new.value in TO[old.value]:
        check_transition("w/param", old, new)
    else:
        with pytest.raises(ResidencyError, match=f"w/param.*{old.value} -> {new.value}"):
            check_transition("w/param", old, new)


def test_no_state_is_a_trap() -> None:
    """Catches a state that a page cannot leave, or cannot come back to nothing from."""
    assert {old for old, _ in LEGAL} == set(Residency)
    assert {new for _, new in LEGAL} == set(Residency)
    for start in Residency:
        reached = {start}
        while grown := {new for old, new in LEGAL if old in reached} - reached:
            reached |= grown
        assert Residency.ABSENT in reached


def test_nothing_goes_on_in_flight_to_fetching() -> None:
    """Catches reading over bytes that are newer than the home tier's."""
    assert [old for old, new in LEGAL if new is Residency.FETCHING] == [Residency.ABSENT]
