"""NvmeTier's lanes: who is served first, and what becomes of prefetch."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nvme_helpers import (
    SMALL,
    Gate,
    buffer_of,
    flush,
    key,
    noise,
    opened,
    read,
    store,
    unaccounted_nbytes,
    write,
)

from zinf_core.buffers import HostBuffer
from zinf_core.errors import (
    AlignmentError,
    KeyAbsentError,
    RangeError,
    TierClosedError,
    TransferCancelledError,
    TransferTimeoutError,
)
from zinf_core.tier import Prefetch, SupportsPrefetch
from zinf_storage.nvme import NvmeTier, SystemCalls

NBYTES = 20_001
BLOCK = SMALL.io_nbytes
ONE_WORKER = replace(SMALL, num_threads=1)


class Watched(Gate):
    """A gate that also notes which buffer each read or write is for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.log: list[str] = []

    def name(self, name: str, buffer: HostBuffer) -> HostBuffer:
        self.names[buffer.address] = name
        return buffer

    def calls(self) -> SystemCalls:
        calls = super().calls()
        return replace(calls, preadv=self._noted(calls.preadv), pwritev=self._noted(calls.pwritev))

    def _noted(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, views: list[memoryview], offset: int) -> int:
            address = np.frombuffer(views[0], np.uint8).ctypes.data
            start = max((known for known in self.names if known <= address), default=None)
            if start is not None and address - start < NBYTES:
                self.log.append(f"{self.names[start]}{(address - start) // BLOCK}")
            return real(fd, views, offset)

        return call


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def tier(tmp_path: Path, watched: Watched) -> Iterator[NvmeTier]:
    """A tier whose only worker is held by a read that is not in the log."""
    with opened(tmp_path, ONE_WORKER, watched.calls()) as tier:
        for i in range(6):
            store(tier, key(i), noise(NBYTES, i))
        watched.hold("preadv")
        busy = tier.read_into(key(5), buffer_of(bytes(1)))
        assert watched.entered["preadv"].wait(timeout=30)
        yield tier
        watched.release("preadv")
        busy.wait(timeout_s=30)


def go_on(watched: Watched, *completions: Prefetch) -> str:
    """Let the worker go on; return the log when everything is done."""
    watched.release("preadv")
    for completion in completions:
        completion.wait(timeout_s=30)
    return " ".join(watched.log)


def test_it_supports_prefetch(tier: NvmeTier) -> None:
    """Catches a tier that callers do not recognize."""
    assert isinstance(tier, SupportsPrefetch)


def test_demand_overtakes_what_waited_longer(tier: NvmeTier, watched: Watched) -> None:
    """Catches a read that is waited for queued behind reads and writes that are not."""
    new = noise(NBYTES, 9)
    pending = [
        tier.write_from(key(0), watched.name("w", buffer_of(new))),
        tier.prefetch_into(key(1), watched.name("p", buffer_of(bytes(NBYTES)))),
        tier.read_into(key(2), watched.name("d", buffer_of(bytes(NBYTES)))),
        tier.read_into(key(3), watched.name("e", buffer_of(bytes(NBYTES)))),
    ]
    assert go_on(watched, *pending) == "d0 d1 d2 e0 e1 e2 p0 w0 p1 w1 p2 w2"
    assert read(tier, key(0)) == new


def test_endless_demand_lets_a_write_and_a_prefetch_through(
    tier: NvmeTier, watched: Watched
) -> None:
    """Catches a write or prefetch that never gets its turn while reads keep coming."""
    pending = [
        tier.write_from(key(0), watched.name("w", buffer_of(noise(BLOCK, 9)))),
        tier.prefetch_into(key(1), watched.name("p", buffer_of(bytes(BLOCK)))),
    ]
    pending += [
        tier.read_into(key(2), watched.name("d", buffer_of(bytes(BLOCK)))) for _ in range(40)
    ]
    order = go_on(watched, *pending).split()
    assert [number for number, name in enumerate(order) if name == "p0"] == [7]
    assert [number for number, name in enumerate(order) if name == "w0"] == [15]


def test_promote_and_wait_move_a_prefetch_up(tier: NvmeTier, watched: Watched) -> None:
    """Catches a prefetch that somebody waits for by now, still served last."""
    buffers = {name: watched.name(name, buffer_of(bytes(NBYTES))) for name in "pqrd"}
    prefetches = [tier.prefetch_into(key(i), buffers[name]) for i, name in enumerate("pqr")]
    demand = tier.read_into(key(3), buffers["d"])
    prefetches[2].promote()
    with pytest.raises(TransferTimeoutError):
        prefetches[1].wait(timeout_s=0.001)
    assert go_on(watched, demand, *prefetches) == "d0 d1 d2 r0 r1 r2 q0 q1 q2 p0 p1 p2"
    for i, name in enumerate("pqrd"):
        assert buffers[name].array.tobytes() == noise(NBYTES, i)


