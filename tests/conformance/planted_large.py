"""Broken tiers, one bug each, that show only in transfers larger than one request."""

from __future__ import annotations

from typing import Final

import numpy as np
from planted_threads import switch_threads

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.completion import Completion
from zinf_core.keys import TensorKey
from zinf_core.testing import DictTier
from zinf_core.units import KiB, MiB

REQUEST: Final = MiB
"""Bytes these tiers say they prefer."""


class LastRequestLost(DictTier):
    """Law 1: of a write of more than two requests, what fills no whole one is dropped."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        nbytes = src.nbytes
        if nbytes > 2 * REQUEST:
            src = src.part(0, nbytes // REQUEST * REQUEST)
        return super().write_from(key, src, offset=offset)


class LaterRequestsAtTheirOwnOffset(DictTier):
    """Law 3: the second and later requests of a read forget where in the key it began."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        completion = super().read_into(key, dst, offset=offset)
        rest = dst.nbytes - REQUEST
        if rest > 0:
            dst.array[REQUEST:] = np.frombuffer(self._stored[key], np.uint8, rest, REQUEST)
        return completion


class LargeWritesCarryTheRest(DictTier):
    """Law 3: a write of more than 16 KiB puts the whole key back, as it was when it began."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        before = self._stored.get(key, b"")
        completion = super().write_from(key, src, offset=offset)
        if src.nbytes > 16 * KiB:
            switch_threads(1e-3)
            end = offset + src.nbytes
            self._stored[key] = before[:offset] + src.array.tobytes() + before[end:]
        return completion


class KeepsLargeDestination(DictTier):
    """Law 6: the destination of the last read of several requests stays in an attribute."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        if dst.nbytes > 2 * REQUEST:
            self._last = dst
        return super().read_into(key, dst, offset=offset)


class AdoptsLargeSource(DictTier):
    """Law 6: a source of several requests is stored instead of copied."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        if src.nbytes == len(self._stored[key]) > 2 * REQUEST and isinstance(src, HostBuffer):
            self._stored[key] = memoryview(src.array)  # type: ignore[assignment]
        return completion
