"""HostTier: named bytes in host memory, inside one pool's budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import (
    BudgetError,
    KeyAbsentError,
    KeyExistsError,
    TierClosedError,
    TierFullError,
)
from zinf_core.keys import Extent, TensorKey
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.tier import validate_reserve, validate_transfer
from zinf_core.units import align_up, format_nbytes

_CAPABILITIES = TierCapabilities(memory_spaces=frozenset({MemorySpace.HOST}), mappable=True)


@dataclass(slots=True, kw_only=True)
class _Entry:
    nbytes: int
    lease: Lease | None
    """None for a key of 0 bytes, and once the key was discarded."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the bytes: one copy at a time, and none while the lease is given back."""


class HostTier:
    """Keeps each key in a lease of `pool`; transfers are copies made at submit.

    Thread-safe: `_lock` guards the table and the counters, each entry's lock its bytes.
    """

    def __init__(self, name: str, *, pool: BufferPool) -> None:
        """Create an empty tier. `pool` must hand out host memory and is not closed with it."""
        self._name = name
        self._pool = pool
        self._lock = threading.Lock()
        self._entries: dict[TensorKey, _Entry] = {}
        self._nbytes = 0
        self._allocated_nbytes = 0
        self._closed = False

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._name

    @property
    def capabilities(self) -> TierCapabilities:
        """Host memory, any offset and length, mappable."""
        return _CAPABILITIES

    def usage(self) -> TierUsage:
        """Return what is stored now. The capacity is the pool's budget, shared with its users."""
        with self._lock:
            self._require_open()
            return TierUsage(
                num_keys=len(self._entries),
                nbytes=self._nbytes,
                allocated_nbytes=self._allocated_nbytes,
                capacity_nbytes=self._pool.budget_nbytes,
            )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Lease room for `nbytes` under `key`.

        Raises KeyExistsError, RangeError, or TierFullError if the pool has no room.
        """
        with self._lock:
            self._require_open()
            validate_reserve(self._name, key, nbytes)
            if key in self._entries:
                raise KeyExistsError(f"{self._name}: {key} is reserved already; discard it first")
            entry = _Entry(nbytes=nbytes, lease=self._leased(key, nbytes) if nbytes else None)
            self._entries[key] = entry
            self._nbytes += nbytes
            self._allocated_nbytes += align_up(nbytes)
        return _extent(entry)

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key`. Raises KeyAbsentError."""
        return _extent(self._entry(key))

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            self._require_open()
            return iter(list(self._entries))

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Copy `dst.nbytes` bytes of `key` from `offset` into `dst` before returning."""
        entry = self._entry(key)
        self._validate(key, entry, dst, offset)
        with entry.lock:
            stored = self._stored(key, entry)
            np.copyto(dst.array, stored[offset : offset + dst.nbytes])
        return CompletedTransfer()

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Copy the bytes of `src` to `key` at `offset` before returning."""
        entry = self._entry(key)
        self._validate(key, entry, src, offset)
        with entry.lock:
            stored = self._stored(key, entry)
            np.copyto(stored[offset : offset + src.nbytes], src.array)
        return CompletedTransfer()

    def map(self, key: TensorKey) -> Buffer:
        """Return the key's own buffer; it belongs to the tier until `discard` or `close`."""
        entry = self._entry(key)
        if not entry.nbytes:
            return HostBuffer(np.zeros(0, np.uint8))
        with entry.lock:
            return _lease_of(self._name, key, entry).buffer

    def discard(self, key: TensorKey) -> None:
        """Forget `key` and release its lease, after a copy that runs. Raises KeyAbsentError."""
        with self._lock:
            self._require_open()
            entry = self._entries.pop(key, None)
            if entry is None:
                raise KeyAbsentError(f"{self._name}: no key {key}")
            self._nbytes -= entry.nbytes
            self._allocated_nbytes -= align_up(entry.nbytes)
        _release(entry)

    def flush(self) -> Completion:
        """Return at once: memory is as durable as it gets."""
        with self._lock:
            self._require_open()
        return CompletedTransfer()

    def close(self) -> None:
        """Release every lease; a second call does nothing."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            _release(entry)

    def _require_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"{self._name}: the tier was closed")

    def _entry(self, key: TensorKey) -> _Entry:
        with self._lock:
            self._require_open()
            entry = self._entries.get(key)
        if entry is None:
            raise KeyAbsentError(f"{self._name}: no key {key}")
        return entry

    def _leased(self, key: TensorKey, nbytes: int) -> Lease:
        try:
            return self._pool.lease_nowait(nbytes)
        except BudgetError as exc:
            raise TierFullError(
                f"{self._name}: no room for {key} of {nbytes} bytes ({format_nbytes(nbytes)}): "
                f"{exc}; raise the budget or discard keys"
            ) from exc

    def _validate(self, key: TensorKey, entry: _Entry, buffer: Buffer, offset: int) -> None:
        validate_transfer(self._name, key, entry.nbytes, buffer, offset, capabilities=_CAPABILITIES)

    def _stored(self, key: TensorKey, entry: _Entry) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if not entry.nbytes:
            return np.zeros(0, np.uint8)
        array: np.ndarray[tuple[int], np.dtype[np.uint8]]
        array = _lease_of(self._name, key, entry).buffer.array
        return array


def _extent(entry: _Entry) -> Extent:
    return Extent(nbytes=entry.nbytes, allocated_nbytes=align_up(entry.nbytes))


def _lease_of(tier_name: str, key: TensorKey, entry: _Entry) -> Lease:
    if entry.lease is None:
        raise KeyAbsentError(f"{tier_name}: {key} was discarded meanwhile")
    return entry.lease


def _release(entry: _Entry) -> None:
    with entry.lock:
        lease, entry.lease = entry.lease, None
    if lease is not None:
        lease.release()
