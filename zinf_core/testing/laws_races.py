"""Checks of laws 8, 12 and 13 on threads that want the same: a name, the last room, the end."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from zinf_core.completion import Completion
from zinf_core.errors import KeyExistsError, TierFullError
from zinf_core.testing.bench import Bench, data_of, expect_bytes, key_of
from zinf_core.testing.limits import THREAD_NAME
from zinf_core.units import PAGE_NBYTES, MiB

_NUM_THREADS: Final = 6
_NUM_ROUNDS: Final = 8
_MAX_CAPACITY: Final = 64 * MiB
_LARGE: Final = MiB + 5


def one_name_has_one_owner(bench: Bench) -> None:
    """Catches a name that is looked up and taken in two steps: two threads both get it."""
    owners: list[list[int]] = [[] for _ in range(_NUM_ROUNDS)]

    def take(thread: int, number: int) -> None:
        try:
            bench.tier.reserve(key_of(number), 64 + thread)
        except KeyExistsError:
            return
        owners[number].append(thread)

    _in_rounds(bench, take)
    for number, found in enumerate(owners):
        key = key_of(number)
        assert len(found) == 1, f"law 8: {len(found)} of {_NUM_THREADS} threads reserved {key}"
        nbytes = bench.tier.stat(key).nbytes
        assert nbytes == 64 + found[0], f"law 8: {key} has {nbytes} bytes, another thread's size"
        bench.write(key, data_of(nbytes))
        bench.expect(key, data_of(nbytes), "law 13: name that several threads wanted")
    usage = bench.tier.usage()
    assert usage.num_keys == _NUM_ROUNDS, f"law 7: {usage.num_keys} of {_NUM_ROUNDS} names taken"
    nbytes = sum(64 + found[0] for found in owners)
    assert usage.nbytes == nbytes, f"law 7: {usage.nbytes} bytes, {nbytes} are stored"


def the_last_room_is_given_once(bench: Bench) -> None:
    """Catches room that is looked up and taken in two steps: the tier holds more than it can."""
    capacity = bench.tier.usage().capacity_nbytes
    if capacity is None or capacity > _MAX_CAPACITY:
        pytest.skip("the tier has no capacity, or too much to fill it here")
    chunk = max(capacity // (16 * PAGE_NBYTES), 1) * PAGE_NBYTES
    num_fitting = _fill(bench, chunk)
    taken: list[int] = []

    def take(thread: int, number: int) -> None:
        key = 1000 * (number + 1) + thread
        try:
            bench.tier.reserve(key_of(key), chunk)
        except TierFullError:
            return
        taken.append(key)

    def give_back(_number: int) -> None:
        usage = bench.tier.usage()
        assert usage.nbytes <= capacity, f"law 8: {usage.nbytes} bytes in a room of {capacity}"
        assert usage.allocated_nbytes <= capacity, (
            f"law 8: {usage.allocated_nbytes} bytes allocated in a room of {capacity}"
        )
        assert len(taken) <= num_fitting, (
            f"law 8: {len(taken)} of {_NUM_THREADS} threads got room of {chunk} bytes, of which "
            f"there was enough for {num_fitting}"
        )
        assert taken, "law 8: there was room, and no thread got it"
        while taken:
            bench.tier.discard(key_of(taken.pop()))
        bench.flush()

    _in_rounds(bench, take, after=give_back)


def every_close_returns_late(bench: Bench, tmp_path: Path) -> None:
    """Catches a close that returns at once because another thread is closing already."""
    for number in range(2):
        folder = tmp_path / f"closed-{number}"
        folder.mkdir()
        other = Bench(bench.hooks, folder, limit_s=bench.limit_s)
        try:
            _Closers(other).run()
        finally:
            other.close()


class _Closers:
    """Threads that close one tier together, with transfers in flight."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._in_flight = threading.Barrier(3)
        self._buffers = [bench.blank(_LARGE) for _ in range(9)]
        self._data = [data_of(_LARGE, i) for i in range(3)]
        self._transfers: list[Completion] = []
        self._num_unsettled: list[int] = []
        self._alive: list[set[threading.Thread]] = []

    def run(self) -> None:
        """Close three times at once; raise AssertionError if one of them left work to another."""
        bench = self._bench
        for i in range(3):
            bench.store(key_of(i), self._data[i])
        bench.tier.reserve(key_of(3), _LARGE)
        bench.together([self._submit_and_close, self._close, self._close])
        assert not any(self._num_unsettled), (
            f"law 12: close() returned while {max(self._num_unsettled)} transfers were not settled"
        )
        left = _threads()
        for alive in self._alive:
            early = sorted(thread.name for thread in alive - left)
            assert not early, f"law 12: close() returned before the tier's threads ended: {early}"
        for transfer in self._transfers:
            bench.wait(transfer)
        for i, dst in enumerate(self._buffers):
            found = bench.hooks.contents(dst)
            expect_bytes(found, self._data[i % 3], "law 12: read in flight at close")

    def _submit_and_close(self) -> None:
        tier, src = self._bench.tier, self._bench.buffer(self._data[0])
        for i, dst in enumerate(self._buffers):
            self._transfers.append(tier.read_into(key_of(i % 3), dst))
        self._transfers.append(tier.write_from(key_of(3), src))
        self._close()

    def _close(self) -> None:
        self._in_flight.wait(timeout=self._bench.hooks.timeout_s)
        self._bench.tier.close()
        self._alive.append(_threads())
        self._num_unsettled.append(sum(not transfer.done() for transfer in self._transfers))


def _threads() -> set[threading.Thread]:
    """Return the threads that are alive, without those of the kit."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith(THREAD_NAME)}


def _in_rounds(
    bench: Bench,
    take: Callable[[int, int], None],
    *,
    after: Callable[[int], None] = lambda _number: None,
) -> None:
    """Call ``take(thread, number)`` on many threads at once, round by round; `after` in between."""
    for number in range(_NUM_ROUNDS):
        bench.together([functools.partial(take, i, number) for i in range(_NUM_THREADS)])
        after(number)


def _fill(bench: Bench, chunk: int) -> int:
    """Reserve keys of `chunk` bytes until there is no room, give two back; return how many fit."""
    held = 0
    while True:
        assert held <= 16, "law 8: more was reserved than usage().capacity_nbytes"
        try:
            bench.tier.reserve(key_of(held), chunk)
        except TierFullError:
            break
        held += 1
    num_freed = min(2, held)
    for i in range(num_freed):
        bench.tier.discard(key_of(i))
    bench.flush()
    return num_freed
