"""TransferScheduler: in which order reads, writes and commits run, and what happens when they end.

[Note: order] Writes of one key run one after the other, in the order they were submitted. A write
that finds no room waits as long as anything runs that may free some, and fails after that; writes
behind it wait with it, so none is overtaken for ever. Where a write looks for room only while it
runs, one that found none goes back to the front and runs again, alone, once something ended. A
commit runs when every write submitted before it ended, and commits run in order; each holds
exactly what those writes left. Apart from that the lanes decide what is next; a read brings what
was current when it was submitted, however late it is served.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import InternalError, TierError, TierFullError, TransferCancelledError
from zinf_core.tier import Prefetch
from zinf_storage.transfers.backlog import Job
from zinf_storage.transfers.completion import PrefetchCompletion, TransferCompletion, prefetched
from zinf_storage.transfers.failures import exiting, without_frames
from zinf_storage.transfers.lanes import Lane
from zinf_storage.transfers.queues import Queues
from zinf_storage.transfers.runner import BlockRunner
from zinf_storage.transfers.transfer import (
    Commit,
    PageT_contra,
    Task,
    Transfer,
    TransferMaker,
    Write,
)

Settle = Callable[[Any, Exception | None], None]


class TransferScheduler(Generic[PageT_contra]):
    """Runs the transfers and commits of one tier in worker threads.

    The lock guards what `maker` knows, the queues and the runner's backlog. Bytes are moved
    without it.
    """

    def __init__(
        self,
        maker: TransferMaker[PageT_contra],
        *,
        tier_name: str,
        num_threads: int,
        window: int = 1,
        finds_room_late: bool = False,
        upkeep: Callable[[], Task | None] | None = None,
    ) -> None:
        """Start the workers. Raises TransferError if the system refuses a thread.

        Each sets up to `window` blocks moving before it finishes the first. With `finds_room_late`
        writes look for room while they run, not when they begin. Whenever something changed,
        `upkeep` is asked, with the lock held, for something to do between two commits.
        """
        self.lock = maker.lock
        self._settled = threading.Condition(self.lock)
        self._maker = maker
        self._tier_name = tier_name
        self._upkeep = upkeep
        self._queues = Queues(finds_room_late=finds_room_late)
        self._runner = BlockRunner(
            self.lock, num_threads=num_threads, window=window, tier_name=tier_name
        )

    def submit_read(self, page: PageT_contra, dst: Buffer, offset: int) -> Completion:
        """Submit a validated read of the version that is current now. Call with the lock held."""
        if not dst.nbytes:
            return CompletedTransfer()
        what = f"{self._tier_name}: read of {page.key}"
        read = self._maker.read(page, dst, offset, what=what)
        self._launch_read(read, Lane.DEMAND)
        return read.completion

    def submit_prefetch(self, page: PageT_contra, dst: Buffer, offset: int) -> Prefetch:
        """Submit a read as `submit_read` does, for nobody yet. Call with the lock held."""
        what = f"{self._tier_name}: prefetch of {page.key}"
        if not dst.nbytes:
            return prefetched(what)
        read = self._maker.read(page, dst, offset, what=what)
        job = self._launch_read(read, Lane.PREFETCH)
        return PrefetchCompletion(
            read.completion,
            cancel=partial(self._cancel, job),
            promote=partial(self._promote, job),
        )

    def submit_write(self, page: PageT_contra, src: Buffer, offset: int) -> Completion:
        """Submit a validated write. Call with the lock held."""
        if not src.nbytes:
            return CompletedTransfer()
        what = f"{self._tier_name}: write of {page.key}"
        write = self._maker.write(page, src, offset, what=what)
        if self._queues.add(write):
            self._pump()
        return write.completion

    def submit_commit(self) -> Completion:
        """Submit a commit of what was submitted before. Call with the lock held."""
        completion = TransferCompletion(f"{self._tier_name}: flush")
        self._queues.add_flush(self._maker.commit(), completion)
        self._pump()
        return completion

    def enter(self) -> None:
        """Note that a call of this thread must end before `drain`. Call with the lock held."""
        self._queues.num_running += 1

    def leave(self) -> None:
        """End what `enter` noted. Call with the lock held."""
        self._queues.num_running -= 1
        self._queues.num_ended += 1
        self._pump()

    def drain(self) -> None:
        """Return when nothing is queued or running. Call without the lock. Blocks."""
        with self._settled:
            self._settled.wait_for(lambda: self._queues.is_idle)

    def shutdown(self) -> None:
        """End the workers. Call without the lock, after `drain`. Blocks."""
        self._runner.close()

    def _cancel(self, job: Job) -> bool:
        task: Task | None = None
        with self.lock:
            if self._runner.withdraw(job):
                what = f"{job.transfer.what} was cancelled before it began"
                task = job.on_end(job.transfer, TransferCancelledError(what))
        if task is not None:
            task()
        return job.is_withdrawn

    def _promote(self, job: Job) -> None:
        with self.lock:
            self._runner.promote(job)

    def _run_commit(self, commit: Commit) -> None:
        error: Exception | None = None
        try:
            commit.run()
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            error = without_frames(exc)
        with self.lock:
            self._queues.retire_flush(error)
            self._pump()

    def _run_upkeep(self, task: Task) -> None:
        try:
            task()
        finally:
            with self.lock:
                self.leave()

    def _tidy(
        self, task: Task, settle: Callable[[Exception | None], None], error: Exception | None
    ) -> None:
        """Do what is to be done before a transfer counts as ended."""
        try:
            task()
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            error = without_frames(exc)
        with self.lock:
            settle(error)
            self._pump()

    # Everything below runs with the lock held.

    def _pump(self) -> None:
        """Start whatever can start, and fail the writes that nothing can help any more."""
        queues = self._queues
        while True:
            refusal = self._admit_writes() if queues.admission else None
            if self._upkeep is not None and not queues.is_flushing:
                self._start_upkeep(self._upkeep())
            if queues.flushes:
                self._start_commit()
            if refusal is None or queues.num_running:
                break
            queues.retire(queues.admission.popleft(), refusal)
        if queues.is_idle:
            self._settled.notify_all()

    def _admit_writes(self) -> TierFullError | None:
        """Start queued writes in order; return why the first of the rest found no room."""
        queues = self._queues
        while queues.admission:
            write = queues.admission[0]
            refusal = queues.refusal()
            if refusal is not None:
                return refusal
            if write.page.discarded:
                queues.retire(queues.admission.popleft(), None)
                continue
            try:
                write.begin()
            except TierFullError as exc:
                return TierFullError(exc.errno, f"{write.what}: {exc.strerror}")
            except TierError as exc:
                queues.retire(queues.admission.popleft(), without_frames(exc))
            else:
                self._launch_write(write)
        return None

    def _start_upkeep(self, task: Task | None) -> None:
        if task is not None and self._runner.run_alone(partial(self._run_upkeep, task)):
            self.enter()

    def _start_commit(self) -> None:
        queues = self._queues
        while queues.flushes and not queues.is_flushing and not queues.flushes[0].waits_for:
            commit = queues.flushes[0].commit
            queues.is_flushing = True
            queues.num_running += 1
            if not self._runner.run_alone(partial(self._run_commit, commit)):
                commit.abandon()
                queues.retire_flush(exiting(f"{self._tier_name}: flush"))

    def _launch_read(self, read: Transfer, lane: Lane) -> Job:
        self._queues.num_running += 1
        job = Job.of(read, lane, self._finish_read)
        if not self._runner.run(job):
            read.end(succeeded=False)
            self._queues.end_read(read, exiting(read.what))
        return job

    def _launch_write(self, write: Write) -> None:
        self._queues.begin_write(write)
        if not self._runner.run(Job.of(write, Lane.WRITE_BACK, self._finish_write)):
            write.end(succeeded=False)
            self._queues.end_write(write, exiting(write.what))

    def _finish_read(self, read: Transfer, error: Exception | None) -> Task | None:
        return self._finish(read, self._queues.end_read, error)

    def _finish_write(self, write: Write, error: Exception | None) -> Task | None:
        """Flip the page and the commits that wait for the write, then as `_finish`."""
        if error is None:
            try:
                write.flip()
                self._queues.include(write)
            except InternalError as exc:
                # A bug of ours; whoever waits must hear of it rather than wait for ever.
                error = without_frames(exc)
        return self._finish(write, self._queues.end_write, error)

    def _finish(self, transfer: Transfer, settle: Settle, error: Exception | None) -> Task | None:
        """Drop what the transfer held and settle it; return how, if not at once."""
        task: Task | None = None
        try:
            task = transfer.end(succeeded=error is None)
        except InternalError as exc:
            error = without_frames(exc)
        if task is not None:
            return partial(self._tidy, task, partial(settle, transfer), error)
        settle(transfer, error)
        self._pump()
        return None
