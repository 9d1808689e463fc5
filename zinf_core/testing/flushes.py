"""Flushes: what a `TierMachine` has flushed, and which of its flushes are in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from zinf_core.completion import Completion
from zinf_core.errors import TierClosedError
from zinf_core.keys import TensorKey
from zinf_core.testing.limits import wait_limited
from zinf_core.testing.model import StoredModel
from zinf_core.tier import Tier

_UNKNOWN: Final = -1
"""Version of a key that was flushed with a write in flight."""

Snapshot = dict[TensorKey, tuple[StoredModel, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingFlush:
    number: int
    completion: Completion
    snapshot: Snapshot


@dataclass(slots=True, kw_only=True)
class Flushes:
    """Keeps what was there when each flush was submitted, and waits for flushes in any order."""

    timeout_s: float
    pending: list[_PendingFlush] = field(default_factory=list)
    """Submitted and not waited for."""
    _durable: Snapshot = field(default_factory=dict)
    _durable_number: int = -1
    _num_submitted: int = 0

    def submit(self, tier: Tier, model: Mapping[TensorKey, StoredModel]) -> None:
        """Submit a flush of what `model` holds."""
        snapshot = {
            key: (stored, _UNKNOWN if stored.in_flight else stored.version)
            for key, stored in model.items()
        }
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        flush = _PendingFlush(number=number, completion=tier.flush(), snapshot=snapshot)
        self.pending.append(flush)

    def settle(self, which: int) -> None:
        """Wait for a flush in flight: what it found is durable then, whatever came later."""
        flush = self.pending.pop(which % len(self.pending))
        wait_limited(flush.completion, timeout_s=self.timeout_s)
        assert flush.completion.done(), "done() is False after wait() returned"
        if flush.number > self._durable_number:
            self._durable, self._durable_number = flush.snapshot, flush.number

    def settle_all(self) -> None:
        """Wait for every flush in flight."""
        while self.pending:
            self.settle(0)

    def settle_closed(self) -> set[TensorKey]:
        """Wait for what was in flight when the tier was closed; it may have given flushes up.

        Return the keys that any flush since the last reopening may have brought back.
        """
        known = set(self._durable)
        while self.pending:
            known |= set(self.pending[0].snapshot)
            try:
                self.settle(0)
            except TierClosedError:
                continue
        return known

    def untouched(self, model: Mapping[TensorKey, StoredModel]) -> dict[TensorKey, StoredModel]:
        """Return the keys of `model` that were flushed and did not change since."""
        return {
            key: stored
            for key, (stored, version) in self._durable.items()
            if model.get(key) is stored and stored.version == version
        }

    def adopt(self, model: Mapping[TensorKey, StoredModel]) -> None:
        """Begin anew, with `model` as what is durable."""
        self._durable = {key: (stored, stored.version) for key, stored in model.items()}
