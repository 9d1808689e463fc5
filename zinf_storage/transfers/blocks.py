"""Blocks: how a transfer is cut into requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One checksummed piece of a key, and the part of it that a transfer covers."""

    index: int
    start: int
    """First logical byte."""
    end: int
    """Logical byte behind the last."""
    low: int
    """First byte covered by the transfer."""
    high: int
    """Byte behind the last covered one; equal to `low` if none is."""

    @property
    def is_covered(self) -> bool:
        """Whether the transfer covers all of the block."""
        return self.low == self.start and self.high == self.end

    @property
    def is_untouched(self) -> bool:
        """Whether the transfer covers nothing of the block."""
        return self.low >= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """The logical bytes `[start, end)` of a key of `key_nbytes` that a transfer moves."""

    key_nbytes: int
    block_nbytes: int
    start: int
    end: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole key."""
        return -(-self.key_nbytes // self.block_nbytes)

    def touched(self) -> range:
        """Return the indices of the blocks the range covers at least in part."""
        return range(self.start // self.block_nbytes, -(-self.end // self.block_nbytes))

    def block(self, index: int) -> Block:
        """Return block `index` with the part that the range covers."""
        start = index * self.block_nbytes
        end = min(start + self.block_nbytes, self.key_nbytes)
        low = min(max(self.start, start), end)
        high = max(min(self.end, end), low)
        return Block(index=index, start=start, end=end, low=low, high=high)
