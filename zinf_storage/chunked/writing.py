"""ChunkWriter: puts chunks on the inner tiers, each version of a chunk into a cell of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zinf_core.buffers import Buffer, ByteArray
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import TierFullError
from zinf_storage.checksum import digest_of
from zinf_storage.chunked.failures import explained
from zinf_storage.chunked.index import Content
from zinf_storage.chunked.inners import CellRequest, InnerTiers
from zinf_storage.chunked.meter import CodecMeter
from zinf_storage.chunked.options import ChunkedOptions
from zinf_storage.chunked.reading import ChunkReader, ExplainedCompletion
from zinf_storage.chunked.scratch import Bench
from zinf_storage.chunked.shuffle import best_width
from zinf_storage.chunked.table import Cell, Chunk
from zinf_storage.chunked.transfer import Step, WriteTransfer, buffer_of
from zinf_storage.transfers.blocks import Block

_LEAST_SAVING = 32
"""A chunk is stored coded if that saves a 32nd of it; less is not worth decoding."""


class ChunkWriter:
    """Writes one chunk at a time. Stateless but for the meter, so any worker may call it."""

    def __init__(
        self, inners: InnerTiers, reader: ChunkReader, *, options: ChunkedOptions, meter: CodecMeter
    ) -> None:
        """Merge with what `reader` reads, encode and check as `options` say."""
        self._inners = inners
        self._reader = reader
        self._options = options
        self._meter = meter

    def start(self, write: WriteTransfer, index: int, bench: Bench) -> Step:
        """Submit the write of a chunk; `write.written` has it when the step is finished.

        A part of a chunk is merged with the rest of it and stored when this returns: may block.
        Raises CorruptDataError, TransferError, TierFullError.
        """
        block = write.span.block(index)
        buffer = buffer_of(write)
        covered = buffer.part(block.low - write.span.start, block.high - block.low)
        if block.is_covered:
            return self._store(write, block, covered, bench)
        if buffer.space is MemorySpace.DEVICE:
            self._store_parts(write, block, covered, bench)
        else:
            merged = self._merged(write, block, covered, bench)
            self._store(write, block, merged, bench).finish()
        return Step(CompletedTransfer(), lambda: None)

    def _merged(self, write: WriteTransfer, block: Block, covered: Buffer, bench: Bench) -> Buffer:
        """Return the whole chunk as it will be; bytes never written are zero."""
        merged = bench.merged.resized(block.end - block.start)
        old = write.old_chunk(block.index)
        if old.content is None:
            merged.array[:] = 0
        else:
            self._reader.load(old, merged, bench, self._reader.describe(write.what, block, old))
        merged.array[block.low - block.start : block.high - block.start] = covered.array
        return merged

    def _store(self, write: WriteTransfer, block: Block, source: Buffer, bench: Bench) -> Step:
        """Store a whole chunk from `source`, coded if that is smaller."""
        stored, codec, width = source, "", 1
        release: Callable[[], None] | None = None
        encoded = self._encoded(source.array, bench) if self._options.codec is not None else None
        if encoded is not None:
            area = bench.coded.popleft()
            release = lambda: bench.coded.append(area)  # noqa: E731 - undoes the line above
            stored, codec, width = area.resized(len(encoded[0])), *encoded[1:]
            stored.array[:] = np.frombuffer(encoded[0], np.uint8)
        try:
            checked = self._options.is_checked
            content = Content(
                stored_nbytes=stored.nbytes,
                checksum=digest_of(stored.array) if checked else None,
                codec=codec,
                width=width,
            )
            cell = self._cell_for(write, block, stored.nbytes)
            completion = self._submit(write, block, cell, stored, 0)
        except BaseException:
            if release is not None:
                release()
            raise

        def conclude() -> None:
            write.written[block.index] = Chunk(cell, content)
            self._meter.stored(
                plain_nbytes=block.end - block.start, stored_nbytes=content.stored_nbytes
            )

        return Step(completion, conclude, release)

    def _encoded(self, plain: ByteArray, bench: Bench) -> tuple[bytes, str, int] | None:
        """Return (coded bytes, codec, width), or None if that saves too little."""
        codec = self._options.codec
        if codec is None:
            return None
        scratch = bench.shuffled.array[: plain.nbytes]

        def encoded_nbytes(sample: ByteArray, width: int) -> int:
            return len(codec.encode(sample, width=width, scratch=scratch[: sample.nbytes]))

        with self._meter.encoding():
            width = self._options.shuffle or best_width(plain, encoded_nbytes)
            coded = codec.encode(plain, width=width, scratch=scratch)
        saved = plain.nbytes - len(coded)
        return (coded, codec.name, width) if saved * _LEAST_SAVING >= plain.nbytes else None

    def _store_parts(
        self, write: WriteTransfer, block: Block, covered: Buffer, bench: Bench
    ) -> None:
        """Store a chunk whose covered part the CPU cannot read: part by part. Blocks."""
        old = write.old_chunk(block.index)
        nbytes = block.end - block.start
        cell = self._cell_for(write, block, nbytes)
        low, high = block.low - block.start, block.high - block.start
        parts: list[tuple[Buffer, int]] = [(covered, low)]
        if old.content is not None:
            what = self._reader.describe(write.what, block, old)
            for start, end in ((0, low), (high, nbytes)):
                if start < end:
                    kept = bench.merged.part(start, end - start)
                    self._reader.copy_part(old, kept, start=start, what=what)
                    parts.append((kept, start))
        for part, start in parts:
            self._submit(write, block, cell, part, start).wait()
        write.written[block.index] = Chunk(cell, Content(nbytes))

    def _cell_for(self, write: WriteTransfer, block: Block, nbytes: int) -> Cell:
        """Return the cell for a new version of a chunk that is stored in `nbytes`.

        What `reserve` took is used for the first version, so that it cannot fail for room; one
        that needs less gets less if it can be had, and `reserve`'s room is given back.
        """
        old = write.old_chunk(block.index)
        if old.content is None and nbytes == old.cell.nbytes:
            return old.cell
        request = CellRequest(
            key=write.page.key, index=block.index, nbytes=nbytes, prefer=old.cell.inner
        )
        try:
            with explained(write.what):
                cell = self._inners.reserve(request)
        except TierFullError:
            if old.content is None:
                return old.cell
            raise
        write.fresh.append(cell)
        return cell

    def _submit(
        self, write: WriteTransfer, block: Block, cell: Cell, src: Buffer, offset: int
    ) -> Completion:
        what = self._reader.describe(write.what, block, Chunk(cell, None))
        with explained(what):
            completion = self._inners.tiers[cell.inner].write_from(
                cell.inner_key, src, offset=offset
            )
        return ExplainedCompletion(completion, what)
