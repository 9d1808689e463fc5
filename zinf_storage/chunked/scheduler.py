"""ChunkScheduler: in which order reads, writes and commits run, and what happens when they end.

[Note: order] Writes of one key run one after the other, in the order they were submitted. A write
that found no room is tried again, alone, as long as anything ended meanwhile or still runs that
may have freed some; writes behind it wait. A commit runs when every write submitted before it
ended, and commits run in order; each holds exactly what those writes left.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from dataclasses import dataclass

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import InternalError, TransferError
from zinf_storage.chunked.commit import Committer
from zinf_storage.chunked.failures import without_frames
from zinf_storage.chunked.inners import InnerTiers
from zinf_storage.chunked.queues import Commit, Queues
from zinf_storage.chunked.reading import ChunkReader
from zinf_storage.chunked.scratch import Bench, Scratch
from zinf_storage.chunked.table import ChunkTable, Entry
from zinf_storage.chunked.transfer import (
    ChunkedCompletion,
    ChunkQueue,
    ReadTransfer,
    Step,
    WriteTransfer,
)
from zinf_storage.chunked.workers import Workers
from zinf_storage.chunked.writing import ChunkWriter
from zinf_storage.nvme.blocks import ByteRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What moves chunks for a scheduler."""

    inners: InnerTiers
    reader: ChunkReader
    writer: ChunkWriter
    committer: Committer
    scratch: Scratch
    workers: Workers
    num_threads: int
    window: int
    """Chunks that each worker has in flight."""


