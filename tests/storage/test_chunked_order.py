"""Chunked tiers: which version a read sees, what a failed write leaves, what a flush holds."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from chunked_helpers import (
    CHUNK,
    SMALL,
    GatedTier,
    Medium,
    contents,
    dicts,
    flush,
    key,
    noise,
    opened,
    read,
    store,
    submit_write,
    write,
)

from zinf_core.errors import TierFullError, TransferError, TransferTimeoutError
from zinf_core.testing import DictTier, Fault, FaultyTier, Operation, Phase, host_buffer
from zinf_storage.chunked import ChunkedOptions, ChunkedTier, codec_named

NBYTES = 4 * CHUNK + 100
ZSTD = ChunkedOptions(
    scheme="compressed", chunk_nbytes=CHUNK, codec=codec_named("zstd"), num_threads=2
)


def num_inner_keys(tier: ChunkedTier) -> int:
    return sum(one.usage().num_keys for one in tier._parts.inners.tiers)


def test_a_read_sees_what_was_there_at_submit() -> None:
    """Catches reads that look the chunks up when a worker gets to them."""
    inner = GatedTier()
    with opened([inner]) as tier:
        store(tier, key(0), noise(NBYTES, 1))
        inner.gate.clear()
        dst = host_buffer(NBYTES)
        early = tier.read_into(key(0), dst)
        pending = submit_write(tier, key(0), noise(NBYTES, 2))
        late = host_buffer(NBYTES)
        late_read = tier.read_into(key(0), late)
        inner.gate.set()
        for completion in (early, pending, late_read):
            completion.wait(timeout_s=30)
        assert dst.array.tobytes() == noise(NBYTES, 1)
        assert late.array.tobytes() == noise(NBYTES, 1), "the write had not ended"
        assert read(tier, key(0)) == noise(NBYTES, 2)
        assert num_inner_keys(tier) == 5, "old chunks were not given back"


def test_writes_of_a_key_keep_their_order() -> None:
    """Catches writes that race for the flip, and parts merged with an old version."""
    inner = GatedTier()
    with opened([inner]) as tier:
        tier.reserve(key(0), NBYTES)
        inner.gate.clear()
        expected = bytearray(noise(NBYTES, 0))
        pending = [submit_write(tier, key(0), bytes(expected))]
        for i, offset in enumerate((0, 100, CHUNK, CHUNK + 50, 3 * CHUNK)):
            data = noise(CHUNK, 10 + i)
            expected[offset : offset + CHUNK] = data
            pending.append(submit_write(tier, key(0), data, offset))
        inner.gate.set()
        for completion in pending:
            completion.wait(timeout_s=30)
        assert read(tier, key(0)) == bytes(expected)


def test_a_part_rewrites_its_chunks_only() -> None:
    """Catches partial writes that copy the whole key."""
    inner = GatedTier()
    with opened([inner]) as tier:
        store(tier, key(0), noise(NBYTES))
        inner.calls.clear()
        write(tier, key(0), noise(CHUNK + 10, 1), offset=CHUNK)
        kinds = [kind for kind, _ in inner.calls]
        assert sorted(kinds) == ["read", "write", "write"], "one chunk is whole, one is merged"


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("nth", range(5))
def test_a_failed_write_changes_no_chunk(nth: int, phase: Phase) -> None:
    """Catches chunks flipped one by one, and cells of failed writes that nobody gives back."""
    inner = FaultyTier(DictTier())
    with opened([inner], ChunkedOptions(chunk_nbytes=CHUNK, num_threads=1)) as tier:
        store(tier, key(0), noise(NBYTES, 1))
        before = inner.usage()
        call = inner.calls.count(Operation.WRITE) + nth
        inner._armed.append(Fault(call=call, operation=Operation.WRITE, phase=phase, damage=True))
        completion = submit_write(tier, key(0), noise(NBYTES, 2))
        with pytest.raises(TransferError, match=r"striped\(dict\): write of layers.0.weight/param"):
            completion.wait(timeout_s=30)
        assert read(tier, key(0)) == noise(NBYTES, 1)
        assert inner.usage() == before
        write(tier, key(0), noise(NBYTES, 3))
        assert read(tier, key(0)) == noise(NBYTES, 3)
        assert inner.usage() == before


@pytest.mark.parametrize("nth", range(5))
def test_a_refused_reserve_takes_nothing(nth: int) -> None:
    """Catches the chunks before the refused one left behind, or the name."""
    inner = FaultyTier(DictTier(capacity_nbytes=nth * CHUNK))
    with opened([inner]) as tier:
        for _ in range(2):
            with pytest.raises(TierFullError, match=str(NBYTES)):
                tier.reserve(key(0), NBYTES)
            assert (inner.usage().num_keys, set(tier.keys())) == (0, set())
        tier.reserve(key(0), nth * CHUNK)


def test_a_full_tier_takes_the_first_write() -> None:
    """Catches a first write that needs room besides what was reserved."""
    for options in (SMALL, ZSTD):
        for data in (bytes(NBYTES), noise(NBYTES)):
            with opened([DictTier(capacity_nbytes=NBYTES)], options) as tier:
                tier.reserve(key(0), NBYTES)
                with pytest.raises(TierFullError):
                    tier.reserve(key(1), 1)
                write(tier, key(0), data)
                assert read(tier, key(0)) == data


def test_a_full_tier_refuses_what_needs_more() -> None:
    """Catches an overwrite that destroys the old bytes before it finds no room for the new."""
    with opened([DictTier(capacity_nbytes=NBYTES)]) as tier:
        store(tier, key(0), noise(NBYTES, 1))
        completion = submit_write(tier, key(0), noise(NBYTES, 2))
        for _ in range(2):
            with pytest.raises(TierFullError, match=r"layers\.0\.weight"):
                completion.wait(timeout_s=30)
        assert read(tier, key(0)) == noise(NBYTES, 1)
        tier.discard(key(0))
        store(tier, key(1), noise(NBYTES, 3))


def test_writes_wait_for_room_that_others_will_free() -> None:
    """Catches overwrites that fail only because they run at the same time."""
    num_keys = 6
    capacity = (num_keys + 1) * NBYTES + CHUNK
    with opened([DictTier(capacity_nbytes=capacity)], ChunkedOptions(chunk_nbytes=CHUNK)) as tier:
        for i in range(num_keys):
            store(tier, key(i), noise(NBYTES, i))
        for round_ in range(5):
            pending = [
                submit_write(tier, key(i), noise(NBYTES, 10 * round_ + i)) for i in range(num_keys)
            ]
            for completion in pending:
                completion.wait(timeout_s=30)
            for i in range(num_keys):
                assert read(tier, key(i)) == noise(NBYTES, 10 * round_ + i)


def test_a_write_waits_for_a_reader_of_old_chunks() -> None:
    """Catches an overwrite that gives up although a read in flight is about to free room."""
    inner = GatedTier(capacity_nbytes=2 * NBYTES)
    with opened([inner], ChunkedOptions(chunk_nbytes=CHUNK)) as tier:
        store(tier, key(0), noise(NBYTES, 1))
        inner.gate.clear()
        dst = host_buffer(NBYTES)
        reading = tier.read_into(key(0), dst)
        first = submit_write(tier, key(0), noise(NBYTES, 2))
        second = submit_write(tier, key(0), noise(NBYTES, 3))
        inner.gate.set()
        for completion in (reading, first, second):
            completion.wait(timeout_s=30)
        assert dst.array.tobytes() == noise(NBYTES, 1)
        assert read(tier, key(0)) == noise(NBYTES, 3)


def test_compressed_gives_back_what_it_saves() -> None:
    """Catches room that stays reserved at full size, and a ratio that is made up."""
    inner = DictTier()
    with opened([inner], ZSTD) as tier:
        tier.reserve(key(0), 8 * CHUNK)
        assert inner.usage().nbytes == 8 * CHUNK
        assert tier.ratio == 1.0
        write(tier, key(0), b"abcd" * (2 * CHUNK))
        assert inner.usage().nbytes < CHUNK
        assert tier.ratio > 8
        assert tier.stat(key(0)).allocated_nbytes == inner.usage().nbytes
        counters = tier.counters
        assert (counters.encoded_nbytes, counters.stored_nbytes) == (
            8 * CHUNK, inner.usage().nbytes,
        )  # fmt: skip
        read(tier, key(0))
        assert tier.counters.decoded_nbytes == 8 * CHUNK
        write(tier, key(0), noise(8 * CHUNK))
        assert inner.usage().nbytes == 8 * CHUNK, "noise is stored as it is"
        assert tier.ratio == 1.0
        assert tier.counters.encode_cpu_s > 0


def test_a_flush_holds_what_was_submitted_before() -> None:
    """Catches commits that miss writes in flight, or take later ones along."""
    medium: Medium = {}
    inner = GatedTier(medium=medium)
    with opened([inner]) as tier:
        for i in range(3):
            store(tier, key(i), noise(NBYTES, i))
        inner.gate.clear()
        before = submit_write(tier, key(0), noise(NBYTES, 10))
        tier.discard(key(2))
        flushed = tier.flush()
        after = submit_write(tier, key(0), noise(NBYTES, 20))
        other = submit_write(tier, key(1), noise(NBYTES, 21))
        tier.discard(key(1))
        inner.gate.set()
        for completion in (before, flushed, after, other):
            completion.wait(timeout_s=30)
        assert contents(tier) == {key(0): noise(NBYTES, 20)}
        kept = copy.deepcopy(medium)
    with opened(dicts([kept])) as tier:
        assert contents(tier) == {key(0): noise(NBYTES, 10), key(1): noise(NBYTES, 1)}


def test_old_chunks_stay_as_long_as_a_commit_needs_them() -> None:
    """Catches generations given back too early, or kept after the next flush."""
    media: list[Medium] = [{}, {}]
    with opened(dicts(media)) as tier:
        store(tier, key(0), noise(NBYTES, 0))
        flush(tier)
        assert num_inner_keys(tier) == 5 + 1
        for i in range(3):
            write(tier, key(0), noise(NBYTES, i))
            assert num_inner_keys(tier) == 10 + 1
        flush(tier)
        assert num_inner_keys(tier) == 5 + 1
        tier.discard(key(0))
        assert num_inner_keys(tier) == 5 + 1
        flush(tier)
        assert num_inner_keys(tier) == 1
        assert [len(medium) for medium in media] == [1, 0]


def test_a_refused_discard_is_made_up_for() -> None:
    """Catches room lost for good because an inner tier failed once to take it back."""
    inner = FaultyTier(DictTier())
    with opened([inner]) as tier:
        store(tier, key(0), noise(NBYTES))
        inner.fail_next(Operation.DISCARD)
        tier.discard(key(0))
        assert inner.usage().num_keys == 1
        tier.reserve(key(1), 0)
        tier.discard(key(1))
        assert inner.usage().num_keys == 0


def test_many_threads_and_keys_leave_nothing() -> None:
    """Catches pins and cells lost in races between writes, reads, discards and flushes."""
    media: list[Medium] = [{}, {}]
    with opened(dicts(media), ChunkedOptions(chunk_nbytes=CHUNK, shares=(1, 3))) as tier:
        start = threading.Barrier(6)

        def work(thread: int) -> None:
            start.wait(timeout=30)
            for i in range(4):
                store(tier, key(thread), noise(NBYTES, thread))
                flush(tier) if thread % 2 else write(tier, key(thread), noise(CHUNK, i))
                assert read(tier, key(thread), CHUNK) == noise(NBYTES, thread)[CHUNK:]
                tier.discard(key(thread))

        with ThreadPoolExecutor(6) as threads:
            for future in [threads.submit(work, i) for i in range(6)]:
                future.result(timeout=60)
        flush(tier)
        assert num_inner_keys(tier) == 1
        assert tier.usage().num_keys == 0


def test_close_ends_what_was_submitted() -> None:
    """Catches a close that drops queued writes, or leaves a thread waiting."""
    inner = GatedTier()
    with opened([inner]) as tier:
        tier.reserve(key(0), NBYTES)
        inner.gate.clear()
        pending = [submit_write(tier, key(0), noise(NBYTES, i)) for i in range(3)]
        assert inner.entered.acquire(timeout=30)
        closing = threading.Thread(target=tier.close)
        closing.start()
        inner.gate.set()
        closing.join(timeout=30)
        assert not closing.is_alive()
        for completion in pending:
            assert completion.done()
            completion.wait()


def test_a_wait_can_time_out() -> None:
    """Catches a timeout that is ignored, or that ends the transfer."""
    inner = GatedTier()
    with opened([inner]) as tier:
        tier.reserve(key(0), 10)
        inner.gate.clear()
        completion = submit_write(tier, key(0), noise(10))
        with pytest.raises(TransferTimeoutError):
            completion.wait(timeout_s=0.01)
        inner.gate.set()
        completion.wait(timeout_s=30)
        assert read(tier, key(0)) == noise(10)
