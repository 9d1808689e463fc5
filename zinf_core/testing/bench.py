"""Bench: one open tier of a suite, with the few operations that every law check is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.capabilities import TierCapabilities
from zinf_core.completion import Completion
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing.crash_model import FlushScope
from zinf_core.testing.crash_orders import SuiteReference
from zinf_core.testing.faults import Operation
from zinf_core.testing.limits import run_together
from zinf_core.tier import Tier

SIZES: Final = (0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 65537, (1 << 20) + 5)
"""Bytes: around the alignments of storage, and nothing at all."""

LIMIT_S: Final = 120.0
"""Seconds after which a whole check counts as stuck, unless the suite says otherwise."""

POISONS: Final = (0xA5, 0x5A)
"""What destinations hold before a read: a byte left untouched differs from data in one of them."""


class TierHooks(Protocol):
    """What a suite tells the checks about its tier; `TierSuite` has defaults for most."""

    timeout_s: float
    num_kills: int
    flush_scope: FlushScope

    def open_tier(self, folder: Path) -> Tier:
        """Return a newly opened tier that keeps what it has to keep in `folder`."""
        ...

    def reopen(self, tier: Tier, folder: Path) -> Tier:
        """Close `tier` and return the tier that finds what it had flushed."""
        ...

    def close(self, tier: Tier) -> None:
        """Close `tier`."""
        ...

    def make_buffer(self, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes` (>= 0) the tier can transfer with."""
        ...

    def fill(self, buffer: Buffer, data: bytes) -> None:
        """Make the buffer's bytes `data`, of exactly its length."""
        ...

    def contents(self, buffer: Buffer) -> bytes:
        """Return the buffer's bytes."""
        ...

    def peek(self, tier: Tier, key: TensorKey) -> bytes | None:
        """Return what is stored, not asking the tier; None if there is no back door."""
        ...

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Change what is stored, not asking the tier; False if there is no back door."""
        ...

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        """Make the environment fail the next `operation`; False if that cannot be arranged."""
        ...

    def in_child(self) -> SuiteReference:
        """Return how another process makes this suite."""
        ...


class Bench:
    """One open tier and short ways to use it. Not thread-safe, except `read` and `store`."""

    def __init__(self, hooks: TierHooks, folder: Path, *, limit_s: float = LIMIT_S) -> None:
        """Open the tier of `hooks` in `folder`. A check that takes `limit_s` seconds is stuck."""
        self.hooks = hooks
        self.folder = folder
        self.limit_s = limit_s
        self.tier: Tier = hooks.open_tier(folder)

    @property
    def capabilities(self) -> TierCapabilities:
        """Capabilities of the open tier."""
        return self.tier.capabilities

    def buffer(self, data: bytes) -> Buffer:
        """Return a new buffer that holds `data`."""
        buffer = self.hooks.make_buffer(len(data))
        self.hooks.fill(buffer, data)
        return buffer

    def blank(self, nbytes: int, poison: int = POISONS[0]) -> Buffer:
        """Return a new buffer of `nbytes` poison bytes."""
        return self.buffer(bytes([poison]) * nbytes)

    def wait(self, completion: Completion) -> None:
        """Wait for the transfer; afterwards it must call itself done."""
        completion.wait(timeout_s=self.hooks.timeout_s)
        assert completion.done(), "done() is False after wait() returned"

    def write(self, key: TensorKey, data: bytes, offset: int = 0) -> None:
        """Write `data` to `key` at `offset` and wait."""
        self.wait(self.tier.write_from(key, self.buffer(data), offset=offset))

    def store(self, key: TensorKey, data: bytes) -> None:
        """Reserve room for `data` under `key`, write it and wait."""
        self.tier.reserve(key, len(data))
        self.write(key, data)

    def read(
        self,
        key: TensorKey,
        nbytes: int | None = None,
        *,
        offset: int = 0,
        poison: int = POISONS[0],
    ) -> bytes:
        """Read `nbytes` (all of the key by default) into a poisoned buffer, wait, return them."""
        nbytes = self.tier.stat(key).nbytes if nbytes is None else nbytes
        dst = self.blank(nbytes, poison)
        self.wait(self.tier.read_into(key, dst, offset=offset))
        return self.hooks.contents(dst)

    def expect(self, key: TensorKey, data: bytes, what: str) -> None:
        """Raise AssertionError unless `key` reads as `data`."""
        expect_bytes(self.read(key), data, f"{what}: {key}")

    def flush(self) -> None:
        """Flush and wait."""
        self.wait(self.tier.flush())

    def reopen(self) -> None:
        """Close the tier and open it again where it was."""
        self.tier = self.hooks.reopen(self.tier, self.folder)

    def close(self) -> None:
        """Close the tier."""
        self.hooks.close(self.tier)

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        """Run `calls` on a thread each, begun together; raise what failed first."""
        run_together(calls, limit_s=self.limit_s / 2, what="work on several threads")

    def ranges(self, nbytes: int) -> list[tuple[int, int]]:
        """Return legal ``(offset, length)`` of a key of `nbytes`: head, middle, tail, all, none."""
        capabilities = self.capabilities
        step = max(capabilities.offset_align, capabilities.length_align)
        unit = step * max(1, nbytes // (5 * step))
        found = {(0, nbytes), (0, 0)}
        if unit < nbytes:
            found |= {(0, unit), (unit, nbytes - unit)}
        if 2 * unit < nbytes:
            found |= {(unit, unit), (2 * unit, nbytes - 2 * unit)}
        last = (max(nbytes - 1, 0) // step) * step
        return sorted(found | {(last, nbytes - last)})


def key_of(index: int) -> TensorKey:
    """Return one of many different keys."""
    kinds = tuple(StateKind)
    return TensorKey.of(f"layers.{index // len(kinds)}.weight", kinds[index % len(kinds)])


def data_of(nbytes: int, seed: int = 0) -> bytes:
    """Return `nbytes` of reproducible noise."""
    return random.Random(seed * 7919 + nbytes).randbytes(nbytes)


def expect_bytes(actual: bytes, expected: bytes, what: str) -> None:
    """Raise AssertionError that names the first wrong byte unless the two are equal."""
    if actual == expected:
        return
    if len(actual) != len(expected):
        raise AssertionError(f"{what}: {len(actual)} bytes, expected {len(expected)}")
    wrong = np.flatnonzero(np.frombuffer(actual, np.uint8) != np.frombuffer(expected, np.uint8))
    first = int(wrong[0])
    raise AssertionError(
        f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, from byte {first} on "
        f"({actual[first]:#04x}, expected {expected[first]:#04x})"
    )


def shuffled(count: int, seed: int) -> Sequence[int]:
    """Return ``range(count)`` in a reproducible order."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