class ChunkScheduler:
    """Runs transfers and commits in worker threads.

    `lock` guards the table and the queues. Nothing is asked of an inner tier under it.
    """

    def __init__(self, table: ChunkTable, machinery: Machinery, *, tier_name: str) -> None:
        """Schedule for the keys of `table`."""
        self.lock = threading.Lock()
        self._settled = threading.Condition(self.lock)
        self._table = table
        self._machinery = machinery
        self._tier_name = tier_name
        self._queues = Queues()

    def submit_read(self, entry: Entry, dst: Buffer, offset: int) -> Completion:
        """Submit a validated read of the version that is current now. Call with the lock held."""
        if not dst.nbytes:
            return CompletedTransfer()
        what = f"{self._tier_name}: read of {entry.key}"
        read = ReadTransfer(
            what=what,
            completion=ChunkedCompletion(what),
            buffer=dst,
            source=entry.version,
            span=self._span(entry, dst, offset),
        )
        read.source.pins += 1
        self._launch(read)
        return read.completion

    def submit_write(self, entry: Entry, src: Buffer, offset: int) -> Completion:
        """Submit a validated write. Call with the lock held."""
        if not src.nbytes:
            return CompletedTransfer()
        what = f"{self._tier_name}: write of {entry.key}"
        write = WriteTransfer(
            what=what,
            completion=ChunkedCompletion(what),
            buffer=src,
            entry=entry,
            span=self._span(entry, src, offset),
        )
        self._queues.add_write(write)
        self._pump()
        return write.completion

    def submit_commit(self) -> Completion:
        """Submit a commit of what was submitted before. Call with the lock held."""
        captured = {entry: entry.version for entry in self._table}
        for version in captured.values():
            version.pins += 1
        commit = Commit(
            completion=ChunkedCompletion(f"{self._tier_name}: flush"),
            captured=captured,
            waits_for={write for queued in self._queues.writes.values() for write in queued},
        )
        self._queues.commits.append(commit)
        self._pump()
        return commit.completion

    def enter(self) -> None:
        """Note that a call of this thread must end before `drain`. Call with the lock held."""
        self._queues.num_running += 1

    def leave(self) -> None:
        """End what `enter` noted, giving unused cells back. Call without the lock. May block."""
        with self.lock:
            unused = self._table.take_unused()
        self._machinery.inners.discard(unused)
        with self.lock:
            self._queues.num_running -= 1
            self._queues.num_ended += 1
            self._pump()

    def drain(self) -> None:
        """Return when nothing is queued or running. Call without the lock. Blocks."""
        with self._settled:
            self._settled.wait_for(lambda: self._queues.is_idle)

    # What workers run. They hold no lock, and no reference into the caller's memory, when they
    # leave the chunk queue.

    def _run(self, transfer: ReadTransfer | WriteTransfer, chunks: ChunkQueue) -> None:
        with self._machinery.scratch.lease() as bench:
            self._move(transfer, chunks, bench)
        if chunks.leave():
            self._end(transfer, chunks.error)

    def _move(
        self, transfer: ReadTransfer | WriteTransfer, chunks: ChunkQueue, bench: Bench
    ) -> None:
        """Move chunks until none is left, some in flight while the next is made ready."""
        machinery = self._machinery
        in_flight: deque[Step] = deque()
        index = chunks.take()
        while index is not None or in_flight:
            try:
                if index is not None:
                    if isinstance(transfer, ReadTransfer):
                        in_flight.append(machinery.reader.start(transfer, index, bench))
                    else:
                        in_flight.append(machinery.writer.start(transfer, index, bench))
                if len(in_flight) >= machinery.window or index is None:
                    in_flight.popleft().finish()
            except Exception as exc:  # noqa: BLE001 - raised by the completion
                chunks.fail(without_frames(exc))
            index = chunks.take()

    def _end(self, transfer: ReadTransfer | WriteTransfer, error: Exception | None) -> None:
        """Account for a transfer that ended, give back what nobody needs, start what waited."""
        write = transfer if isinstance(transfer, WriteTransfer) else None
        with self.lock:
            try:
                if write is not None and error is None:
                    self._apply(write)
                self._unpin_source(transfer)
            except InternalError as exc:
                # A bug of ours; whoever waits must hear of it rather than wait for ever.
                error = exc
            unused = self._table.take_unused()
        if write is not None and error is not None:
            unused += write.fresh
        self._machinery.inners.discard(unused)
        with self.lock:
            self._queues.num_running -= 1
            if write is not None:
                self._queues.num_writing -= 1
            if write is not None and self._queues.may_find_room(write, error):
                self._queues.starved.append(write)
            else:
                self._settle(transfer, error)
            self._pump()

    def _run_commit(self, commit: Commit) -> None:
        committer, error = self._machinery.committer, None
        try:
            committer.write(commit.captured)
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            error = without_frames(exc)
        with self.lock:
            try:
                for version in committer.conclude(commit.captured, succeeded=error is None):
                    self._table.unpin(version)
            except InternalError as exc:
                error = exc
            unused = self._table.take_unused()
        self._machinery.inners.discard(unused)
        try:
            if error is None:
                committer.tidy()
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            error = without_frames(exc)
        with self.lock:
            self._end_commit(commit, error)
            self._pump()

    # Everything below runs with the lock held.

    def _span(self, entry: Entry, buffer: Buffer, offset: int) -> ByteRange:
        return ByteRange(
            key_nbytes=entry.nbytes,
            block_nbytes=self._table.chunk_nbytes,
            start=offset,
            end=offset + buffer.nbytes,
        )

    def _pump(self) -> None:
        """Start whatever can start."""
        queues = self._queues
        while (write := queues.next_write()) is not None:
            self._begin(write)
        while (commit := queues.next_commit()) is not None:
            self._begin_commit(commit)
        if queues.is_idle:
            self._settled.notify_all()

    def _begin(self, write: WriteTransfer) -> None:
        if write.entry.discarded:
            self._settle(write, None)
            return
        write.begin(write.entry.version, num_ended=self._queues.num_ended)
        write.entry.version.pins += 1
        self._queues.num_writing += 1
        self._launch(write)

    def _launch(self, transfer: ReadTransfer | WriteTransfer) -> None:
        indices = transfer.span.touched()
        num_runners = min(self._machinery.num_threads, len(indices))
        chunks = ChunkQueue(indices, num_runners=num_runners)
        self._queues.num_running += 1
        for _ in range(num_runners):
            if not self._machinery.workers.hand_out(self._run, transfer, chunks):
                chunks.fail(_exiting(transfer.what))
                if chunks.leave():
                    self._abandon(transfer, chunks.error)

    def _abandon(self, transfer: ReadTransfer | WriteTransfer, error: Exception | None) -> None:
        """End a transfer that no worker will run."""
        self._queues.num_running -= 1
        if isinstance(transfer, WriteTransfer):
            self._queues.num_writing -= 1
        self._unpin_source(transfer)
        self._settle(transfer, error)

    def _unpin_source(self, transfer: ReadTransfer | WriteTransfer) -> None:
        if transfer.source is not None:
            self._table.unpin(transfer.source)

    def _apply(self, write: WriteTransfer) -> None:
        """Flip the key, and in the commits that wait for the write, to what was written."""
        if write.source is None:
            raise InternalError(f"{write.what} ended before it was begun")
        version = self._table.derive(write.source, write.written)
        self._table.flip(write.entry, version)
        for commit in self._queues.commits:
            if write in commit.waits_for and write.entry in commit.captured:
                self._table.unpin(commit.captured[write.entry])
                commit.captured[write.entry] = version
                version.pins += 1
        self._table.unpin(version)

    def _settle(self, transfer: ReadTransfer | WriteTransfer, error: Exception | None) -> None:
        transfer.buffer = None
        self._queues.num_ended += 1
        if isinstance(transfer, WriteTransfer):
            self._queues.retire_write(transfer)
        transfer.completion.settle(error)

    def _begin_commit(self, commit: Commit) -> None:
        self._queues.committing = True
        self._queues.num_running += 1
        if not self._machinery.workers.hand_out(self._run_commit, commit):
            for version in commit.captured.values():
                self._table.unpin(version)
            self._end_commit(commit, _exiting(f"{self._tier_name}: flush"))

    def _end_commit(self, commit: Commit, error: Exception | None) -> None:
        queues = self._queues
        queues.num_running -= 1
        queues.num_ended += 1
        queues.committing = False
        queues.commits.popleft()
        commit.completion.settle(error)


def _exiting(what: str) -> TransferError:
    return TransferError(errno.ESHUTDOWN, f"{what} was dropped: the interpreter is exiting")
