"""Checks of laws 12 and 13 with many threads: lifetimes that overlap, one key for all, close."""

from __future__ import annotations

import functools
import random
import threading
from typing import Final

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import TierClosedError
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import Bench, data_of, expect_bytes, key_of

_NUM_THREADS: Final = 6
_SIZES: Final = (0, 1, 511, 4096, 4097, 20000, 65537)
_SHARED: Final = tuple(key_of(i) for i in range(4))
_NUM_VERSIONS: Final = 40
_STRIDE, _INVERSE = 37, 173
"""Versions of a key differ by 37 in every byte; 37 x 173 is 1 modulo 256."""


def lifetimes_may_overlap(bench: Bench) -> None:
    """Catches tables, room and queues that threads change under each other.

    Each thread reserves, writes, reads and discards keys of its own, with transfers in flight, and
    compares with a dict of its own; all read some keys that nobody writes, and flush now and then.
    """
    for i, key in enumerate(_SHARED):
        bench.store(key, data_of(20000, i))
    workers = [_Worker(bench, number) for number in range(_NUM_THREADS)]
    bench.together([worker.run for worker in workers])
    held = dict.fromkeys(_SHARED, 20000)
    for worker in workers:
        held |= {key: len(data) for key, data in worker.model.items()}
    assert set(bench.tier.keys()) == set(held), "law 13: keys() is not what the threads left"
    usage = bench.tier.usage()
    assert usage.num_keys == len(held), "law 13: usage().num_keys is not what the threads left"
    assert usage.nbytes == sum(held.values()), "law 13: usage().nbytes is not what they left"
    for worker in workers:
        for key, data in worker.model.items():
            bench.expect(key, data, "law 13: after all threads ended")


class _Worker:
    """One thread's random calls; deterministic but for what the other threads do meanwhile."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.model: dict[TensorKey, bytes] = {}
        self._bench = bench
        self._number = number
        self._random = random.Random(number)
        self._writes: dict[TensorKey, Completion] = {}
        self._reads: list[tuple[Completion, Buffer, bytes]] = []

    def run(self) -> None:
        calls = (self._store, self._write, self._write, self._read, self._read_shared, self._drop)
        for _ in range(60):
            self._random.choice(calls)()
            if len(self._reads) > 5:
                self._settle_reads()
        if self._number % 3 == 0:
            self._bench.flush()
        for key in list(self._writes):
            self._settle_write(key)
        self._settle_reads()

    def _store(self) -> None:
        key = key_of(1000 * (self._number + 1) + self._random.randrange(6))
        if key not in self.model:
            data = self._random.randbytes(self._random.choice(_SIZES))
            self._bench.store(key, data)
            self.model[key] = data
        elif self._random.random() < 0.2:
            self._bench.flush()

    def _write(self) -> None:
        key = self._own()
        if key is None:
            return
        self._settle_reads()  # law 4 speaks of reads submitted after a write
        data = self._random.randbytes(len(self.model[key]))
        src = self._bench.buffer(data)
        self._writes[key] = self._bench.tier.write_from(key, src)
        self.model[key] = data

    def _read(self) -> None:
        key = self._own()
        if key is not None:
            self._submit_read(key, self.model[key])

    def _read_shared(self) -> None:
        index = self._random.randrange(len(_SHARED))
        self._submit_read(_SHARED[index], data_of(20000, index))

    def _drop(self) -> None:
        key = self._own()
        if key is not None and self._random.random() < 0.5:
            self._bench.tier.discard(key)
            del self.model[key]

    def _own(self) -> TensorKey | None:
        """Return one of the thread's keys, with no write of it in flight."""
        if not self.model:
            return None
        key = self._random.choice(sorted(self.model))
        self._settle_write(key)
        return key

    def _submit_read(self, key: TensorKey, expected: bytes) -> None:
        dst = self._bench.blank(len(expected))
        self._reads.append((self._bench.tier.read_into(key, dst), dst, expected))

    def _settle_write(self, key: TensorKey) -> None:
        completion = self._writes.pop(key, None)
        if completion is not None:
            self._bench.wait(completion)

    def _settle_reads(self) -> None:
        for completion, dst, expected in self._reads:
            self._bench.wait(completion)
            found = self._bench.hooks.contents(dst)
            expect_bytes(found, expected, f"law 13: read of thread {self._number}")
        self._reads.clear()


