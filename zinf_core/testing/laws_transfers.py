"""Checks of laws 6, 9, 10 and 13: who owns a buffer when, what fails when, who may submit."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import Completion
from zinf_core.errors import (
    AlignmentError,
    ConfigError,
    CorruptDataError,
    RangeError,
    TierFullError,
    TransferError,
    UnsupportedBufferError,
)
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import POISONS, SIZES, Bench, data_of, expect_bytes, key_of
from zinf_core.testing.buffers import ForeignBuffer, GuardedBuffer, watch
from zinf_core.testing.faults import Operation
from zinf_core.testing.laws_bytes import over_sizes

_LARGE = (1 << 20) + 5
_SMALL = 8192


def done_means_done(bench: Bench) -> None:
    """Catches a completion that is done before the bytes are there."""
    data = data_of(_LARGE)
    bench.store(key_of(0), data)
    for _ in range(4):
        dst = bench.blank(_LARGE)
        completion = bench.tier.read_into(key_of(0), dst)
        if completion.done():
            expect_bytes(bench.hooks.contents(dst), data, "law 6: done() without wait()")
        completion.wait(timeout_s=bench.hooks.timeout_s)
        expect_bytes(bench.hooks.contents(dst), data, "law 6: right after wait()")
        bench.wait(completion)


@over_sizes
def source_is_free_after_wait(bench: Bench, nbytes: int) -> None:
    """Catches a tier that stores the caller's buffer, or reads it again later."""
    data = data_of(nbytes)
    src = bench.buffer(data)
    bench.tier.reserve(key_of(0), nbytes)
    bench.wait(bench.tier.write_from(key_of(0), src))
    bench.hooks.fill(src, bytes([POISONS[1]]) * nbytes)
    bench.expect(key_of(0), data, "law 6: source reused after its write")
    bench.flush()
    bench.expect(key_of(0), data, "law 6: source reused before flush")


@over_sizes
def destination_is_free_after_wait(bench: Bench, nbytes: int) -> None:
    """Catches late stores into a destination that has another use already."""
    bench.store(key_of(0), data_of(nbytes))
    bench.store(key_of(1), data_of(nbytes, 1))
    dst = bench.blank(nbytes)
    bench.wait(bench.tier.read_into(key_of(0), dst))
    other_use = data_of(nbytes, 2)
    bench.hooks.fill(dst, other_use)
    bench.flush()
    expect_bytes(bench.hooks.contents(dst), other_use, "law 6: destination reused, then flush")
    bench.write(key_of(0), data_of(nbytes, 3))
    bench.expect(key_of(1), data_of(nbytes, 1), "law 6: another key")
    expect_bytes(bench.hooks.contents(dst), other_use, "law 6: destination reused after its read")


def no_reference_is_kept(bench: Bench) -> None:
    """Catches workers, queues and caches that keep the last buffer they saw alive."""
    bench.store(key_of(0), data_of(_SMALL))
    for submit in (bench.tier.read_into, bench.tier.write_from):
        expect_no_reference(bench, submit, key_of(0), _SMALL)


def expect_no_reference(
    bench: Bench, submit: Callable[..., Completion], key: TensorKey, nbytes: int
) -> None:
    """Transfer all of a key of `nbytes`. Raises AssertionError if the buffer lives on."""
    dead = threading.Event()
    _transfer_and_forget(bench, functools.partial(submit, key), nbytes, dead)
    # a worker may hold its arguments for an instant after it has announced completion
    freed = dead.wait(timeout=min(bench.hooks.timeout_s, 5.0))
    if not freed:
        gc.collect()  # a cycle that is garbage is not kept
        freed = dead.is_set()
    assert freed, (
        f"law 6: {getattr(submit, '__name__', submit)} keeps a reference to its buffer of "
        f"{nbytes} bytes after completion"
    )


def _transfer_and_forget(
    bench: Bench, submit: Callable[[Buffer], Completion], nbytes: int, dead: threading.Event
) -> None:
    buffer = bench.buffer(data_of(nbytes, 1))
    watch(buffer, dead.set)
    bench.wait(submit(buffer))


@over_sizes
def transfers_stay_inside(bench: Bench, nbytes: int) -> None:
    """Catches padding written past the buffer's capacity into memory of somebody else."""
    if MemorySpace.HOST not in bench.capabilities.memory_spaces:
        pytest.skip("guards need host memory")
    data = data_of(nbytes)
    guarded = GuardedBuffer.of(nbytes)
    guarded.buffer.array[:] = np.frombuffer(data, np.uint8)
    bench.tier.reserve(key_of(0), nbytes)
    bench.wait(bench.tier.write_from(key_of(0), guarded.buffer))
    guarded.buffer.array[:] = POISONS[0]
    bench.wait(bench.tier.read_into(key_of(0), guarded.buffer))
    expect_bytes(guarded.buffer.array.tobytes(), data, "law 6: buffer without spare capacity")
    assert guarded.is_intact(), "law 6: bytes outside the buffer's capacity were changed"


