"""Reads and writes of one key: what is to be done block by block, and how a block is moved."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import xxhash

from zinf_core.errors import CorruptDataError, InternalError, TransferTimeoutError
from zinf_core.units import PAGE_NBYTES, align_up
from zinf_storage.nvme.blocks import Block, ByteRange
from zinf_storage.nvme.memory import BOUNCE_NBYTES, BouncePages, TransferMemory
from zinf_storage.nvme.pages import Checksums, Page, Version
from zinf_storage.nvme.segments import SegmentStore

_NOTHING: Final = ByteRange(key_nbytes=0, block_nbytes=1, start=0, end=0)


class TransferCompletion:
    """Completion of one transfer or commit that workers run. Thread-safe."""

    __slots__ = ("_done", "_error", "_what")

    def __init__(self, what: str) -> None:
        """Start undone; `what` names the transfer in messages."""
        self._what = what
        self._done = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done or raise what it failed with, the same every time.

        Raises TransferTimeoutError if `timeout_s` seconds passed first.
        """
        if not self._done.wait(timeout_s):
            raise TransferTimeoutError(f"{self._what} was not done within {timeout_s} s")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def settle(self, error: Exception | None) -> None:
        """Make the completion done. Called once, after all bookkeeping."""
        self._error = error
        self._done.set()


class BlockQueue:
    """The blocks of one transfer still to be moved, and the first failure. Thread-safe.

    The lock guards the three fields; runners take blocks until none is left or one failed.
    """

    def __init__(self, indices: Iterable[int], *, num_runners: int) -> None:
        """Queue `indices` for `num_runners` runners, each of which must `leave` in the end."""
        self._lock = threading.Lock()
        self._indices: Iterator[int] = iter(indices)
        self._num_runners = num_runners
        self.error: Exception | None = None

    def take(self) -> int | None:
        """Return the next block, None if there is nothing more to do."""
        with self._lock:
            return None if self.error else next(self._indices, None)

    def fail(self, error: Exception) -> None:
        """Remember the first error and stop handing out blocks."""
        with self._lock:
            if self.error is None:
                self.error = error

    def leave(self) -> bool:
        """Return whether the calling runner was the last one."""
        with self._lock:
            self._num_runners -= 1
            return self._num_runners == 0


@dataclass(slots=True, kw_only=True, eq=False)
class ReadTransfer:
    """A read in flight. Belongs to its runners until the last one left."""

    what: str
    completion: TransferCompletion
    memory: TransferMemory | None
    offset: int
    source: Version
    span: ByteRange
    verify: bool
    """Check every block, also those checked before."""
    verified: list[int] = field(default_factory=list)
    """Blocks whose checksum was found right."""

    def indices(self) -> range:
        """Return the blocks to move."""
        return self.span.touched()

    def move(self, index: int, mover: BlockMover) -> None:
        """Move one block. Blocks."""
        mover.read(self, index)


@dataclass(slots=True, kw_only=True, eq=False)
class WriteTransfer:
    """A write, queued or in flight. Belongs to its runners from `begin` until the last one left."""

    what: str
    completion: TransferCompletion
    memory: TransferMemory | None
    offset: int
    nbytes: int
    page: Page
    source: Version | None = None
    """Version that the bytes outside the range come from."""
    target: Version | None = None
    """Version being filled; the source itself if that was never written."""
    span: ByteRange = _NOTHING
    checksums: dict[int, int | None] = field(default_factory=dict)
    """Of the blocks moved so far."""

    @property
    def is_whole(self) -> bool:
        """Whether the write replaces every byte of the key."""
        return self.nbytes == self.page.nbytes

    def begin(self, source: Version, target: Version) -> None:
        """Fix between which two versions the write happens."""
        self.source, self.target = source, target
        self.span = ByteRange(
            key_nbytes=target.nbytes,
            block_nbytes=target.block_nbytes,
            start=self.offset,
            end=self.offset + self.nbytes,
        )

    def indices(self) -> range:
        """Return the blocks to move: all into a new extent, the touched ones in place."""
        return self.span.touched() if self.source is self.target else range(self.span.num_blocks)

    def move(self, index: int, mover: BlockMover) -> None:
        """Move one block. Blocks."""
        self.checksums[index] = mover.write(self, index)

    def merged_checksums(self) -> Checksums:
        """Return the target's checksums now that every block was moved."""
        if self.target is None:
            raise InternalError(f"{self.what} was not begun")
        old = enumerate(self.target.checksums)
        return tuple(self.checksums.get(index, checksum) for index, checksum in old)


