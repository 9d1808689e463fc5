"""Broken tiers, one bug each, that show only while a flush is in flight."""

from __future__ import annotations

import threading

from planted_bytes import Later
from planted_crash import CrashSuite, FileTier, linger

from zinf_core.completion import Completion
from zinf_core.errors import TransferTimeoutError
from zinf_core.keys import TensorKey
from zinf_core.testing import DictTier


class LateFlush(DictTier):
    """Sound: a flush copies what there was when it was submitted, when it is waited for."""

    def __init__(self, medium: dict[TensorKey, bytes]) -> None:
        super().__init__(medium=medium)
        self._own_medium = medium
        self._num_taken = self._num_kept = 0

    def flush(self) -> Completion:
        with self._lock:
            self._check_open()
            found = dict(self._stored)
            self._num_taken += 1
            number = self._num_taken
        return Later(lambda: self._keep(number, found), done=False)

    def _keep(self, number: int, found: dict[TensorKey, bytes]) -> None:
        if number > self._num_kept:
            self._num_kept = number
            self._own_medium.clear()
            self._own_medium.update(found)


class JoinsRunningFlush(LateFlush):
    """Law 14: a flush submitted while one runs is that one."""

    _running: Completion | None = None

    def flush(self) -> Completion:
        if self._running is None or self._running.done():
            self._running = super().flush()
        return self._running


class OlderFlushWins(LateFlush):
    """Law 14: flushes that end in another order than they began leave the oldest."""

    def _keep(self, number: int, found: dict[TensorKey, bytes]) -> None:
        self._num_kept = 0
        super()._keep(number, found)


class FlushForgetsDiscards(LateFlush):
    """Law 14: a key discarded while another flush runs stays in the next one."""

    def __init__(self, medium: dict[TensorKey, bytes]) -> None:
        super().__init__(medium)
        self._revived: dict[TensorKey, bytes] = {}
        self._last: Completion | None = None

    def discard(self, key: TensorKey) -> None:
        if self._last is not None and not self._last.done() and key in self._stored:
            self._revived[key] = self._stored[key]
        super().discard(key)

    def flush(self) -> Completion:
        self._last = super().flush()
        return self._last

    def _keep(self, number: int, found: dict[TensorKey, bytes]) -> None:
        super()._keep(number, {**self._revived, **found})


class TornFlush(LateFlush):
    """Law 14: half of the keys are looked at when the flush is submitted, half when it ends."""

    def _keep(self, number: int, found: dict[TensorKey, bytes]) -> None:
        early = list(found.items())[::2]
        late = {key: data for key, data in self._stored.items() if (key, data) not in early}
        super()._keep(number, {**dict(early), **late})


class FlushTakesWhatComesLater(FileTier):
    """Law 14: the flush looks at the keys when its worker begins, not when it is submitted."""

    _worker: threading.Thread | None = None

    def flush(self) -> Completion:
        self._join()
        with self._lock:
            self._check_open()
        self._worker = threading.Thread(target=self._work)
        self._worker.start()
        return _OfThread(self._worker)

    def _work(self) -> None:
        linger()
        with self._lock:
            self._save(self._text())

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()

    def close(self) -> None:
        self._join()
        super().close()


class _OfThread:
    """Completion of what a thread does."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferTimeoutError("the flush was not done in time")


class FlushTakesWhatComesLaterSuite(CrashSuite):
    kind = FlushTakesWhatComesLater
