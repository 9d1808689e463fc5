"""Broken tiers, one bug each, that show only with several threads, or when a call has failed."""

from __future__ import annotations

import threading

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import KeyAbsentError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing import DictTier, FaultyTier


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
