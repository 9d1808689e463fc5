"""Samples, rounds and the test data of a tier, on tiers whose behaviour is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import TransferError
from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.tier import Tier
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.bench.disk import DiskWatch, Verdict
from zinf_storage.bench.grid import Cell, Effort, Operation, Order, Schedule, plan_schedule
from zinf_storage.bench.sample import Clocks, Sampler
from zinf_storage.bench.session import Session, Steering, best_cell
from zinf_storage.bench.workload import Request, Workload, allocate_noise
from zinf_storage.host import HostTier

PAGE = 4096
DATA_NBYTES = 64 * PAGE


class Late:
    """A completion that is done once it was waited for, and says how many were in flight."""

    def __init__(self, tier: SlowTier, error: Exception | None) -> None:
        self._tier = tier
        self._error = error
        self._done = False

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        if not self._done:
            self._done = True
            self._tier.in_flight -= 1
            self._tier.now_s += 1.0
        if self._error is not None:
            raise self._error


class SlowTier:
    """A host tier whose requests take a second each by its own clock, one after the other."""

    def __init__(self, tier: Tier, *, fail_at: int = -1) -> None:
        self._tier = tier
        self._count = itertools.count()
        self._fail_at = fail_at
        self.now_s = 0.0
        self.in_flight = 0
        self.most_in_flight = 0
        self.moves: list[tuple[bool, TensorKey, int, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self._tier.read_into(key, dst, offset=offset).wait()
        return self._late(False, key, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        self._tier.write_from(key, src, offset=offset).wait()
        return self._late(True, key, src, offset)

    def _late(self, is_write: bool, key: TensorKey, buffer: Buffer, offset: int) -> Completion:
        self.moves.append((is_write, key, offset, buffer.nbytes))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        error = TransferError("planted") if next(self._count) == self._fail_at else None
        return Late(self, error)

    def clocks(self) -> Clocks:
        return Clocks(wall_s=lambda: self.now_s, cpu_s=lambda: self.now_s / 4)


@pytest.fixture
def host() -> Iterator[HostTier]:
    pool = BufferPool("host", budget_nbytes=1 << 24, allocator=PageAlignedAllocator())
    tier = HostTier("host", pool=pool)
    yield tier
    tier.close()


def filled(tier: Tier) -> Workload:
    arena = allocate_noise(DATA_NBYTES // 4, PageAlignedAllocator())
    workload = Workload(tier, data_nbytes=DATA_NBYTES, arena=arena, token="t")
    workload.fill(lambda: False)
    return workload


def steering(should_stop: Callable[[], bool] = lambda: False) -> Steering:
    return Steering(describe=lambda what: None, advance=lambda what: None, should_stop=should_stop)


def cell(
    operation: Operation = Operation.READ,
    order: Order = Order.SEQUENTIAL,
    *,
    nbytes: int = PAGE,
    depth: int = 1,
) -> Cell:
    return Cell(operation=operation, order=order, nbytes=nbytes, depth=depth)


def test_times_and_bytes_are_what_happened(host: HostTier) -> None:
    """Catches a rate without the last requests, and a latency without the time in the queue.

    A request takes one second and four are in flight: the fourth waits for three others.
    """
    workload = filled(host)
    slow = SlowTier(host)
    sampler = Sampler(slow, should_stop=lambda: False, clocks=slow.clocks())
    one = cell(depth=4)
    with workload.requests(one) as requests:
        found = sampler.measure(requests, workload.slots(one), seconds=8.0)
    assert slow.most_in_flight == 4
    assert slow.in_flight == 0
    count = len(slow.moves)
    assert found.read_nbytes == count * PAGE
    assert found.written_nbytes == 0
    assert found.wall_s == count
    assert found.bytes_per_s == PAGE
    assert found.cpu_share == 0.25
    assert len(found.latencies_s) == count
    assert sorted(found.latencies_s)[:3] == [1.0, 2.0, 3.0]
    assert set(found.latencies_s[3:]) == {4.0}


def test_every_slot_is_used_once_however_slow(host: HostTier) -> None:
    """Catches a sample of a slow tier that never reaches the depth it is named for."""
    workload = filled(host)
    slow = SlowTier(host)
    sampler = Sampler(slow, should_stop=lambda: False, clocks=slow.clocks())
    one = cell(Operation.WRITE, depth=8)
    with workload.requests(one) as requests:
        found = sampler.measure(requests, workload.slots(one), seconds=0.0)
    assert (len(slow.moves), slow.most_in_flight) == (8, 8)
    assert found.written_nbytes == 8 * PAGE


def test_immediate_tiers_have_no_queue(host: HostTier) -> None:
    """Catches the latency of a copy made at submit counted with those submitted after it."""
    workload = filled(host)
    ticks = itertools.count()
    clocks = Clocks(wall_s=lambda: float(next(ticks)), cpu_s=lambda: 0.0)
    sampler = Sampler(host, should_stop=lambda: False, clocks=clocks)
    one = cell(depth=8)
    with workload.requests(one) as requests:
        found = sampler.measure(requests, workload.slots(one), seconds=50.0)
    assert set(found.latencies_s) == {1.0}


def test_a_failure_leaves_nothing_in_flight(host: HostTier) -> None:
    """Catches buffers used again while a tier still writes to them."""
    workload = filled(host)
    slow = SlowTier(host, fail_at=3)
    sampler = Sampler(slow, should_stop=lambda: False, clocks=slow.clocks())
    one = cell(depth=4)
    with pytest.raises(TransferError, match="planted"), workload.requests(one) as requests:
        sampler.measure(requests, workload.slots(one), seconds=50.0)
    assert slow.in_flight == 0


@pytest.mark.parametrize("order", Order)
def test_reads_cover_the_data(host: HostTier, order: Order) -> None:
    """Catches reads of one spot over and over, which a drive's own cache answers."""
    workload = filled(host)
    one = cell(order=order)
    with workload.requests(one) as requests:
        places = [(request.key, request.offset) for request in requests]
    assert len(set(places)) == len(places) == DATA_NBYTES // PAGE
    ahead = sum(a[0] == b[0] and b[1] - a[1] == PAGE for a, b in itertools.pairwise(places))
    assert (ahead > 50) == (order is Order.SEQUENTIAL)
    with workload.requests(one) as again:
        assert [(request.key, request.offset) for request in again] != places


