"""Traffic: the transfers a `TierMachine` has in flight, each with a buffer of its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from zinf_core.errors import TransferCancelledError
from zinf_core.keys import TensorKey
from zinf_core.testing.buffers import BufferHooks
from zinf_core.testing.limits import wait_limited
from zinf_core.testing.model import Patch, PendingRead, PendingWrite, StoredModel
from zinf_core.tier import SupportsPrefetch, Tier

_SCRIBBLE = 0xEE

Pending = PendingRead | PendingWrite


class Traffic:
    """Submits transfers, waits for them and compares what reads found with the model.

    Keeps to the laws: a write waits for those in flight that it overlaps. Destinations are
    poisoned with what they must not hold, sources scribbled on as soon as they are free.
    """

    def __init__(self, buffers: BufferHooks, *, timeout_s: float) -> None:
        """Start with nothing in flight."""
        self.pending: list[Pending] = []
        self._buffers = buffers
        self._timeout_s = timeout_s

    def read(
        self, tier: Tier, key: TensorKey, stored: StoredModel, span: range, *, ahead: bool = False
    ) -> PendingRead:
        """Submit a read of the bytes `span` of `key`; `ahead`: a prefetch, if `tier` has it."""
        dst = self._buffers.make(len(span))
        values = stored.values[span.start : span.stop].copy()
        self._buffers.fill(dst, (~values).tobytes())
        prefetch = None
        if ahead and isinstance(tier, SupportsPrefetch):
            prefetch = tier.prefetch_into(key, dst, offset=span.start)
        item = PendingRead(
            stored=stored,
            offset=span.start,
            values=values,
            known=stored.known[span.start : span.stop].copy(),
            patches=list(stored.in_flight),
            dst=dst,
            completion=prefetch or tier.read_into(key, dst, offset=span.start),
            prefetch=prefetch,
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
        src = self._buffers.make(len(patch.data))
        self._buffers.fill(src, patch.data.tobytes())
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
            wait_limited(item.completion, timeout_s=self._timeout_s)
            assert item.completion.done(), "done() is False after wait() returned"
            self._check(item)
            self._forget(item)

    def settle_all(self) -> None:
        """Wait for everything in flight."""
        self.settle(self.pending)

    def settle_closed(self) -> None:
        """Wait for everything in flight when the tier was closed; it may give prefetches up."""
        for item in list(self.pending):
            try:
                self.settle([item])
            except TransferCancelledError:
                if not isinstance(item, PendingRead) or item.prefetch is None:
                    raise
                self._forget(item)

    def poll(self, item: Pending) -> None:
        """Ask whether `item` is done; if so, its bytes must be there. It stays in flight."""
        if item.completion.done():
            self._check(item)

    def cancel(self, item: Pending) -> None:
        """Give `item` up if it is a prefetch that can be, and end it if it cannot any more: which
        of the two depends on the tier's speed, and what comes next must not."""
        prefetch = item.prefetch if isinstance(item, PendingRead) else None
        if prefetch is None:
            return
        if not prefetch.cancel():
            self.settle([item])
            return
        with pytest.raises(TransferCancelledError):
            prefetch.wait(timeout_s=self._timeout_s)
        assert prefetch.done(), "done() is False after cancel() returned True"
        self._forget(item)

    def _forget(self, item: Pending) -> None:
        self.pending = [other for other in self.pending if other is not item]

    def _check(self, item: Pending) -> None:
        if isinstance(item, PendingWrite):
            if item.patch in item.stored.in_flight:
                item.stored.settle(item.patch)
            self._buffers.fill(item.src, bytes([_SCRIBBLE]) * item.src.nbytes)
        else:
            found = np.frombuffer(self._buffers.contents(item.dst), np.uint8)
            num_wrong = item.num_wrong(found)
            assert not num_wrong, f"{num_wrong} of {len(found)} bytes read are wrong"
