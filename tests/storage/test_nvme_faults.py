"""Fault sweep: every system call fails once in every way; then everything works again."""

from __future__ import annotations

import errno
import os
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from nvme_helpers import (
    SMALL,
    FailingCalls,
    buffer_of,
    flush,
    key,
    noise,
    opened,
    read,
    store,
    unaccounted_nbytes,
)

from zinf_core.completion import Completion
from zinf_core.errors import TierError, TierFullError, TransferError
from zinf_core.keys import TensorKey
from zinf_storage.nvme import NvmeTier, SystemCalls

NBYTES = 20_001
ERRNOS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EDQUOT", "EAGAIN", "EINTR")}
FULL = (errno.ENOSPC, errno.EDQUOT)
PASSING = (errno.EAGAIN, errno.EINTR)
"""Errors of a read or write that ask for another attempt."""


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Workload:
    """Steps on one tier, each of which may fail; `expected` is what a dict would hold."""

    def __init__(self, tier: NvmeTier, failing: FailingCalls) -> None:
        self.tier = tier
        self.failing = failing
        self.expected: dict = {}
        self.errors: list[TierError] = []

    def run(self, seed: int) -> None:
        for i in range(2):
            self.reserve(key(i))
            self.write(key(i), noise(NBYTES, seed + i))
        self.flush()
        self.write(key(0), noise(NBYTES, seed + 2))
        self.write(key(1), noise(5000, seed + 3), 8192)
        self.read(key(1))
        self.flush()

    def reserve(self, which: TensorKey) -> None:
        if which not in self.expected:
            before = self.tier.usage()
            try:
                self.tier.reserve(which, NBYTES)
            except TierError as exc:
                self.errors.append(exc)
                assert self.tier.usage() == before, "law 8"
                self.tier.reserve(which, NBYTES)
            self.expected[which] = None

    def write(self, which: TensorKey, data: bytes, offset: int = 0) -> None:
        completion = self.tier.write_from(which, buffer_of(data), offset=offset)
        if self._settled(completion):
            old = self.expected[which]
            if old is None:
                # Bytes of a reserved key outside its first write are unspecified, but must stay.
                old = self._read_back(which)
                assert old[offset : offset + len(data)] == data
            self.expected[which] = old[:offset] + data + old[offset + len(data) :]
        self.check(which)

    def read(self, which: TensorKey) -> None:
        self._settled(self.tier.read_into(which, buffer_of(bytes(NBYTES))))
        self.check(which)

    def flush(self) -> None:
        self._settled(self.tier.flush())

    def check(self, which: TensorKey) -> None:
        """Law 9: reading gives the bytes of the last write that did not fail."""
        if self.expected[which] is not None and self.failing.fired:
            assert read(self.tier, which) == self.expected[which]

    def _read_back(self, which: TensorKey) -> bytes:
        data = b""
        while not data:
            try:
                data = read(self.tier, which)
            except TierError as exc:
                self.errors.append(exc)
        return data

    def _settled(self, completion: Completion) -> bool:
        error = _error_of(completion)
        assert _error_of(completion) is error, "the same result every time"
        if error is not None:
            self.errors.append(error)
        return error is None


def _error_of(completion: Completion) -> TierError | None:
    try:
        completion.wait(timeout_s=30)
    except TierError as exc:
        return exc
    return None


