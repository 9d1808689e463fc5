"""Tier: named bytes at rest, on host memory, a device, an NVMe drive or anywhere else.

A tier needs no base class; whatever has these methods is a tier. It keeps fourteen laws, each a
named test of `zinf_core.testing.TierSuite`:

1.  What was written is what is read.
2.  Keys do not disturb each other.
3.  Ranges are exact: a transfer touches `[offset, offset + nbytes)` of the key and nothing else.
4.  A read submitted after a write's `wait` sees that write.
5.  A transfer is exact or it raises: there are no short counts.
6.  Between submit and completion the buffer is the tier's; afterwards the tier keeps no reference.
7.  `usage()` equals the sum of what is stored.
8.  A failed `reserve` changes nothing.
9.  After a failed write, reading gives the old bytes or CorruptDataError, never an unnoticed mix.
10. Bad arguments raise at submit; failures of the environment raise at `wait`.
11. `stat`, `discard`, `read_into` and `write_from` of an absent key raise KeyAbsentError.
12. `close` settles everything in flight, may be called twice, and later calls raise
    TierClosedError.
13. Any thread may submit.
14. Opening an existing persistent tier destroys nothing.

A reserved key that was never written reads as unspecified bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.errors import AlignmentError, ConfigError, RangeError, UnsupportedBufferError
from zinf_core.keys import Extent, TensorKey


@runtime_checkable
class Tier(Protocol):
    """Place that stores named bytes."""

    @property
    def name(self) -> str:
        """Name used in messages and statistics, e.g. ``"nvme"``."""
        ...

    @property
    def capabilities(self) -> TierCapabilities:
        """What the tier can do; constant after opening."""
        ...

    def usage(self) -> TierUsage:
        """Return what is stored now. Never blocks on transfers."""
        ...

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Make room for `nbytes` (>= 0) under `key`.

        Raises KeyExistsError if `key` is reserved, RangeError if `nbytes` is negative,
        TierFullError if there is no room; a failure changes nothing (law 8).
        """
        ...

    def stat(self, key: TensorKey) -> Extent:
        """Return where `key` lies. Raises KeyAbsentError."""
        ...

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys, in no particular order."""
        ...

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Submit a read of `dst.nbytes` bytes of `key` from `offset` into `dst`. Never blocks on
        the transfer.

        `dst` belongs to the tier until the completion is done (law 6). Raises KeyAbsentError,
        RangeError, AlignmentError or UnsupportedBufferError at once; TransferError and
        CorruptDataError are raised by `wait`.
        """
        ...

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Submit a write of `src.nbytes` bytes from `src` to `key` at `offset`.

        `src` must not change until the completion is done. Raises as `read_into`; `wait` may also
        raise TierFullError. Bytes of `key` outside the range keep their values.
        """
        ...

    def discard(self, key: TensorKey) -> None:
        """Forget `key` and free its room; transfers of it in flight end first or undisturbed.
        Raises KeyAbsentError."""
        ...

    def flush(self) -> Completion:
        """Submit making durable what was written before; on persistent tiers the next open finds
        it (a manifest commit)."""
        ...

    def close(self) -> None:
        """Settle everything in flight and release threads, descriptors and memory. Blocks."""
        ...


@runtime_checkable
class SupportsMap(Protocol):
    """A tier whose keys can be used in place."""

    def map(self, key: TensorKey) -> Buffer:
        """Return the key's own bytes: reading and writing the buffer is reading and writing the
        tier, until `discard` or `close`. Raises KeyAbsentError."""
        ...


@runtime_checkable
class Prefetch(Completion, Protocol):
    """Completion of a read that nobody waits for yet."""

    def cancel(self) -> bool:
        """Give the read up if no byte of it has moved; return whether that was so. Then it is
        done and `wait` raises TransferCancelledError; else it goes on. Never blocks."""
        ...

    def promote(self) -> None:
        """Treat the read like one that is waited for from now on. Never blocks."""
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A tier that can tell reads ahead of time from reads that are waited for.

    Such a tier serves `read_into` first, and `prefetch_into` and `write_from` fairly after it.
    """

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        """Submit a read as `read_into` does, to be done when the tier has time for it."""
        ...


