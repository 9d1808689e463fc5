"""ChunkReader: brings chunks from the inner tiers into memory, checked and decoded."""

from __future__ import annotations

from collections.abc import Mapping

from zinf_core.buffers import Buffer, ByteArray, HostBuffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import CorruptDataError, InternalError
from zinf_storage.checksum import digest_of
from zinf_storage.chunked.codecs import Codec
from zinf_storage.chunked.failures import explained
from zinf_storage.chunked.index import Content
from zinf_storage.chunked.inners import InnerTiers
from zinf_storage.chunked.meter import CodecMeter
from zinf_storage.chunked.scratch import Bench
from zinf_storage.chunked.table import Chunk
from zinf_storage.chunked.transfer import ReadTransfer, Step, buffer_of
from zinf_storage.transfers.blocks import Block


class ChunkReader:
    """Reads one chunk at a time. Stateless but for the meter, so any worker may call it."""

    def __init__(
        self, inners: InnerTiers, *, codecs: Mapping[str, Codec], meter: CodecMeter
    ) -> None:
        """Decode with `codecs`, by name."""
        self._inners = inners
        self._codecs = codecs
        self._meter = meter

    def start(self, read: ReadTransfer, index: int, bench: Bench) -> Step:
        """Submit the read of a chunk, or of the part of it that `read` covers.

        Plain bytes go straight into the caller's memory. A part of a chunk that is checked or
        coded takes the way over `bench`, and is there when this returns: may block. Raises
        CorruptDataError, TransferError.
        """
        block = read.span.block(index)
        chunk = read.source.chunks[index]
        dst = buffer_of(read).part(block.low - read.span.start, block.high - block.low)
        content = chunk.content
        what = self.describe(read.what, block, chunk)
        if content is None or (
            not content.codec and (content.checksum is None or block.is_covered)
        ):
            completion = self._submit(chunk, dst, block.low - block.start, what)
            return Step(completion, lambda: _verify(content, dst, what))
        if block.is_covered:
            return self._start_coded(chunk, content, dst.array, bench, what)
        merged = bench.merged.resized(block.end - block.start)
        self.load(chunk, merged, bench, what)
        dst.array[:] = merged.array[block.low - block.start : block.high - block.start]
        return Step(CompletedTransfer(), lambda: None)

    def load(self, chunk: Chunk, dst: HostBuffer, bench: Bench, what: str) -> None:
        """Fill `dst` with all of a chunk that was written. Blocks. Raises as `start`."""
        content = chunk.content
        if content is None:
            raise InternalError(f"{what}: nothing was written there")
        if content.codec:
            self._start_coded(chunk, content, dst.array, bench, what).finish()
        else:
            completion = self._submit(chunk, dst, 0, what)
            Step(completion, lambda: _verify(content, dst, what)).finish()

    def copy_part(self, chunk: Chunk, dst: HostBuffer, *, start: int, what: str) -> None:
        """Fill `dst` with plain bytes of a chunk from `start`. Blocks. Raises as `start`."""
        self._submit(chunk, dst, start, what).wait()

    def describe(self, what: str, block: Block, chunk: Chunk) -> str:
        """Return how messages call a transfer of `block` with the tier that `chunk` lies on."""
        where = self._inners.names[chunk.cell.inner]
        return f"{what}, bytes {block.start} to {block.end} on {where}"

    def _start_coded(
        self, chunk: Chunk, content: Content, dst: ByteArray, bench: Bench, what: str
    ) -> Step:
        area = bench.coded.popleft()
        coded = area.resized(content.stored_nbytes)

        def conclude() -> None:
            _verify(content, coded, what)
            scratch = bench.shuffled.array[: dst.nbytes]
            with explained(what), self._meter.decoding(dst.nbytes):
                self._codecs[content.codec].decode(
                    coded.array, dst, width=content.width, scratch=scratch
                )

        try:
            completion = self._submit(chunk, coded, 0, what)
        except BaseException:
            bench.coded.append(area)
            raise
        return Step(completion, conclude, lambda: bench.coded.append(area))

    def _submit(self, chunk: Chunk, dst: Buffer, offset: int, what: str) -> Completion:
        cell = chunk.cell
        with explained(what):
            completion = self._inners.tiers[cell.inner].read_into(
                cell.inner_key, dst, offset=offset
            )
        return ExplainedCompletion(completion, what)


class ExplainedCompletion:
    """An inner tier's completion that raises in the words of the tier above."""

    __slots__ = ("_inner", "_what")

    def __init__(self, inner: Completion, what: str) -> None:
        """Stand for `inner`, which moves `what`."""
        self._inner = inner
        self._what = what

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait as `Completion.wait`."""
        with explained(self._what):
            self._inner.wait(timeout_s)


def _verify(content: Content | None, stored: Buffer, what: str) -> None:
    if content is None or content.checksum is None:
        return
    found = digest_of(stored.array)
    if found != content.checksum:
        raise CorruptDataError(
            f"{what} failed: {stored.nbytes} stored bytes have checksum {found:016x} instead of "
            f"{content.checksum:016x}; restore the inner tier from a copy or write the key anew"
        )
