"""Check that a caller whose n-th call fails, whichever it is, can clean up and begin again."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import TierError, TransferCancelledError
from zinf_core.testing.bench import Bench, TierHooks, data_of, expect_bytes, key_of
from zinf_core.testing.sweep import sweep_faults
from zinf_core.tier import SupportsPrefetch, Tier

_NBYTES: Final = 8192
_KEYS: Final = (key_of(0), key_of(1))


def every_call_may_fail(bench: Bench, tmp_path: Path) -> None:
    """Catches keys, room and workers that a caller which stopped half-way leaves stuck."""
    opened: list[Tier] = []
    numbers = itertools.count()

    def open_one() -> Tier:
        folder = tmp_path / f"sweep-{next(numbers)}"
        folder.mkdir()
        opened.append(bench.hooks.open_tier(folder))
        return opened[-1]

    try:
        sweep_faults(_Caller(bench.hooks), open_tier=open_one)
    finally:
        for tier in opened:
            bench.hooks.close(tier)


class _Caller:
    """Uses every method that can fail, and waits for what it submitted whatever happens."""

    def __init__(self, hooks: TierHooks) -> None:
        self._hooks = hooks

    def __call__(self, tier: Tier) -> None:
        submitted: list[Completion] = []
        try:
            self._write(tier, submitted)
            self._wait(tier.flush())
            self._read(tier, submitted)
            if isinstance(tier, SupportsPrefetch):
                self._prefetch(tier, submitted)
            tier.discard(_KEYS[0])
        finally:
            self._settle(submitted)

    def _write(self, tier: Tier, submitted: list[Completion]) -> None:
        for i, key in enumerate(_KEYS):
            tier.reserve(key, _NBYTES)
            submitted.append(tier.write_from(key, self._buffer(data_of(_NBYTES, i))))
        for completion in submitted:
            self._wait(completion)

    def _read(self, tier: Tier, submitted: list[Completion]) -> None:
        for i, key in enumerate(_KEYS):
            dst = self._buffer(bytes(_NBYTES))
            submitted.append(tier.read_into(key, dst))
            self._wait(submitted[-1])
            expect_bytes(self._hooks.contents(dst), data_of(_NBYTES, i), "fault sweep: read")

    def _prefetch(self, tier: SupportsPrefetch, submitted: list[Completion]) -> None:
        dst = self._buffer(bytes(_NBYTES))
        submitted.append(tier.prefetch_into(_KEYS[0], dst))
        given_up = tier.prefetch_into(_KEYS[1], self._buffer(bytes(_NBYTES)))
        submitted.append(given_up)
        if not given_up.cancel():
            self._wait(given_up)
        self._wait(submitted[-2])
        expect_bytes(self._hooks.contents(dst), data_of(_NBYTES, 0), "fault sweep: prefetch")

    def _buffer(self, data: bytes) -> Buffer:
        buffer = self._hooks.make_buffer(len(data))
        self._hooks.fill(buffer, data)
        return buffer

    def _wait(self, completion: Completion) -> None:
        completion.wait(timeout_s=self._hooks.timeout_s)

    def _settle(self, submitted: list[Completion]) -> None:
        for completion in submitted:
            try:
                self._wait(completion)
            except (TierError, TransferCancelledError):
                continue