def calls_made(tmp_path: Path) -> dict[str, int]:
    failing = FailingCalls()
    with opened(tmp_path / "count", SMALL, failing.calls()) as tier:
        at_open = dict(failing.counts)
        workload = Workload(tier, failing)
        failing.arm("none", 0)
        workload.run(0)
        assert workload.errors == []
    return {name: count - at_open.get(name, 0) for name, count in failing.counts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("number", ERRNOS.values(), ids=ERRNOS.keys())
def test_every_call_fails_once(tmp_path: Path, number: int) -> None:
    """Catches a failed call that is swallowed, loses an extent, mixes old and new bytes, or
    leaves the tier or its folder unusable."""
    num_runs = 0
    for name, count in calls_made(tmp_path).items():
        for nth in range(count):
            num_runs += 1
            folder = tmp_path / f"{name}-{nth}"
            _run_with_failure(folder, name, nth, number)
    assert num_runs > 30


def _run_with_failure(folder: Path, name: str, nth: int, number: int) -> None:
    failing = FailingCalls()
    with opened(folder, SMALL, failing.calls()) as tier:
        workload = Workload(tier, failing)
        failing.arm(name, failure(number), nth=nth)
        workload.run(0)
        assert failing.fired, f"{name} number {nth} never came"
        is_advice = name in {"fadvise", "statvfs"}
        is_retried = number in PASSING and name in {"preadv", "pwritev"}
        # Where a segment does not fit, a smaller one may.
        is_smaller = number in FULL and name in {"open", "fallocate", "fsync"}
        assert len(workload.errors) <= 1
        # Room for the manifest after the next is not what a commit is asked for.
        is_ahead = "_renew" in failing.failed_in
        is_fine = is_advice or is_retried or is_smaller or is_ahead
        assert workload.errors or is_fine, f"{name} number {nth}"
        for error in workload.errors:
            _check_error(error, folder, number)
        for which in workload.expected:
            workload.check(which)
        workload.run(50)
        assert len(workload.errors) <= 1
        assert unaccounted_nbytes(tier) == 0, f"{name} number {nth} lost an extent"
        expected = workload.expected
    with opened(folder) as tier:
        assert {which: read(tier, which) for which in list(tier.keys())} == expected


def _check_error(error: TierError, folder: Path, number: int) -> None:
    wanted = TierFullError if number in FULL else TransferError
    assert isinstance(error, wanted)
    assert error.errno == number
    assert str(folder) in str(error)
    if wanted is TierFullError:
        assert "bytes are free there" in str(error)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("nbytes", [0, 1, 100, 4096, 5000])
def test_a_short_count_goes_on(tmp_path: Path, name: str, nbytes: int) -> None:
    """Catches a transfer taken for complete, or going on from an unaligned place (law 5)."""
    failing = FailingCalls()
    with opened(tmp_path, SMALL, failing.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        failing.arm(name, nbytes)
        if name == "pwritev":
            tier.write_from(key(0), buffer_of(noise(NBYTES, 1))).wait(timeout_s=30)
        expected = noise(NBYTES, 1 if name == "pwritev" else 0)
        assert read(tier, key(0)) == expected
        assert failing.fired
        assert read(tier, key(0)) == expected


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("operation", ["read", "prefetch", "write"])
def test_a_transfer_error_says_everything(tmp_path: Path, operation: str, number: int) -> None:
    """Catches a message that leaves out the file, the place, the size, the key or the reason."""
    failing = FailingCalls()
    with opened(tmp_path, SMALL, failing.calls()) as tier:
        store(tier, key(3), noise(5000))
        submit = {
            "read": tier.read_into, "prefetch": tier.prefetch_into, "write": tier.write_from
        }[operation]  # fmt: skip
        offset = tier.stat(key(3)).offset
        failing.arm("pwritev" if operation == "write" else "preadv", failure(number))
        with pytest.raises(TierFullError if number in FULL else TransferError) as caught:
            submit(key(3), buffer_of(noise(5000))).wait(timeout_s=30)
        if operation == "write":
            offset = 8192  # the fresh extent
        for needed in (
            f"nvme: {operation} of layers.3.weight/param", f"8192 bytes at file offset {offset}",
            str(tmp_path / "segment-00000.zinf"), os.strerror(number),
        ):  # fmt: skip
            assert needed in str(caught.value)
        assert caught.value.errno == number


@pytest.mark.parametrize("number", PASSING, ids=["EAGAIN", "EINTR"])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_passing_error_is_tried_again(tmp_path: Path, name: str, number: int) -> None:
    """Catches a transfer that fails because of a signal or a busy moment, even several of them,
    or that goes on from the wrong byte after one."""
    failures = iter(())
    real = getattr(os, name)

    def call(fd: int, views: list[memoryview], offset: int) -> int:
        for error in failures:
            raise error
        return real(fd, [views[0][:4096]], offset)

    with opened(tmp_path, SMALL, replace(SystemCalls(), **{name: call})) as tier:
        store(tier, key(0), noise(NBYTES))
        failures = iter([failure(number)] * 7)
        completion = tier.write_from(key(0), buffer_of(noise(NBYTES, 1)))
        completion.wait(timeout_s=30)
        assert read(tier, key(0)) == noise(NBYTES, 1)
        assert next(failures, None) is None


def test_waiting_again_does_not_grow_the_error(tmp_path: Path) -> None:
    """Catches an error that collects the frames of everyone who waited, and what they hold."""
    failing = FailingCalls()
    with opened(tmp_path, SMALL, failing.calls()) as tier:
        store(tier, key(0), noise(5000))
        failing.arm("preadv", failure(errno.EIO))
        completion = tier.read_into(key(0), buffer_of(bytes(5000)))
        depths = []
        for _ in range(3):
            error = _error_of(completion)
            assert error is not None
            depths.append(len(traceback.extract_tb(error.__traceback__)))
        assert len(set(depths)) == 1


@pytest.mark.parametrize("number", PASSING, ids=["EAGAIN", "EINTR"])
def test_a_drive_that_moves_nothing_is_given_up(tmp_path: Path, number: int) -> None:
    """Catches an endless loop where every call wants to be made again."""

    def busy(*args: object) -> int:
        raise failure(number)

    with opened(tmp_path, SMALL, replace(SystemCalls(), pwritev=busy)) as tier:
        tier.reserve(key(0), 5000)
        with pytest.raises(TransferError, match="made no progress in 8 attempts") as caught:
            tier.write_from(key(0), buffer_of(noise(5000))).wait(timeout_s=30)
        assert f"{tmp_path}/segment-00000.zinf: 8192 bytes at offset 0" in str(caught.value)
        assert caught.value.errno == errno.EAGAIN


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_failure_among_many_hits_one(tmp_path: Path, name: str, number: int) -> None:
    """Catches an error that reaches a neighbour in another lane, blocks of a failed transfer that
    are still moved and end it twice, and a worker, a buffer or an extent lost with it."""
    failing = FailingCalls()
    with opened(tmp_path, replace(SMALL, num_threads=3), failing.calls()) as tier:
        for i in range(4):
            store(tier, key(i), noise(NBYTES, i))
        for nth in range(0, 9 if name == "preadv" else 6, 2):
            buffers = [buffer_of(bytes(NBYTES)) for _ in range(3)]
            failing.arm(name, failure(number), nth=nth)
            prefetches = [tier.prefetch_into(key(i), buffers[i]) for i in range(2)]
            writes = [tier.write_from(key(i), buffer_of(noise(NBYTES, i))) for i in (2, 3)]
            demand = tier.read_into(key(2), buffers[2])
            prefetches[1].promote()
            reads = [*prefetches, demand]
            errors = [_error_of(completion) for completion in (*reads, *writes)]
            assert failing.fired
            (error,) = filter(None, errors)
            _check_error(error, tmp_path, number)
            assert (error in errors[:3]) == (name == "preadv")
            assert not any(prefetch.cancel() for prefetch in prefetches)
            for i, buffer in enumerate(buffers):
                assert errors[i] or buffer.array.tobytes() == noise(NBYTES, i)
                assert not buffer.is_shared()
            assert [read(tier, key(i)) for i in range(4)] == [noise(NBYTES, i) for i in range(4)]
        flush(tier)
        assert unaccounted_nbytes(tier) == 0


def test_a_file_system_without_direct_io_or_fallocate(tmp_path: Path) -> None:
    """Catches a tier that only works where both exist; the path taken must say so."""

    def open_buffered(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise failure(errno.EINVAL)
        return os.open(path, flags, *mode)

    def no_fallocate(*args: object) -> None:
        raise failure(errno.EOPNOTSUPP)

    calls = replace(SystemCalls(), open=open_buffered, fallocate=no_fallocate)
    with opened(tmp_path, SMALL, calls) as tier:
        store(tier, key(0), noise(NBYTES))
        assert read(tier, key(0)) == noise(NBYTES)
        assert tier.path_taken == "posix-buffered, not preallocated"


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_a_failing_open_leaves_nothing_locked(tmp_path: Path, name: str) -> None:
    """Catches a lock, thread or descriptor kept by an open that failed half-way."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(NBYTES))
        flush(tier)
    for nth in range(1 if name == "preadv" else 3):
        failing = FailingCalls()
        failing.arm(name, failure(errno.EMFILE), nth=nth)
        with pytest.raises(TransferError, match=str(tmp_path)):
            NvmeTier.open(tmp_path, calls=failing.calls())
        assert failing.fired
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(NBYTES)


def test_a_doubtful_commit_keeps_both_versions(tmp_path: Path) -> None:
    """Catches extents freed after a commit whose last sync failed: either manifest may be the
    one a crash leaves, so neither's bytes may be written over."""
    failing = FailingCalls()
    with opened(tmp_path, SMALL, failing.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        flush(tier)
        first = tier._parts.table.page(key(0)).version
        tier.write_from(key(0), buffer_of(noise(NBYTES, 1))).wait()
        second = tier._parts.table.page(key(0)).version
        failing.arm("fsync", failure(errno.EIO), nth=1)
        with pytest.raises(TransferError):
            flush(tier)
        tier.write_from(key(0), buffer_of(noise(NBYTES, 2))).wait()
        assert first.pins == 1
        assert second.pins == 1
        flush(tier)
        assert (first.pins, second.pins) == (0, 0)
        assert unaccounted_nbytes(tier) == 0
