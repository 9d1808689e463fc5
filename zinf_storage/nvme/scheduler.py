"""TransferScheduler: in which order reads, writes and commits run, and what happens when they end.

[Note: order] Writes of one key run one after the other, in the order they were submitted. A write
that finds no room waits as long as anything runs that may free some, and fails after that; writes
behind it wait with it, so none is overtaken for ever. A commit runs when every write submitted
before it ended, and commits run in order; each holds exactly what those writes left.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import InternalError, TierError, TierFullError, TransferError
from zinf_storage.nvme.blocks import ByteRange
from zinf_storage.nvme.commit import Captured, Committer
from zinf_storage.nvme.memory import TransferMemory
from zinf_storage.nvme.options import NvmeOptions
from zinf_storage.nvme.pages import Page, PageTable
from zinf_storage.nvme.transfer import (
    BlockMover,
    BlockQueue,
    ReadTransfer,
    TransferCompletion,
    WriteTransfer,
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Commit:
    """A commit, waiting or running."""

    completion: TransferCompletion
    captured: Captured
    """What it makes durable; final once `waits_for` is empty."""
    waits_for: set[WriteTransfer]
    """Writes submitted before it that did not end yet."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Queues:
    """What was submitted and did not end yet."""

    writes: dict[Page, deque[WriteTransfer]] = field(default_factory=dict)
    """Per page, in order of submission; only the first of each may run."""
    admission: deque[WriteTransfer] = field(default_factory=deque)
    """Firsts of their page that wait for room, in order."""
    commits: deque[_Commit] = field(default_factory=deque)
    committing: bool = False
    num_running: int = 0
    """Reads, writes and commits that workers have."""


