"""Backlog: the transfers under way, and which of their blocks wait, move, or have moved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zinf_storage.transfers.lanes import FRESH, Lane, choose
from zinf_storage.transfers.transfer import Task, Transfer

OnEnd = Callable[[Any, Exception | None], Task | None]


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A transfer under way. Guarded by the tier's lock."""

    transfer: Transfer
    lane: Lane
    on_end: OnEnd
    """Called with `transfer` and the first failure, None for success, when no worker has a block
    any more, the lock held. Returns what the worker is to do without the lock, if anything."""
    next_index: int
    """Block that a worker gets next."""
    end_index: int
    """Index behind the last block."""
    next_nbytes: int
    """Bytes of the next block."""
    has_begun: bool = False
    """Whether a worker ever got a block."""
    is_withdrawn: bool = False
    num_moving: int = 0
    """Blocks that workers have now."""
    error: Exception | None = None
    """First failure; no further block is handed out after it."""

    @classmethod
    def of(cls, transfer: Transfer, lane: Lane, on_end: OnEnd) -> Job:
        """Return the job of moving all blocks of `transfer`, which has at least one."""
        indices = transfer.indices()
        return cls(
            transfer=transfer,
            lane=lane,
            on_end=on_end,
            next_index=indices.start,
            end_index=indices.stop,
            next_nbytes=transfer.block_nbytes(indices.start),
        )


_Queue = OrderedDict[Job, None]


class Backlog:
    """Jobs by lane, each lane in the order of submission. Guarded by the tier's lock."""

    def __init__(self) -> None:
        """Start empty."""
        self._lanes: tuple[_Queue, _Queue, _Queue] = OrderedDict(), OrderedDict(), OrderedDict()
        """Per Lane, jobs of which at least one block waits."""
        self._state = FRESH
        self.num_waiting = 0
        """Blocks that wait."""
        self.num_moving = 0
        """Blocks that workers have."""

    def add(self, job: Job) -> None:
        """Queue all blocks of `job`."""
        self._lanes[job.lane][job] = None
        self.num_waiting += job.end_index - job.next_index

    def take(self) -> tuple[Job, int] | None:
        """Return the block to move next, None if none waits; `finish` must follow."""
        if not self.num_waiting:
            return None
        demand, prefetch, write_back = self._lanes
        chosen, self._state = choose(
            self._state,
            demand=_next_nbytes(demand),
            prefetch=_next_nbytes(prefetch),
            write_back=_next_nbytes(write_back),
        )
        job = next(iter(self._lanes[chosen]))
        index = job.next_index
        job.has_begun = True
        job.num_moving += 1
        job.next_index += 1
        self.num_moving += 1
        self.num_waiting -= 1
        if job.next_index == job.end_index:
            del self._lanes[chosen][job]
        else:
            job.next_nbytes = job.transfer.block_nbytes(job.next_index)
        return job, index

    def finish(self, job: Job, error: Exception | None) -> bool:
        """Note that a block was moved, or failed with `error`; return whether the job ended."""
        self.num_moving -= 1
        job.num_moving -= 1
        if error is not None and job.error is None:
            job.error = error
            self._drop(job)
        return not job.num_moving and job.next_index == job.end_index

    def withdraw(self, job: Job) -> bool:
        """Take `job` out if no worker got a block of it; return whether it is out."""
        if not job.has_begun and not job.is_withdrawn:
            job.is_withdrawn = True
            self._drop(job)
        return job.is_withdrawn

    def promote(self, job: Job) -> None:
        """Move what waits of `job` to the end of the demand lane."""
        if job.next_index < job.end_index and job.lane is not Lane.DEMAND:
            del self._lanes[job.lane][job]
            job.lane = Lane.DEMAND
            self._lanes[Lane.DEMAND][job] = None

    def _drop(self, job: Job) -> None:
        self.num_waiting -= job.end_index - job.next_index
        job.next_index = job.end_index
        self._lanes[job.lane].pop(job, None)


def _next_nbytes(queue: _Queue) -> int:
    return next(iter(queue)).next_nbytes if queue else 0
