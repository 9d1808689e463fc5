"""Checks of SupportsPrefetch: reads that nobody waits for yet, and that may be given up."""

from __future__ import annotations

import gc
import threading

import pytest

from zinf_core.buffers import Buffer
from zinf_core.errors import KeyAbsentError, RangeError, TierClosedError, TransferCancelledError
from zinf_core.testing.bench import POISONS, Bench, data_of, expect_bytes, key_of
from zinf_core.testing.buffers import watch
from zinf_core.testing.laws_bytes import over_sizes
from zinf_core.tier import Prefetch, SupportsPrefetch

_LARGE = (1 << 20) + 5
_SMALL = 8192


@over_sizes
def prefetched_is_read(bench: Bench, nbytes: int) -> None:
    """Catches a second read path with errors of its own, and a promotion that restarts a read."""
    tier, data = _prefetching(bench), data_of(nbytes)
    bench.store(key_of(0), data)
    for i, (offset, length) in enumerate(bench.ranges(nbytes)):
        dst = bench.blank(length, POISONS[i % 2])
        prefetch = tier.prefetch_into(key_of(0), dst, offset=offset)
        if i % 3 == 1:
            prefetch.promote()
        bench.wait(prefetch)
        prefetch.promote()
        bench.wait(prefetch)
        what = f"prefetch of [{offset}, {offset + length}) of {nbytes}"
        expect_bytes(bench.hooks.contents(dst), data[offset : offset + length], what)


def prefetch_refuses_like_read(bench: Bench) -> None:
    """Catches a prefetch whose arguments nobody checks, or only its wait."""
    tier = _prefetching(bench)
    step = max(bench.capabilities.offset_align, bench.capabilities.length_align)
    bench.store(key_of(0), data_of(_SMALL))
    with pytest.raises(KeyAbsentError):
        tier.prefetch_into(key_of(1), bench.blank(_SMALL))
    for offset in (-step, step, _SMALL + step):
        with pytest.raises(RangeError):
            tier.prefetch_into(key_of(0), bench.blank(_SMALL), offset=offset)
    bench.tier.close()
    with pytest.raises(TierClosedError):
        tier.prefetch_into(key_of(0), bench.blank(_SMALL))


def cancelled_prefetch_is_over(bench: Bench) -> None:
    """Catches a cancelled prefetch that still writes, hangs, or keeps its buffer.

    Prefetches queue behind reads and are cancelled at once. Where `cancel` says True the buffer
    is the caller's again, with everything that law 6 says; where it says False the bytes arrive.
    """
    _prefetching(bench)
    bench.store(key_of(0), data_of(_LARGE))
    in_front = [bench.blank(_LARGE) for _ in range(min(2 * bench.capabilities.max_in_flight, 16))]
    reads = [bench.tier.read_into(key_of(0), dst) for dst in in_front]
    kept, forgotten = [], []
    for i in range(8):
        dst = bench.blank(_LARGE)
        if _cancelled(bench, dst):
            bench.hooks.fill(dst, data_of(_LARGE, i + 1))
            kept.append((dst, data_of(_LARGE, i + 1)))
        forgotten.append(_cancelled_and_forgotten(bench))
    for dst, read in zip(in_front, reads, strict=True):
        bench.wait(read)
        expect_bytes(bench.hooks.contents(dst), data_of(_LARGE), "prefetch: read in front of it")
    bench.flush()
    bench.expect(key_of(0), data_of(_LARGE), "prefetch: read after cancelled ones")
    for dst, other_use in kept:
        expect_bytes(bench.hooks.contents(dst), other_use, "prefetch: buffer reused after cancel")
    gc.collect()  # errors keep the frames they went through alive, in cycles
    for dead in forgotten:
        freed = dead.wait(timeout=min(bench.hooks.timeout_s, 5.0))
        assert freed, "prefetch: the tier keeps a reference to the buffer of a cancelled one"


def cancel_comes_too_late(bench: Bench) -> None:
    """Catches a cancel that takes back what was done, or says it did."""
    tier = _prefetching(bench)
    bench.store(key_of(0), data_of(_SMALL))
    dst = bench.blank(_SMALL)
    prefetch = tier.prefetch_into(key_of(0), dst)
    bench.wait(prefetch)
    assert not prefetch.cancel(), "prefetch: cancel() is True after wait() returned"
    bench.wait(prefetch)
    expect_bytes(bench.hooks.contents(dst), data_of(_SMALL), "prefetch: cancelled too late")


def prefetch_outlives_its_key(bench: Bench) -> None:
    """Catches a queued prefetch that reads what took the place of its key."""
    tier = _prefetching(bench)
    bench.store(key_of(0), data_of(_LARGE))
    buffers = [bench.blank(_LARGE) for _ in range(4)]
    prefetches = [tier.prefetch_into(key_of(0), dst) for dst in buffers]
    bench.tier.discard(key_of(0))
    bench.store(key_of(0), data_of(_LARGE, 1))
    bench.store(key_of(1), data_of(_LARGE, 2))
    for dst, prefetch in zip(buffers, prefetches, strict=True):
        bench.wait(prefetch)
        what = "prefetch: in flight when its key was discarded"
        expect_bytes(bench.hooks.contents(dst), data_of(_LARGE), what)


def close_settles_prefetches(bench: Bench) -> None:
    """Catches queued prefetches that close leaves behind: waits that hang, bytes that come late.

    Close may do them or give them up.
    """
    tier = _prefetching(bench)
    bench.store(key_of(0), data_of(_LARGE))
    buffers = [bench.blank(_LARGE) for _ in range(8)]
    prefetches = [tier.prefetch_into(key_of(0), dst) for dst in buffers]
    bench.tier.close()
    for dst, prefetch in zip(buffers, prefetches, strict=True):
        assert prefetch.done(), "prefetch: not settled after close()"
        assert not prefetch.cancel(), "prefetch: cancel() is True after close()"
        try:
            bench.wait(prefetch)
        except TransferCancelledError:
            continue
        what = "prefetch: in flight at close"
        expect_bytes(bench.hooks.contents(dst), data_of(_LARGE), what)


def _prefetching(bench: Bench) -> SupportsPrefetch:
    tier = bench.tier
    if not isinstance(tier, SupportsPrefetch):
        pytest.skip("the tier does not support prefetch")
    return tier


def _cancelled(bench: Bench, dst: Buffer) -> bool:
    """Prefetch into `dst` and cancel; return whether the tier gave it up, all rules kept."""
    prefetch: Prefetch = _prefetching(bench).prefetch_into(key_of(0), dst)
    if not prefetch.cancel():
        bench.wait(prefetch)
        expect_bytes(bench.hooks.contents(dst), data_of(_LARGE), "prefetch: cancel() was False")
        return False
    assert prefetch.done(), "prefetch: done() is False after cancel() returned True"
    for _ in range(2):
        with pytest.raises(TransferCancelledError):
            prefetch.wait(timeout_s=bench.hooks.timeout_s)
    return True


def _cancelled_and_forgotten(bench: Bench) -> threading.Event:
    """Cancel a prefetch and drop its buffer; return what is set when the memory is freed."""
    dead = threading.Event()
    dst = bench.blank(_LARGE)
    watch(dst, dead.set)
    _cancelled(bench, dst)
    return dead