def a_failed_write_is_noticed(bench: Bench) -> None:
    """Catches a failed write that leaves a mixture behind, or is reported as a success."""
    old, new = data_of(_SMALL), data_of(_SMALL, 1)
    bench.store(key_of(0), old)
    bench.store(key_of(1), old)
    for _ in range(3):
        _need(bench.hooks.fail_next(bench.tier, Operation.WRITE))
        completion = bench.tier.write_from(key_of(0), bench.buffer(new))
        with pytest.raises((TransferError, TierFullError)):
            completion.wait(timeout_s=bench.hooks.timeout_s)
        try:
            found = bench.read(key_of(0))
        except CorruptDataError:
            pass
        else:
            expect_bytes(found, old, "law 9: after a failed write")
    bench.expect(key_of(1), old, "law 9: the key beside")
    bench.write(key_of(0), new)
    bench.expect(key_of(0), new, "law 9: the write that works again")


def failures_come_from_wait(bench: Bench) -> None:
    """Catches environment failures raised at submit, raised once only, or never."""
    bench.store(key_of(0), data_of(_SMALL))
    for operation, submit in (
        (Operation.READ, bench.tier.read_into),
        (Operation.WRITE, bench.tier.write_from),
    ):
        _need(bench.hooks.fail_next(bench.tier, operation))
        completion = submit(key_of(0), bench.blank(_SMALL))
        for _ in range(2):
            with pytest.raises((TransferError, TierFullError)):
                completion.wait(timeout_s=bench.hooks.timeout_s)
            assert completion.done(), "law 10: done() is False after wait() raised"
    bench.write(key_of(0), data_of(_SMALL, 1))
    bench.expect(key_of(0), data_of(_SMALL, 1), "law 10: after the failures")


def bad_ranges_raise(bench: Bench) -> None:
    """Catches ranges outside the key that are cut, wrapped around or noticed too late."""
    data = data_of(_SMALL)
    bench.store(key_of(0), data)
    step = max(bench.capabilities.offset_align, bench.capabilities.length_align)
    bad = [(-step, _SMALL), (step, _SMALL), (0, _SMALL + step), (_SMALL + step, 0), (-step, step)]
    for offset, length in bad:
        _refused(bench, bench.blank(length), offset, RangeError)
    bench.expect(key_of(0), data, "law 10: after refused ranges")


def misalignment_raises(bench: Bench) -> None:
    """Catches alignment the device needs but the tier does not check."""
    capabilities = bench.capabilities
    unit = max(capabilities.offset_align, capabilities.length_align)
    data = data_of(4 * unit)
    bench.store(key_of(0), data)
    if capabilities.offset_align > 1:
        _refused(bench, bench.blank(unit), 1, AlignmentError)
    if capabilities.length_align > 1:
        _refused(bench, bench.blank(capabilities.length_align + 1), 0, AlignmentError)
    if capabilities.address_align > 1 and MemorySpace.HOST in capabilities.memory_spaces:
        shifted = GuardedBuffer.of(4 * unit, shift=1)
        for submit in (bench.tier.read_into, bench.tier.write_from):
            with pytest.raises(AlignmentError):
                submit(key_of(0), shifted.buffer)
        assert shifted.is_intact(), "law 10: a refused transfer wrote outside its buffer"
    bench.expect(key_of(0), data, "law 10: after refused alignments")


def bad_buffers_raise(bench: Bench) -> None:
    """Catches memory the tier cannot reach, and things that are no buffers, let through."""
    bench.store(key_of(0), data_of(_SMALL))
    for space in MemorySpace:
        if bench.capabilities.takes(space):
            continue
        foreign = ForeignBuffer(bench.blank(_SMALL), space)
        _refused(bench, foreign, 0, UnsupportedBufferError)
    for submit in (bench.tier.read_into, bench.tier.write_from):
        nothing: Any = bytearray(_SMALL)
        with pytest.raises((ConfigError, TypeError)):
            submit(key_of(0), nothing)
    bench.expect(key_of(0), data_of(_SMALL), "law 10: after refused buffers")


def threads_do_not_disturb(bench: Bench) -> None:
    """Catches state shared between submitters without a lock."""
    num_threads, num_rounds = 8, 4

    def work(thread: int) -> None:
        for i in range(num_rounds):
            for nbytes in SIZES[1:9]:
                key = key_of(1000 * thread + nbytes)
                if i == 0:
                    bench.tier.reserve(key, nbytes)
                bench.write(key, data_of(nbytes, 10 * thread + i))
                bench.expect(key, data_of(nbytes, 10 * thread + i), f"law 13: thread {thread}")

    bench.together([functools.partial(work, i) for i in range(num_threads)])
    assert bench.tier.usage().num_keys == num_threads * 8, "law 13: keys were lost"
    for thread in range(num_threads):
        for nbytes in SIZES[1:9]:
            expected = data_of(nbytes, 10 * thread + num_rounds - 1)
            bench.expect(key_of(1000 * thread + nbytes), expected, "law 13: afterwards")


def _need(arranged: bool) -> None:
    if not arranged:
        pytest.skip("the suite cannot make the environment fail")


def _refused(bench: Bench, buffer: Buffer, offset: int, error: type[Exception]) -> None:
    memory = buffer.behind if isinstance(buffer, ForeignBuffer) else buffer
    before = bench.hooks.contents(memory)
    for submit in (bench.tier.read_into, bench.tier.write_from):
        with pytest.raises(error):
            submit(key_of(0), buffer, offset=offset)
    expect_bytes(bench.hooks.contents(memory), before, "law 10: buffer of a refused transfer")