def test_writes_are_whole_keys_and_do_not_stay(host: HostTier) -> None:
    """Catches writes of parts, which shadow paging answers with a copy, and keys left behind."""
    workload = filled(host)
    before = set(host.keys())
    for operation in (Operation.WRITE, Operation.MIXED):
        one = cell(operation, Order.RANDOM, nbytes=2 * PAGE, depth=2)
        with workload.requests(one) as requests:
            writes = [request for request in requests if request.is_write]
            assert {host.stat(request.key).nbytes for request in writes} == {2 * PAGE}
            assert {request.offset for request in writes} == {0}
            assert len({request.key for request in writes}) >= one.depth
            if operation is Operation.MIXED:
                turns = [request.is_write for request in requests]
                assert turns == [False, True] * (len(turns) // 2)
        assert set(host.keys()) == before
    workload.remove()
    assert list(host.keys()) == []


def test_the_data_cannot_be_compressed() -> None:
    """Catches test data of zeros, which some drives and tiers store for nothing."""
    memory = allocate_noise(1 << 16, PageAlignedAllocator()).array
    counts = np.bincount(memory, minlength=256)
    assert counts.min() > 128
    assert counts.max() < 512


def test_a_session_measures_everything_in_rounds(host: HostTier) -> None:
    """Catches a cell that is forgotten, and rounds that measure one cell many times in a row."""
    schedule = plan_schedule(Effort.QUICK, data_nbytes=DATA_NBYTES, align=1, seconds=0.01)
    seen: list[str] = []
    session = Session(
        host,
        filled(host),
        watch=DiskWatch((), filesystem=""),
        steering=Steering(
            describe=lambda what: None, advance=seen.append, should_stop=lambda: False
        ),
    )
    results, is_complete = session.run(schedule)
    assert is_complete
    assert [result.cell for result in results] == list(schedule.cells)
    assert sorted(seen) == sorted(str(one) for one in schedule.cells for _ in range(3))
    for result in results:
        assert result.verdict is Verdict.NO_FILES
        assert result.bytes_per_s is not None
        assert result.bytes_per_s.num_samples == 3
        assert result.p50_s is not None
        assert result.p99_s is not None
        assert 0 < result.p50_s.median <= result.p99_s.median
    best = best_cell(results)
    assert best is not None
    assert best.bytes_per_s is not None
    assert all(r.bytes_per_s.median <= best.bytes_per_s.median for r in results if r.bytes_per_s)


def test_stopping_keeps_what_there_is(host: HostTier) -> None:
    """Catches an interrupt that loses the rounds before it, or is not noticed within one."""
    schedule = plan_schedule(Effort.QUICK, data_nbytes=DATA_NBYTES, align=1, seconds=0.01)
    seen: list[str] = []
    session = Session(
        host,
        filled(host),
        watch=DiskWatch((), filesystem=""),
        steering=Steering(
            describe=lambda what: None, advance=seen.append, should_stop=lambda: len(seen) >= 3
        ),
    )
    results, is_complete = session.run(schedule)
    assert not is_complete
    assert len(seen) == 3
    assert {str(result.cell) for result in results} <= set(seen)


def test_slow_tiers_end_in_time(host: HostTier) -> None:
    """Catches a full grid over a tier so slow that it would take the night."""
    one = cell()
    schedule = Schedule(cells=(one,) * 3, num_rounds=2, sample_s=0.0, limit_s=-1.0)
    session = Session(host, filled(host), watch=DiskWatch((), filesystem=""), steering=steering())
    assert session.run(schedule) == ((), False)


def test_requests_in_words() -> None:
    """Catches a request that says nothing about where it goes."""
    request = Request(key=TensorKey("a", "param"), offset=PAGE, is_write=True)
    assert request.offset == PAGE
    assert str(cell(depth=4)) == "sequential read, 4 KiB, depth 4"
