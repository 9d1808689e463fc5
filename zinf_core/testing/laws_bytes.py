"""Checks of laws 1 to 5: the bytes that come back are the bytes that went in, where they went."""

from __future__ import annotations

from typing import Final

import pytest

from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing.bench import (
    POISONS,
    SIZES,
    Bench,
    data_of,
    expect_bytes,
    key_of,
    shuffled,
)

over_sizes: Final = pytest.mark.parametrize("nbytes", SIZES)

_LOOK_ALIKES: Final = (
    TensorKey.of("w", StateKind.PARAM),
    TensorKey.of("w", StateKind.PARAM, "param"),
    TensorKey.of("w/param", StateKind.PARAM),
    TensorKey.of("w/param/param", StateKind.PARAM),
    TensorKey.of("w", StateKind.GRAD),
    TensorKey.of("W", StateKind.PARAM),
    TensorKey.of("w ", StateKind.PARAM),
    TensorKey.of("w.0", StateKind.PARAM),
    TensorKey.of("w_0", StateKind.PARAM),
    TensorKey.of("w%2F0", StateKind.PARAM),
    TensorKey.of("w/0", StateKind.PARAM),
    TensorKey.of("../w", StateKind.PARAM),
    TensorKey.of("\u00e9", StateKind.PARAM),
    TensorKey.of("e\u0301", StateKind.PARAM),
    TensorKey.of("long." * 100 + "a", StateKind.PARAM),
    TensorKey.of("long." * 100 + "b", StateKind.PARAM),
    TensorKey.of("", StateKind.PARAM),
)
"""Different keys that print alike, or become one as a file name."""


@over_sizes
def written_is_read(bench: Bench, nbytes: int) -> None:
    """Catches padding taken for data, odd sizes cut off, empty keys refused."""
    data = data_of(nbytes)
    bench.store(key_of(0), data)
    bench.expect(key_of(0), data, "law 1: first read")
    bench.expect(key_of(0), data, "law 1: second read")


def written_is_stored(bench: Bench) -> None:
    """Catches a write and a read that are wrong in the same way, and so agree."""
    model = _twice_written(bench)
    for key, data in model.items():
        found = bench.hooks.peek(bench.tier, key)
        if found is None:
            pytest.skip("the suite has no peek")
        expect_bytes(found, data, f"law 1: what the back door sees of {key}")


def stored_is_read(bench: Bench) -> None:
    """Catches reads served from a copy the tier remembers, or from a wrong place."""
    for key, data in _twice_written(bench).items():
        other = data_of(len(data), 3)
        if not bench.hooks.poke(bench.tier, key, other):
            pytest.skip("the suite has no poke")
        bench.expect(key, other, "law 1: what came in by the back door")


def keys_are_apart(bench: Bench) -> None:
    """Catches neighbours overwritten by padding, and room reused while it is still in use."""
    model = {key_of(i): data_of(nbytes, i) for i, nbytes in enumerate(SIZES)}
    for key, data in model.items():
        bench.store(key, data)
    for i, key in enumerate(list(model)):
        if i % 3 == 1:
            model[key] = data_of(len(model[key]), 100 + i)
            bench.write(key, model[key])
        elif i % 3 == 2:
            bench.tier.discard(key)
            del model[key]
    for i in range(8):
        model[key_of(50 + i)] = data_of(SIZES[i], 200 + i)
        bench.store(key_of(50 + i), model[key_of(50 + i)])
    for key, data in model.items():
        bench.expect(key, data, "law 2: after work on other keys")


def look_alikes_are_apart(bench: Bench) -> None:
    """Catches keys turned into file names or text that two of them share."""
    for i, key in enumerate(_LOOK_ALIKES):
        bench.store(key, data_of(64 + i, i))
    assert set(bench.tier.keys()) == set(_LOOK_ALIKES), "law 2: keys() lost or merged keys"
    for i, key in enumerate(_LOOK_ALIKES):
        bench.expect(key, data_of(64 + i, i), "law 2: keys that look alike")