def one_key_serves_all(bench: Bench) -> None:
    """Catches reads that meet a write half-way: cleared bytes, room that moved, stale copies.

    Writers take turns, readers do not. Each byte of a read must be of a version between the last
    one waited for before the read was submitted, and the last one begun before it was over. A mix
    of versions is allowed there: no law makes a read that overlaps a write atomic.
    """
    key, hammer = key_of(0), _Hammer(20000)
    bench.store(key, hammer.version(0))
    turn, over = threading.Lock(), threading.Event()

    def write() -> None:
        try:
            for _ in range(_NUM_VERSIONS // 2):
                with turn:
                    hammer.begun += 1
                    bench.write(key, hammer.version(hammer.begun))
                    hammer.ended = hammer.begun
        finally:
            over.set()  # also if it failed: nobody else ends the readers

    def read() -> None:
        while not over.is_set():
            first = hammer.ended
            found = bench.read(key)
            hammer.expect(found, first, hammer.begun)

    bench.together([write, write, read, read, read, read])
    bench.expect(key, hammer.version(_NUM_VERSIONS), "law 13: after the last write")


class _Hammer:
    """Versions of one key that differ in every byte. `begun` and `ended` count writes."""

    def __init__(self, nbytes: int) -> None:
        self.begun = 0
        self.ended = 0
        self._base = np.frombuffer(data_of(nbytes), np.uint8)

    def version(self, number: int) -> bytes:
        return (self._base + np.uint8(_STRIDE * number % 256)).tobytes()

    def expect(self, found: bytes, first: int, last: int) -> None:
        """Raise AssertionError unless each byte is of one of the versions `first` to `last`."""
        versions = (np.frombuffer(found, np.uint8) - self._base) * np.uint8(_INVERSE)
        wrong = np.flatnonzero((versions < first) | (versions > last))
        assert not len(wrong), (
            f"law 13: {len(wrong)} of {len(found)} bytes, from byte {wrong[0]} on, are of none of "
            f"the versions {first} to {last} that were stored during the read"
        )


def close_meets_submitters(bench: Bench) -> None:
    """Catches transfers that close forgets, hangs or feeds with freed memory.

    Threads keep submitting while two others close. What was taken must end right, or say at its
    wait that the tier was closed; what is submitted after close must be refused.
    """
    nbytes = 65537
    for i in range(_NUM_THREADS):
        bench.store(key_of(i), data_of(nbytes, i))
        bench.store(key_of(100 + i), data_of(nbytes, i))
    bench.flush()
    tier, closed = bench.tier, threading.Event()
    under_way = threading.Semaphore(0)

    def submit(number: int) -> None:
        try:
            is_open = _submit_three(bench, number, nbytes)
        finally:
            under_way.release(2)
        while is_open:
            refuses = closed.is_set()
            is_open = _submit_three(bench, number, nbytes)
            assert not (is_open and refuses), "law 12: a transfer was taken after close()"

    def close() -> None:
        for _ in range(_NUM_THREADS):
            under_way.acquire()
        tier.close()
        closed.set()

    submitters = [functools.partial(submit, i) for i in range(_NUM_THREADS)]
    bench.together([*submitters, close, close])
    if bench.capabilities.persistent:
        bench.reopen()
        for i in range(_NUM_THREADS):
            bench.expect(key_of(i), data_of(nbytes, i), "law 14: after a close under load")


def _submit_three(bench: Bench, number: int, nbytes: int) -> bool:
    """Read twice and write once, all in flight together; return False if the tier is closed."""
    completions: list[Completion] = []
    buffers = [bench.blank(nbytes), bench.blank(nbytes)]
    expected, is_open = data_of(nbytes, number), True
    try:
        for dst in buffers:
            completions.append(bench.tier.read_into(key_of(number), dst))  # noqa: PERF401
        src = bench.buffer(expected)
        completions.append(bench.tier.write_from(key_of(100 + number), src))
    except TierClosedError:
        is_open = False
    for i, completion in enumerate(completions):
        try:
            bench.wait(completion)
        except TierClosedError:
            is_open = False
            continue
        if i < len(buffers):
            found = bench.hooks.contents(buffers[i])
            expect_bytes(found, expected, "law 12: read in flight at close")
    return is_open
