"""Checks of law 14 on flushes that overlap: with each other, and with other work."""

from __future__ import annotations

from typing import Final

import pytest

from zinf_core.keys import TensorKey
from zinf_core.testing.bench import Bench, data_of, key_of, shuffled
from zinf_core.testing.crash_model import FlushScope

_NBYTES: Final = 20000
_NUM_KEYS: Final = 24
_NUM_ROUNDS: Final = 3

State = dict[TensorKey, bytes]


def flushes_may_overlap(bench: Bench) -> None:
    """Catches a flush that settles for one begun before it: what was done in between is lost."""
    _need_persistent(bench)
    model: State = {}
    for number in range(_NUM_ROUNDS):
        for i in range(4):
            _put(bench, model, key_of(10 * number + i), seed=i)
        flushes = [bench.tier.flush()]
        for i in range(3):
            _put(bench, model, key_of(10 * number + i), seed=100 + i)
            _put(bench, model, key_of(10 * number + 5 + i), seed=i)
            gone = key_of(10 * number + (3 if i == 0 else 4 + i))
            bench.tier.discard(gone)
            del model[gone]
            flushes.append(bench.tier.flush())
        order = shuffled(len(flushes), seed=number) if number else range(len(flushes))
        for i in order:
            bench.wait(flushes[i])
        bench.reopen()
        _expect(bench, model, "law 14: after flushes in flight together")


def a_flush_takes_one_moment(bench: Bench) -> None:
    """Catches a flush that looks at one key after the other while they change.

    All keys are overwritten or discarded one by one while a flush is in flight, and the tier is
    opened again. It must be as it was at one moment since the flush was submitted; where flushes
    promise nothing about the tier as a whole, each key must be.
    """
    _need_persistent(bench)
    for number in range(_NUM_ROUNDS):
        model: State = {}
        for i in range(_NUM_KEYS):
            _put(bench, model, key_of(i), seed=number)
        flush = bench.tier.flush()
        states = [dict(model)]
        for i in shuffled(_NUM_KEYS, seed=number):
            if i % 4:
                _put(bench, model, key_of(i), seed=100 + number)
            else:
                bench.tier.discard(key_of(i))
                del model[key_of(i)]
            states.append(dict(model))
        bench.wait(flush)
        bench.reopen()
        _expect_one_of(bench, states)
        for key in list(bench.tier.keys()):
            bench.tier.discard(key)


def _need_persistent(bench: Bench) -> None:
    if not bench.capabilities.persistent:
        pytest.skip("the tier is not persistent")


def _put(bench: Bench, model: State, key: TensorKey, *, seed: int) -> None:
    data = data_of(_NBYTES, seed)
    if key in model:
        bench.write(key, data)
    else:
        bench.store(key, data)
    model[key] = data


def _expect(bench: Bench, model: State, what: str) -> None:
    found = set(bench.tier.keys())
    lost, left = _named(set(model) - found), _named(found - set(model))
    assert not lost, f"{what}: {lost} stored before the last flush are gone"
    assert not left, f"{what}: {left} discarded before the last flush are there again"
    for key, data in model.items():
        bench.expect(key, data, what)


def _expect_one_of(bench: Bench, states: list[State]) -> None:
    found = {key: bench.read(key) for key in list(bench.tier.keys())}
    if bench.hooks.flush_scope is FlushScope.TIER:
        assert found in states, (
            "law 14: after a flush during which keys were changed one by one, the tier is as it "
            "was at no moment since: some changes are there, and earlier ones are not"
        )
        return
    for key in {*states[0], *found}:
        allowed = [state.get(key) for state in states]
        assert found.get(key) in allowed, f"law 14: {key} is as it was at no moment since a flush"


def _named(keys: set[TensorKey]) -> list[str]:
    return sorted(map(str, keys))
