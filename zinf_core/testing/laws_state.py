"""Checks of laws 7, 8, 11, 12 and 14 and of the methods around them: what a tier holds when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from zinf_core.capabilities import TierUsage
from zinf_core.errors import (
    KeyAbsentError,
    KeyExistsError,
    RangeError,
    TierClosedError,
    TierFullError,
)
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import SIZES, Bench, data_of, expect_bytes, key_of
from zinf_core.tier import SupportsMap, Tier
from zinf_core.units import PAGE_NBYTES, MiB

_NBYTES = 8192
_DESCRIPTORS = Path("/proc/self/fd")


def usage_is_the_sum(bench: Bench) -> None:
    """Catches counts that drift when keys are rewritten, discarded or empty."""
    held: dict[int, int] = {}
    for i, nbytes in enumerate(SIZES):
        extent = bench.tier.reserve(key_of(i), nbytes)
        assert extent.nbytes == nbytes, f"law 7: reserve returned {extent} for {nbytes} bytes"
        held[i] = nbytes
        _expect_usage(bench, held)
    for i, nbytes in enumerate(SIZES):
        for seed in range(3):
            bench.write(key_of(i), data_of(nbytes, seed))
        bench.read(key_of(i))
        _expect_usage(bench, held)
    for i in list(held)[::2]:
        bench.tier.discard(key_of(i))
        del held[i]
        _expect_usage(bench, held)
    bench.flush()
    _expect_usage(bench, held)


def discarded_room_is_used_again(bench: Bench) -> None:
    """Catches extents that are never freed: the tier fills up although little is stored."""
    capacity = bench.tier.usage().capacity_nbytes
    if capacity is None or capacity > 64 * MiB:
        pytest.skip("the tier has no capacity, or too much to fill it here")
    pages = max(capacity // (8 * PAGE_NBYTES), 1)
    for i in range(12):
        bench.store(key_of(i), data_of(PAGE_NBYTES * pages, i))
        data = data_of(PAGE_NBYTES * pages, 100 + i)
        bench.write(key_of(i), data)
        bench.expect(key_of(i), data, f"law 7: chunk {i}")
        bench.tier.discard(key_of(i))
    _expect_usage(bench, {})


def a_failed_reserve_changes_nothing(bench: Bench) -> None:
    """Catches room or names taken by a reserve that raised."""
    data = data_of(_NBYTES)
    bench.store(key_of(0), data)
    capacity = bench.tier.usage().capacity_nbytes
    failing: list[tuple[int, int, type[Exception]]] = [
        (0, _NBYTES, KeyExistsError),
        (0, 1, KeyExistsError),
        (1, -1, RangeError),
    ]
    if capacity is not None:
        failing += [(2, capacity + 1, TierFullError), (2, 1 << 60, TierFullError)]
    before = bench.tier.usage()
    for _ in range(5):
        for i, nbytes, error in failing:
            with pytest.raises(error):
                bench.tier.reserve(key_of(i), nbytes)
            assert bench.tier.usage() == before, f"law 8: {error.__name__} changed usage()"
            assert list(bench.tier.keys()) == [key_of(0)], "law 8: a failed reserve left a key"
    bench.expect(key_of(0), data, "law 8: the key that was there")
    for i in (1, 2):
        bench.store(key_of(i), data)
        bench.expect(key_of(i), data, "law 8: a reserve that fits afterwards")


def absent_keys_raise(bench: Bench) -> None:
    """Catches unknown keys that are created, ignored or noticed only by wait."""
    bench.store(key_of(0), data_of(_NBYTES))
    bench.store(key_of(1), data_of(_NBYTES))
    bench.tier.discard(key_of(1))
    for absent in (key_of(1), key_of(2)):
        for call in _calls_with_key(bench.tier, bench, absent):
            with pytest.raises(KeyAbsentError):
                call()
    assert list(bench.tier.keys()) == [key_of(0)], "law 11: asking for a key created it"
    bench.expect(key_of(0), data_of(_NBYTES), "law 11: the key that is there")


def discard_leaves_transfers_alone(bench: Bench) -> None:
    """Catches room given to another key while a transfer of the old one is in flight."""
    nbytes = MiB + 5
    bench.store(key_of(0), data_of(nbytes))
    buffers = [bench.blank(nbytes) for _ in range(4)]
    reads = [bench.tier.read_into(key_of(0), dst) for dst in buffers]
    bench.tier.discard(key_of(0))
    bench.store(key_of(0), data_of(nbytes, 1))
    bench.store(key_of(1), data_of(nbytes, 2))
    for dst, read in zip(buffers, reads, strict=True):
        bench.wait(read)
        what = "discard: read that was in flight"
        expect_bytes(bench.hooks.contents(dst), data_of(nbytes), what)
    bench.expect(key_of(0), data_of(nbytes, 1), "discard: key that took the name")


def a_late_write_does_not_reach_the_next_key(bench: Bench) -> None:
    """Catches a write of a discarded key that lands in the key that has its name or room now."""
    bench.tier.reserve(key_of(0), _NBYTES)
    late = bench.tier.write_from(key_of(0), bench.buffer(data_of(_NBYTES)))
    bench.tier.discard(key_of(0))
    bench.store(key_of(0), data_of(_NBYTES, 1))
    bench.wait(late)
    bench.expect(key_of(0), data_of(_NBYTES, 1), "discard: key that took the name")
    _expect_usage(bench, {0: _NBYTES})


def close_settles_everything(bench: Bench) -> None:
    """Catches transfers forgotten by close: waits that hang, bytes that arrive after it."""
    nbytes = MiB + 5
    for i in range(4):
        bench.store(key_of(i), data_of(nbytes, i))
    buffers = [bench.blank(nbytes) for _ in range(4)]
    reads = [bench.tier.read_into(key_of(i), dst) for i, dst in enumerate(buffers)]
    bench.tier.reserve(key_of(4), nbytes)
    write = bench.tier.write_from(key_of(4), bench.blank(nbytes))
    bench.tier.close()
    for completion in (*reads, write):
        assert completion.done(), "law 12: a transfer is not settled after close()"
        bench.wait(completion)
    for i, dst in enumerate(buffers):
        what = "law 12: read in flight at close"
        expect_bytes(bench.hooks.contents(dst), data_of(nbytes, i), what)


def closed_tiers_refuse(bench: Bench) -> None:
    """Catches a second close that raises, and calls that reach freed memory or descriptors."""
    bench.store(key_of(0), data_of(_NBYTES))
    tier = bench.tier
    tier.close()
    tier.close()
    calls: list[Callable[[], object]] = [
        tier.usage,
        lambda: list(tier.keys()),
        lambda: tier.reserve(key_of(1), 1),
        tier.flush,
        *_calls_with_key(tier, bench, key_of(0)),
    ]
    for call in calls:
        with pytest.raises(TierClosedError):
            call()
    tier.close()


def close_releases_everything(bench: Bench, tmp_path: Path) -> None:
    """Catches threads and file descriptors that outlive the tier."""
    folder = tmp_path / "released"
    folder.mkdir()
    threads, descriptors = set(threading.enumerate()), _descriptors()
    other = Bench(bench.hooks, folder)
    for i in range(8):
        other.store(key_of(i), data_of(_NBYTES, i))
    other.flush()
    other.close()
    left = set(threading.enumerate()) - threads
    assert not left, f"law 12: threads outlive close(): {left}"
    num_waits = int(10 * min(bench.hooks.timeout_s, 5.0))  # a client library may close late
    pause = threading.Event()
    while _descriptors() - descriptors and num_waits:
        num_waits -= pause.wait(0.1) is False
    assert not _descriptors() - descriptors, "law 12: file descriptors outlive close()"


def reopening_destroys_nothing(bench: Bench) -> None:
    """Catches an open that truncates, forgets or reuses the room of what is there."""
    if not bench.capabilities.persistent:
        pytest.skip("the tier is not persistent")
    model = {key_of(i): data_of(nbytes, i) for i, nbytes in enumerate(SIZES)}
    for key, data in model.items():
        bench.store(key, data)
    bench.tier.reserve(key_of(90), _NBYTES)
    bench.tier.discard(key_of(90))
    bench.flush()
    for i in range(3):
        bench.reopen()
        assert set(bench.tier.keys()) == set(model), "law 14: keys changed by reopening"
        for key, data in model.items():
            bench.expect(key, data, f"law 14: after opening {i + 2} times")
        model[key_of(100 + i)] = data_of(_NBYTES, 100 + i)
        bench.store(key_of(100 + i), model[key_of(100 + i)])
        model[key_of(3)] = data_of(SIZES[3], 200 + i)
        bench.write(key_of(3), model[key_of(3)])
        bench.flush()
    nbytes = sum(map(len, model.values()))
    assert bench.tier.usage().nbytes == nbytes, "law 14: usage() is wrong after reopening"


def reopening_without_flush_keeps_what_was_flushed(bench: Bench) -> None:
    """Catches flushed keys that later, unflushed work takes with it."""
    if not bench.capabilities.persistent:
        pytest.skip("the tier is not persistent")
    for i in range(6):
        bench.store(key_of(i), data_of(_NBYTES, i))
    bench.flush()
    for i in range(10, 16):
        bench.store(key_of(i), data_of(_NBYTES, i))
    bench.tier.discard(key_of(10))
    bench.reopen()
    for i in range(6):
        bench.expect(key_of(i), data_of(_NBYTES, i), "law 14: key flushed before")


def keys_is_a_snapshot(bench: Bench) -> None:
    """Catches iteration over the live table, which breaks when keys come and go."""
    for i in range(4):
        bench.tier.reserve(key_of(i), 8)
    found = bench.tier.keys()
    first = next(found)
    bench.tier.reserve(key_of(9), 8)
    bench.tier.discard(key_of(3))
    assert {first, *found} == {key_of(i) for i in range(4)}, "keys() is not a snapshot"
    assert set(bench.tier.keys()) == {key_of(i) for i in (0, 1, 2, 9)}, "keys() is not current"


def capabilities_are_sane(bench: Bench) -> None:
    """Catches a tier that promises a method it lacks, or changes its mind after opening."""
    tier, before = bench.tier, bench.capabilities
    assert isinstance(tier, Tier), f"{type(tier).__name__} lacks a method of Tier"
    assert tier.name, "the tier has no name"
    space = bench.hooks.make_buffer(8).space
    assert before.takes(space), f"make_buffer gives {space}, which the tier does not take"
    assert not before.mappable or isinstance(tier, SupportsMap), "mappable, but there is no map"
    bench.store(key_of(0), data_of(_NBYTES))
    bench.flush()
    assert tier.capabilities == before, "capabilities changed after opening"


def map_is_the_key(bench: Bench) -> None:
    """Catches a map that is a copy, or of another key, or of the wrong length."""
    tier = bench.tier
    if not (bench.capabilities.mappable and isinstance(tier, SupportsMap)):
        pytest.skip("the tier is not mappable")
    for i, nbytes in enumerate(SIZES[1:]):
        bench.store(key_of(i), data_of(nbytes, i))
        mapped = tier.map(key_of(i))
        assert mapped.nbytes == nbytes, f"map: {mapped.nbytes} bytes of a key of {nbytes}"
        expect_bytes(bench.hooks.contents(mapped), data_of(nbytes, i), "map: what was written")
        bench.hooks.fill(mapped, data_of(nbytes, 50 + i))
        bench.expect(key_of(i), data_of(nbytes, 50 + i), "map: stored through the map")
        bench.write(key_of(i), data_of(nbytes, 70 + i))
        expect_bytes(bench.hooks.contents(mapped), data_of(nbytes, 70 + i), "map: after a write")
    with pytest.raises(KeyAbsentError):
        tier.map(key_of(99))


def _calls_with_key(tier: Tier, bench: Bench, key: TensorKey) -> list[Callable[[], object]]:
    """Return every call of `tier` that names a key, ready to be made with `key`."""
    calls: list[Callable[[], object]] = [
        lambda: tier.stat(key),
        lambda: tier.read_into(key, bench.blank(_NBYTES)),
        lambda: tier.write_from(key, bench.blank(_NBYTES)),
        lambda: tier.discard(key),
    ]
    if tier.capabilities.mappable and isinstance(tier, SupportsMap):
        mappable: SupportsMap = tier
        calls.append(lambda: mappable.map(key))
    return calls


def _expect_usage(bench: Bench, held: dict[int, int]) -> None:
    usage: TierUsage = bench.tier.usage()
    nbytes = sum(held.values())
    assert usage.num_keys == len(held), f"law 7: {usage.num_keys} keys, {len(held)} are stored"
    assert usage.nbytes == nbytes, f"law 7: {usage.nbytes} bytes, {nbytes} are stored"
    capacity = usage.capacity_nbytes
    assert capacity is None or usage.allocated_nbytes <= capacity, "law 7: capacity exceeded"
    assert set(bench.tier.keys()) == {key_of(i) for i in held}, "law 7: keys() is wrong"
    for i, size in held.items():
        assert bench.tier.stat(key_of(i)).nbytes == size, f"law 7: stat of {key_of(i)} is wrong"


def _descriptors() -> set[str]:
    """Return this process's descriptors; nothing where the system does not list them."""
    return {entry.name for entry in _DESCRIPTORS.iterdir()} if _DESCRIPTORS.is_dir() else set()
