"""NvmeTier with several things in flight; a gate in the system calls fixes who is first."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_helpers import (
    SMALL,
    FailingCalls,
    Gate,
    buffer_of,
    flush,
    key,
    noise,
    num_fds,
    opened,
    read,
    store,
    unaccounted_nbytes,
    write,
)

from zinf_core.errors import TierClosedError, TransferError, TransferTimeoutError
from zinf_storage.nvme import NvmeTier, SystemCalls

NBYTES = 20_001


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def tier(tmp_path: Path, gate: Gate) -> Iterator[NvmeTier]:
    with opened(tmp_path, SMALL, gate.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        store(tier, key(1), noise(NBYTES, 1))
        yield tier
        for name in ("preadv", "pwritev", "fdatasync"):
            gate.release(name)


def test_a_held_write_is_not_done_and_times_out(tier: NvmeTier, gate: Gate) -> None:
    """Catches done() before the bytes landed, a wait that ignores its timeout, and old bytes
    that are gone before the new ones are complete."""
    gate.hold("pwritev")
    completion = tier.write_from(key(0), buffer_of(noise(NBYTES, 2)))
    assert gate.entered["pwritev"].wait(timeout=30)
    assert not completion.done()
    with pytest.raises(TransferTimeoutError, match=f"write of {key(0)}"):
        completion.wait(timeout_s=0.001)
    assert read_with_other_worker(tier) == noise(NBYTES)
    gate.release("pwritev")
    completion.wait(timeout_s=30)
    assert completion.done()
    assert read(tier, key(0)) == noise(NBYTES, 2)


def read_with_other_worker(tier: NvmeTier) -> bytes:
    """The committed bytes as the file has them: both workers are held."""
    extent = tier.stat(key(0))
    data = tier._parts.folder.segment_path(extent.segment).read_bytes()
    return data[extent.offset : extent.offset + extent.nbytes]


def test_writes_of_one_key_keep_their_order(tier: NvmeTier, gate: Gate) -> None:
    """Catches a later write overtaken by an earlier one."""
    gate.hold("pwritev")
    completions = [
        tier.write_from(key(0), buffer_of(noise(NBYTES, seed))) for seed in range(2, 9)
    ] + [tier.write_from(key(0), buffer_of(noise(4096, 9)), offset=4096)]
    gate.release("pwritev")
    for completion in completions:
        completion.wait(timeout_s=30)
    expected = bytearray(noise(NBYTES, 8))
    expected[4096:8192] = noise(4096, 9)
    assert read(tier, key(0)) == expected
    assert unaccounted_nbytes(tier) == 0


def test_a_read_in_flight_keeps_the_version_it_began_with(tier: NvmeTier, gate: Gate) -> None:
    """Catches an old extent freed, and written over, under a read of it."""
    gate.hold("preadv")
    dst = buffer_of(bytes(NBYTES))
    reading = tier.read_into(key(0), dst)
    assert gate.entered["preadv"].wait(timeout=30)
    gate.hold("pwritev")
    writes = [tier.write_from(key(0), buffer_of(noise(NBYTES, s))) for s in (2, 3, 4)]
    gate.release("pwritev")
    gate.release("preadv")
    for completion in (reading, *writes):
        completion.wait(timeout_s=30)
    assert dst.array.tobytes() == noise(NBYTES)
    assert unaccounted_nbytes(tier) == 0


def test_discard_leaves_transfers_in_flight_alone(tier: NvmeTier, gate: Gate) -> None:
    """Catches room freed under a transfer, or a late write that reaches the key's successor."""
    gate.hold("pwritev")
    late = [tier.write_from(key(0), buffer_of(noise(NBYTES, s))) for s in (2, 3)]
    tier.discard(key(0))
    tier.reserve(key(0), 5000)
    new = tier.write_from(key(0), buffer_of(noise(5000)))
    gate.release("pwritev")
    for completion in (*late, new):
        completion.wait(timeout_s=30)
    assert read(tier, key(0)) == noise(5000)
    flush(tier)
    assert unaccounted_nbytes(tier) == 0


def test_a_flush_holds_what_was_submitted_before_it(tmp_path: Path) -> None:
    """Catches a commit that misses an earlier write, or takes in a later write or discard."""
    gate = Gate()
    with opened(tmp_path, SMALL, gate.calls()) as tier:
        for i in range(3):
            store(tier, key(i), noise(NBYTES, i))
        gate.hold("pwritev")
        gate.hold("fdatasync")
        before = tier.write_from(key(0), buffer_of(noise(NBYTES, 10)))
        flushed = tier.flush()
        after = tier.write_from(key(0), buffer_of(noise(NBYTES, 20)))
        also_after = tier.write_from(key(1), buffer_of(noise(NBYTES, 21)))
        tier.discard(key(2))
        tier.reserve(key(3), 100)
        gate.release("pwritev")
        for completion in (before, after, also_after):
            completion.wait(timeout_s=30)
        assert not flushed.done()
        gate.release("fdatasync")
        flushed.wait(timeout_s=30)
        assert read(tier, key(0)) == noise(NBYTES, 20)
    with opened(tmp_path) as tier:
        assert set(tier.keys()) == {key(0), key(1), key(2)}
        assert read(tier, key(0)) == noise(NBYTES, 10)
        assert read(tier, key(1)) == noise(NBYTES, 1)
        assert read(tier, key(2)) == noise(NBYTES, 2)


