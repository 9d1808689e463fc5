"""TierMachine: Hypothesis looks for a sequence of calls after which a tier is not a dict."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zinf_core.buffers import Buffer
from zinf_core.errors import KeyAbsentError, KeyExistsError, RangeError, TierFullError
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import data_of, key_of
from zinf_core.testing.buffers import BufferHooks, fill_host, host_buffer, host_contents
from zinf_core.testing.flushes import Flushes
from zinf_core.testing.limits import run_limited
from zinf_core.testing.model import Patch, StoredModel
from zinf_core.testing.traffic import Pending, Traffic
from zinf_core.tier import Tier

_MAX_PENDING: Final = 12
_MAX_FLUSHES: Final = 3
_SIZES: Final = (0, 1, 7, 100, 511, 512, 513, 4095, 4096, 4097, 8192, 12000)

_keys = st.integers(0, 4).map(key_of)
_sizes = st.sampled_from(_SIZES)
_seeds = st.integers(0, 250)
_parts = st.integers(0, 8)
_indices = st.integers(0, _MAX_PENDING - 1)


def machine_for(
    open_tier: Callable[[Path], Tier],
    *,
    make_buffer: Callable[[int], Buffer] = host_buffer,
    fill: Callable[[Buffer, bytes], None] = fill_host,
    contents: Callable[[Buffer], bytes] = host_contents,
    timeout_s: float = 30.0,
) -> type[TierMachine]:
    """Return the state machine for the tier that `open_tier(folder)` opens. In a test file::

        TestMyTierMachine = machine_for(MyTier.open).TestCase

    A persistent tier is closed and opened again in the same folder. The tier needs room for
    1 MiB. `make_buffer` makes memory the tier can transfer with; if that is not host memory,
    `fill` and `contents` say how its bytes are set and looked at. A wait that takes longer than
    `timeout_s` fails.
    """
    own = {
        "open_tier": staticmethod(open_tier),
        "buffers": BufferHooks(make=make_buffer, fill=fill, contents=contents),
        "timeout_s": timeout_s,
    }
    return type("TierMachineForOne", (TierMachine,), own)


class TierMachine(RuleBasedStateMachine):
    """Random calls against a dict of `StoredModel`; made for one tier by `machine_for`.

    It stays within the laws: no two writes of the same bytes are in flight together, and a byte
    read while a write of it is in flight may be the old or the new one. Each transfer has a
    buffer of its own, poisoned before a read and scribbled on after a write.
    """

    open_tier: ClassVar[Callable[[Path], Tier]]
    buffers: ClassVar[BufferHooks]
    timeout_s: ClassVar[float]

    def __init__(self) -> None:
        """Make a folder; the tier is opened by the first rule."""
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="zinf-machine-")
        self._tier: Tier | None = None
        self._model: dict[TensorKey, StoredModel] = {}
        own = type(self)
        self._traffic = Traffic(own.buffers, timeout_s=own.timeout_s)
        self._flushes = Flushes(timeout_s=own.timeout_s)

    @property
    def tier(self) -> Tier:
        """The open tier."""
        assert self._tier is not None, "the tier is not open"
        return self._tier

    @initialize(nbytes=st.lists(_sizes, min_size=3, max_size=3))
    def start(self, nbytes: list[int]) -> None:
        """Open the tier in an empty folder and store a few keys."""
        self._open()
        for index, size in enumerate(nbytes):
            self.store(key_of(index), size, seed=index)

    @rule(key=_keys, nbytes=_sizes)
    def reserve(self, key: TensorKey, nbytes: int) -> None:
        """Reserve; a key that is there raises."""
        if key in self._model:
            with pytest.raises(KeyExistsError):
                self.tier.reserve(key, nbytes)
        else:
            assert self.tier.reserve(key, nbytes).nbytes == nbytes, "reserve returned another size"
            self._model[key] = StoredModel(nbytes)

    @rule(key=_keys, nbytes=_sizes, seed=_seeds)
    def store(self, key: TensorKey, nbytes: int, seed: int) -> None:
        """Reserve unless the key is there, write it whole and wait."""
        if key not in self._model:
            self.reserve(key, nbytes)
        stored = self._model[key]
        patch = Patch(0, np.frombuffer(data_of(stored.nbytes, seed), np.uint8))
        self._traffic.settle([self._traffic.write(self.tier, key, stored, patch)])

    @rule(key=_keys)
    def reserve_in_vain(self, key: TensorKey) -> None:
        """Reserve what cannot be had; the invariants say that nothing changed."""
        error = KeyExistsError if key in self._model else RangeError
        with pytest.raises((error, RangeError)):
            self.tier.reserve(key, -1)
        capacity = self.tier.usage().capacity_nbytes
        if capacity is not None and key not in self._model:
            with pytest.raises(TierFullError):
                self.tier.reserve(key, capacity + 1)

    @rule(key=_keys)
    def ask_for_absent(self, key: TensorKey) -> None:
        """Name a key that is not there, in every call that takes one."""
        if key in self._model:
            return
        buffer = self.buffers.make(0)
        for call in (self.tier.stat, self.tier.discard):
            with pytest.raises(KeyAbsentError):
                call(key)
        for submit in (self.tier.read_into, self.tier.write_from):
            with pytest.raises(KeyAbsentError):
                submit(key, buffer)

    @precondition(lambda self: self._model)
    @rule(which=_indices, first=_parts, count=_parts, seed=_seeds)
    def write(self, which: int, first: int, count: int, seed: int) -> None:
        """Submit a write of a whole key or of a legal range."""
        key, stored = self._pick(which)
        span = self._span(stored.nbytes, first, count)
        patch = Patch(span.start, np.frombuffer(data_of(len(span), seed), np.uint8))
        self._traffic.write(self.tier, key, stored, patch)
        self._limit()

    @precondition(lambda self: self._model)
    @rule(which=_indices, first=_parts, count=_parts, ahead=st.booleans())
    def read(self, which: int, first: int, count: int, ahead: bool) -> None:
        """Submit a read, or a prefetch, of a whole key or of a legal range."""
        key, stored = self._pick(which)
        span = self._span(stored.nbytes, first, count)
        self._traffic.read(self.tier, key, stored, span, ahead=ahead)
        self._limit()

    @precondition(lambda self: self._model)
    @rule(which=_indices)
    def expect_stored(self, which: int) -> None:
        """Read a whole key and wait."""
        key, stored = self._pick(which)
        assert self.tier.stat(key).nbytes == stored.nbytes, f"stat of {key} has another size"
        self._read_whole(key, stored)

    @precondition(lambda self: self._model)
    @rule(which=_indices)
    def discard(self, which: int) -> None:
        """Discard, whatever is in flight."""
        key, _ = self._pick(which)
        self.tier.discard(key)
        del self._model[key]

    @precondition(lambda self: self._traffic.pending)
    @rule(which=_indices)
    def wait(self, which: int) -> None:
        """Wait for any transfer in flight."""
        self._traffic.settle([self._pending(which)])

    @precondition(lambda self: self._traffic.pending)
    @rule(which=_indices)
    def poll(self, which: int) -> None:
        """Ask whether a transfer is done; if so, its bytes are there."""
        self._traffic.poll(self._pending(which))

    @precondition(lambda self: self._traffic.pending)
    @rule(which=_indices)
    def cancel(self, which: int) -> None:
        """Give a prefetch up, if it can be."""
        self._traffic.cancel(self._pending(which))

    @rule()
    def flush(self) -> None:
        """Flush; what was waited for before is durable then."""
        self.submit_flush()
        self._flushes.settle(-1)

    @rule()
    def submit_flush(self) -> None:
        """Submit a flush; others may be in flight, and work goes on before it is waited for."""
        if len(self._flushes.pending) >= _MAX_FLUSHES:
            self._flushes.settle(0)
        self._flushes.submit(self.tier, self._model)

    @precondition(lambda self: self._flushes.pending)
    @rule(which=_indices)
    def settle_flush(self, which: int) -> None:
        """Wait for any flush in flight."""
        self._flushes.settle(which)

    @rule(flush=st.booleans(), luck=st.integers(0, 3))
    def reopen(self, flush: bool, luck: int) -> None:
        """Close with transfers in flight, or after a flush, and open again.

        A tier that forgets everything then is reopened only with `luck`.
        """
        persistent = self.tier.capabilities.persistent
        if not persistent and luck < 3:
            return
        if flush:
            self._traffic.settle_all()
            self.flush()
        run_limited(self.tier.close, limit_s=2 * self.timeout_s, what="close()")
        self._traffic.settle_closed()
        flushed = self._flushes.settle_closed()
        self._open()
        if persistent:
            self._adopt(flushed)
        else:
            self._model.clear()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """Keys and usage are those of the model."""
        if self._tier is None:
            return
        usage = self.tier.usage()
        assert set(self.tier.keys()) == set(self._model), "keys() is not what was reserved"
        assert usage.num_keys == len(self._model), "usage().num_keys is wrong"
        nbytes = sum(stored.nbytes for stored in self._model.values())
        assert usage.nbytes == nbytes, f"usage().nbytes is {usage.nbytes}, {nbytes} are reserved"

    def teardown(self) -> None:
        """Unless a rule failed, check everything once more and empty the tier; close it."""
        try:
            if self._tier is not None and sys.exception() is None:
                self._expect_all()
        finally:
            self._close()

    def _expect_all(self) -> None:
        self._traffic.settle_all()
        self._flushes.settle_all()
        while self._model:
            self.expect_stored(0)
            self.discard(0)
        self.holds_what_the_model_holds()

    def _close(self) -> None:
        try:
            if self._tier is not None:
                run_limited(self._tier.close, limit_s=2 * self.timeout_s, what="close()")
        finally:
            self._folder.cleanup()

    def _open(self) -> None:
        self._tier = type(self).open_tier(Path(self._folder.name))

    def _pick(self, which: int) -> tuple[TensorKey, StoredModel]:
        """Return one of the keys that are there."""
        keys = sorted(self._model)
        key = keys[which % len(keys)]
        return key, self._model[key]

    def _pending(self, which: int) -> Pending:
        """Return one of the transfers in flight."""
        return self._traffic.pending[which % len(self._traffic.pending)]

    def _limit(self) -> None:
        self._traffic.settle(self._traffic.pending[:-_MAX_PENDING])

    def _read_whole(self, key: TensorKey, stored: StoredModel) -> None:
        whole = range(stored.nbytes)
        self._traffic.settle([self._traffic.read(self.tier, key, stored, whole)])

    def _span(self, nbytes: int, first: int, count: int) -> range:
        """Return a legal range from `first` eighths of a key on, of `count` eighths, 0 for all."""
        capabilities = self.tier.capabilities
        step = max(capabilities.offset_align, capabilities.length_align)
        unit = step * max(1, nbytes // (8 * step))
        offset = unit * (first % (nbytes // unit + 1))
        return range(offset, min(offset + unit * (count or 9), nbytes))

    def _adopt(self, flushed: set[TensorKey]) -> None:
        """Check keys untouched since the last flush; take the others as they are found."""
        found = set(self.tier.keys())
        before, self._model = self._model, self._flushes.untouched(self._model)
        for key, stored in self._model.items():
            assert key in found, f"{key} was flushed and is gone after reopening"
            self._read_whole(key, stored)
        assert found <= {*before, *flushed}, "reopening brought keys nobody reserved"
        for key in found - set(self._model):
            self._model[key] = StoredModel(self.tier.stat(key).nbytes)
        self._flushes.adopt(self._model)