class TransferScheduler:
    """Runs transfers and commits in worker threads.

    `lock` guards the page table, the free extents and the queues. I/O happens outside of it,
    except creating a segment. All workers are started at once, so that submitting never has to.
    """

    def __init__(
        self, table: PageTable, *, mover: BlockMover, committer: Committer, tier_name: str,
        options: NvmeOptions,
    ) -> None:  # fmt: skip
        """Start the workers. Raises TransferError if the system refuses a thread."""
        self.lock = threading.Lock()
        self._settled = threading.Condition(self.lock)
        self._table = table
        self._mover = mover
        self._committer = committer
        self._tier_name = tier_name
        self._options = options
        self._queues = _Queues()
        self._executor = _started_executor(options.num_threads, tier_name)

    def submit_read(self, page: Page, dst: Buffer, offset: int) -> Completion:
        """Submit a validated read of the version that is current now. Call with the lock held."""
        if not dst.nbytes:
            return CompletedTransfer()
        source = page.version
        what = f"{self._tier_name}: read of {page.key}"
        transfer = ReadTransfer(
            what=what,
            completion=TransferCompletion(what),
            memory=TransferMemory(dst),
            offset=offset,
            source=source,
            span=ByteRange(
                key_nbytes=source.nbytes,
                block_nbytes=source.block_nbytes,
                start=offset,
                end=offset + dst.nbytes,
            ),
            verify=self._options.verify_reads,
        )
        source.pins += 1
        self._launch(transfer)
        return transfer.completion

    def submit_write(self, page: Page, src: Buffer, offset: int) -> Completion:
        """Submit a validated write. Call with the lock held."""
        if not src.nbytes:
            return CompletedTransfer()
        what = f"{self._tier_name}: write of {page.key}"
        transfer = WriteTransfer(
            what=what,
            completion=TransferCompletion(what),
            memory=TransferMemory(src),
            offset=offset,
            nbytes=src.nbytes,
            page=page,
        )
        queued = self._queues.writes.setdefault(page, deque())
        queued.append(transfer)
        if len(queued) == 1:
            self._queues.admission.append(transfer)
            self._pump()
        return transfer.completion

    def submit_commit(self) -> Completion:
        """Submit a commit of what was submitted before. Call with the lock held."""
        commit = _Commit(
            completion=TransferCompletion(f"{self._tier_name}: flush"),
            captured={page: self._table.snapshot(page.version) for page in self._table},
            waits_for={write for queued in self._queues.writes.values() for write in queued},
        )
        self._queues.commits.append(commit)
        self._pump()
        return commit.completion

    def drain(self) -> None:
        """Return when nothing is queued or running. Call without the lock. Blocks."""
        with self._settled:
            self._settled.wait_for(self._is_idle)

    def shutdown(self) -> None:
        """End the workers. Call without the lock, after `drain`. Blocks."""
        self._executor.shutdown(wait=True)

    # What workers run. They hold no lock, and no reference into the caller's memory, when they
    # leave the block queue.

    def _run(self, transfer: ReadTransfer | WriteTransfer, blocks: BlockQueue) -> None:
        while (index := blocks.take()) is not None:
            try:
                transfer.move(index, self._mover)
            except Exception as exc:  # noqa: BLE001 - raised by the completion
                blocks.fail(_without_frames(exc))
        if blocks.leave():
            with self.lock:
                self._end(transfer, blocks.error)
                self._pump()

    def _run_commit(self, commit: _Commit) -> None:
        error: Exception | None = None
        try:
            self._committer.write(commit.captured)
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            error = _without_frames(exc)
        with self.lock:
            self._end_commit(commit, error)
            self._pump()

    # Everything below runs with the lock held.

    def _is_idle(self) -> bool:
        queues = self._queues
        return not (queues.num_running or queues.writes or queues.commits)

    def _pump(self) -> None:
        """Start whatever can start, and fail the writes that nothing can help any more."""
        queues = self._queues
        while True:
            refusal = self._admit_writes()
            self._start_commit()
            if refusal is None or queues.num_running:
                break
            self._end_write(queues.admission.popleft(), refusal)
        if self._is_idle():
            self._settled.notify_all()

    def _admit_writes(self) -> TierFullError | None:
        """Start queued writes in order; return why the first of the rest found no room."""
        admission = self._queues.admission
        while admission:
            write = admission[0]
            try:
                self._begin(write)
            except TierFullError as exc:
                return TierFullError(exc.errno, f"{write.what}: {exc.strerror}")
            except TierError as exc:
                self._end_write(admission.popleft(), _without_frames(exc))
            else:
                admission.popleft()
        return None

    def _begin(self, write: WriteTransfer) -> None:
        page = write.page
        if page.discarded:
            self._end_write(write, None)
            return
        source = page.version
        if source.is_written:
            nbytes = self._options.io_nbytes if write.is_whole else source.block_nbytes
            target = self._table.shadow(page, block_nbytes=nbytes)
        else:
            target = source
            target.pins += 1
        source.pins += 1
        write.begin(source, target)
        self._launch(write)

    def _launch(self, transfer: ReadTransfer | WriteTransfer) -> None:
        indices = transfer.indices()
        num_runners = min(self._options.num_threads, len(indices))
        blocks = BlockQueue(indices, num_runners=num_runners)
        self._queues.num_running += 1
        for _ in range(num_runners):
            if not self._hand_out(self._run, transfer, blocks):
                blocks.fail(_exiting(transfer.what))
                if blocks.leave():
                    self._end(transfer, blocks.error)

    def _start_commit(self) -> None:
        queues = self._queues
        while queues.commits and not queues.committing and not queues.commits[0].waits_for:
            commit = queues.commits[0]
            queues.committing = True
            queues.num_running += 1
            if not self._hand_out(self._run_commit, commit):
                self._end_commit(commit, _exiting(f"{self._tier_name}: flush"))

    def _hand_out(self, function: Callable[..., None], *args: object) -> bool:
        try:
            self._executor.submit(function, *args)
        except RuntimeError:
            # The interpreter is exiting and takes no more work.
            return False
        return True

    def _end(self, transfer: ReadTransfer | WriteTransfer, error: Exception | None) -> None:
        self._queues.num_running -= 1
        if isinstance(transfer, WriteTransfer):
            self._end_write(transfer, error)
            return
        transfer.memory = None
        transfer.source.unverified.difference_update(transfer.verified)
        try:
            self._table.unpin(transfer.source)
        except InternalError as exc:
            error = exc
        transfer.completion.settle(error)

    def _end_write(self, write: WriteTransfer, error: Exception | None) -> None:
        write.memory = None
        try:
            self._apply(write, succeeded=error is None)
        except InternalError as exc:
            # A bug of ours; whoever waits must hear of it rather than wait for ever.
            error = exc
        queued = self._queues.writes[write.page]
        queued.popleft()
        if queued:
            self._queues.admission.append(queued[0])
        else:
            del self._queues.writes[write.page]
        write.completion.settle(error)

    def _apply(self, write: WriteTransfer, *, succeeded: bool) -> None:
        """Flip the page and the commits that wait for the write, and drop its pins."""
        source, target = write.source, write.target
        if target is not None and succeeded:
            self._table.flip(write.page, target, write.merged_checksums())
        for commit in self._queues.commits:
            if write in commit.waits_for:
                commit.waits_for.remove(write)
                if target is not None and succeeded and write.page in commit.captured:
                    self._table.unpin(commit.captured[write.page].version)
                    commit.captured[write.page] = self._table.snapshot(target)
        if source is not None and target is not None:
            self._table.unpin(source)
            self._table.unpin(target)

    def _end_commit(self, commit: _Commit, error: Exception | None) -> None:
        queues = self._queues
        queues.num_running -= 1
        queues.committing = False
        queues.commits.popleft()
        try:
            for snapshot in self._committer.conclude(commit.captured, succeeded=error is None):
                self._table.unpin(snapshot.version)
        except InternalError as exc:
            error = exc
        commit.completion.settle(error)


def _started_executor(num_threads: int, tier_name: str) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"zinf-{tier_name}")
    gate = threading.Event()
    try:
        # A thread is started only when none is idle: the gate keeps each of them busy.
        for _ in range(num_threads):
            executor.submit(gate.wait)
    except RuntimeError as exc:
        gate.set()
        executor.shutdown(wait=True)
        raise TransferError(
            errno.EAGAIN,
            f"{tier_name}: the system refused one of {num_threads} threads: {exc}; lower "
            "NvmeOptions.num_threads",
        ) from exc
    gate.set()
    return executor


def _exiting(what: str) -> TransferError:
    return TransferError(errno.ESHUTDOWN, f"{what} was dropped: the interpreter is exiting")


def _without_frames(error: Exception) -> Exception:
    """Return `error` without tracebacks, whose frames would keep the caller's memory (law 6)."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
