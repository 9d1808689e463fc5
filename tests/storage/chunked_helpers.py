"""What the tests of chunked tiers share: bytes, short calls, and inner tiers over a medium."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import TransferError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import DictTier, host_buffer
from zinf_core.tier import Tier
from zinf_storage.chunked import ChunkedOptions, ChunkedTier

CHUNK = 4096
SMALL = ChunkedOptions(chunk_nbytes=CHUNK, num_threads=2)
CHECKED = ChunkedOptions(scheme="checksummed", chunk_nbytes=CHUNK, num_threads=2, checksums=True)
Medium = dict[TensorKey, bytes]


def key(index: int) -> TensorKey:
    return TensorKey.of(f"layers.{index}.weight", StateKind.PARAM)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(1000 * nbytes + seed).randbytes(nbytes)


def submit_write(tier: Tier, which: TensorKey, data: bytes, offset: int = 0) -> Completion:
    buffer = host_buffer(len(data))
    buffer.array[:] = np.frombuffer(data, np.uint8)
    return tier.write_from(which, buffer, offset=offset)


def write(tier: Tier, which: TensorKey, data: bytes, offset: int = 0) -> None:
    submit_write(tier, which, data, offset).wait(timeout_s=30)


def store(tier: Tier, which: TensorKey, data: bytes) -> None:
    tier.reserve(which, len(data))
    write(tier, which, data)


def read(tier: Tier, which: TensorKey, offset: int = 0, nbytes: int | None = None) -> bytes:
    buffer = host_buffer(tier.stat(which).nbytes - offset if nbytes is None else nbytes)
    buffer.array[:] = 0xA5
    tier.read_into(which, buffer, offset=offset).wait(timeout_s=30)
    return buffer.array.tobytes()


def contents(tier: Tier) -> dict[TensorKey, bytes]:
    return {which: read(tier, which) for which in set(tier.keys())}


def flush(tier: Tier) -> None:
    tier.flush().wait(timeout_s=30)


def dicts(media: Sequence[Medium]) -> list[DictTier]:
    return [DictTier(f"dict{i}", medium=medium) for i, medium in enumerate(media)]


@contextmanager
def opened(inner: Sequence[Tier], options: ChunkedOptions = SMALL) -> Iterator[ChunkedTier]:
    tier = ChunkedTier.open(inner, options=options)
    try:
        yield tier
    finally:
        tier.close()


class PowerCut:
    """A countdown of calls to inner tiers after which the machine is off."""

    def __init__(self, num_calls: int | None = None) -> None:
        self.num_calls = num_calls
        self.count = 0

    def take(self) -> None:
        if self.num_calls is not None and self.count >= self.num_calls:
            raise TransferError(5, "the power is off")
        self.count += 1


class MortalTier(DictTier):
    """A DictTier that does nothing any more once the power is cut.

    With `prompt`, every change is durable at once, as on a tier that has no commits. The flush
    number `lie_at` from now, if that is set, happens and says that it failed.
    """

    def __init__(self, name: str, medium: Medium, cut: PowerCut, *, prompt: bool = False) -> None:
        super().__init__(name, medium=medium)
        self._cut = cut
        self._prompt = prompt
        self.lie_at = 0

    def reserve(self, which: TensorKey, nbytes: int) -> object:
        self._cut.take()
        extent = super().reserve(which, nbytes)
        self._leak()
        return extent

    def write_from(self, which: TensorKey, src: object, *, offset: int = 0) -> Completion:
        try:
            self._cut.take()
        except TransferError as exc:
            if self._prompt:
                # Torn: half of it reached the medium.
                super().write_from(which, src.part(0, src.nbytes // 2), offset=offset)
                self._leak()
            return CompletedTransfer(exc)
        completion = super().write_from(which, src, offset=offset)
        self._leak()
        return completion

    def discard(self, which: TensorKey) -> None:
        self._cut.take()
        super().discard(which)
        self._leak()

    def flush(self) -> Completion:
        try:
            self._cut.take()
        except TransferError as exc:
            return CompletedTransfer(exc)
        self.lie_at -= 1
        if self.lie_at == 0:
            super().flush()
            return CompletedTransfer(TransferError(5, "a flush that happened"))
        return super().flush()

    def _leak(self) -> None:
        if self._prompt:
            super().flush()


class GatedTier(DictTier):
    """A DictTier whose transfers happen when the gate is open and somebody waits for them."""

    def __init__(self, name: str = "gated", **options: object) -> None:
        super().__init__(name, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.calls: list[tuple[str, TensorKey]] = []

    def read_into(self, which: TensorKey, dst: object, *, offset: int = 0) -> Completion:
        self.calls.append(("read", which))
        return _Gated(self, lambda: super(GatedTier, self).read_into(which, dst, offset=offset))

    def write_from(self, which: TensorKey, src: object, *, offset: int = 0) -> Completion:
        self.calls.append(("write", which))
        return _Gated(self, lambda: super(GatedTier, self).write_from(which, src, offset=offset))


class _Gated:
    def __init__(self, tier: GatedTier, act: Callable[[], Completion]) -> None:
        self._tier = tier
        self._act: Callable[[], Completion] | None = act

    def done(self) -> bool:
        return self._act is None

    def wait(self, timeout_s: float | None = None) -> None:
        self._tier.entered.release()
        assert self._tier.gate.wait(timeout=30)
        act, self._act = self._act, None
        if act is not None:
            act().wait()
