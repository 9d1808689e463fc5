"""Checks of laws 1, 3 and 6 on transfers that a tier has to cut into several requests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from zinf_core.testing.bench import POISONS, Bench, data_of, expect_bytes, key_of, shuffled
from zinf_core.testing.laws_transfers import expect_no_reference
from zinf_core.units import KiB, MiB, align_up

_ROOM: Final = 16 * MiB
"""What the kit asks tiers to have room for."""
_MAX_ROOM: Final = 64 * MiB
_MIN_NBYTES: Final = 4 * MiB
_ODD: Final = 5
_NUM_THREADS, _NUM_PIECES = 4, 8


def large_keys_are_read(bench: Bench) -> None:
    """Catches the last request of several that is cut off, repeated, or put in a wrong place."""
    nbytes = _large(bench, 0.75)
    data = data_of(nbytes)
    bench.store(key_of(0), data)
    for poison in POISONS:
        found = bench.read(key_of(0), poison=poison)
        expect_bytes(found, data, f"law 1: key of {nbytes} bytes")


def large_ranges_are_exact(bench: Bench) -> None:
    """Catches ranges of several requests whose first or last one begins or ends elsewhere."""
    nbytes = _large(bench, 0.375)
    model = bytearray(data_of(nbytes))
    noise = data_of(nbytes + 16, 1)
    bench.store(key_of(0), bytes(model))
    for i, (offset, length) in enumerate(bench.ranges(nbytes)):
        if length in (0, nbytes):
            continue
        what = f"[{offset}, {offset + length}) of {nbytes}"
        found = bench.read(key_of(0), length, offset=offset)
        expect_bytes(found, bytes(model[offset : offset + length]), f"law 3: read of {what}")
        model[offset : offset + length] = noise[i : i + length]
        bench.write(key_of(0), noise[i : i + length], offset)
        bench.expect(key_of(0), bytes(model), f"law 3: write of {what}")


def large_writes_side_by_side(bench: Bench) -> None:
    """Catches a partial write that carries old bytes over those of another thread's."""
    step = max(bench.capabilities.offset_align, bench.capabilities.length_align)
    key = key_of(0)
    for number, wanted in enumerate((20 * KiB, 20 * KiB, _large(bench, 0.375) // _NUM_PIECES)):
        nbytes = align_up(wanted, step)
        bench.store(key, data_of(_NUM_PIECES * nbytes))
        order = shuffled(_NUM_PIECES, seed=number)
        pieces = [data_of(nbytes, 1 + i) for i in range(_NUM_PIECES)]
        bench.together(
            [
                functools.partial(_write_pieces, bench, pieces, order[i::_NUM_THREADS])
                for i in range(_NUM_THREADS)
            ]
        )
        what = f"law 3: disjoint writes of {nbytes} bytes from {_NUM_THREADS} threads"
        bench.expect(key, b"".join(pieces), what)
        bench.tier.discard(key)


def large_buffers_are_free(bench: Bench) -> None:
    """Catches a large buffer that is stored, kept, or used once more after its transfer."""
    nbytes = _large(bench, 0.75)
    data, other_use = data_of(nbytes), bytes([POISONS[1]]) * nbytes
    buffer = bench.buffer(data)
    bench.tier.reserve(key_of(0), nbytes)
    bench.wait(bench.tier.write_from(key_of(0), buffer))
    bench.hooks.fill(buffer, other_use)
    bench.flush()
    bench.expect(key_of(0), data, f"law 6: source of {nbytes} bytes reused")
    bench.wait(bench.tier.read_into(key_of(0), buffer))
    bench.hooks.fill(buffer, other_use)
    bench.flush()
    what = f"law 6: destination of {nbytes} bytes reused"
    expect_bytes(bench.hooks.contents(buffer), other_use, what)
    expect_no_reference(bench, bench.tier.read_into, key_of(0), nbytes)
    bench.tier.discard(key_of(0))  # a write of all may need as much room again
    bench.tier.reserve(key_of(0), nbytes)
    expect_no_reference(bench, bench.tier.write_from, key_of(0), nbytes)


def _large(bench: Bench, share: float) -> int:
    """Return more bytes than two requests of the preferred size, or `share` of the room."""
    capacity = bench.tier.usage().capacity_nbytes
    room = _ROOM if capacity is None else min(capacity, _MAX_ROOM)
    wanted = max(2 * bench.capabilities.preferred_io_nbytes, _MIN_NBYTES)
    return min(wanted, int(share * room)) + _ODD


def _write_pieces(bench: Bench, pieces: list[bytes], indices: Sequence[int]) -> None:
    """Write some of the pieces of a key, in flight together."""
    nbytes = len(pieces[0])
    pending = [
        bench.tier.write_from(key_of(0), bench.buffer(pieces[i]), offset=i * nbytes)
        for i in indices
    ]
    for completion in pending:
        bench.wait(completion)
