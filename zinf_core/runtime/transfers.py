"""TransfersInFlight: submitted transfers, each with what must happen when it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from zinf_core.completion import Completion

Finish = Callable[[Exception | None], None]
"""Called once, with the error of the transfer or None; must not raise."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer in flight and what it keeps alive until it is done."""

    completion: Completion
    finish: Finish
    finished: bool = False


class TransfersInFlight:
    """Transfers in order of submission. Guarded by the lock of its owner."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        """Start with none."""
        self._queue: deque[Transfer] = deque()

    def __len__(self) -> int:
        """Return how many are not finished."""
        return sum(not transfer.finished for transfer in self._queue)

    def add(self, completion: Completion, finish: Finish) -> Transfer:
        """Take over `completion`; `finish` runs when it is found to be done."""
        transfer = Transfer(completion, finish)
        self._queue.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Block until `transfer` is done and finished; raise what it failed with.

        An interrupt (KeyboardInterrupt) leaves it in flight, to be waited for again.
        """
        error: Exception | None = None
        try:
            transfer.completion.wait()
        except Exception as exc:
            if not transfer.completion.done():
                raise
            error = exc
        if not transfer.finished:
            transfer.finished = True
            transfer.finish(error)
        if error is not None:
            raise error

    def reap(self) -> bool:
        """Finish every transfer that is done, without blocking; return whether there was one.

        Raises the first error found, after finishing that transfer.
        """
        done = [t for t in self._queue if t.finished or t.completion.done()]
        for transfer in done:
            self._queue.remove(transfer)
            if not transfer.finished:
                self.wait(transfer)
        return bool(done)

    def wait_oldest(self) -> bool:
        """Block until the oldest transfer is finished; return False if there is none."""
        while self._queue and self._queue[0].finished:
            self._queue.popleft()
        if not self._queue:
            return False
        self.wait(self._queue[0])
        return True
