"""Placement: totals follow the shares, one key is spread evenly, small keys are spread too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zinf_core.units import PAGE_NBYTES
from zinf_storage.chunked.placement import Placed, split
from zinf_storage.chunked.rates import shares_of

_shares = st.lists(st.integers(1, 100), min_size=1, max_size=6)
_sizes = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=80)


def place(sizes: list[int], shares: list[int]) -> tuple[list[int], Placed]:
    """Return the tier each size goes to when none is full."""
    placed, tiers = Placed.nothing(len(shares)), []
    for nbytes in sizes:
        tiers.append(placed.ranking(nbytes, shares)[0])
        placed = placed.after(tiers[-1], nbytes)
    return tiers, placed


@given(shares=_shares, sizes=_sizes)
def test_totals_follow_the_shares(shares: list[int], sizes: list[int]) -> None:
    """Catches a policy that counts chunks instead of bytes, or drifts off: at any time no tier is
    ahead of its share by more than one chunk per other tier."""
    tiers, placed = place(sizes, shares)
    total = 0
    held = [0] * len(shares)
    for tier, nbytes in zip(tiers, sizes, strict=True):
        total += nbytes
        held[tier] += nbytes
        slack = max(sizes) * (len(shares) - 1)
        for share, have in zip(shares, held, strict=True):
            assert have <= total * share / sum(shares) + slack + 1
    assert list(placed.nbytes) == held


@given(shares=_shares, nbytes=st.integers(1, 1 << 30))
def test_every_tier_is_ranked(shares: list[int], nbytes: int) -> None:
    """Catches a tier that is never asked although the others are full."""
    ranking = Placed.nothing(len(shares)).ranking(nbytes, shares)
    assert sorted(ranking) == list(range(len(shares)))


@given(shares=_shares, before=_sizes)
def test_one_key_is_spread_by_itself(shares: list[int], before: list[int]) -> None:
    """Catches keys that lie on one tier because others are to catch up: whatever came before, a
    key of many chunks has its share on each tier, to a few chunks."""
    _, placed = place(before, shares)
    nbytes, count = 1 << 20, 20 * len(shares)
    held = [0] * len(shares)
    for _ in range(count):
        tier = placed.ranking(nbytes, shares)[0]
        placed = placed.after(tier, nbytes)
        held[tier] += 1
    for share, have in zip(shares, held, strict=True):
        assert abs(have - count * share / sum(shares)) <= 2 * len(shares)


def test_small_keys_take_turns() -> None:
    """Catches keys of one chunk that all begin on the first tier."""
    tiers, _ = place([100] * 6, [1, 1])
    assert tiers == [0, 1, 0, 1, 0, 1]
    tiers, _ = place([100], [1, 3])
    assert tiers == [1], "the first key lies on the fastest tier"
    tiers, _ = place([100] * 8, [3, 1])
    assert sorted(tiers) == [0] * 6 + [1] * 2


@given(nbytes=st.integers(0, 1 << 50), shares=_shares)
def test_split_keeps_within_the_whole(nbytes: int, shares: list[int]) -> None:
    """Catches capacities that add up to more than was allowed, or are no whole pages."""
    parts = split(nbytes, shares, unit=PAGE_NBYTES)
    assert sum(parts) <= nbytes < sum(parts) + len(parts) * PAGE_NBYTES
    assert all(part % PAGE_NBYTES == 0 for part in parts)


def test_shares_from_rates() -> None:
    """Catches shares of 0, which would leave a slow tier out, and rates taken for bytes."""
    assert shares_of([2e9, 1e9]) == (100, 50)
    assert shares_of([1e3, 1e9]) == (1, 100)
    assert shares_of([1e9, None]) == (1, 1)
