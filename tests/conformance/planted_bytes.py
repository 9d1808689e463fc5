"""Broken tiers, one bug each, in what arrives where and when: laws 1 to 6."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing import DictTier


class Later:
    """Completion of an act that happens in wait, whatever `done` says."""

    def __init__(self, act: Callable[[], None], *, done: bool) -> None:
        self._act = act
        self._says_done = done
        self._happened = False

    def done(self) -> bool:
        return self._says_done or self._happened

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._happened:
            self._act()
        self._happened = True


class ShortRead(DictTier):
    """Law 5: the last byte of a read does not arrive, and nobody is told."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        last = dst.array[-1:].copy()
        completion = super().read_into(key, dst, offset=offset)
        dst.array[-1:] = last
        return completion


class ReadOffByOne(DictTier):
    """Law 3: a read from within a key starts a byte early."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        super().read_into(key, dst, offset=offset).wait()
        return super().read_into(key, dst, offset=max(offset - 1, 0))


class WriteClearsRest(DictTier):
    """Law 3: a partial write zeroes what follows it."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        end = offset + src.nbytes
        self._stored[key] = self._stored[key][:end].ljust(len(self._stored[key]), b"\0")
        return completion


class ShadowWriteLosesNeighbour(DictTier):
    """Law 3: each write carries the rest of the key as it was at submit."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        before = self._stored.get(key)
        super().write_from(key, src, offset=offset)
        after = self._stored[key]
        self._stored[key] = before if before is not None else after

        def flip() -> None:
            if key in self._stored:
                self._stored[key] = after

        return Later(flip, done=False)


class AliasedKeys(DictTier):
    """Law 2: keys are told apart by how they print."""

    @staticmethod
    def _alias(key: TensorKey) -> TensorKey:
        return TensorKey(str(key), "param")

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        if self._alias(key) in self._stored:
            super().discard(self._alias(key))
        return super().reserve(self._alias(key), nbytes)

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return super().read_into(self._alias(key), dst, offset=offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        return super().write_from(self._alias(key), src, offset=offset)


class AgreeingErrors(DictTier):
    """Law 1: a write inverts its bytes and a read inverts them back."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        src.array[:] = ~src.array
        completion = super().write_from(key, src, offset=offset)
        src.array[:] = ~src.array
        return completion

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        completion = super().read_into(key, dst, offset=offset)
        dst.array[:] = ~dst.array
        return completion


class StaleCache(DictTier):
    """Law 4: what was read once is served again after a write."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[tuple[TensorKey, int, int], bytes] = {}

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        completion = super().read_into(key, dst, offset=offset)
        found = self._cache.setdefault((key, offset, dst.nbytes), dst.array.tobytes())
        dst.array[:] = np.frombuffer(found, np.uint8)
        return completion


class KeepsReference(DictTier):
    """Law 6: the last buffer seen stays in an attribute."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self._last = dst
        return super().read_into(key, dst, offset=offset)


class AdoptsSource(DictTier):
    """Law 6: a whole write stores the caller's memory instead of a copy."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        if src.nbytes == len(self._stored[key]):
            self._stored[key] = memoryview(src.array)  # type: ignore[assignment]
        return completion


class CompletesEarly(DictTier):
    """Law 6: a read says it is done before its bytes are there."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        now = dst.array.copy()
        super().read_into(key, dst, offset=offset)
        late = dst.array.copy()
        dst.array[:] = now

        def arrive() -> None:
            dst.array[:] = late

        return Later(arrive, done=True)


class LateStore(DictTier):
    """Law 6: the last read happens once more at the next flush."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        completion = super().read_into(key, dst, offset=offset)
        self._again = (dst, dst.array.copy())
        return completion

    def flush(self) -> Completion:
        dst, found = self._again
        dst.array[:] = found
        return super().flush()


class Overruns(DictTier):
    """Law 6: a read stores one byte past the buffer."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        completion = super().read_into(key, dst, offset=offset)
        if dst.nbytes == dst.capacity_nbytes:
            ctypes.memset(dst.address + dst.nbytes, 0, 1)
        return completion
