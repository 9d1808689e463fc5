"""ThrottledTier: exactly as slow as it says, by a clock that only the test moves."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
from chunked_helpers import key, noise

from zinf_core.capabilities import TierCapabilities
from zinf_core.errors import (
    ConfigError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from zinf_core.registry import TierUrl, open_tier
from zinf_core.testing import DeferredTier, DictTier, FaultyTier, Operation, host_buffer
from zinf_core.tier import SupportsMap, SupportsPrefetch
from zinf_storage.throttled import Limits, SystemClock, ThrottledTier, throttled


class Clock:
    """A clock that moves only when somebody waits on it."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, time_s: float) -> None:
        self.time_s = max(self.time_s, time_s)


def opened(limits: Limits, inner: DictTier | None = None) -> tuple[ThrottledTier, Clock]:
    clock = Clock()
    tier = throttled(inner or DictTier(), limits, clock=clock)
    for i in range(3):
        tier.reserve(key(i), 1000)
    return tier, clock


def after(clock: Clock, start_s: float = 100.0) -> float:
    return pytest.approx(clock.time_s - start_s)


RATES = Limits(read_bytes_per_s=1000.0, write_bytes_per_s=500.0, latency_s=0.25)


def test_a_transfer_takes_its_bytes_and_the_latency() -> None:
    """Catches rates mixed up, and bits for bytes."""
    tier, clock = opened(RATES)
    buffer = host_buffer(1000)
    tier.read_into(key(0), buffer).wait()
    assert after(clock) == 1.25
    tier.write_from(key(0), buffer).wait()
    assert after(clock) == 1.25 + 2.25
    tier.read_into(key(0), buffer.part(0, 100), offset=900).wait()
    assert after(clock) == 1.25 + 2.25 + 0.35


def test_transfers_take_turns_and_latencies_overlap() -> None:
    """Catches transfers in flight that each have the full rate, or each pay the latency in turn."""
    tier, clock = opened(RATES)
    reads = [tier.read_into(key(i), host_buffer(1000)) for i in range(3)]
    for i, read in enumerate(reads):
        assert not read.done()
        clock.wait_until(100.0 + i + 1 + 0.24)
        assert not read.done()
        clock.wait_until(100.0 + i + 1 + 0.26)
        assert read.done()
    clock.wait_until(200.0)
    late = tier.read_into(key(0), host_buffer(1000))
    late.wait()
    assert clock.time_s == pytest.approx(201.25), "an idle lane saves nothing up"


@pytest.mark.parametrize(("is_shared", "expected_s"), [(False, 2.0), (True, 4.0)])
def test_lanes(is_shared: bool, expected_s: float) -> None:
    """Catches reads that hold writes up on a drive that does both at once, and the reverse."""
    tier, clock = opened(
        Limits(read_bytes_per_s=500.0, write_bytes_per_s=500.0, is_shared=is_shared)
    )
    both = [tier.read_into(key(0), host_buffer(1000)), tier.write_from(key(1), host_buffer(1000))]
    for completion in both:
        completion.wait()
    assert after(clock) == expected_s


def test_a_flush_comes_after_the_writes() -> None:
    """Catches a flush that is done before what it flushes."""
    tier, clock = opened(RATES)
    tier.write_from(key(0), host_buffer(1000))
    tier.flush().wait()
    assert after(clock) == 2.25


def test_a_wait_can_time_out() -> None:
    """Catches a timeout that waits for the transfer, or makes it start anew."""
    tier, clock = opened(RATES)
    read = tier.read_into(key(0), host_buffer(1000))
    with pytest.raises(TransferTimeoutError, match=r"throttled\(dict\)"):
        read.wait(timeout_s=0.5)
    assert after(clock) == 0.5
    read.wait(timeout_s=1.0)
    assert after(clock) == 1.25
    read.wait(timeout_s=0.0)


def test_slow_inner_tiers_are_waited_for() -> None:
    """Catches a transfer that is done when it is due though the inner one is not."""
    tier, clock = opened(RATES, DeferredTier(DictTier(), polls_until_done=10**9))
    read = tier.read_into(key(0), host_buffer(1000))
    clock.wait_until(1000.0)
    assert not read.done()
    read.wait()
    assert read.done()


def test_failures_come_when_the_transfer_is_due() -> None:
    """Catches failures that are lost, or come sooner than the bytes would."""
    inner = FaultyTier(DictTier())
    tier, clock = opened(RATES, inner)
    inner.fail_next(Operation.READ)
    read = tier.read_into(key(0), host_buffer(1000))
    assert not read.done()
    for _ in range(2):
        with pytest.raises(TransferError):
            read.wait()
    assert after(clock) == 1.25


def test_close_takes_as_long_as_what_is_in_flight() -> None:
    """Catches a close after which transfers are not done, or that forgets the inner tier."""
    inner = DictTier()
    tier, clock = opened(RATES, inner)
    read = tier.read_into(key(0), host_buffer(1000))
    tier.close()
    assert read.done()
    assert after(clock) == 1.25
    tier.close()
    assert inner._closed


