"""Reads and writes of one key: what is to be done block by block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zinf_core.errors import InternalError
from zinf_storage.nvme.memory import TransferMemory
from zinf_storage.nvme.pages import Checksums, Page, PageTable, Version
from zinf_storage.transfers.blocks import ByteRange
from zinf_storage.transfers.completion import TransferCompletion

if TYPE_CHECKING:
    from zinf_storage.nvme.mover import BlockMover

_NOTHING: Final = ByteRange(key_nbytes=0, block_nbytes=1, start=0, end=0)


@dataclass(slots=True, kw_only=True, eq=False)
class ReadTransfer:
    """A read in flight. Belongs to the workers until its last block was moved."""

    what: str
    completion: TransferCompletion
    memory: TransferMemory | None
    offset: int
    source: Version
    """The version read; pinned."""
    span: ByteRange
    verify: bool
    """Check every block, also those checked before."""
    table: PageTable
    mover: BlockMover
    verified: list[int] = field(default_factory=list)
    """Blocks whose checksum was found right."""

    def indices(self) -> range:
        """Return the blocks to move."""
        return self.span.touched()

    def block_nbytes(self, index: int) -> int:
        """Return the bytes that block `index` brings."""
        start = index * self.span.block_nbytes
        return min(start + self.span.block_nbytes, self.span.end) - max(start, self.span.start)

    def move(self, index: int) -> None:
        """Move one block. Blocks."""
        self.mover.read(self, index)

    def end(self, *, succeeded: bool) -> None:
        """Drop the pin; blocks found right need not be checked again."""
        del succeeded
        self.source.unverified.difference_update(self.verified)
        self.table.unpin(self.source)

    def release(self) -> None:
        """Drop the caller's memory."""
        self.memory = None


@dataclass(slots=True, kw_only=True, eq=False)
class WriteTransfer:
    """A write, queued or in flight. Belongs to the workers from `begin` to the last block."""

    what: str
    completion: TransferCompletion
    memory: TransferMemory | None
    offset: int
    nbytes: int
    page: Page
    io_nbytes: int
    """Bytes per block if every byte of the key is replaced."""
    table: PageTable
    mover: BlockMover
    source: Version | None = None
    """Version that the bytes outside the range come from; pinned."""
    target: Version | None = None
    """Version being filled, the source itself if that was never written; pinned."""
    span: ByteRange = _NOTHING
    checksums: dict[int, int | None] = field(default_factory=dict)
    """Of the blocks moved so far."""

    def begin(self) -> None:
        """Fix between which two versions the write happens. Raises TierFullError, TransferError."""
        source = target = self.page.version
        if source.is_written:
            is_whole = self.nbytes == self.page.nbytes
            nbytes = self.io_nbytes if is_whole else source.block_nbytes
            target = self.table.shadow(self.page, block_nbytes=nbytes)
        else:
            target.pins += 1
        source.pins += 1
        self.source, self.target = source, target
        self.span = ByteRange(
            key_nbytes=target.nbytes,
            block_nbytes=target.block_nbytes,
            start=self.offset,
            end=self.offset + self.nbytes,
        )

    def versions(self) -> tuple[Version, Version]:
        """Return source and target. Raises InternalError before `begin`."""
        if self.source is None or self.target is None:
            raise InternalError(f"{self.what} was not begun")
        return self.source, self.target

    def indices(self) -> range:
        """Return the blocks to move: all into a new extent, the touched ones in place."""
        return self.span.touched() if self.source is self.target else range(self.span.num_blocks)

    def block_nbytes(self, index: int) -> int:
        """Return the bytes that block `index` brings, old ones that are copied included."""
        return min(self.span.block_nbytes, self.span.key_nbytes - index * self.span.block_nbytes)

    def move(self, index: int) -> None:
        """Move one block. Blocks."""
        self.checksums[index] = self.mover.write(self, index)

    def flip(self) -> None:
        """Make what was written the current version."""
        target = self.versions()[1]
        self.table.flip(self.page, target, self._merged_checksums(target))

    def end(self, *, succeeded: bool) -> None:
        """Drop the pins."""
        del succeeded
        for version in self.versions():
            self.table.unpin(version)

    def release(self) -> None:
        """Drop the caller's memory."""
        self.memory = None

    def _merged_checksums(self, target: Version) -> Checksums:
        """Return the target's checksums now that every block was moved."""
        old = enumerate(target.checksums)
        return tuple(self.checksums.get(index, checksum) for index, checksum in old)
