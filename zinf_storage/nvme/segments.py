"""SegmentStore: the segment files of one tier and which of their bytes are free."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import Final

from zinf_core.errors import CorruptDataError, TierError, TierFullError
from zinf_core.runtime.manifest import ManifestSegment, Region, sync_folder
from zinf_core.units import PAGE_NBYTES, align_up, format_nbytes
from zinf_storage.nvme.extents import FreeExtents
from zinf_storage.nvme.folder import Folder, segment_name
from zinf_storage.nvme.memory import Span
from zinf_storage.nvme.options import NvmeOptions
from zinf_storage.nvme.pieces import pieces
from zinf_storage.nvme.posix import FileAccess, SegmentFile, io_error, require_free

_MAX_SEGMENT_NBYTES: Final = 1 << 62
"""More than any file system has; keeps sizes within what system calls take."""


class SegmentStore:
    """Allocates, reads and writes ranges of segment files, which only ever grow in number.

    Allocation must be called under the tier's lock; reads and writes of allocated ranges may run
    in any thread without it.
    """

    def __init__(
        self, folder: Folder, *, tier_name: str, options: NvmeOptions, access: FileAccess
    ) -> None:
        """Start without segments; those in `folder` that nobody opens here are left alone."""
        self._access = access
        self._folder = folder
        self._tier_name = tier_name
        self._options = options
        self._extents = FreeExtents()
        self._files: dict[int, SegmentFile] = {}
        """Replaced, never changed: workers read it without the lock."""
        self._next_number = max(folder.segment_sizes(), default=-1) + 1

    @property
    def direct(self) -> bool:
        """Whether transfers must be of whole pages."""
        return self._access.direct

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all segment files."""
        return self._extents.capacity_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes of them that hold nothing."""
        return self._extents.free_nbytes

    @property
    def is_preallocated(self) -> bool:
        """Whether the file system gave every segment its blocks in advance."""
        return all(file.preallocated for file in self._files.values())

    def numbers(self) -> set[int]:
        """Return the numbers of the open segments."""
        return set(self._files)

    def manifest_segments(self) -> tuple[ManifestSegment, ...]:
        """Return how a manifest names the open segments."""
        return tuple(
            ManifestSegment(number=number, name=file.path.name, nbytes=file.nbytes)
            for number, file in sorted(self._files.items())
        )

    def open_existing(self, segment: ManifestSegment) -> None:
        """Open a segment that a manifest names, all of it free. Raises CorruptDataError."""
        path = self._folder.segment_path(segment.number)
        if segment.name != segment_name(segment.number):
            raise CorruptDataError(
                f"manifest {self._folder.manifest_path}: segment name {segment.name!r} is not ours"
            )
        try:
            file = SegmentFile.open(path, segment.nbytes, access=self._access)
        except FileNotFoundError as exc:
            raise CorruptDataError(
                f"{self._tier_name}: {path} of {segment.nbytes} bytes is missing, the manifest "
                "names it; restore the file from a copy"
            ) from exc
        except OSError as exc:
            what = f"{self._tier_name}: opening a segment"
            raise io_error(
                exc, what, path, needed=segment.nbytes, calls=self._access.calls
            ) from exc
        self._files = {**self._files, segment.number: file}
        self._extents.add_segment(segment.number, segment.nbytes)

    def claim(self, region: Region) -> None:
        """Take a range that a manifest names."""
        self._extents.claim(region)

    def allocate(self, nbytes: int, *, spare_nbytes: int = 0) -> tuple[Region, ...]:
        """Take room for `nbytes` and leave at least `spare_nbytes` free, growing if need be.

        Contiguous unless neither a hole nor the device has that much in one piece. May block on
        creating a file. Raises TierFullError or TransferError; nothing changed then.
        """
        nbytes, spare_nbytes = align_up(nbytes), align_up(spare_nbytes)
        missing = nbytes + spare_nbytes - self._extents.free_nbytes
        if missing > 0 or (nbytes and not self._extents.fits_whole(nbytes)):
            self._grow(nbytes, spare_nbytes)
        regions = self._extents.allocate(nbytes)
        if regions is None:
            raise TierFullError(errno.ENOSPC, f"{self._tier_name}: no room for {nbytes} bytes")
        return regions

    def free(self, regions: Iterable[Region]) -> None:
        """Give ranges back; nothing may be in flight on them."""
        self._extents.free(regions)

    def read(self, regions: Sequence[Region], start: int, memory: Span, what: str) -> None:
        """Fill `memory` with the extent's bytes from `start`. Blocks. `what` names the transfer."""
        for piece in pieces(regions, start, memory.nbytes):
            part = memory[piece.view_offset : piece.view_offset + piece.nbytes]
            self._files[piece.segment].read_exact(part, piece.file_offset, what)

    def write(self, regions: Sequence[Region], start: int, memory: Span, what: str) -> None:
        """Write `memory` to the extent's bytes from `start`. Blocks. `what` names the transfer."""
        for piece in pieces(regions, start, memory.nbytes):
            part = memory[piece.view_offset : piece.view_offset + piece.nbytes]
            self._files[piece.segment].write_exact(part, piece.file_offset, what)

    def locate(self, regions: Sequence[Region], start: int) -> str:
        """Return the file and offset of one byte of an extent, for messages."""
        piece = next(pieces(regions, start, 1))
        return f"{self._files[piece.segment].path} at offset {piece.file_offset}"

    def sync(self) -> None:
        """Make everything written so far durable. Blocks. Raises TransferError."""
        for file in self._files.values():
            file.sync(f"{self._tier_name}: sync")

    def close(self, *, keep: set[int]) -> None:
        """Close every file and delete those not in `keep`, which hold nothing committed."""
        files, self._files = self._files, {}
        for number, file in files.items():
            file.close()
            if number not in keep:
                file.path.unlink(missing_ok=True)

    def _grow(self, nbytes: int, spare_nbytes: int) -> None:
        """Add a segment, the largest sensible one that fits; none if scattering will do."""
        missing = nbytes + spare_nbytes - self._extents.free_nbytes
        capacity = self._options.capacity_nbytes
        limit = None if capacity is None else max(capacity - self.allocated_nbytes, 0)
        refusal: TierError | None = None
        for size in _growth_sizes(
            nbytes, spare_nbytes, missing, segment_nbytes=self._options.segment_nbytes, limit=limit
        ):
            try:
                self._add_segment(size)
            except TierFullError as exc:
                refusal = exc
            else:
                return
        if missing > 0:
            raise refusal or self._over_budget(nbytes, spare_nbytes)

    def _add_segment(self, nbytes: int) -> None:
        number = self._next_number
        path = self._folder.segment_path(number)
        what = f"{self._tier_name}: a new segment"
        try:
            require_free(path, nbytes, calls=self._access.calls)
            file = SegmentFile.create(path, nbytes, access=self._access)
            try:
                sync_folder(self._folder.path, calls=self._access.calls)
            except BaseException:
                file.close()
                path.unlink(missing_ok=True)
                raise
        except OSError as exc:
            raise io_error(exc, what, path, needed=nbytes, calls=self._access.calls) from exc
        self._next_number += 1
        self._files = {**self._files, number: file}
        self._extents.add_segment(number, nbytes)

    def _over_budget(self, nbytes: int, spare_nbytes: int) -> TierFullError:
        capacity = self._options.capacity_nbytes
        return TierFullError(
            errno.ENOSPC,
            f"{self._tier_name}: {nbytes} bytes ({format_nbytes(nbytes)}) and {spare_nbytes} spare "
            f"bytes to overwrite with do not fit at {self._folder.path}: {self.free_nbytes} of "
            f"{self.allocated_nbytes} bytes are free, capacity_nbytes = {capacity}; raise it or "
            "discard keys",
        )


def _growth_sizes(
    nbytes: int, spare_nbytes: int, missing: int, *, segment_nbytes: int, limit: int | None
) -> list[int]:
    """Return the segment sizes worth trying, largest first; each is enough, none beyond `limit`."""
    enough = max(missing, PAGE_NBYTES)
    wishes = {segment_nbytes, nbytes + spare_nbytes, nbytes, missing}
    limit = _MAX_SEGMENT_NBYTES if limit is None else min(limit, _MAX_SEGMENT_NBYTES)
    wishes = {min(wish, limit - limit % PAGE_NBYTES) for wish in wishes}
    contiguous = {wish for wish in wishes if wish >= max(nbytes, enough)}
    scattered = {wish for wish in wishes if wish >= enough and missing > 0}
    return sorted(contiguous | scattered, reverse=True)
