"""Checks of what happens when room ends: laws 7, 8 and 9 on a full and on a failing device."""

from __future__ import annotations

import pytest

from zinf_core.errors import CorruptDataError, TierFullError, TransferError
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import Bench, data_of, expect_bytes, key_of
from zinf_core.testing.faults import Operation
from zinf_core.units import PAGE_NBYTES, MiB, format_nbytes

_MAX_CAPACITY = 64 * MiB
_SMALL = 8192


def a_full_tier_stays_whole(bench: Bench) -> None:
    """Catches a tier that breaks what it holds when it is full, or never has room again.

    Fills it with 16 keys or fewer until it refuses one, checks that everything is as before, reads
    and overwrites all, discards one and stores another in its place.
    """
    chunk = _chunk(bench)
    model = _filled(bench, chunk)
    assert model, f"full: no room for one key of {chunk} bytes in an empty tier"
    _expect_model(bench, model, "full: stored before it was full")
    for i, key in enumerate(model):
        data = data_of(chunk, 100 + i)
        try:
            bench.write(key, data)
        except TierFullError:
            continue
        model[key] = data
    _expect_model(bench, model, "full: overwritten while full, or refused and old")
    bench.flush()
    gone = next(iter(model))
    bench.tier.discard(gone)
    del model[gone]
    bench.flush()
    model[key_of(90)] = data_of(chunk, 90)
    bench.store(key_of(90), model[key_of(90)])
    _expect_model(bench, model, "full: after one key took the place of another")


def a_full_tier_empties(bench: Bench) -> None:
    """Catches room that a refused call, or being full, has cost for good."""
    chunk = _chunk(bench)
    fitted = []
    for _ in range(3):
        model = _filled(bench, chunk)
        fitted.append(len(model))
        for key in model:
            bench.tier.discard(key)
        bench.flush()
        usage = bench.tier.usage()
        assert (usage.num_keys, usage.nbytes) == (0, 0), f"full: emptied, but usage() is {usage}"
    assert min(fitted) == fitted[0], f"full: {fitted} keys fitted in turn; room was lost"


def one_failure_among_many(bench: Bench) -> None:
    """Catches a device failure that takes transfers beside it along, or room, or workers."""
    old = {key_of(i): data_of(_SMALL, i) for i in range(8)}
    for key, data in old.items():
        bench.store(key, data)
    before = bench.tier.usage()
    for seed in (100, 200, 300):
        new = {key: data_of(_SMALL, seed + i) for i, key in enumerate(old)}
        if not bench.hooks.fail_next(bench.tier, Operation.WRITE):
            pytest.skip("the suite cannot make the environment fail")
        failed = _write_together(bench, new)
        assert failed, "law 9: a write was made to fail, and none of those in flight did"
        for key, data in new.items():
            if key not in failed:
                bench.expect(key, data, "law 9: write beside one that failed")
                old[key] = data
        for key in failed:
            _expect_old(bench, key, old[key])
            bench.write(key, data_of(_SMALL, seed))
            old[key] = data_of(_SMALL, seed)
    after = bench.tier.usage()
    assert (after.num_keys, after.nbytes) == (before.num_keys, before.nbytes), (
        f"law 7: failed writes changed usage() from {before} to {after}"
    )
    _expect_model(bench, old, "law 9: after all failures")


def _chunk(bench: Bench) -> int:
    """Return a sixteenth of the capacity in bytes, in whole pages."""
    capacity = bench.tier.usage().capacity_nbytes
    if capacity is None or capacity > _MAX_CAPACITY:
        pytest.skip("the tier has no capacity, or too much to fill it here")
    return max(capacity // (16 * PAGE_NBYTES), 1) * PAGE_NBYTES


def _filled(bench: Bench, chunk: int) -> dict[TensorKey, bytes]:
    """Store keys of `chunk` bytes until one is refused, in the way law 8 asks for."""
    model: dict[TensorKey, bytes] = {}
    while True:
        key = key_of(len(model))
        assert len(model) <= 16, "full: more was stored than usage().capacity_nbytes"
        before = bench.tier.usage()
        try:
            bench.tier.reserve(key, chunk)
        except TierFullError as exc:
            _expect_useful(exc, key, chunk)
            assert bench.tier.usage() == before, "law 8: a refused reserve changed usage()"
            assert set(bench.tier.keys()) == set(model), "law 8: a refused reserve changed keys()"
            return model
        try:
            bench.write(key, data_of(chunk, len(model)))
        except TierFullError:
            bench.tier.discard(key)
            return model
        model[key] = data_of(chunk, len(model))


def _expect_useful(error: TierFullError, key: TensorKey, nbytes: int) -> None:
    """Raise AssertionError unless the message says which key, and how many bytes it needs."""
    message = str(error)
    assert str(key) in message, f"full: the message does not name {key}: {message}"
    assert str(nbytes) in message or format_nbytes(nbytes) in message, (
        f"full: the message does not say that {nbytes} bytes were asked for: {message}"
    )


def _expect_model(bench: Bench, model: dict[TensorKey, bytes], what: str) -> None:
    for key, data in model.items():
        bench.expect(key, data, what)


def _write_together(bench: Bench, new: dict[TensorKey, bytes]) -> list[TensorKey]:
    """Write all keys, in flight together; return those whose wait raised."""
    pending = [(key, bench.tier.write_from(key, bench.buffer(data))) for key, data in new.items()]
    failed = []
    for key, completion in pending:
        try:
            bench.wait(completion)
        except (TransferError, TierFullError):
            failed.append(key)
    return failed


def _expect_old(bench: Bench, key: TensorKey, old: bytes) -> None:
    try:
        found = bench.read(key)
    except CorruptDataError:
        return
    expect_bytes(found, old, "law 9: after a failed write among others")