def test_flushes_in_a_row_commit_in_order(tmp_path: Path) -> None:
    """Catches an older snapshot that replaces a newer one."""
    with opened(tmp_path) as tier:
        tier.reserve(key(0), NBYTES)
        pending = []
        for seed in range(6):
            pending.append(tier.write_from(key(0), buffer_of(noise(NBYTES, seed))))
            pending.append(tier.flush())
        for completion in pending:
            completion.wait(timeout_s=30)
        assert unaccounted_nbytes(tier) == 0
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(NBYTES, 5)


def test_close_settles_what_is_in_flight(tmp_path: Path) -> None:
    """Catches a close that drops queued transfers, or waits for ever, or lets new ones in."""
    gate = Gate()
    with opened(tmp_path, SMALL, gate.calls()) as tier:
        tier.reserve(key(0), NBYTES)
        gate.hold("pwritev")
        pending = [tier.write_from(key(0), buffer_of(noise(NBYTES, s))) for s in range(3)]
        pending.append(tier.flush())
        closers = [threading.Thread(target=tier.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        gate.release("pwritev")
        for closer in closers:
            closer.join(timeout=30)
        assert all(completion.done() for completion in pending)
        for call in (tier.flush, tier.usage, tier.keys, tier.reclaim):
            with pytest.raises(TierClosedError, match=str(tmp_path)):
                call()
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(NBYTES, 2)


def test_the_buffer_is_free_when_the_completion_is_done(tmp_path: Path) -> None:
    """Catches a reference kept by queue, worker or error (law 6), also after a failure."""
    failing = FailingCalls()
    with opened(tmp_path, SMALL, failing.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        for name, submit in (("preadv", tier.read_into), ("pwritev", tier.write_from)):
            for is_failing in (False, True):
                buffer = buffer_of(noise(NBYTES))
                if is_failing:
                    failing.arm(name, OSError(5, "bad"))
                completion = submit(key(0), buffer)
                try:
                    completion.wait(timeout_s=30)
                except TransferError:
                    assert is_failing
                assert not buffer.is_shared()
                dead = weakref.ref(buffer.memory)
                del buffer
                gc.collect()
                assert dead() is None, (name, is_failing)


def test_threads_and_descriptors_are_constant(tmp_path: Path) -> None:
    """Catches a descriptor or a thread per transfer, commit or overwrite."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(NBYTES))
        baseline = threading.active_count(), num_fds()
        for seed in range(60):
            write(tier, key(0), noise(NBYTES, seed))
            read(tier, key(0))
            if seed % 10 == 0:
                flush(tier)
            assert (threading.active_count(), num_fds()) == baseline


def test_requests_are_in_flight_together(tmp_path: Path) -> None:
    """Catches transfers of one block each that go through one worker while the others rest."""
    together, entered, armed = threading.Barrier(2), threading.Event(), threading.Event()

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if armed.is_set():
            entered.set()
            together.wait(timeout=30)
        return os.preadv(fd, views, offset)

    with opened(tmp_path, SMALL, SystemCalls(preadv=preadv)) as tier:
        store(tier, key(0), noise(100))
        armed.set()
        first = tier.read_into(key(0), buffer_of(bytes(100)))
        assert entered.wait(timeout=30)
        second = tier.prefetch_into(key(0), buffer_of(bytes(100)))
        first.wait(timeout_s=30)
        second.wait(timeout_s=30)


def test_many_wait_for_one_transfer(tier: NvmeTier, gate: Gate) -> None:
    """Catches a completion that lets only the first of its waiters go."""
    gate.hold("pwritev")
    completion = tier.write_from(key(0), buffer_of(noise(NBYTES, 2)))
    waiters = [threading.Thread(target=completion.wait, args=(30,)) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    with pytest.raises(TransferTimeoutError):
        completion.wait(timeout_s=0.01)
    gate.release("pwritev")
    for waiter in waiters:
        waiter.join(timeout=30)
    assert not any(waiter.is_alive() for waiter in waiters)
    completion.wait(timeout_s=0)


def test_many_threads_submit(tmp_path: Path) -> None:
    """Catches bookkeeping that two submitters damage for each other (law 13)."""
    errors = []

    def work(thread: int) -> None:
        try:
            for seed in range(6):
                for i in range(2):
                    which = key(10 * thread + i)
                    if seed == 0:
                        tier.reserve(which, NBYTES)
                    write(tier, which, noise(NBYTES, thread + seed))
                    assert read(tier, which) == noise(NBYTES, thread + seed)
                flush(tier)
        except Exception as exc:  # noqa: BLE001 - shown by the assertion below
            errors.append(exc)

    with opened(tmp_path) as tier:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert errors == []
        flush(tier)
        assert tier.usage().num_keys == 12
        assert unaccounted_nbytes(tier) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    """Catches a hang in a forked data loader, whose copy of the tier has no workers, and a
    child that unlocks its parent's folder."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(NBYTES))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                tier.read_into(key(0), buffer_of(bytes(NBYTES)))
            except TierClosedError:
                tier.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert read(tier, key(0)) == noise(NBYTES)
        with pytest.raises(OSError, match="in use"):
            NvmeTier.open(tmp_path)
