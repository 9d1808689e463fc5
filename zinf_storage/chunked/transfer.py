"""Reads and writes of one key in flight, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import InternalError
from zinf_storage.chunked.table import Cell, Chunk, Entry, KeyVersion
from zinf_storage.transfers.blocks import ByteRange
from zinf_storage.transfers.completion import TransferCompletion
from zinf_storage.transfers.transfer import Task

if TYPE_CHECKING:
    from zinf_storage.chunked.maker import Machinery


@dataclass(slots=True, kw_only=True, eq=False)
class ReadTransfer:
    """A read in flight. Belongs to the workers until its last chunk was moved."""

    what: str
    completion: TransferCompletion
    buffer: Buffer | None
    """The caller's; None once the transfer is done (law 6)."""
    source: KeyVersion
    """The version read; pinned."""
    span: ByteRange
    machinery: Machinery

    def indices(self) -> range:
        """Return the chunks to move."""
        return self.span.touched()

    def block_nbytes(self, index: int) -> int:
        """Return the bytes that chunk `index` brings."""
        block = self.span.block(index)
        return block.high - block.low

    def move(self, index: int) -> Step:
        """Set one chunk moving. May block."""
        bench = self.machinery.scratch.of_this_worker()
        return self.machinery.reader.start(self, index, bench)

    def end(self, *, succeeded: bool) -> Task:
        """Drop the pin; return how to give back what nobody needs any more."""
        del succeeded
        self.machinery.table.unpin(self.source)
        return self.machinery.giving_back()

    def release(self) -> None:
        """Drop the caller's buffer."""
        self.buffer = None


@dataclass(slots=True, kw_only=True, eq=False)
class WriteTransfer:
    """A write, queued or in flight. Belongs to the workers from `begin` to the last chunk. One
    that finds no room for a chunk is begun anew."""

    what: str
    completion: TransferCompletion
    buffer: Buffer | None
    """The caller's; None once the transfer is done (law 6)."""
    page: Entry
    span: ByteRange
    machinery: Machinery
    source: KeyVersion | None = None
    """Version that the bytes outside the range come from; pinned while an attempt runs."""
    target: KeyVersion | None = None
    """Version that was made; pinned from `flip` to `end`."""
    written: dict[int, Chunk] = field(default_factory=dict)
    """The chunks stored so far."""
    fresh: list[Cell] = field(default_factory=list)
    """Cells reserved for this attempt; unused if it fails."""

    def begin(self) -> None:
        """Begin an attempt to write over the current version."""
        self.source = self.page.version
        self.source.pins += 1
        self.written, self.fresh = {}, []

    def old_chunk(self, index: int) -> Chunk:
        """Return the chunk that this write replaces."""
        return self._begun().chunks[index]

    def indices(self) -> range:
        """Return the chunks to move."""
        return self.span.touched()

    def block_nbytes(self, index: int) -> int:
        """Return the bytes that are stored, before they are coded, old ones of a chunk included."""
        block = self.span.block(index)
        return block.end - block.start

    def move(self, index: int) -> Step:
        """Set one chunk moving. May block."""
        bench = self.machinery.scratch.of_this_worker()
        return self.machinery.writer.start(self, index, bench)

    def flip(self) -> None:
        """Make what was written the current version."""
        self.target = self.machinery.table.derive(self._begun(), self.written)
        self.machinery.table.flip(self.page, self.target)

    def end(self, *, succeeded: bool) -> Task:
        """Drop the pins; return how to give back what nobody needs any more."""
        table = self.machinery.table
        if self.target is not None:
            table.unpin(self.target)
        table.unpin(self._begun())
        self.source = self.target = None
        return self.machinery.giving_back(() if succeeded else self.fresh)

    def release(self) -> None:
        """Drop the caller's buffer."""
        self.buffer = None

    def _begun(self) -> KeyVersion:
        if self.source is None:
            raise InternalError(f"{self.what} was not begun")
        return self.source


class Step:
    """One chunk on its way: an inner transfer to wait for, and what is to be done after it."""

    __slots__ = ("_completion", "_conclude", "_release")

    def __init__(
        self,
        completion: Completion,
        conclude: Callable[[], None],
        release: Callable[[], None] | None = None,
    ) -> None:
        """Wait for `completion`, then `conclude`; `release` is called whatever happens."""
        self._completion = completion
        self._conclude = conclude
        self._release = release

    def finish(self) -> None:
        """Wait and conclude. Blocks. Raises what either does."""
        try:
            self._completion.wait()
            self._conclude()
        finally:
            if self._release is not None:
                self._release()


def buffer_of(transfer: ReadTransfer | WriteTransfer) -> Buffer:
    """Return the caller's buffer. Raises InternalError once the transfer is done."""
    if transfer.buffer is None:
        raise InternalError(f"{transfer.what} went on after it was done")
    return transfer.buffer
