"""Traffic: the transfers a `TierMachine` has in flight, each with a buffer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.keys import TensorKey
from zinf_core.testing.model import Patch, PendingRead, PendingWrite, StoredModel
from zinf_core.tier import Tier

_SCRIBBLE = 0xEE

Pending = PendingRead | PendingWrite


class Traffic:
    """Submits transfers, waits for them and compares what reads found with the model.

    Keeps to the laws: a write waits for those in flight that it overlaps. Destinations are
    poisoned with what they must not hold, sources scribbled on as soon as they are free.
    """

    def __init__(self, make_buffer: Callable[[int], Buffer], *, timeout_s: float) -> None:
        """Start with nothing in flight."""
        self.pending: list[Pending] = []
        self._make_buffer = make_buffer
        self._timeout_s = timeout_s

    def read(self, tier: Tier, key: TensorKey, stored: StoredModel, span: range) -> PendingRead:
        """Submit a read of the bytes `span` of `key`."""
        dst = self._make_buffer(len(span))
        values = stored.values[span.start : span.stop].copy()
        dst.array[:] = ~values
        item = PendingRead(
            stored=stored,
            offset=span.start,
            values=values,
            known=stored.known[span.start : span.stop].copy(),
            patches=list(stored.in_flight),
            dst=dst,
            completion=tier.read_into(key, dst, offset=span.start),
        )
        self.pending.append(item)
        return item

    def write(self, tier: Tier, key: TensorKey, stored: StoredModel, patch: Patch) -> PendingWrite:
        """Submit a write of `patch` to `key`."""
        self.settle(
            item
            for item in self.pending
            if isinstance(item, PendingWrite)
            and item.stored is stored
            and item.patch.overlaps(patch)
        )
        src = self._make_buffer(len(patch.data))
        src.array[:] = patch.data
        stored.submit(patch)
        for item in self.pending:
            if isinstance(item, PendingRead) and item.stored is stored:
                item.patches.append(patch)
        completion = tier.write_from(key, src, offset=patch.offset)
        written = PendingWrite(stored=stored, patch=patch, src=src, completion=completion)
        self.pending.append(written)
        return written

    def settle(self, items: Iterable[Pending]) -> None:
        """Wait for `items`, in their order."""
        for item in list(items):
            item.completion.wait(timeout_s=self._timeout_s)
            assert item.completion.done(), "done() is False after wait() returned"
            self._check(item)
            self.pending = [other for other in self.pending if other is not item]

    def settle_all(self) -> None:
        """Wait for everything in flight."""
        self.settle(self.pending)

    def poll(self, item: Pending) -> None:
        """Ask whether `item` is done; if so, its bytes must be there. It stays in flight."""
        if item.completion.done():
            self._check(item)

    def _check(self, item: Pending) -> None:
        if isinstance(item, PendingWrite):
            if item.patch in item.stored.in_flight:
                item.stored.settle(item.patch)
            item.src.array[:] = _SCRIBBLE
        else:
            found = np.asarray(item.dst.array)
            num_wrong = item.num_wrong(found)
            assert not num_wrong, f"{num_wrong} of {len(found)} bytes read are wrong"
