"""Pieces: where a run of bytes of a key lies in the segment files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zinf_core.errors import InternalError
from zinf_core.runtime.manifest import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of bytes that is contiguous in the key and in one segment file."""

    segment: int
    file_offset: int
    view_offset: int
    """Where it lies in the memory of the request."""
    nbytes: int


def pieces(regions: Sequence[Region], start: int, nbytes: int) -> Iterator[Piece]:
    """Yield where `nbytes` bytes from logical byte `start` of an extent lie, in order.

    `nbytes` may reach into the padding of the last page. Raises InternalError beyond that.
    """
    at, region_start = 0, 0
    for region in regions:
        inside = start + at - region_start
        if at < nbytes and inside < region.nbytes:
            length = min(nbytes - at, region.nbytes - inside)
            yield Piece(
                segment=region.segment,
                file_offset=region.offset + inside,
                view_offset=at,
                nbytes=length,
            )
            at += length
        region_start += region.nbytes
    if at < nbytes:
        raise InternalError(f"bytes {start} to {start + nbytes} lie outside an extent")
