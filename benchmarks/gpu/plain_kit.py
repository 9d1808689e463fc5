"""A few of the kit's checks without pytest and Hypothesis, for machines that have neither."""

from __future__ import annotations

import random
from pathlib import Path

from gpu.rigs import Rig

from zinf_core.buffers import Buffer
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import SIZES, Bench, data_of, expect_bytes, key_of
from zinf_core.testing.crash_model import FlushScope
from zinf_core.testing.crash_orders import SuiteReference
from zinf_core.testing.faults import Operation
from zinf_core.tier import Tier

_NUM_STEPS = 120
_NUM_KEYS = 6


class PlainHooks:
    """A rig as `zinf_core.testing.bench.TierHooks`."""

    timeout_s = 20.0
    num_kills = 0
    flush_scope = FlushScope.TIER

    def __init__(self, rig: Rig) -> None:
        """Stand for `rig`."""
        self._rig = rig

    def open_tier(self, folder: Path) -> Tier:
        """Open the tier."""
        return self._rig.open(folder)

    def reopen(self, tier: Tier, folder: Path) -> Tier:
        """Close and open the tier."""
        tier.close()
        return self._rig.open(folder)

    def close(self, tier: Tier) -> None:
        """Close the tier."""
        tier.close()

    def make_buffer(self, nbytes: int) -> Buffer:
        """Return a buffer of the rig's kind."""
        return self._rig.make(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        """Set the bytes of a buffer."""
        self._rig.lab.fill(buffer, data)

    def contents(self, buffer: Buffer) -> bytes:
        """Return the bytes of a buffer."""
        return self._rig.lab.contents(buffer)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        """Return what is stored."""
        return self._rig.door.peek(tier, key)

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Change what is stored."""
        return self._rig.door.poke(tier, key, data)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        """Have the next operation fail."""
        del tier
        return self._rig.fail(operation)

    def in_child(self) -> SuiteReference:
        """Refer to the class; no process is killed here."""
        return SuiteReference.of(type(self))


def plain_failures(hooks: PlainHooks, place: Path) -> dict[str, str]:
    """Return what went wrong, by check: bytes of all sizes, back doors, random calls, reopening."""
    failures = {}
    for check in (_sizes, _doors, _many, _random, _reopened):
        folder = place / check.__name__
        folder.mkdir(parents=True)
        bench = Bench(hooks, folder)
        try:
            check(bench)
        except Exception as exc:  # noqa: BLE001 - the report names it
            failures[check.__name__.strip("_")] = f"{type(exc).__name__}: {exc}"
        finally:
            bench.close()
    return failures


def _sizes(bench: Bench) -> None:
    for index, nbytes in enumerate(SIZES):
        data = data_of(nbytes)
        bench.store(key_of(index), data)
        bench.expect(key_of(index), data, f"{nbytes} bytes")
        for start, length in bench.ranges(nbytes):
            found = bench.read(key_of(index), length, offset=start)
            expect_bytes(found, data[start : start + length], f"{length} bytes at {start}")


def _doors(bench: Bench) -> None:
    for index, nbytes in enumerate(SIZES):
        key, data = key_of(index), data_of(nbytes, 1)
        bench.store(key, data)
        bench.flush()
        expect_bytes(bench.hooks.peek(bench.tier, key) or b"", data, "what is stored")


def _many(bench: Bench) -> None:
    """Sixteen transfers in flight, in buffers of their own."""
    nbytes = 65537
    for index in range(16):
        bench.tier.reserve(key_of(index), nbytes)
    sources = [bench.buffer(data_of(nbytes, index)) for index in range(16)]
    writes = [bench.tier.write_from(key_of(i), source) for i, source in enumerate(sources)]
    for write in writes:
        bench.wait(write)
    targets = [bench.blank(nbytes) for _ in range(16)]
    reads = [bench.tier.read_into(key_of(i), target) for i, target in enumerate(targets)]
    for index, (read, target) in enumerate(zip(reads, targets, strict=True)):
        bench.wait(read)
        expect_bytes(bench.hooks.contents(target), data_of(nbytes, index), f"key {index}")


def _random(bench: Bench) -> None:
    """Random calls against a dict."""
    draw, model = random.Random(7), dict[TensorKey, bytes]()
    for step in range(_NUM_STEPS):
        key = key_of(draw.randrange(_NUM_KEYS))
        if key not in model:
            model[key] = data_of(draw.choice(SIZES), step)
            bench.store(key, model[key])
        elif draw.random() < 0.2:
            bench.tier.discard(key)
            del model[key]
        elif draw.random() < 0.6:
            start, length = draw.choice(bench.ranges(len(model[key])))
            data = data_of(length, step)
            bench.write(key, data, offset=start)
            model[key] = model[key][:start] + data + model[key][start + length :]
        for known, data in model.items():
            bench.expect(known, data, f"after call {step}")


def _reopened(bench: Bench) -> None:
    if not bench.capabilities.persistent:
        return
    data = data_of(SIZES[-1], 3)
    bench.store(key_of(0), data)
    bench.flush()
    bench.reopen()
    bench.expect(key_of(0), data, "after opening again")
