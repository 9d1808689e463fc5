"""Worker threads of the tier, what they share of one transfer, and errors that come out of them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from zinf_core.errors import TransferError


class PartQueue:
    """The parts of one transfer still to be moved, and the first failure. Thread-safe.

    The lock guards the fields; runners take parts until none is left or one failed.
    """

    def __init__(self, indices: Iterable[int], *, num_runners: int) -> None:
        """Queue `indices` for `num_runners` runners, each of which must `leave` in the end."""
        self._lock = threading.Lock()
        self._indices: Iterator[int] = iter(indices)
        self._num_runners = num_runners
        self.error: Exception | None = None

    def take(self) -> int | None:
        """Return the next part, None if there is nothing more to do."""
        with self._lock:
            return None if self.error else next(self._indices, None)

    def fail(self, error: Exception) -> None:
        """Remember the first error and stop handing out parts."""
        with self._lock:
            if self.error is None:
                self.error = error

    def leave(self) -> bool:
        """Return whether the calling runner was the last one."""
        with self._lock:
            self._num_runners -= 1
            return self._num_runners == 0


def started_workers(num_threads: int, tier_name: str) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run. Raises TransferError if one is refused."""
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
            "num_threads",
        ) from exc
    gate.set()
    return executor


def without_frames(error: Exception) -> Exception:
    """Return `error` without tracebacks, whose frames would keep the caller's memory (law 6)."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def exiting(what: str) -> TransferError:
    """Return the error of a transfer that no worker takes any more."""
    return TransferError(errno.ESHUTDOWN, f"{what} was dropped: the interpreter is exiting")