@runtime_checkable
class SupportsRemove(Protocol):
    """A tier that can end without leaving anything behind."""

    def remove(self) -> None:
        """Close, then delete everything the tier keeps anywhere, flushed or not. Blocks."""
        ...


@runtime_checkable
class SupportsReclaim(Protocol):
    """A tier that knows what a killed process left behind."""

    def reclaim(self) -> int:
        """Delete what no flush refers to and no open tier uses; return its bytes. Blocks."""
        ...


def remove_tier(tier: Tier) -> None:
    """Close `tier` with nothing left in it: by its own `remove`, or key by key. Blocks."""
    if isinstance(tier, SupportsRemove):
        tier.remove()
        return
    try:
        for key in list(tier.keys()):
            tier.discard(key)
    finally:
        tier.close()


def reclaim_tier(tier: Tier) -> int:
    """Delete what killed processes left behind in `tier`, if it knows; return its bytes. Blocks."""
    return tier.reclaim() if isinstance(tier, SupportsReclaim) else 0


def validate_reserve(tier_name: str, key: TensorKey, nbytes: int) -> None:
    """Raise RangeError unless `nbytes` is a possible size, ConfigError unless it is an int. For use
    by tiers."""
    if type(nbytes) is not int:
        raise ConfigError(f"{tier_name}: nbytes = {nbytes!r} for {key} is no int; write int(...)")
    if nbytes < 0:
        raise RangeError(f"{tier_name}: cannot reserve {nbytes} bytes for {key}")


def validate_transfer(
    tier_name: str,
    key: TensorKey,
    stored_nbytes: int,
    buffer: Buffer,
    offset: int,
    *,
    capabilities: TierCapabilities,
) -> None:
    """Raise what law 10 asks for at submit. For use by tiers.

    Raises RangeError, AlignmentError, UnsupportedBufferError, or ConfigError for no Buffer or an
    offset that is no int.
    """
    if type(offset) is not int:
        raise ConfigError(f"{tier_name}: offset = {offset!r} of {key} is no int; write int(...)")
    if not isinstance(getattr(buffer, "space", None), MemorySpace):
        raise ConfigError(f"{tier_name}: {type(buffer).__name__} is not a Buffer")
    if not capabilities.takes(buffer.space):
        spaces = ", ".join(sorted(space.value for space in capabilities.memory_spaces))
        raise UnsupportedBufferError(
            f"{tier_name}: cannot transfer {key} with {buffer.space.value} memory, only {spaces}"
        )
    end = offset + buffer.nbytes
    if offset < 0 or end > stored_nbytes:
        raise RangeError(
            f"{tier_name}: bytes {offset} to {end} lie outside {key} of {stored_nbytes} bytes"
        )
    _require_aligned(tier_name, key, stored_nbytes, buffer, offset, capabilities=capabilities)


def _require_aligned(
    tier_name: str,
    key: TensorKey,
    stored_nbytes: int,
    buffer: Buffer,
    offset: int,
    *,
    capabilities: TierCapabilities,
) -> None:
    end = offset + buffer.nbytes
    if offset % capabilities.offset_align:
        raise AlignmentError(
            f"{tier_name}: offset {offset} of {key} is not a multiple of "
            f"{capabilities.offset_align} bytes"
        )
    if buffer.nbytes % capabilities.length_align and end != stored_nbytes:
        raise AlignmentError(
            f"{tier_name}: length {buffer.nbytes} of {key} is not a multiple of "
            f"{capabilities.length_align} bytes and does not end at its end"
        )
    if buffer.nbytes and buffer.address % capabilities.address_align:
        raise AlignmentError(
            f"{tier_name}: buffer address {buffer.address:#x} for {key} is not a multiple of "
            f"{capabilities.address_align} bytes; lease buffers from a BufferPool"
        )
