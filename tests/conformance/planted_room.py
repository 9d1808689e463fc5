"""Broken tiers, one bug each, that show only when the tier is full."""

from __future__ import annotations

from zinf_core.errors import TierFullError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing import DictTier
from zinf_core.units import PAGE_NBYTES, MiB


class Small(DictTier):
    """A tier of 1 MiB."""

    def __init__(self) -> None:
        super().__init__(capacity_nbytes=MiB)


class TakesTheRest(Small):
    """Law 8: a reserve that does not fit keeps the room there was."""

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        try:
            return super().reserve(key, nbytes)
        except TierFullError:
            self._stored[key] = b""
            raise


class EvictsTheOldest(Small):
    """Law 8: a full tier makes room by dropping a key."""

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        try:
            return super().reserve(key, nbytes)
        except TierFullError:
            if not self._stored:
                raise
            del self._stored[next(iter(self._stored))]
            return self.reserve(key, nbytes)


class RefusalCostsRoom(Small):
    """Law 7: each reserve that was refused lowers what fits for good."""

    lost_nbytes = 0

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        if self._stored_nbytes() + nbytes > MiB - self.lost_nbytes:
            self.lost_nbytes += PAGE_NBYTES
            raise TierFullError(28, f"{self.name}: no room for {nbytes} bytes of {key}")
        return super().reserve(key, nbytes)


class SaysTooLittle(Small):
    """Law 8: the message names neither the key nor the bytes."""

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        try:
            return super().reserve(key, nbytes)
        except TierFullError as exc:
            raise TierFullError(28, f"{self.name}: no space left on device") from exc