@over_sizes
def reads_are_exact(bench: Bench, nbytes: int) -> None:
    """Catches ranges off by one, rounded to blocks, or counted from the wrong end."""
    data = data_of(nbytes)
    bench.store(key_of(0), data)
    for offset, length in bench.ranges(nbytes):
        found = bench.read(key_of(0), length, offset=offset)
        what = f"law 3: read of [{offset}, {offset + length}) of {nbytes}"
        expect_bytes(found, data[offset : offset + length], what)


@over_sizes
def writes_are_exact(bench: Bench, nbytes: int) -> None:
    """Catches partial writes that touch a byte too many, or forget the rest of the key."""
    model = bytearray(data_of(nbytes))
    bench.store(key_of(0), bytes(model))
    bench.store(key_of(1), data_of(nbytes, 1))
    for i, (offset, length) in enumerate(bench.ranges(nbytes)):
        model[offset : offset + length] = data_of(length, 10 + i)
        bench.write(key_of(0), data_of(length, 10 + i), offset)
        bench.expect(key_of(0), bytes(model), f"law 3: write of [{offset}, {offset + length})")
    bench.expect(key_of(1), data_of(nbytes, 1), "law 3: the key beside")


def writes_side_by_side_are_exact(bench: Bench) -> None:
    """Catches a partial write that carries old bytes over those of another one in flight."""
    step = max(bench.capabilities.offset_align, bench.capabilities.length_align, 512)
    count, key = 8, key_of(0)
    bench.store(key, data_of(step * count))
    pending = [
        bench.tier.write_from(key, bench.buffer(data_of(step, 1 + i)), offset=i * step)
        for i in range(count)
    ]
    for i in shuffled(count, seed=3):
        bench.wait(pending[i])
    expected = b"".join(data_of(step, 1 + i) for i in range(count))
    bench.expect(key, expected, "law 3: disjoint writes in flight together")


@over_sizes
def a_write_is_seen(bench: Bench, nbytes: int) -> None:
    """Catches caches that are not told of writes, and reads of the room a key had before."""
    bench.tier.reserve(key_of(0), nbytes)
    for i in range(4):
        bench.write(key_of(0), data_of(nbytes, i))
        bench.expect(key_of(0), data_of(nbytes, i), f"law 4: after write {i}")
    bench.tier.discard(key_of(0))
    bench.store(key_of(0), data_of(nbytes + 3, 9))
    bench.expect(key_of(0), data_of(nbytes + 3, 9), "law 4: after discard, reserve and write")


@over_sizes
def reads_are_whole(bench: Bench, nbytes: int) -> None:
    """Catches short counts taken for success: each byte must replace two different poisons."""
    data = data_of(nbytes)
    bench.store(key_of(0), data)
    for poison in POISONS:
        found = bench.read(key_of(0), poison=poison)
        expect_bytes(found, data, f"law 5: read over poison {poison:#04x}")


def many_in_flight_are_whole(bench: Bench) -> None:
    """Catches queues that lose, merge or mix up transfers when more are submitted than fit."""
    count = min(4 * bench.capabilities.max_in_flight + 5, 64)
    sizes = [SIZES[i % (len(SIZES) - 1)] for i in range(count)]
    for i, nbytes in enumerate(sizes):
        bench.tier.reserve(key_of(i), nbytes)
    writes = [
        bench.tier.write_from(key_of(i), bench.buffer(data_of(nbytes, i)))
        for i, nbytes in enumerate(sizes)
    ]
    for i in shuffled(count, seed=1):
        bench.wait(writes[i])
    buffers = [bench.blank(nbytes) for nbytes in sizes]
    reads = [bench.tier.read_into(key_of(i), buffers[i]) for i in range(count)]
    for i in shuffled(count, seed=2):
        bench.wait(reads[i])
        found = bench.hooks.contents(buffers[i])
        expect_bytes(found, data_of(sizes[i], i), f"law 5: read {i} of {count} in flight")


def _twice_written(bench: Bench) -> dict[TensorKey, bytes]:
    """Store one key of each size, write it once more, flush; return what was written last."""
    model = {key_of(i): data_of(nbytes, 1) for i, nbytes in enumerate(SIZES)}
    for key, data in model.items():
        bench.store(key, data_of(len(data), 2))
        bench.write(key, data)
    bench.flush()
    return model
