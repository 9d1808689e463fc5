"""DeferredTier: when transfers happen, to the byte and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from chip_memory import ChipBuffer, ChipTier, chip_contents, fill_chip

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import Completion
from zinf_core.errors import (
    ConfigError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from zinf_core.keys import StateKind, TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    FaultyTier,
    Operation,
    host_buffer,
    latest,
    seeded_order,
)
from zinf_core.testing.memory import UNWRITTEN
from zinf_core.tier import SupportsMap
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.host import HostTier

A, B = (TensorKey.of(name, StateKind.PARAM) for name in "ab")


class RecordingTier(DictTier):
    """Names each transfer when it happens: the first byte of its buffer, after a letter."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        for key in (A, B):
            self.reserve(key, 4)

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self.events.append(f"read {key.name}")
        return super().read_into(key, dst, offset=offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        self.events.append(f"write {key.name}{src.array[0]}")
        return super().write_from(key, src, offset=offset)

    def flush(self) -> Completion:
        self.events.append("flush")
        return super().flush()

    def discard(self, key: TensorKey) -> None:
        self.events.append(f"discard {key.name}")
        super().discard(key)


def of(value: int) -> HostBuffer:
    buffer = host_buffer(4)
    buffer.array[:] = value
    return buffer


def test_destination_is_poisoned_until_wait() -> None:
    """Catches a wrapper that reads at submit, which would hide every early use."""
    tier = DeferredTier(RecordingTier())
    tier.write_from(A, of(7)).wait()
    dst = of(1)
    completion = tier.read_into(A, dst)
    assert dst.array.tolist() == [0xA5] * 4
    completion.wait()
    assert dst.array.tolist() == [7] * 4


def test_source_reused_early_corrupts() -> None:
    """Catches a wrapper that copies sources: the caller's bug would not show."""
    tier = DeferredTier(RecordingTier())
    src, dst = of(1), of(0)
    completion = tier.write_from(A, src)
    src.array[:] = 2
    completion.wait()
    tier.read_into(A, dst).wait()
    assert dst.array.tolist() == [2] * 4


def test_done_makes_progress_only_at_the_last_poll() -> None:
    """Catches polls that help a transfer along, and callers that poll getting stuck."""
    inner = RecordingTier()
    completion = DeferredTier(inner, polls_until_done=3).write_from(A, of(1))
    assert [completion.done() for _ in range(2)] == [False, False]
    assert inner.events == []
    assert completion.done()
    assert inner.events == ["write a1"]
    assert completion.done()


def test_wait_without_time_gives_up() -> None:
    """Catches callers for whom a time-out is the end of the transfer."""
    inner = RecordingTier()
    completion = DeferredTier(inner).write_from(A, of(1))
    with pytest.raises(TransferTimeoutError):
        completion.wait(timeout_s=0)
    assert inner.events == []
    completion.wait(timeout_s=10)
    assert inner.events == ["write a1"]


@pytest.mark.parametrize(
    ("order", "events"),
    [
        (latest, ["write b2"]),
        (lambda count: count - 1, ["read a", "write a1", "write b2"]),
        (lambda count: count // 2, ["write a1", "read a", "write b2"]),
    ],
)
def test_order_decides_what_happens_first(order: Callable[[int], int], events: list[str]) -> None:
    """Catches an order that is not asked, or asked about the wrong candidates."""
    inner = RecordingTier()
    tier = DeferredTier(inner, order=order)
    tier.write_from(A, of(1))
    tier.read_into(A, of(0))
    tier.write_from(B, of(2)).wait()
    assert inner.events == events
    assert tier.num_pending == 3 - len(events)
    tier.close()


def test_seeded_orders_repeat_and_differ() -> None:
    """Catches an order drawn from something else than its seed."""

    def run(seed: int) -> list[str]:
        inner = RecordingTier()
        tier = DeferredTier(inner, order=seeded_order(seed))
        for value in range(6):
            tier.write_from(A, of(value))
        tier.close()
        return inner.events

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(10)}) > 5


def test_flush_follows_what_was_submitted_before() -> None:
    """Catches a flush that makes nothing durable, or waits for what came after it."""
    inner = RecordingTier()
    tier = DeferredTier(inner)
    tier.write_from(A, of(1))
    flush = tier.flush()
    late = tier.write_from(B, of(2))
    assert inner.events == []
    flush.wait()
    assert inner.events == ["write a1", "flush"]
    late.wait()


def test_discard_settles_its_key_only() -> None:
    """Catches transfers that meet the next owner of the name, and needless progress."""
    inner = RecordingTier()
    tier = DeferredTier(inner)
    tier.write_from(A, of(1))
    tier.write_from(B, of(2))
    tier.discard(A)
    assert inner.events == ["write a1", "discard a"]
    assert tier.num_pending == 1
    tier.close()
    assert inner.events == ["write a1", "discard a", "write b2"]


def test_failure_belongs_to_its_own_transfer() -> None:
    """Catches an error raised by the wait that happened to run the transfer."""
    faulty = FaultyTier(DictTier())
    for key in (A, B):
        faulty.reserve(key, 4)
    tier = DeferredTier(faulty, order=lambda count: count - 1)
    faulty.fail_next(Operation.WRITE)
    failing, fine = tier.write_from(A, of(1)), tier.write_from(B, of(2))
    fine.wait()
    for _ in range(2):
        with pytest.raises(TransferError):
            failing.wait()


def test_wrapped_tier_is_not_mappable() -> None:
    """Catches a map that goes around the deferral."""
    pool = BufferPool("host", budget_nbytes=MiB, allocator=PageAlignedAllocator())
    tier = DeferredTier(HostTier("host", pool=pool))
    assert not tier.capabilities.mappable
    assert not isinstance(tier, SupportsMap)
    tier.close()


def test_device_only_tier_is_refused() -> None:
    """Catches poison written to memory that numpy cannot reach."""
    inner = DictTier()
    spaces = frozenset({MemorySpace.DEVICE})
    inner.capabilities = replace(inner.capabilities, memory_spaces=spaces)
    with pytest.raises(ConfigError, match="host memory"):
        DeferredTier(inner)


def test_other_memory_is_poisoned_through_the_hook() -> None:
    """Catches races in device memory that nobody sees for want of poison."""
    poisoned = []

    def fill(buffer: Buffer, data: bytes) -> None:
        poisoned.append((buffer, data))

    inner = ChipTier()
    inner.reserve(A, 4)
    tier = DeferredTier(inner, fill=fill)
    assert tier.capabilities.memory_spaces == {MemorySpace.DEVICE}
    dst = ChipBuffer.make(4)
    fill_chip(dst, b"abcd")
    read = tier.read_into(A, dst)
    assert poisoned == [(dst, b"\xa5" * 4)]
    assert chip_contents(dst) == b"abcd"
    read.wait()
    assert chip_contents(dst) == bytes([UNWRITTEN]) * 4


def test_prefetch_can_be_cancelled_until_it_happens() -> None:
    """Catches a cancelled prefetch that happens at close, or one that is taken back too late."""
    inner = RecordingTier()
    tier = DeferredTier(inner)
    cancelled, kept = tier.prefetch_into(A, of(0)), tier.prefetch_into(B, of(0))
    assert cancelled.cancel()
    assert not cancelled.cancel()
    assert cancelled.done()
    assert tier.num_pending == 1
    kept.promote()
    kept.wait()
    assert not kept.cancel()
    tier.close()
    assert inner.events == ["read b"]
    with pytest.raises(TransferCancelledError, match=r"a/param"):
        cancelled.wait()
