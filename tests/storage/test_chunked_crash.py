"""Power cuts: whatever a flush got done, the next open finds that flush or the one before."""

from __future__ import annotations

import copy

import pytest
from chunked_helpers import (
    CHECKED,
    CHUNK,
    SMALL,
    Medium,
    MortalTier,
    PowerCut,
    contents,
    dicts,
    flush,
    key,
    noise,
    opened,
    store,
    write,
)

from zinf_core.errors import CorruptDataError, TierError
from zinf_core.keys import TensorKey
from zinf_storage.chunked import ChunkedOptions, ChunkedTier
from zinf_storage.chunked.names import ChunkName, index_number

State = dict[TensorKey, bytes]


def first_state(tier: ChunkedTier) -> State:
    """Store three keys over all inner tiers and flush."""
    for i, nbytes in enumerate((3 * CHUNK + 5, 100, 0)):
        store(tier, key(i), noise(nbytes, i))
    flush(tier)
    return contents(tier)


def second_state(tier: ChunkedTier) -> State:
    """Overwrite one key whole and one in part, add one, discard one."""
    write(tier, key(0), noise(3 * CHUNK + 5, 10))
    write(tier, key(0), noise(CHUNK, 11), offset=CHUNK)
    tier.discard(key(1))
    store(tier, key(3), noise(2 * CHUNK, 12))
    return contents(tier)


def is_whole(media: list[Medium], options: ChunkedOptions, allowed: list[State]) -> State:
    """Open after the cut; check what is found, that nothing else is left, and that it works."""
    with opened(dicts(media), options) as tier:
        found = contents(tier)
        assert found in allowed
        inner = tier._parts.inners.tiers
        names = [name for one in inner for name in set(one.keys())]
        num_chunks = sum(-(-len(data) // CHUNK) for data in found.values())
        assert len([name for name in names if ChunkName.parse(name)]) == num_chunks
        assert len([name for name in names if index_number(name)]) == 1
        if key(9) not in found:
            store(tier, key(9), noise(2 * CHUNK))
        flush(tier)
    with opened(dicts(media), options) as tier:
        assert contents(tier) == {**found, key(9): noise(2 * CHUNK)}
    return found


@pytest.mark.parametrize("options", [SMALL, CHECKED], ids=["striped", "checksummed"])
@pytest.mark.parametrize("prompt", [False, True], ids=["commits", "prompt"])
def test_a_flush_happens_whole_or_not_at_all(options: ChunkedOptions, prompt: bool) -> None:
    """Catches an index before its chunks, chunks discarded before the index that does not need
    them, and drives that are committed one by one; on inner tiers with and without commits."""
    count = 2 if options is SMALL else 1
    base: list[Medium] = [{} for _ in range(count)]
    with opened(dicts(base), options) as tier:
        old = first_state(tier)
    num_calls, outcomes = 0, []
    while True:
        media = copy.deepcopy(base)
        cut = PowerCut()
        inner = [MortalTier(f"m{i}", medium, cut, prompt=prompt) for i, medium in enumerate(media)]
        with opened(inner, options) as tier:
            new = second_state(tier)
            cut.count, cut.num_calls = 0, num_calls
            failed = False
            try:
                flush(tier)
            except TierError:
                failed = True
            after = copy.deepcopy(media)
        outcomes.append(is_whole(after, options, [old, new]) == new)
        if not failed:
            break
        num_calls += 1
    assert outcomes[-1], "a flush that succeeded is not found"
    assert outcomes == sorted(outcomes), "the commit point is not one call"
    assert num_calls >= 5, f"only {num_calls} calls in a flush; was anything cut?"
    assert not outcomes[0]


@pytest.mark.parametrize("prompt", [False, True], ids=["commits", "prompt"])
def test_the_first_open_may_be_cut_short(prompt: bool) -> None:
    """Catches a tier that can never be opened again after a crash while it was made."""
    num_calls = 0
    while True:
        media: list[Medium] = [{}, {}]
        cut = PowerCut(num_calls)
        inner = [MortalTier(f"m{i}", medium, cut, prompt=prompt) for i, medium in enumerate(media)]
        try:
            with opened(inner):
                done = cut.count < num_calls
        except TierError:
            done = False
        if is_whole(copy.deepcopy(media), SMALL, [{}]) == {} and done:
            break
        num_calls += 1
    assert num_calls >= 3


def test_unflushed_work_is_gone() -> None:
    """Catches an open that takes the newest chunks it finds instead of those of the last flush."""
    media: list[Medium] = [{}, {}]
    cut = PowerCut()
    inner = [MortalTier(f"m{i}", medium, cut, prompt=True) for i, medium in enumerate(media)]
    with opened(inner) as tier:
        old = first_state(tier)
        second_state(tier)
        after = copy.deepcopy(media)
    is_whole(after, SMALL, [old])


def test_a_failed_flush_costs_nothing() -> None:
    """Catches commits that lose the last one's chunks when they fail, or leave room pinned."""
    media: list[Medium] = [{}, {}]
    cut = PowerCut()
    with opened([MortalTier(f"m{i}", m, cut) for i, m in enumerate(media)]) as tier:
        first_state(tier)
        new = second_state(tier)
        for num_calls in range(6):
            cut.count, cut.num_calls = 0, num_calls
            with pytest.raises(TierError):
                flush(tier)
            cut.num_calls = None
            assert contents(tier) == new
            write(tier, key(3), noise(2 * CHUNK, num_calls))
            new[key(3)] = noise(2 * CHUNK, num_calls)
        flush(tier)
    is_whole(media, SMALL, [new])


@pytest.mark.parametrize(("which", "lie_at"), [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)])
def test_a_flush_in_doubt_keeps_what_both_outcomes_need(which: int, lie_at: int) -> None:
    """Catches chunks given back after a flush that failed by its own account, and happened."""
    media: list[Medium] = [{}, {}]
    inner = [MortalTier(f"m{i}", m, PowerCut(), prompt=True) for i, m in enumerate(media)]
    with opened(inner) as tier:
        old = first_state(tier)
        new = second_state(tier)
        inner[which].lie_at = lie_at
        with pytest.raises(TierError):
            flush(tier)
        for seed in range(2):
            write(tier, key(0), noise(3 * CHUNK + 5, 20 + seed))
            write(tier, key(3), noise(2 * CHUNK, 20 + seed))
        later = contents(tier)
        is_whole(copy.deepcopy(media), SMALL, [old, new])
        flush(tier)
        is_whole(copy.deepcopy(media), SMALL, [later])


def test_damage_to_the_index_is_noticed() -> None:
    """Catches an older index, or none, taken in place of the damaged one."""
    media: list[Medium] = [{}, {}]
    with opened(dicts(media)) as tier:
        first_state(tier)
        second_state(tier)
        flush(tier)
    (name,) = [name for name in media[0] if index_number(name) is not None]
    whole = media[0][name]
    for at in (0, 9, 13, 25, len(whole) // 2, len(whole) - 1):
        media[0][name] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises(CorruptDataError, match=r"striped\(dict0,dict1\)"):
            ChunkedTier.open(dicts(media), options=SMALL)
    media[0][name] = whole[:-1]
    with pytest.raises(CorruptDataError, match="index"):
        ChunkedTier.open(dicts(media), options=SMALL)
    media[0][name] = whole
    with opened(dicts(media)) as tier:
        assert len(contents(tier)) == 3
