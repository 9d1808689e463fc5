"""FreeExtents against a bytemap: which pages are taken is kept in a plain set beside it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.errors import InternalError
from zinf_core.runtime.manifest import Region
from zinf_storage.nvme.extents import FreeExtents

PAGE = 4096
_segments = st.lists(st.integers(0, 12), min_size=1, max_size=4)
_steps = st.lists(st.tuples(st.booleans(), st.integers(0, 9 * PAGE)), max_size=40)


def pages_of(regions: tuple[Region, ...]) -> list[tuple[int, int]]:
    return [
        (region.segment, page)
        for region in regions
        for page in range(region.offset // PAGE, region.end // PAGE)
    ]


def with_segments(sizes: list[int]) -> FreeExtents:
    extents = FreeExtents()
    for number, pages in enumerate(sizes):
        extents.add_segment(number, pages * PAGE)
    return extents


@given(sizes=_segments, steps=_steps, seed=st.integers(0, 99))
def test_live_extents_never_overlap_and_usage_is_exact(
    sizes: list[int], steps: list[tuple[bool, int]], seed: int
) -> None:
    """Catches an extent handed out twice, lost pages, holes not coalesced, or a refusal while
    there is room."""
    extents, rng = with_segments(sizes), random.Random(seed)
    live: list[tuple[Region, ...]] = []
    taken: set[tuple[int, int]] = set()
    for is_free, nbytes in steps:
        if is_free and live:
            regions = live.pop(rng.randrange(len(live)))
            extents.free(regions)
            taken.difference_update(pages_of(regions))
        else:
            regions = extents.allocate(nbytes)
            wanted = -(-nbytes // PAGE)
            assert (regions is None) == (wanted > sum(sizes) - len(taken))
            if regions is not None:
                pages = pages_of(regions)
                assert len(pages) == wanted
                assert not taken & set(pages)
                assert all(page < sizes[segment] for segment, page in pages)
                assert all(r.offset % PAGE == 0 and r.nbytes % PAGE == 0 for r in regions)
                taken.update(pages)
                live.append(regions)
        assert extents.free_nbytes == (sum(sizes) - len(taken)) * PAGE
        free = [(r.segment, r.offset, r.end) for r in extents.holes()]
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(free))
    for regions in live:
        extents.free(regions)
    whole = [(number, 0, pages * PAGE) for number, pages in enumerate(sizes) if pages]
    assert [(r.segment, r.offset, r.nbytes) for r in extents.holes()] == whole


@given(sizes=_segments, nbytes=st.integers(1, 12 * PAGE))
def test_one_region_whenever_a_hole_is_large_enough(sizes: list[int], nbytes: int) -> None:
    """Catches needless scattering, which would make every read of the key several."""
    extents = with_segments(sizes)
    wanted = -(-nbytes // PAGE)
    regions = extents.allocate(nbytes)
    if wanted <= max(sizes):
        assert regions is not None
        assert len(regions) == 1
        best = min(size for size in sizes if size >= wanted)
        assert sizes[regions[0].segment] == best


def test_scattered_only_when_no_hole_is_large_enough() -> None:
    """Catches a fragmented but half-empty device that refuses an overwrite."""
    extents = with_segments([8])
    singles = [extents.allocate(PAGE) for _ in range(8)]
    for regions in singles[::2]:
        extents.free(regions)
    regions = extents.allocate(3 * PAGE)
    assert len(regions) == 3
    assert extents.allocate(2 * PAGE) is None
    assert extents.free_nbytes == PAGE


def test_freeing_twice_or_outside_is_a_bug_that_shows() -> None:
    """Catches silent double frees, which later hand one extent to two keys."""
    extents = with_segments([4])
    (region,) = extents.allocate(2 * PAGE)
    extents.free([region])
    for bad in (region, Region(segment=0, offset=3 * PAGE, nbytes=2 * PAGE)):
        with pytest.raises(InternalError):
            extents.free([bad])
    with pytest.raises(InternalError):
        extents.free([Region(segment=7, offset=0, nbytes=PAGE)])
    assert extents.free_nbytes == 4 * PAGE


def test_claiming_takes_exactly_the_region() -> None:
    """Catches an open that hands a committed extent to the next write."""
    extents = with_segments([4])
    middle = Region(segment=0, offset=PAGE, nbytes=2 * PAGE)
    extents.claim(middle)
    assert [(r.offset, r.nbytes) for r in extents.holes()] == [(0, PAGE), (3 * PAGE, PAGE)]
    for overlapping in (middle, Region(segment=0, offset=0, nbytes=2 * PAGE)):
        with pytest.raises(InternalError):
            extents.claim(overlapping)
