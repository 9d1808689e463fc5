"""FreeExtents: which byte ranges of the segments are free. Pure: knows no file, lock or clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from zinf_core.errors import InternalError
from zinf_core.runtime.manifest import Region
from zinf_core.units import align_up


class FreeExtents:
    """Free list over page-aligned ranges of several segments, neighbours always coalesced.

    Not thread-safe.
    """

    def __init__(self) -> None:
        """Start without segments."""
        self._sizes: dict[int, int] = {}
        self._by_offset: dict[int, list[tuple[int, int]]] = {}
        """Per segment, its holes as (offset, nbytes), sorted."""
        self._by_size: list[tuple[int, int, int]] = []
        """All holes as (nbytes, segment, offset), sorted."""
        self.free_nbytes = 0
        self.capacity_nbytes = 0

    def add_segment(self, number: int, nbytes: int) -> None:
        """Add a segment of `nbytes` (a multiple of 4096), all of it free."""
        if number in self._sizes:
            raise InternalError(f"segment {number} was added twice")
        self._sizes[number] = nbytes
        self._by_offset[number] = []
        self.capacity_nbytes += nbytes
        if nbytes:
            self.free_nbytes += nbytes
            self._insert(number, 0, nbytes)

    def fits_whole(self, nbytes: int) -> bool:
        """Return whether one hole holds `nbytes`."""
        return bool(self._by_size) and self._by_size[-1][0] >= align_up(nbytes)

    def allocate(self, nbytes: int) -> tuple[Region, ...] | None:
        """Take `nbytes`, rounded up to pages, and return where they lie.

        One region from the smallest hole that holds them all; only if none does, several from
        the largest holes down. None if less is free; nothing is taken then.
        """
        wanted = align_up(nbytes)
        if wanted > self.free_nbytes:
            return None
        regions = []
        while wanted:
            at = bisect_left(self._by_size, (wanted, -1, -1))
            size, segment, offset = self._by_size[min(at, len(self._by_size) - 1)]
            region = Region(segment=segment, offset=offset, nbytes=min(size, wanted))
            self._cut(region, offset, size)
            regions.append(region)
            wanted -= region.nbytes
        return tuple(regions)

    def claim(self, region: Region) -> None:
        """Take exactly `region`. Raises InternalError if any of it is not free."""
        holes = self._by_offset.get(region.segment, [])
        at = bisect_left(holes, (region.offset + 1, 0)) - 1
        if at < 0 or region.nbytes < 1 or holes[at][0] + holes[at][1] < region.end:
            raise InternalError(f"{region} is not free and cannot be claimed")
        self._cut(region, *holes[at])

    def free(self, regions: Iterable[Region]) -> None:
        """Give `regions` back. Raises InternalError if any of it is free already."""
        for region in regions:
            self._give_back(region)

    def holes(self) -> list[Region]:
        """Return the free ranges in order of segment and offset."""
        return [
            Region(segment=segment, offset=offset, nbytes=nbytes)
            for segment in sorted(self._by_offset)
            for offset, nbytes in self._by_offset[segment]
        ]

    def _cut(self, region: Region, hole_offset: int, hole_nbytes: int) -> None:
        self._remove(region.segment, hole_offset, hole_nbytes)
        before = region.offset - hole_offset
        after = hole_offset + hole_nbytes - region.end
        if before:
            self._insert(region.segment, hole_offset, before)
        if after:
            self._insert(region.segment, region.end, after)
        self.free_nbytes -= region.nbytes

    def _give_back(self, region: Region) -> None:
        if region.nbytes < 1 or region.end > self._sizes.get(region.segment, 0):
            raise InternalError(f"{region} lies outside its segment")
        holes = self._by_offset[region.segment]
        offset, end = region.offset, region.end
        at = bisect_left(holes, (offset, 0))
        previous = holes[at - 1] if at else None
        following = holes[at] if at < len(holes) else None
        if (previous and sum(previous) > offset) or (following and following[0] < end):
            raise InternalError(f"{region} is free already")
        if following and following[0] == end:
            self._remove(region.segment, *following)
            end += following[1]
        if previous and sum(previous) == offset:
            self._remove(region.segment, *previous)
            offset = previous[0]
        self._insert(region.segment, offset, end - offset)
        self.free_nbytes += region.nbytes

    def _insert(self, segment: int, offset: int, nbytes: int) -> None:
        insort(self._by_offset[segment], (offset, nbytes))
        insort(self._by_size, (nbytes, segment, offset))

    def _remove(self, segment: int, offset: int, nbytes: int) -> None:
        holes = self._by_offset[segment]
        del holes[bisect_left(holes, (offset, nbytes))]
        del self._by_size[bisect_left(self._by_size, (nbytes, segment, offset))]
