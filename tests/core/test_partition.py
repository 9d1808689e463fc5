"""Sub-group ranges: a cover in order, within the limit, in as few pieces as there can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.errors import BudgetTooSmallError
from zinf_core.policy.partition import sub_group_ranges

SIZES = st.lists(st.integers(0, 9), max_size=9)


def fewest(sizes: list[int], limit: int) -> int:
    """Return the least number of consecutive pieces, by trying every first cut."""
    if not sizes:
        return 0
    pieces = [
        1 + fewest(sizes[cut:], limit)
        for cut in range(1, len(sizes) + 1)
        if sum(sizes[:cut]) <= limit
    ]
    return min(pieces)


@given(SIZES, st.integers(9, 30))
def test_ranges_cover_every_item_once_in_order(sizes: list[int], limit: int) -> None:
    """Catches an item that is left out, updated twice, or updated out of order."""
    ranges = sub_group_ranges(sizes, limit)
    assert [index for piece in ranges for index in piece] == list(range(len(sizes)))
    assert all(len(piece) > 0 for piece in ranges)


@given(SIZES, st.integers(9, 30))
def test_no_range_exceeds_the_limit(sizes: list[int], limit: int) -> None:
    """Catches an item counted for the wrong range."""
    for piece in sub_group_ranges(sizes, limit):
        assert sum(sizes[index] for index in piece) <= limit


@given(SIZES, st.integers(9, 30))
def test_ranges_are_as_few_as_possible(sizes: list[int], limit: int) -> None:
    """Catches cutting too early, which costs read-ahead."""
    assert len(sub_group_ranges(sizes, limit)) == fewest(sizes, limit)


@given(SIZES.filter(any), st.data())
def test_an_item_over_the_limit_is_named(sizes: list[int], data: st.DataObject) -> None:
    """Catches a range over the limit instead of an error that names the item."""
    limit = data.draw(st.integers(0, max(sizes) - 1))
    first = next(index for index, size in enumerate(sizes) if size > limit)
    message = rf"item {first} needs {sizes[first]} B.*{limit} B"
    with pytest.raises(BudgetTooSmallError, match=message):
        sub_group_ranges(sizes, limit)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 0, []),
        ([0, 0], 0, [range(2)]),
        ([4, 4, 4], 4, [range(1), range(1, 2), range(2, 3)]),
        ([4, 4, 4], 8, [range(2), range(2, 3)]),
        ([4, 4, 4], 12, [range(3)]),
        ([4, 0, 0], 4, [range(3)]),
        ([0, 4, 1], 4, [range(2), range(2, 3)]),
    ],
)
def test_by_hand(sizes: list[int], limit: int, expected: list[range]) -> None:
    """Catches a limit taken as exclusive, and empty items that open a range of their own."""
    assert sub_group_ranges(sizes, limit) == expected
