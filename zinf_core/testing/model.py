"""What a key may hold while transfers of it are in flight: the model of `TierMachine`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zinf_core.buffers import Buffer, ByteArray
from zinf_core.completion import Completion
from zinf_core.tier import Prefetch


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """Bytes that a write puts at an offset of its key."""

    offset: int
    data: ByteArray

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.offset + len(self.data)

    def overlaps(self, other: Patch) -> bool:
        """Return whether the two share a byte."""
        return self.offset < other.end and other.offset < self.end


class StoredModel:
    """One reservation of a key: its bytes, which of them are known, and the writes in flight."""

    def __init__(self, nbytes: int) -> None:
        """Model a key that was reserved and never written."""
        self.values: ByteArray = np.zeros(nbytes, np.uint8)
        self.known: npt.NDArray[np.bool_] = np.zeros(nbytes, np.bool_)
        self.in_flight: list[Patch] = []
        self.version = 0
        """Writes submitted so far."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return len(self.values)

    def submit(self, patch: Patch) -> None:
        """Note a write that may happen from now on."""
        self.in_flight.append(patch)
        self.version += 1

    def settle(self, patch: Patch) -> None:
        """Note that the write has happened."""
        self.in_flight = [other for other in self.in_flight if other is not patch]
        self.values[patch.offset : patch.end] = patch.data
        self.known[patch.offset : patch.end] = True


@dataclass(slots=True, kw_only=True)
class PendingWrite:
    """A write submitted and not waited for."""

    stored: StoredModel
    patch: Patch
    src: Buffer
    completion: Completion


@dataclass(slots=True, kw_only=True)
class PendingRead:
    """A read submitted and not waited for, and what each of its bytes may be."""

    stored: StoredModel
    offset: int
    values: ByteArray
    known: npt.NDArray[np.bool_]
    patches: list[Patch] = field(default_factory=list)
    """Writes of the key in flight at some time since the read was submitted."""
    dst: Buffer
    completion: Completion
    prefetch: Prefetch | None = None
    """The completion, if the read was submitted as a prefetch."""

    def num_wrong(self, found: ByteArray) -> int:
        """Return how many bytes are neither the old ones nor those of a write in flight."""
        fine = ~self.known | (found == self.values)
        for patch in self.patches:
            start = max(patch.offset - self.offset, 0)
            end = min(patch.end - self.offset, len(found))
            if start < end:
                new = patch.data[start + self.offset - patch.offset :][: end - start]
                fine[start:end] |= found[start:end] == new
        return int(len(found) - np.count_nonzero(fine))
