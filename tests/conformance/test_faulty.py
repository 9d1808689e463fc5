"""FaultyTier: which call fails, when, with what, and what is left behind."""

from __future__ import annotations

import errno

import pytest

from zinf_core.buffers import HostBuffer
from zinf_core.errors import (
    ConfigError,
    CorruptDataError,
    TierFullError,
    TransferCancelledError,
    TransferError,
)
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    Fault,
    FaultPlan,
    FaultyTier,
    Operation,
    Phase,
    host_buffer,
    no_space,
    seeded_order,
)
from zinf_core.tier import Tier

A, B = (TensorKey.of(name, StateKind.PARAM) for name in "ab")


def of(value: int, nbytes: int = 4) -> HostBuffer:
    buffer = host_buffer(nbytes)
    buffer.array[:] = value
    return buffer


def read(tier: FaultyTier, key: TensorKey = A) -> list[int]:
    dst = of(0, tier.stat(key).nbytes)
    tier.read_into(key, dst).wait()
    return dst.array.tolist()


def opened(*faults: Fault) -> FaultyTier:
    """Return a tier with A = 1111 and B, after four calls: reserve, write, reserve, write."""
    tier = FaultyTier(DictTier(), plan=FaultPlan(faults=faults))
    for key in (A, B):
        tier.reserve(key, 4)
        tier.write_from(key, of(1)).wait()
    return tier


def test_counts_every_call_in_order() -> None:
    """Catches a sweep that leaves calls out because they were not counted."""
    tier = opened()
    read(tier)
    tier.flush().wait()
    tier.discard(A)
    names = [operation.name for operation in tier.calls]
    assert names == ["RESERVE", "WRITE", "RESERVE", "WRITE", "READ", "FLUSH", "DISCARD"]
    assert tier.fired == ()


def test_counts_all_calls_or_those_of_one_operation() -> None:
    """Catches a fault that hits the call before or after the one meant."""
    among_all = Fault(call=5)
    among_reads = Fault(call=2, operation=Operation.READ)
    tier = opened(among_all, among_reads)
    assert read(tier) == [1] * 4
    for fault in (among_all, among_reads):
        with pytest.raises(TransferError) as caught:
            read(tier)
        assert caught.value.errno == errno.EIO
        assert tier.fired[-1] is fault
    assert read(tier) == [1] * 4


def test_fails_at_submit_or_at_wait() -> None:
    """Catches phases mixed up: the two leave a caller in different places."""
    tier = opened(Fault(call=4, phase=Phase.SUBMIT), Fault(call=5, phase=Phase.WAIT))
    with pytest.raises(TransferError):
        tier.write_from(A, of(2))
    completion = tier.write_from(A, of(2))
    for _ in range(2):
        with pytest.raises(TransferError):
            completion.wait()
    assert read(tier) == [1] * 4


def test_reserve_and_discard_fail_at_once() -> None:
    """Catches a planned failure that passes because the call returns no completion."""
    tier = opened(
        Fault(call=2, operation=Operation.RESERVE, error=no_space),
        Fault(call=0, operation=Operation.DISCARD),
    )
    before = tier.usage()
    with pytest.raises(TierFullError) as caught:
        tier.reserve(TensorKey.of("c", StateKind.PARAM), 4)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(TransferError):
        tier.discard(A)
    assert tier.usage() == before


def test_flush_fails() -> None:
    """Catches a flush whose failure nobody can plan."""
    tier = opened(Fault(call=0, operation=Operation.FLUSH))
    completion = tier.flush()
    with pytest.raises(TransferError):
        completion.wait()
    tier.flush().wait()


def test_damaged_key_is_corrupt_until_written_whole() -> None:
    """Catches a failed write that looks like the old or the new bytes to a reader."""
    tier = opened()
    tier.fail_next(Operation.WRITE, damage=True)
    with pytest.raises(TransferError):
        tier.write_from(A, of(2)).wait()
    with pytest.raises(CorruptDataError):
        read(tier)
    tier.write_from(A, of(3, 2)).wait()
    with pytest.raises(CorruptDataError):
        read(tier)
    assert read(tier, B) == [1] * 4
    tier.write_from(A, of(4)).wait()
    assert read(tier) == [4] * 4


def test_discard_heals_a_damaged_key() -> None:
    """Catches damage that sticks to a name."""
    tier = opened()
    tier.fail_next(Operation.WRITE, damage=True)
    with pytest.raises(TransferError):
        tier.write_from(A, of(2)).wait()
    tier.discard(A)
    tier.reserve(A, 4)
    tier.write_from(A, of(5)).wait()
    assert read(tier) == [5] * 4