def test_a_poll_does_not_promote(tier: NvmeTier, watched: Watched) -> None:
    """Catches a caller that only looks and so pushes its prefetch before demand."""
    first = tier.prefetch_into(key(0), watched.name("p", buffer_of(bytes(BLOCK))))
    second = tier.prefetch_into(key(1), watched.name("q", buffer_of(bytes(BLOCK))))
    assert not second.done()
    with pytest.raises(TransferTimeoutError, match=f"prefetch of {key(1)}"):
        second.wait(timeout_s=0)
    assert go_on(watched, first, second) == "p0 q0"


def test_cancel_gives_a_prefetch_up(tier: NvmeTier, watched: Watched) -> None:
    """Catches bytes that arrive after a cancel, a buffer or an old version that stays taken, and
    a cancelled prefetch that is never done."""
    buffer = watched.name("p", buffer_of(b"\xa5" * NBYTES))
    prefetch = tier.prefetch_into(key(0), buffer)
    version = tier._parts.table.page(key(0)).version
    assert version.pins == 2
    assert [prefetch.cancel(), prefetch.cancel()] == [True, True]
    assert prefetch.done()
    assert version.pins == 1
    for _ in range(2):
        with pytest.raises(TransferCancelledError, match=f"prefetch of {key(0)} was cancelled"):
            prefetch.wait(timeout_s=30)
    prefetch.promote()
    assert not buffer.is_shared()
    assert buffer.array.tobytes() == b"\xa5" * NBYTES
    dead = weakref.ref(buffer.memory)
    del buffer
    gc.collect()
    assert dead() is None
    assert go_on(watched) == ""
    write(tier, key(0), noise(NBYTES, 9))
    flush(tier)
    assert read(tier, key(0)) == noise(NBYTES, 9)
    assert unaccounted_nbytes(tier) == 0


