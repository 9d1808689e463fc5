"""Cutting transfers into blocks and blocks into pieces, against a byte-by-byte count."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zinf_storage
from zinf_core.errors import InternalError
from zinf_core.runtime.manifest import Region
from zinf_storage.nvme.pieces import pieces
from zinf_storage.transfers.blocks import ByteRange

PAGE = 4096


@given(key_nbytes=st.integers(1, 200), block_nbytes=st.integers(1, 70), data=st.data())
def test_touched_blocks_cover_the_range_once(
    key_nbytes: int, block_nbytes: int, data: st.DataObject
) -> None:
    """Catches bytes moved twice, left out, or moved outside the range at the block edges."""
    start = data.draw(st.integers(0, key_nbytes - 1))
    end = data.draw(st.integers(start + 1, key_nbytes))
    span = ByteRange(key_nbytes=key_nbytes, block_nbytes=block_nbytes, start=start, end=end)
    covered = []
    for index in span.touched():
        block = span.block(index)
        assert not block.is_untouched
        covered += range(block.low, block.high)
    assert covered == list(range(start, end))
    everything = [span.block(index) for index in range(span.num_blocks)]
    assert [b for block in everything for b in range(block.start, block.end)] == list(
        range(key_nbytes)
    )
    for block in everything:
        inside = set(range(block.start, block.end)) & set(range(start, end))
        assert set(range(block.low, block.high)) == inside
        assert block.is_untouched == (not inside)
        assert block.is_covered == (len(inside) == block.end - block.start)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_pieces_follow_the_regions(sizes: list[int], data: st.DataObject) -> None:
    """Catches a scattered key read from the wrong place where one region ends."""
    regions = [
        Region(segment=i % 2, offset=100 * PAGE * i, nbytes=size * PAGE)
        for i, size in enumerate(sizes)
    ]
    places = [(r.segment, r.offset + b) for r in regions for b in range(0, r.nbytes, 512)]
    start = data.draw(st.integers(0, len(places) - 1))
    count = data.draw(st.integers(1, len(places) - start))
    found = [
        (piece.segment, piece.file_offset + b)
        for piece in pieces(regions, start * 512, count * 512)
        for b in range(0, piece.nbytes, 512)
    ]
    assert found == places[start : start + count]


def test_pieces_outside_the_extent_are_a_bug_that_shows() -> None:
    """Catches an overrun that would read a neighbour's bytes."""
    with pytest.raises(InternalError):
        list(pieces([Region(segment=0, offset=0, nbytes=PAGE)], 0, PAGE + 1))


def test_tiers_share_only_what_lies_beside_them() -> None:
    """Catches a part of one tier that another comes to depend on."""
    packages = ("chunked", "nvme", "object_store")
    root = Path(zinf_storage.__file__).parent
    found = [
        f"{path.relative_to(root)} imports {other}"
        for package in packages
        for path in sorted((root / package).glob("*.py"))
        for other in packages
        if other != package and f"zinf_storage.{other}" in path.read_text(encoding="utf-8")
    ]
    assert found == []