def test_everything_else_is_passed_on() -> None:
    """Catches answers of its own, and a map that goes round the limits."""
    inner = DictTier("drive", medium={}, capabilities=TierCapabilities(
        memory_spaces=DictTier().capabilities.memory_spaces, offset_align=512))  # fmt: skip
    tier, _ = opened(RATES, inner)
    assert tier.capabilities == inner.capabilities
    assert tier.capabilities.persistent
    assert tier.name == "throttled(drive)"
    assert "500 B/s written" in tier.path_taken
    assert tier.usage() == inner.usage()
    assert tier.stat(key(0)) == inner.stat(key(0))
    tier.discard(key(0))
    assert set(tier.keys()) == set(inner.keys()) == {key(1), key(2)}
    assert not isinstance(tier, SupportsMap)
    assert not isinstance(tier, SupportsPrefetch)
    host = open_tier("throttled://[host://]?latency_s=0.5", capacity_nbytes=1 << 20)
    assert not host.capabilities.mappable
    host.close()


def test_prefetches_take_the_lane() -> None:
    """Catches prefetches that are free, that cannot be given up, or do not give their time back."""
    tier, clock = opened(RATES, DeferredTier(DictTier()))
    assert isinstance(tier, SupportsPrefetch)
    first = tier.prefetch_into(key(0), host_buffer(1000))
    second = tier.prefetch_into(key(1), host_buffer(1000))
    assert second.cancel()
    assert second.done()
    for _ in range(2):
        with pytest.raises(TransferCancelledError):
            second.wait()
    assert after(clock) == 0.0
    read = tier.read_into(key(2), host_buffer(1000))
    first.promote()
    first.wait()
    assert after(clock) == 1.25
    assert not first.cancel()
    read.wait()
    assert after(clock) == 2.25, "the cancelled one's second was given back"


def test_any_number_of_threads_may_submit() -> None:
    """Catches two transfers booked for the same time."""
    tier, clock = opened(Limits(read_bytes_per_s=1000.0))
    reads: list[object] = []
    start = threading.Barrier(8)

    def submit() -> None:
        start.wait(timeout=30)
        reads.extend(tier.read_into(key(0), host_buffer(1000)) for _ in range(25))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    due = sorted(read.due_s for read in reads)
    assert due == [pytest.approx(101.0 + i) for i in range(200)]
    assert all(a < b for a, b in itertools.pairwise(due))
    assert clock.time_s == 100.0


def test_the_system_clock_waits() -> None:
    """Catches a wait that returns early, or for a time that is over."""
    clock = SystemClock()
    due_s = clock.now_s() + 0.01
    clock.wait_until(due_s)
    assert clock.now_s() >= due_s
    clock.wait_until(due_s - 1000.0)
    clock.wait_until(-math.inf)


def test_urls() -> None:
    """Catches rates that do not arrive, or in another unit."""
    tier = open_tier(
        "throttled://[host://]?read_bytes_per_s=100MB&write_bytes_per_s=1MiB&latency_s=0.001",
        capacity_nbytes=1 << 20,
    )
    assert tier._limits == Limits(
        read_bytes_per_s=1e8, write_bytes_per_s=float(1 << 20), latency_s=0.001
    )
    assert tier.usage().capacity_nbytes == 1 << 20
    tier.reserve(key(0), 1000)
    tier.write_from(key(0), host_buffer(1000)).wait()
    tier.close()
    tier = open_tier("throttled://[host://]?bytes_per_s=2GB", capacity_nbytes=1 << 20)
    assert tier._limits == Limits(read_bytes_per_s=2e9, write_bytes_per_s=2e9, is_shared=True)
    tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "throttled://?bytes_per_s=1",
        "throttled://[host://]",
        "throttled://[host://][host://]?bytes_per_s=1",
        "throttled:///path?bytes_per_s=1",
        "throttled://[host://]?bytes_per_s=0",
        "throttled://[host://]?read_bytes_per_s=fast",
        "throttled://[host://]?bytes_per_s=1&read_bytes_per_s=1",
        "throttled://[host://]?latency_s=-1",
        "throttled://[host://]?latency_s=inf",
        "throttled://[host://]?latency_s=nan",
        "throttled://[host://]?latency_s=soon",
        "throttled://[host://]?speed=1",
    ],
)
def test_urls_that_cannot_work(url: str) -> None:
    """Catches limits that are ignored, contradict each other, or never end."""
    assert TierUrl.parse(url).scheme == "throttled"
    with pytest.raises(ConfigError):
        open_tier(url, capacity_nbytes=1 << 20)


def test_bytes_arrive() -> None:
    """Catches a throttle that forgets to transfer."""
    tier, _ = opened(RATES)
    src, dst = host_buffer(1000), host_buffer(1000)
    src.array[:] = list(noise(1000))
    tier.write_from(key(0), src).wait()
    tier.read_into(key(0), dst).wait()
    assert dst.array.tobytes() == noise(1000)
