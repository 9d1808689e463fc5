"""Reads and writes of one key: what is to be done part by part, and how a part is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.errors import CorruptDataError, InternalError
from zinf_storage.checksum import digest_of
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.pages import Page, PageTable, Part, Version
from zinf_storage.object_store.sweep import Sweeper
from zinf_storage.transfers.completion import TransferCompletion

_NOTHING: Final = range(0)


@dataclass(slots=True, kw_only=True, eq=False)
class ReadTransfer:
    """A read in flight. Belongs to the workers until its last part was moved."""

    what: str
    completion: TransferCompletion
    buffer: Buffer | None
    offset: int
    nbytes: int
    source: Version
    """The version read; pinned."""
    table: PageTable
    mover: PartMover

    def indices(self) -> range:
        """Return the parts to move."""
        return self.source.touched(self.offset, self.nbytes)

    def block_nbytes(self, index: int) -> int:
        """Return the bytes that part `index` brings."""
        low, high = overlap(self, self.source.span(index))
        return high - low

    def move(self, index: int) -> None:
        """Move one part. Blocks."""
        self.mover.read(self, index)

    def end(self, *, succeeded: bool) -> None:
        """Drop the pin."""
        del succeeded
        self.table.unpin(self.source)

    def release(self) -> None:
        """Drop the caller's buffer."""
        self.buffer = None


@dataclass(slots=True, kw_only=True, eq=False)
class WriteTransfer:
    """A write, queued or in flight. Belongs to the workers from `begin` to the last part."""

    what: str
    completion: TransferCompletion
    buffer: Buffer | None
    offset: int
    nbytes: int
    page: Page
    table: PageTable
    mover: PartMover
    sweeper: Sweeper
    source: Version | None = None
    """Version that the bytes outside the range come from; pinned."""
    target: Version | None = None
    """Version being made; pinned."""
    touched: range = _NOTHING

    def begin(self) -> None:
        """Fix between which two versions the write happens. Raises TierFullError."""
        self.target, self.touched = self.table.shadow(self.page, self.offset, self.nbytes)
        self.source = self.table.pin(self.page.version)

    def versions(self) -> tuple[Version, Version]:
        """Return source and target. Raises InternalError before `begin`."""
        if self.source is None or self.target is None:
            raise InternalError(f"{self.what} was not begun")
        return self.source, self.target

    def indices(self) -> range:
        """Return the parts to move."""
        return self.touched

    def block_nbytes(self, index: int) -> int:
        """Return the bytes that are put, old ones of a part included."""
        return len(self.versions()[1].span(index))

    def move(self, index: int) -> None:
        """Move one part. Blocks."""
        self.mover.write(self, index)

    def flip(self) -> None:
        """Make what was written the current version."""
        self.table.flip(self.page, self.versions()[1])

    def end(self, *, succeeded: bool) -> None:
        """Drop the pins."""
        self.sweeper.is_urgent |= not succeeded
        for version in self.versions():
            self.table.unpin(version)

    def release(self) -> None:
        """Drop the caller's buffer."""
        self.buffer = None


class PartMover:
    """Moves one part at a time between the caller's memory and the bucket. Any worker may call it.

    A write of a whole part goes out from the caller's memory and a read comes into it; only a
    write of some bytes of a part takes scratch memory, of one part.
    """

    def __init__(self, bucket: Bucket, *, verify_reads: bool) -> None:
        """Move to and from `bucket`."""
        self._bucket = bucket
        self._verify_reads = verify_reads

    def read(self, transfer: ReadTransfer, index: int) -> None:
        """Read what is wanted of part `index`. Blocks. Raises CorruptDataError, TransferError."""
        source = transfer.source
        part, span = source.parts[index], source.span(index)
        low, high = overlap(transfer, span)
        view = _view(transfer, low, high)
        if part is None:
            np.asarray(view)[:] = 0
        else:
            self._fetch(part, view, offset=low - span.start, what=transfer.what)

    def write(self, transfer: WriteTransfer, index: int) -> None:
        """Put part `index`. Blocks. Raises CorruptDataError, TransferError, TierFullError."""
        source, target = transfer.versions()
        part, span = target.parts[index], target.span(index)
        if part is None:
            raise InternalError(f"{transfer.what} has no part {index}")
        low, high = overlap(transfer, span)
        view = _view(transfer, low, high)
        if len(view) < part.nbytes:
            merged = memoryview(bytearray(part.nbytes))
            old = source.parts[index]
            if old is not None:
                self._fetch(old, merged, offset=0, what=transfer.what)
            merged[low - span.start : high - span.start] = view
            view = merged
        part.checksum = digest_of(view)
        self._bucket.put(part.name, view, doing=transfer.what)

    def _fetch(self, part: Part, view: memoryview, *, offset: int, what: str) -> None:
        """Fill `view` from byte `offset` of a part, checked if that is all of it."""
        found = self._bucket.read_into(part.name, view, offset=offset, doing=what)
        if found != part.nbytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {part.nbytes}"
            raise self._corrupt(part, what, state)
        if self._verify_reads and len(view) == part.nbytes:
            checksum = digest_of(view)
            if checksum != part.checksum:
                raise self._corrupt(
                    part, what, f"has checksum {checksum:016x} instead of {part.checksum:016x}"
                )

    def _corrupt(self, part: Part, what: str, state: str) -> CorruptDataError:
        return CorruptDataError(
            f"{what} failed: {self._bucket.url_of(part.name)} {state}; restore the object from a "
            "copy or write the key anew"
        )


def overlap(transfer: ReadTransfer | WriteTransfer, span: range) -> tuple[int, int]:
    """Return which bytes of the key are in both."""
    end = transfer.offset + transfer.nbytes
    return max(transfer.offset, span.start), min(end, span.stop)


def _view(transfer: ReadTransfer | WriteTransfer, low: int, high: int) -> memoryview:
    """Return the caller's memory for bytes `low` to `high` of the key."""
    if transfer.buffer is None:
        raise InternalError(f"{transfer.what} went on after it was done")
    array: Any = transfer.buffer.array
    return memoryview(array)[low - transfer.offset : high - transfer.offset]