def test_failed_read_ruins_its_destination() -> None:
    """Catches callers that use a buffer although its read failed."""
    tier = opened()
    tier.fail_next(Operation.READ)
    dst = of(9)
    with pytest.raises(TransferError):
        tier.read_into(A, dst).wait()
    assert dst.array.tolist() == [0x5E, 0x5E, 9, 9]


def test_short_device() -> None:
    """Catches a device whose end is counted per key, or a byte off."""
    tier = FaultyTier(DictTier(), plan=FaultPlan(device_nbytes=10))
    for key in (A, B):
        tier.reserve(key, 8)
    tier.write_from(A, of(1, 8)).wait()
    completion = tier.write_from(B, of(1, 3))
    with pytest.raises(TransferError):
        completion.wait()
    tier.write_from(B, of(1, 2)).wait()


def test_full_device() -> None:
    """Catches room that is counted wrong when it is given back."""
    tier = FaultyTier(DictTier(), plan=FaultPlan(room_nbytes=10))
    tier.reserve(A, 8)
    with pytest.raises(TierFullError):
        tier.reserve(B, 3)
    tier.reserve(B, 2)
    tier.discard(A)
    tier.reserve(A, 8)


def test_planned_room_is_the_capacity() -> None:
    """Catches a caller that plans with room which the device will refuse."""
    plan = FaultPlan(room_nbytes=10)
    for inner, capacity in ((DictTier(), 10), (DictTier(capacity_nbytes=4), 4)):
        assert FaultyTier(inner, plan=plan).usage().capacity_nbytes == capacity


@pytest.mark.parametrize("deferred", [False, True])
def test_device_that_ends_in_the_middle(deferred: bool) -> None:
    """Catches keys that a dying device takes along although they were written before."""
    short: Tier = FaultyTier(DictTier(), plan=FaultPlan(device_nbytes=10 * 64 + 32))
    tier = DeferredTier(short, order=seeded_order(1)) if deferred else short
    keys = [TensorKey.of(f"k{i}", StateKind.PARAM) for i in range(8)]
    for value, key in enumerate(keys):
        tier.reserve(key, 64)
        tier.write_from(key, of(value, 64)).wait()
    failed = []
    for key in keys:
        try:
            tier.write_from(key, of(99, 64)).wait()
        except TransferError:
            failed.append(key)
    assert failed == keys[2:]
    for value, key in enumerate(keys):
        dst = of(0, 64)
        tier.read_into(key, dst).wait()
        assert set(dst.array.tolist()) == {value if key in failed else 99}
        tier.discard(key)
    assert tier.usage().nbytes == 0
    tier.close()


def test_prefetch_fails_like_a_read() -> None:
    """Catches prefetches that no plan reaches, and a failed one that can be taken back."""
    tier = opened()
    tier.fail_next(Operation.PREFETCH)
    dst = of(9)
    prefetch = tier.prefetch_into(A, dst)
    assert prefetch.done()
    assert not prefetch.cancel()
    prefetch.promote()
    for _ in range(2):
        with pytest.raises(TransferError):
            prefetch.wait()
    assert dst.array.tolist() == [0x5E, 0x5E, 9, 9]
    tier.prefetch_into(A, dst).wait()
    assert dst.array.tolist() == [1] * 4
    assert tier.calls[-2:] == (Operation.PREFETCH, Operation.PREFETCH)


def test_prefetch_of_the_inner_tier_is_used() -> None:
    """Catches a wrapper that turns prefetches which can be cancelled into reads."""
    tier = FaultyTier(DeferredTier(DictTier()))
    tier.reserve(A, 4)
    prefetch = tier.prefetch_into(A, of(0))
    assert prefetch.cancel()
    with pytest.raises(TransferCancelledError):
        prefetch.wait()


def test_bad_arguments_are_no_calls() -> None:
    """Catches a sweep that spends its fault on a call the tier refuses anyway."""
    tier = opened()
    tier.fail_next(Operation.READ)
    with pytest.raises(ValueError, match="outside"):
        tier.read_into(A, of(0, 5))
    assert len(tier.calls) == 4
    with pytest.raises(TransferError):
        read(tier)


def test_negative_call_is_refused() -> None:
    """Catches a plan that can never happen."""
    with pytest.raises(ConfigError, match="negative"):
        Fault(call=-1)
