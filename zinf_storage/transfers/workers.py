"""Workers: the threads of one tier, all started at once, and how they come to an end.

[Note: exit] The interpreter waits for ordinary threads before it calls any `atexit` function, so
a thread that waits for work would keep a program from ending that never closed its tier. An
executor's thread, and only that, is told to leave before. So one thread joins the executor's and
then sends the others home, after what they have. The executor's thread also leaves when the
executor is collected; the threads refer to nothing of the tier while they are idle, so a tier that
was dropped without `close` loses its threads as well.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final

from zinf_core.errors import ConfigError, TransferError
from zinf_storage.transfers.transfer import Task

_MAX_THREADS: Final = 1024


def require_threads(what: str, num_threads: int) -> None:
    """Raise ConfigError unless a tier may have `num_threads`; `what` names its settings."""
    if not 1 <= num_threads <= _MAX_THREADS:
        raise ConfigError(f"{what}: num_threads = {num_threads} is not 1 to {_MAX_THREADS}")


class Workers:
    """Threads that call the functions handed to them.

    One more thread runs what takes long and does not move blocks (commits), one function at a
    time, so that it never holds up a transfer.
    """

    def __init__(self, num_threads: int, *, tier_name: str) -> None:
        """Start `num_threads` threads and two helpers. Raises TransferError if one is refused."""
        name = f"zinf-{tier_name}"
        self._tasks = _Tasks(num_threads)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-commit")
        self._threads: list[threading.Thread] = []
        try:
            last = self._executor.submit(threading.current_thread).result()
            self._start(f"{name}-exit", _dismiss, last, self._tasks)
            for number in range(num_threads):
                self._start(f"{name}-{number}", _serve, self._tasks)
        except RuntimeError as exc:
            self.close()
            raise TransferError(
                errno.EAGAIN,
                f"{tier_name}: the system refused one of {num_threads + 2} threads: {exc}; lower "
                "num_threads",
            ) from exc

    def call(self, function: Task) -> bool:
        """Let some thread call `function`; False if the threads were sent home. Never blocks."""
        return self._tasks.put(function)

    def call_alone(self, function: Task) -> bool:
        """Let the thread for long work call `function`; False if the interpreter is exiting."""
        try:
            self._executor.submit(function)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Return when everything handed over was called and the threads ended. Blocks."""
        self._executor.shutdown(wait=True)
        self._tasks.end()
        for thread in self._threads:
            thread.join()

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name)
        thread.start()
        self._threads.append(thread)


class _Tasks:
    """Functions to call, in order; thread-safe. The lock guards `_has_ended`."""

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._num_threads = num_threads
        self._has_ended = False
        self._lock = threading.Lock()

    def put(self, function: Task) -> bool:
        with self._lock:
            if not self._has_ended:
                self._queue.put(function)
            return not self._has_ended

    def get(self) -> Task | None:
        return self._queue.get()

    def end(self) -> None:
        """Let every thread leave when it has called what was put so far."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                for _ in range(self._num_threads):
                    self._queue.put(None)


def _serve(tasks: _Tasks) -> None:
    while (function := tasks.get()) is not None:
        function()
        del function


def _dismiss(last: threading.Thread, tasks: _Tasks) -> None:
    last.join()
    tasks.end()
