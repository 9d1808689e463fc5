"""Broken tiers, one bug each, that show only with several threads, or when a call has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import KeyAbsentError, KeyExistsError, TransferTimeoutError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing import DeferredTier, DictTier, FaultyTier
from zinf_core.units import MiB


def switch_threads(delay_s: float = 1e-4) -> None:
    """Let another thread run, as a system call would."""
    threading.Event().wait(delay_s)


class UnlockedTable(DictTier):
    """Law 13: reserve replaces the table by a copy that it began without a lock."""

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        table = dict(self._stored)
        extent = super().reserve(key, nbytes)
        table[key] = self._stored[key]
        switch_threads()
        self._stored = table
        return extent


class ClearsBeforeWriting(DictTier):
    """Law 13: a write empties the key first, and readers may look in between."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        if key in self._stored:
            self._stored[key] = bytes(len(self._stored[key]))
            switch_threads()
        return super().write_from(key, src, offset=offset)


class ReadsFreedMemory(DictTier):
    """Law 12: a read that close overtakes finds zeros and succeeds."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        nbytes = self.stat(key).nbytes
        self._validate(key, nbytes, dst, offset)
        switch_threads(5e-3)
        stored = self._stored.get(key, bytes(nbytes))
        dst.array[:] = np.frombuffer(stored[offset : offset + dst.nbytes], np.uint8)
        return CompletedTransfer()


class FailureSpreads(FaultyTier):
    """Law 9: the write after a failed one is taken, and never done."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        num_fired = len(self.fired)
        completion = super().write_from(key, src, offset=offset)
        skip, self._skip = getattr(self, "_skip", False), len(self.fired) > num_fired
        if skip and not self._skip:
            old = self._inner._stored[key]  # type: ignore[attr-defined]
            self._inner._stored[key] = bytes(len(old))  # type: ignore[attr-defined]
        return completion


class UnwrittenIsStuck(DictTier):
    """Fault sweep: a key that was reserved and never written cannot be discarded."""

    def __init__(self) -> None:
        super().__init__()
        self._written: set[TensorKey] = set()

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        self._written.add(key)
        return completion

    def discard(self, key: TensorKey) -> None:
        if key in self._stored and key not in self._written:
            raise KeyAbsentError(f"{self.name}: nothing was written to {key}")
        super().discard(key)


class TwoOwners(DictTier):
    """Law 8: a name is looked up, and taken after a while."""

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        if key in self._stored:
            raise KeyExistsError(f"{self.name}: {key} is reserved already")
        switch_threads()
        self._stored[key] = bytes(nbytes)
        return self.stat(key)


class Overbooks(DictTier):
    """Law 8: room is looked up, and taken after a while."""

    def __init__(self) -> None:
        super().__init__(capacity_nbytes=MiB)

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        super().reserve(key, nbytes)
        super().discard(key)
        switch_threads(1e-3)
        with self._lock:
            self._stored[key] = bytes(nbytes)
        return self.stat(key)


class SecondCloseEarly(DeferredTier):
    """Law 12: who closes while another thread does returns at once."""

    _closing = False

    def close(self) -> None:
        closing, self._closing = self._closing, True
        if not closing:
            switch_threads(2e-2)
            super().close()


class GivesUpSilently(DictTier):
    """Law 6: a wait returns when its time is over, whether the transfer is or not."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self._validate(key, self.stat(key).nbytes, dst, offset)
        return _Patient(lambda: DictTier.read_into(self, key, dst, offset=offset).wait())


class DoneAndImpatient(DictTier):
    """Law 6: a wait without patience raises, even if all is done."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        super().write_from(key, src, offset=offset)
        return _Impatient()


class _Patient:
    """Completion of an act that happens in a wait of a second or more."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._happened = False

    def done(self) -> bool:
        return self._happened

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._happened and (timeout_s is None or timeout_s >= 0.1):
            self._act()
            self._happened = True


class _Impatient(CompletedTransfer):
    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s == 0:
            raise TransferTimeoutError("no time at all")


class OneWaiter(DictTier):
    """Law 13: who is not the first to wait hangs, whatever the timeout; `stop` ends it."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        super().read_into(key, dst, offset=offset)
        return _ForOne(self._stop)


class _ForOne(CompletedTransfer):
    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop
        self._first = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._first.acquire(blocking=False):
            self._stop.wait()


class WaitsForEver(OneWaiter):
    """Law 5: a read never happens, and its wait ignores the timeout; `stop` ends it."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        completion = super().read_into(key, dst, offset=offset)
        completion.wait()
        return completion


class CloseHangs(DictTier):
    """Law 12: close waits for what never happens; `stop` ends it."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def close(self) -> None:
        self._stop.wait()
        super().close()
