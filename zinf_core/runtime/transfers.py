"""TransfersInFlight: submitted transfers, each with what must happen when it is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from zinf_core.completion import Completion
from zinf_core.errors import ZinfError
from zinf_core.tier import Prefetch

Finish = Callable[[Exception | None], None]
"""Called once, with the error of the transfer or None; must not raise."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer in flight and what it keeps alive until it is done."""

    completion: Completion
    finish: Finish
    is_ahead: bool = False
    """A read that nobody waits for: if it fails, whoever needs the bytes reads them again."""
    finished: bool = False


class TransfersInFlight:
    """Transfers in order of submission. Guarded by the lock of its owner."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        """Start with none."""
        self._pending: dict[Transfer, None] = {}

    def __len__(self) -> int:
        """Return how many are not finished."""
        return len(self._pending)

    def add(self, completion: Completion, finish: Finish, *, is_ahead: bool = False) -> Transfer:
        """Take over `completion`; `finish` runs when it is found to be done."""
        transfer = Transfer(completion, finish, is_ahead)
        self._pending[transfer] = None
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Block until `transfer` is done and finished; raise what it failed with.

        An interrupt (KeyboardInterrupt) leaves it in flight, to be waited for again.
        """
        completion = transfer.completion
        if transfer.is_ahead and isinstance(completion, Prefetch):
            completion.promote()
        try:
            completion.wait()
        except Exception as exc:
            if completion.done():
                self._finish(transfer, exc)
            raise
        self._finish(transfer, None)

    def _finish(self, transfer: Transfer, error: Exception | None) -> None:
        if not transfer.finished:
            transfer.finished = True
            del self._pending[transfer]
            transfer.finish(error)

    def reap(self) -> bool:
        """Finish every transfer that is done, without blocking; return whether there was one.

        Raises the first error found, after finishing that transfer; not those of reads ahead.
        """
        done = [transfer for transfer in self._pending if transfer.completion.done()]
        for transfer in done:
            self._wait_for_room(transfer)
        return bool(done)

    def wait_oldest(self) -> bool:
        """Block until the oldest transfer is finished; return False if there is none."""
        oldest = next(iter(self._pending), None)
        if oldest is None:
            return False
        self._wait_for_room(oldest)
        return True

    def _wait_for_room(self, transfer: Transfer) -> None:
        """Wait as someone who does not need the bytes themselves."""
        with suppress(*((ZinfError,) if transfer.is_ahead else ())):
            self.wait(transfer)
