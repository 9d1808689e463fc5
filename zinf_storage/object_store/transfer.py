"""Reads and writes of one key: what is to be done part by part, and how a part is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.errors import CorruptDataError, InternalError
from zinf_storage.checksum import digest_of
from zinf_storage.nvme.completion import TransferCompletion
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.pages import Page, Part, Version

_NOTHING: Final = range(0)


@dataclass(slots=True, kw_only=True, eq=False)
class ReadTransfer:
    """A read in flight. Belongs to its runners until the last one left."""

    what: str
    completion: TransferCompletion
    buffer: Buffer | None
    offset: int
    nbytes: int
    source: Version
    """The version read; pinned."""

    @classmethod
    def of(cls, what: str, source: Version, dst: Buffer, offset: int) -> ReadTransfer:
        """Return a read of `dst.nbytes` bytes (> 0) of the pinned `source`."""
        return cls(
            what=what,
            completion=TransferCompletion(what),
            buffer=dst,
            offset=offset,
            nbytes=dst.nbytes,
            source=source,
        )

    def indices(self) -> range:
        """Return the parts to move."""
        return self.source.touched(self.offset, self.nbytes)


@dataclass(slots=True, kw_only=True, eq=False)
class WriteTransfer:
    """A write, queued or in flight. Belongs to its runners from `begin` until the last one left."""

    what: str
    completion: TransferCompletion
    buffer: Buffer | None
    offset: int
    nbytes: int
    page: Page
    source: Version | None = None
    """Version that the bytes outside the range come from; pinned."""
    target: Version | None = None
    """Version being made; pinned."""
    touched: range = _NOTHING

    @classmethod
    def of(cls, what: str, page: Page, src: Buffer, offset: int) -> WriteTransfer:
        """Return a write of `src.nbytes` bytes (> 0) of `page`, not begun."""
        return cls(
            what=what,
            completion=TransferCompletion(what),
            buffer=src,
            offset=offset,
            nbytes=src.nbytes,
            page=page,
        )

    def begin(self, source: Version, target: Version, touched: range) -> None:
        """Fix between which two versions the write happens."""
        self.source, self.target, self.touched = source, target, touched

    def indices(self) -> range:
        """Return the parts to move."""
        return self.touched


class PartMover:
    """Moves one part at a time between the caller's memory and the bucket. Any worker may call it.

    A write of a whole part goes out from the caller's memory and a read comes into it; only a
    write of some bytes of a part takes scratch memory, of one part.
    """

    def __init__(self, bucket: Bucket, *, verify_reads: bool) -> None:
        """Move to and from `bucket`."""
        self._bucket = bucket
        self._verify_reads = verify_reads

    def move(self, transfer: ReadTransfer | WriteTransfer, index: int) -> None:
        """Move part `index`. Blocks. Raises CorruptDataError, TransferError, TierFullError."""
        if isinstance(transfer, ReadTransfer):
            self._read(transfer, index)
        else:
            self._write(transfer, index)

    def _read(self, transfer: ReadTransfer, index: int) -> None:
        source = transfer.source
        part, span = source.parts[index], source.span(index)
        low, high = _overlap(transfer, span)
        view = _view(transfer, low, high)
        if part is None:
            np.asarray(view)[:] = 0
        else:
            self._fetch(part, view, offset=low - span.start, what=transfer.what)

    def _write(self, transfer: WriteTransfer, index: int) -> None:
        source, target = transfer.source, transfer.target
        if source is None or target is None:
            raise InternalError(f"{transfer.what} was not begun")
        part, span = target.parts[index], target.span(index)
        if part is None:
            raise InternalError(f"{transfer.what} has no part {index}")
        low, high = _overlap(transfer, span)
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


def _overlap(transfer: ReadTransfer | WriteTransfer, span: range) -> tuple[int, int]:
    """Return which bytes of the key are in both."""
    end = transfer.offset + transfer.nbytes
    return max(transfer.offset, span.start), min(end, span.stop)


def _view(transfer: ReadTransfer | WriteTransfer, low: int, high: int) -> memoryview:
    """Return the caller's memory for bytes `low` to `high` of the key."""
    if transfer.buffer is None:
        raise InternalError(f"{transfer.what} went on after it was done")
    array: Any = transfer.buffer.array
    return memoryview(array)[low - transfer.offset : high - transfer.offset]