class BlockMover:
    """Moves one block at a time between the caller's memory and the segment files.

    Stateless but for the bounce pages, so any worker may call it.
    """

    def __init__(self, segments: SegmentStore, *, num_threads: int) -> None:
        """Serve at most `num_threads` workers at once."""
        self._segments = segments
        self._bounce = BouncePages(num_threads)

    def read(self, transfer: ReadTransfer, index: int) -> None:
        """Bring the covered part of a block into memory and check it if that is due.

        Raises CorruptDataError, TransferError.
        """
        block = transfer.span.block(index)
        source = transfer.source
        due = transfer.verify or index in source.unverified
        expected = source.checksums[index] if due else None
        if expected is None or block.is_covered:
            self._read_covered(transfer, block)
            if expected is not None:
                view = _memory(transfer).view(block.low - transfer.offset, block.high - block.low)
                found = xxhash.xxh3_64_intdigest(view)
                self._require_equal(found, expected, source, block, transfer.what)
        else:
            self._read_checked(transfer, block, expected)
        if expected is not None:
            transfer.verified.append(index)

    def write(self, transfer: WriteTransfer, index: int) -> int | None:
        """Write one block of the target and return its checksum, None if it has no bytes yet.

        Raises CorruptDataError, TransferError, TierFullError.
        """
        source, target = transfer.source, transfer.target
        if source is None or target is None:
            raise InternalError(f"{transfer.what} was not begun")
        block = transfer.span.block(index)
        if block.is_covered:
            return self._write_covered(transfer, target, block)
        if block.is_untouched and source.checksums[index] is None:
            return None
        return self._merge(transfer, source, target, block)

    def _read_covered(self, transfer: ReadTransfer, block: Block) -> None:
        memory, regions = _memory(transfer), transfer.source.regions
        start, nbytes = block.low - transfer.offset, block.high - block.low
        if self._is_ragged(nbytes):
            padded = memory.padded_view(start, nbytes)
            if padded is not None:
                self._segments.read(regions, block.low, padded, transfer.what)
                return
        body = nbytes - nbytes % PAGE_NBYTES if self._is_ragged(nbytes) else nbytes
        self._segments.read(regions, block.low, memory.view(start, body), transfer.what)
        if body < nbytes:
            with self._bounce.lease() as area:
                page = area[:PAGE_NBYTES]
                self._segments.read(regions, block.low + body, page, transfer.what)
                memory.view(start + body, nbytes - body)[:] = page[: nbytes - body]

    def _read_checked(self, transfer: ReadTransfer, block: Block, expected: int) -> None:
        """Read all of a block for its checksum and copy the covered part."""
        memory, digest = _memory(transfer), xxhash.xxh3_64()
        with self._bounce.lease() as area:
            for start in range(block.start, block.end, BOUNCE_NBYTES):
                end = min(start + BOUNCE_NBYTES, block.end)
                self._segments.read(
                    transfer.source.regions, start, self._io_view(area, end - start), transfer.what
                )
                digest.update(area[: end - start])
                low, high = max(start, block.low), min(end, block.high)
                if low < high:
                    view = memory.view(low - transfer.offset, high - low)
                    view[:] = area[low - start : high - start]
        self._require_equal(digest.intdigest(), expected, transfer.source, block, transfer.what)

    def _write_covered(self, transfer: WriteTransfer, target: Version, block: Block) -> int:
        memory = _memory(transfer)
        start, nbytes = block.low - transfer.offset, block.high - block.low
        checksum: int = xxhash.xxh3_64_intdigest(memory.view(start, nbytes))
        ragged = self._is_ragged(nbytes)
        padded = memory.padded_view(start, nbytes) if ragged else None
        if padded is not None:
            self._segments.write(target.regions, block.low, padded, transfer.what)
            return checksum
        body = nbytes - nbytes % PAGE_NBYTES if ragged else nbytes
        self._segments.write(target.regions, block.low, memory.view(start, body), transfer.what)
        if body < nbytes:
            with self._bounce.lease() as area:
                page = area[:PAGE_NBYTES]
                page[: nbytes - body] = memory.view(start + body, nbytes - body)
                self._segments.write(target.regions, block.low + body, page, transfer.what)
        return checksum

    def _merge(
        self, transfer: WriteTransfer, source: Version, target: Version, block: Block
    ) -> int:
        """Write a block made of old bytes and the covered new ones; check the old ones."""
        memory, old, new = _memory(transfer), xxhash.xxh3_64(), xxhash.xxh3_64()
        with self._bounce.lease() as area:
            for start in range(block.start, block.end, BOUNCE_NBYTES):
                end = min(start + BOUNCE_NBYTES, block.end)
                view = self._io_view(area, end - start)
                self._segments.read(source.regions, start, view, transfer.what)
                old.update(area[: end - start])
                low, high = max(start, block.low), min(end, block.high)
                if low < high:
                    covered = memory.view(low - transfer.offset, high - low)
                    area[low - start : high - start] = covered
                new.update(area[: end - start])
                self._segments.write(target.regions, start, view, transfer.what)
        expected = source.checksums[block.index]
        if expected is not None:
            self._require_equal(old.intdigest(), expected, source, block, transfer.what)
        checksum: int = new.intdigest()
        return checksum

    def _require_equal(
        self, found: int, expected: int, source: Version, block: Block, what: str
    ) -> None:
        if found != expected:
            raise CorruptDataError(
                f"{what} failed: bytes {block.start} to {block.end} at "
                f"{self._segments.locate(source.regions, block.start)} have checksum {found:016x} "
                f"instead of {expected:016x}; restore the file from a copy or write the key anew"
            )

    def _is_ragged(self, nbytes: int) -> bool:
        return self._segments.direct and nbytes % PAGE_NBYTES != 0

    def _io_view(self, area: memoryview, nbytes: int) -> memoryview:
        return area[: align_up(nbytes) if self._segments.direct else nbytes]


def _memory(transfer: ReadTransfer | WriteTransfer) -> TransferMemory:
    if transfer.memory is None:
        raise InternalError(f"{transfer.what} went on after it was done")
    return transfer.memory
