"""Workers: the threads of a ChunkedTier, all started when it opens."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from zinf_core.errors import TransferError


class Workers:
    """A fixed number of threads that run what they are handed, in order. Thread-safe."""

    def __init__(self, num_threads: int, *, tier_name: str) -> None:
        """Start the threads. Raises TransferError if the system refuses one."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"zinf-{tier_name}")
        gate = threading.Event()
        try:
            # A thread is started only when none is idle: the gate keeps each of them busy.
            for _ in range(num_threads):
                self._executor.submit(gate.wait)
        except RuntimeError as exc:
            gate.set()
            self.close()
            raise TransferError(
                errno.EAGAIN,
                f"{tier_name}: the system refused one of {num_threads} threads: {exc}; lower "
                "num_threads",
            ) from exc
        gate.set()

    def hand_out(self, function: Callable[..., None], *args: object) -> bool:
        """Have a worker call `function`; return False if the interpreter is exiting."""
        try:
            self._executor.submit(function, *args)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """End the threads once they have nothing to do. Blocks."""
        self._executor.shutdown(wait=True)