def test_cancel_comes_too_late_for_what_has_begun(tmp_path: Path, watched: Watched) -> None:
    """Catches a read given up half-way, whose buffer is then written to by a worker."""
    with opened(tmp_path, ONE_WORKER, watched.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        watched.hold("preadv")
        buffer = buffer_of(bytes(NBYTES))
        prefetch = tier.prefetch_into(key(0), buffer)
        assert watched.entered["preadv"].wait(timeout=30)
        assert not prefetch.cancel()
        assert not prefetch.done()
        watched.release("preadv")
        prefetch.wait(timeout_s=30)
        assert not prefetch.cancel()
        prefetch.wait()
        assert buffer.array.tobytes() == noise(NBYTES)
        assert not buffer.is_shared()


def test_a_cancelled_prefetch_is_one_less_for_close(tier: NvmeTier, watched: Watched) -> None:
    """Catches a close that waits for a prefetch which nobody will serve any more."""
    prefetch = tier.prefetch_into(key(0), buffer_of(bytes(NBYTES)))
    kept = tier.prefetch_into(key(1), buffer_of(bytes(NBYTES)))
    closer = threading.Thread(target=tier.close)
    closer.start()
    prefetch.cancel()
    watched.release("preadv")
    closer.join(timeout=30)
    assert not closer.is_alive()
    assert kept.done()
    assert not kept.cancel()
    with pytest.raises(TierClosedError):
        tier.prefetch_into(key(0), buffer_of(bytes(NBYTES)))


def test_a_cancel_that_leaves_nothing_to_do_lets_close_go_on(tmp_path: Path) -> None:
    """Catches a close that sleeps on, for nobody tells it that the last transfer was given up."""
    waits = threading.Event()

    class Announcing(threading.Condition):
        def wait_for(self, *args: object) -> bool:
            waits.set()
            return super().wait_for(*args)  # type: ignore[arg-type]

    with opened(tmp_path) as tier:
        store(tier, key(0), noise(NBYTES))
        scheduler = tier._parts.scheduler
        scheduler._settled = Announcing(scheduler.lock)
        workers, late = scheduler._runner._workers, []
        real, workers.call = workers.call, lambda function: late.append(function) is None
        prefetch = tier.prefetch_into(key(0), buffer_of(bytes(NBYTES)))
        workers.call = real
        closer = threading.Thread(target=tier.close)
        closer.start()
        assert waits.wait(timeout=30)
        assert prefetch.cancel()
        closer.join(timeout=30)
        assert not closer.is_alive()
        for function in late:
            function()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_cancel_and_promote_race_with_workers(tmp_path: Path, num_threads: int) -> None:
    """Catches a prefetch that is both given up and served, or neither (then this hangs)."""
    with opened(tmp_path, replace(SMALL, num_threads=num_threads)) as tier:
        for i in range(4):
            store(tier, key(i), noise(NBYTES, i))
        start = threading.Barrier(3)
        outcomes: list[tuple[int, HostBuffer, Prefetch, bool]] = []

        def work(thread: int) -> None:
            start.wait(timeout=30)
            for number in range(40):
                which = (thread + number) % 4
                buffer = buffer_of(b"\xa5" * NBYTES)
                prefetch = tier.prefetch_into(key(which), buffer)
                if number % 3 == 0:
                    prefetch.promote()
                outcomes.append((which, buffer, prefetch, prefetch.cancel()))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(outcomes) == 120
        for which, buffer, prefetch, is_cancelled in outcomes:
            if is_cancelled:
                with pytest.raises(TransferCancelledError):
                    prefetch.wait(timeout_s=30)
                assert buffer.array.tobytes() == b"\xa5" * NBYTES
            else:
                prefetch.wait(timeout_s=30)
                assert buffer.array.tobytes() == noise(NBYTES, which)
            assert prefetch.cancel() == is_cancelled
        flush(tier)
        assert unaccounted_nbytes(tier) == 0
        assert {tier._parts.table.page(key(i)).version.pins for i in range(4)} == {2}


def test_a_prefetch_brings_what_was_current_when_it_was_submitted(
    tier: NvmeTier, watched: Watched
) -> None:
    """Catches an old extent written over under a prefetch that a write overtook."""
    watched.hold("pwritev")
    buffer = buffer_of(bytes(NBYTES))
    prefetch = tier.prefetch_into(key(0), buffer)
    late = [tier.write_from(key(0), buffer_of(noise(NBYTES, seed))) for seed in (7, 8, 9)]
    watched.release("pwritev")
    go_on(watched, prefetch, *late)
    assert buffer.array.tobytes() == noise(NBYTES)
    assert read(tier, key(0)) == noise(NBYTES, 9)


def test_bad_prefetches_are_refused_at_submit(tier: NvmeTier) -> None:
    """Catches checks that only the other reads have (laws 10 and 11)."""
    buffer = buffer_of(bytes(NBYTES))
    with pytest.raises(KeyAbsentError):
        tier.prefetch_into(key(99), buffer)
    with pytest.raises(RangeError):
        tier.prefetch_into(key(0), buffer, offset=4096)
    with pytest.raises(AlignmentError):
        tier.prefetch_into(key(0), buffer_of(bytes(8)), offset=8)
    assert not buffer.is_shared()


def test_nothing_to_prefetch_is_done_at_once(tier: NvmeTier) -> None:
    """Catches a prefetch of no bytes that waits for a worker or can be cancelled."""
    prefetch = tier.prefetch_into(key(0), buffer_of(b""))
    assert prefetch.done()
    prefetch.promote()
    assert not prefetch.cancel()
    prefetch.wait(timeout_s=0)


def test_a_commit_holds_up_no_transfer(tmp_path: Path) -> None:
    """Catches a flush that takes the only worker while the drive syncs."""
    gate = Gate()
    with opened(tmp_path, ONE_WORKER, gate.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        gate.hold("fdatasync")
        flushed = tier.flush()
        assert gate.entered["fdatasync"].wait(timeout=30)
        write(tier, key(0), noise(NBYTES, 1))
        assert read(tier, key(0)) == noise(NBYTES, 1)
        assert not flushed.done()
        gate.release("fdatasync")
        flushed.wait(timeout_s=30)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(NBYTES)


def test_all_lanes_at_once_from_many_threads(tmp_path: Path) -> None:
    """Catches bookkeeping that lanes damage for each other (law 13)."""
    errors: list[Exception] = []

    def work(thread: int) -> None:
        try:
            mine = key(thread)
            tier.reserve(mine, NBYTES)
            for seed in range(8):
                data = noise(NBYTES, 10 * thread + seed)
                write(tier, mine, data)
                buffers = [buffer_of(bytes(NBYTES)) for _ in range(3)]
                given_up = tier.prefetch_into(mine, buffer_of(bytes(NBYTES)))
                ahead = tier.prefetch_into(mine, buffers[0])
                late = tier.write_from(mine, buffer_of(noise(NBYTES, 99)))
                now = tier.read_into(mine, buffers[1])
                given_up.cancel()
                for completion in (now, ahead, late):
                    completion.wait(timeout_s=30)
                assert buffers[0].array.tobytes() == data
                assert buffers[1].array.tobytes() in (data, noise(NBYTES, 99))
                flush(tier)
        except Exception as exc:  # noqa: BLE001 - shown by the assertion below
            errors.append(exc)

    with opened(tmp_path) as tier:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert errors == []
        flush(tier)
        assert unaccounted_nbytes(tier) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_in_the_middle_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    """Catches a forked data loader that waits for a lock whose holder it does not have."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(NBYTES))
        with tier._parts.scheduler.lock:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    threading.Timer(20, os._exit, (2,)).start()
                    tier.prefetch_into(key(0), buffer_of(bytes(NBYTES)))
                except TierClosedError:
                    tier.close()
                    status = 0
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert read(tier, key(0)) == noise(NBYTES)
