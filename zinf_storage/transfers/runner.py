"""BlockRunner: has workers move the blocks of jobs, in the order that the lanes ask for."""

from __future__ import annotations

import threading
from collections import deque

from zinf_storage.transfers.backlog import Backlog, Job
from zinf_storage.transfers.failures import without_frames
from zinf_storage.transfers.transfer import Step, Task
from zinf_storage.transfers.workers import Workers

_Moved = tuple[Job, Exception | None]


class BlockRunner:
    """Runs jobs. A worker that is called moves blocks until none waits; few calls are needed.

    `lock` is the tier's: it must be held by whoever calls a method, except `close`, and is held
    when a job's `on_end` is called. Blocks are moved without it.
    """

    def __init__(
        self, lock: threading.Lock, *, num_threads: int, window: int, tier_name: str
    ) -> None:
        """Start `num_threads` workers, each of which sets up to `window` blocks moving before it
        finishes the first. Raises TransferError if the system refuses a thread."""
        self._lock = lock
        self._num_threads = num_threads
        self._window = window
        self._backlog = Backlog()
        self._num_active = 0
        """Workers that were called and did not find the backlog empty since."""
        self._workers = Workers(num_threads, tier_name=tier_name)

    def run(self, job: Job) -> bool:
        """Have all blocks of `job` moved; False, and nothing done, if the workers are gone."""
        self._backlog.add(job)
        num_blocks = self._backlog.num_waiting + self._backlog.num_moving
        wanted = min(num_blocks, self._num_threads)
        while self._num_active < wanted and self._workers.call(self._work):
            self._num_active += 1
        if not self._num_active:
            self._backlog.withdraw(job)
        return self._num_active > 0

    def run_alone(self, function: Task) -> bool:
        """Have `function` called beside the blocks, after those handed over before; False if the
        interpreter is exiting."""
        return self._workers.call_alone(function)

    def withdraw(self, job: Job) -> bool:
        """Give `job` up if no worker has begun it; return whether this call did."""
        return not job.is_withdrawn and self._backlog.withdraw(job)

    def promote(self, job: Job) -> None:
        """Serve what is left of `job` in the demand lane from now on."""
        self._backlog.promote(job)

    def close(self) -> None:
        """End the workers when they are through. Call without the lock. Blocks."""
        self._workers.close()

    def _work(self) -> None:
        """Move blocks until none waits."""
        moving: deque[tuple[Job, Step]] = deque()
        moved: _Moved | None = None
        while True:
            taken, task = None, None
            with self._lock:
                if moved is not None:
                    job, error = moved
                    if self._backlog.finish(job, error):
                        task = job.on_end(job.transfer, job.error)
                if task is None:
                    taken = self._backlog.take()
                    if taken is None and not moving:
                        self._num_active -= 1
                        return
            if task is None:
                moved = self._move(taken, moving)
            else:
                moved = None
                task()

    def _move(
        self, taken: tuple[Job, int] | None, moving: deque[tuple[Job, Step]]
    ) -> _Moved | None:
        """Set the block `taken`, if any, moving; return one that was moved, None if none is due.

        Nothing of this call refers to the caller's memory when it returns.
        """
        try:
            if taken is not None:
                job, index = taken
                step = job.transfer.move(index)
                if step is None:
                    return job, None
                moving.append((job, step))
                if len(moving) < self._window:
                    return None
            job, step = moving.popleft()
            step.finish()
        except Exception as exc:  # noqa: BLE001 - raised by the completion
            return job, without_frames(exc)
        return job, None
