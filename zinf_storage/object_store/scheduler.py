"""TransferScheduler: in which order reads, writes and commits run, and what happens when they end.

[Note: order] Writes of one key run one after the other, in the order they were submitted. A write
that finds no room within the capacity waits as long as anything runs that may free some, and
fails after that. A commit holds exactly what was submitted before it. Workers go from transfer to
transfer part by part, so a large one does not keep others waiting.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import InternalError, TierError, TierFullError
from zinf_storage.nvme.completion import TransferCompletion
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.commit import Captured, Committer
from zinf_storage.object_store.pages import Page, PageTable
from zinf_storage.object_store.sweep import Sweeper
from zinf_storage.object_store.transfer import PartMover, ReadTransfer, WriteTransfer
from zinf_storage.object_store.workers import PartQueue, exiting, started_workers, without_frames

_Transfer = ReadTransfer | WriteTransfer


@dataclass(slots=True, kw_only=True, eq=False)
class _Commit:
    """A commit, waiting or running."""

    completion: TransferCompletion
    captured: Captured
    """What it makes durable, pinned; final once `waits_for` is empty."""
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
    """Reads, writes, commits and sweeps that workers have."""


class TransferScheduler:
    """Runs transfers and commits in worker threads, all started at once.

    `lock` guards the page table and the queues; requests are made outside of it.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        bucket: Bucket,
        mover: PartMover,
        committer: Committer,
        tier_name: str,
        num_threads: int,
    ) -> None:
        """Start the workers. Raises TransferError if the system refuses a thread."""
        self.lock = threading.Lock()
        self._settled = threading.Condition(self.lock)
        self._table = table
        self.sweeper = Sweeper(table, bucket, lock=self.lock, tier_name=tier_name)
        self._mover = mover
        self._committer = committer
        self._tier_name = tier_name
        self._num_threads = num_threads
        self._queues = _Queues()
        self._executor = started_workers(num_threads, tier_name)

    def submit_read(self, page: Page, dst: Buffer, offset: int) -> Completion:
        """Submit a validated read of the version that is current now. Call with the lock held."""
        if not dst.nbytes:
            return CompletedTransfer()
        what = f"{self._tier_name}: read of {page.key}"
        transfer = ReadTransfer.of(what, self._table.pin(page.version), dst, offset)
        self._launch(transfer)
        return transfer.completion

    def submit_write(self, page: Page, src: Buffer, offset: int) -> Completion:
        """Submit a validated write. Call with the lock held."""
        if not src.nbytes:
            return CompletedTransfer()
        transfer = WriteTransfer.of(f"{self._tier_name}: write of {page.key}", page, src, offset)
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
            captured={page: self._table.pin(page.version) for page in self._table},
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

    # What workers run. They hold no lock while they wait for a request.

    def _run(self, transfer: _Transfer, parts: PartQueue, index: int | None = None) -> None:
        index = parts.take() if index is None else index
        if index is not None:
            try:
                self._mover.move(transfer, index)
            except Exception as exc:  # noqa: BLE001 - raised by the completion
                parts.fail(without_frames(exc))
            index = parts.take()
            if index is not None:
                if self._hand_out(self._run, transfer, parts, index):
                    return
                parts.fail(exiting(transfer.what))
        if parts.leave():
            with self.lock:
                self._end(transfer, parts.error)
                self._pump()

    def _run_commit(self, commit: _Commit) -> None:
        error: Exception | None = None
        # Makes room for the manifest. If it fails, so does the sweep below, which tells.
        with contextlib.suppress(TierError):
            self.sweeper.sweep()
        try:
            self._committer.write(commit.captured)
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            error = without_frames(exc)
        with self.lock:
            error = self._conclude(commit, error)
        if error is None:
            try:
                self.sweeper.sweep()
            except Exception as exc:  # noqa: BLE001 - raised by the completion
                error = without_frames(exc)
        with self.lock:
            self._end_commit(commit, error)
            self._pump()

    def _run_sweep(self) -> None:
        # After a failure the names are garbage again; the next flush tries once more and tells.
        with contextlib.suppress(TierError):
            self.sweeper.sweep()
        with self.lock:
            self._queues.num_running -= 1
            self.sweeper.is_running = False
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
            self._start_sweep()
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
            if write.page.discarded:
                self._end_write(admission.popleft(), None)
                continue
            try:
                target, touched = self._table.shadow(write.page, write.offset, write.nbytes)
            except TierFullError as exc:
                return TierFullError(exc.errno, f"{write.what}: {exc.strerror}")
            admission.popleft()
            write.begin(self._table.pin(write.page.version), target, touched)
            self._launch(write)
        return None

    def _launch(self, transfer: _Transfer) -> None:
        indices = transfer.indices()
        num_runners = min(self._num_threads, len(indices))
        parts = PartQueue(indices, num_runners=num_runners)
        self._queues.num_running += 1
        for _ in range(num_runners):
            if not self._hand_out(self._run, transfer, parts):
                parts.fail(exiting(transfer.what))
                if parts.leave():
                    self._end(transfer, parts.error)

    def _start_sweep(self) -> None:
        if not self._queues.committing and self.sweeper.is_due():
            self.sweeper.is_running = self._hand_out(self._run_sweep)
            self._queues.num_running += self.sweeper.is_running

    def _start_commit(self) -> None:
        queues = self._queues
        while queues.commits and not (queues.committing or self.sweeper.is_running):
            if queues.commits[0].waits_for:
                break
            commit = queues.commits[0]
            queues.committing = True
            queues.num_running += 1
            if not self._hand_out(self._run_commit, commit):
                for version in commit.captured.values():
                    self._table.unpin(version)
                self._end_commit(commit, exiting(f"{self._tier_name}: flush"))

    def _hand_out(self, function: Callable[..., None], *args: object) -> bool:
        try:
            self._executor.submit(function, *args)
        except RuntimeError:
            # The interpreter is exiting and takes no more work.
            return False
        return True

    def _end(self, transfer: _Transfer, error: Exception | None) -> None:
        self._queues.num_running -= 1
        if isinstance(transfer, WriteTransfer):
            self._end_write(transfer, error)
            return
        transfer.buffer = None
        try:
            self._table.unpin(transfer.source)
        except InternalError as exc:
            # A bug of ours; whoever waits must hear of it rather than wait for ever.
            error = exc
        transfer.completion.settle(error)

    def _end_write(self, write: WriteTransfer, error: Exception | None) -> None:
        write.buffer = None
        self.sweeper.is_urgent |= error is not None
        try:
            self._apply(write, succeeded=error is None)
        except InternalError as exc:
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
            self._table.flip(write.page, target)
        for commit in self._queues.commits:
            if write in commit.waits_for:
                commit.waits_for.remove(write)
                if target is not None and succeeded and write.page in commit.captured:
                    self._table.unpin(commit.captured[write.page])
                    commit.captured[write.page] = self._table.pin(target)
        if source is not None and target is not None:
            self._table.unpin(source)
            self._table.unpin(target)

    def _conclude(self, commit: _Commit, error: Exception | None) -> Exception | None:
        """Drop the pins that the commit made superfluous; return its error."""
        versions, names = self._committer.conclude(commit.captured, succeeded=error is None)
        self._table.garbage += names
        try:
            for version in versions:
                self._table.unpin(version)
        except InternalError as exc:
            return exc
        return error

    def _end_commit(self, commit: _Commit, error: Exception | None) -> None:
        queues = self._queues
        queues.num_running -= 1
        queues.committing = False
        queues.commits.popleft()
        commit.completion.settle(error)
