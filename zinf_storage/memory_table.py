"""MemoryTable: named bytes in leases of one pool; what HostTier and DeviceTier have in common."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.device import Device
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
from zinf_storage.memory_copies import AllSettled, Entry, TrackedCopy
from zinf_storage.owner_lock import OwnerLock
from zinf_storage.transfers.ending import Ending

_DONE: Final = CompletedTransfer()


class MemoryTable:
    """Keeps each key in a lease of `pool`.

    Between host memory and host memory the CPU copies, at submit; it waits for copies by the
    device that it would disturb. Everything else is left to `device`, and tracked until it is done:
    `discard`, `close` and `flush` wait for it.

    A write by the device that fails leaves the key damaged: until all of it is written again, its
    reads raise CorruptDataError (law 9).

    Thread-safe: `_lock` guards the table and the counters, each entry's lock its bytes. A forked
    child is refused.
    """

    def __init__(
        self,
        name: str,
        *,
        pool: BufferPool,
        device: Device | None,
        capabilities: TierCapabilities,
    ) -> None:
        """Create an empty table. `pool` and `device` are not closed with it."""
        self.name = name
        self.capabilities = capabilities
        self.entries: dict[TensorKey, Entry] = {}
        self._pool = pool
        self._device = device
        self._is_on_device = pool.space is MemorySpace.DEVICE
        self._lock = OwnerLock(threading.Lock(), what=name)
        self._nbytes = 0
        self._allocated_nbytes = 0
        self._closed = False
        self._ending = Ending()

    def usage(self) -> TierUsage:
        """Return what is stored now."""
        with self._lock:
            self._require_open()
            return TierUsage(
                num_keys=len(self.entries),
                nbytes=self._nbytes,
                allocated_nbytes=self._allocated_nbytes,
                capacity_nbytes=self._pool.budget_nbytes,
            )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Lease room for `nbytes` under `key`."""
        with self._lock:
            self._require_open()
            validate_reserve(self.name, key, nbytes)
            if key in self.entries:
                raise KeyExistsError(f"{self.name}: {key} is reserved already; discard it first")
            lease = self._leased(key, nbytes) if nbytes else None
            entry = Entry(name=f"{self.name}: {key}", nbytes=nbytes, lease=lease)
            self.entries[key] = entry
            self._nbytes += nbytes
            self._allocated_nbytes += align_up(nbytes)
        return _extent(entry)

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key`."""
        return _extent(self._entry(key))

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            self._require_open()
            return iter(list(self.entries))

    def read_into(self, key: TensorKey, dst: Buffer, offset: int) -> Completion:
        """Copy `dst.nbytes` bytes of `key` from `offset` into `dst`, or submit that."""
        entry = self._entry(key)
        validate_transfer(self.name, key, entry.nbytes, dst, offset, capabilities=self.capabilities)
        end = offset + dst.nbytes
        if self._is_on_device or dst.space is MemorySpace.DEVICE:
            return self._submit(entry, dst, range(offset, end), is_write=False)
        while True:
            with entry.lock:
                ahead = entry.copies and entry.disturbed(range(offset, end), is_write=False)
                if not ahead:
                    stored = _stored(entry)
                    if entry.damaged:
                        return CompletedTransfer(entry.corruption())
                    np.copyto(dst.array, stored[offset:end])
                    return _DONE
            _settle(ahead)

    def write_from(self, key: TensorKey, src: Buffer, offset: int) -> Completion:
        """Copy the bytes of `src` to `key` at `offset`, or submit that."""
        entry = self._entry(key)
        validate_transfer(self.name, key, entry.nbytes, src, offset, capabilities=self.capabilities)
        end = offset + src.nbytes
        if self._is_on_device or src.space is MemorySpace.DEVICE:
            return self._submit(entry, src, range(offset, end), is_write=True)
        while True:
            with entry.lock:
                ahead = entry.copies and entry.disturbed(range(offset, end), is_write=True)
                if not ahead:
                    stored = _stored(entry)
                    np.copyto(stored[offset:end], src.array)
                    if entry.damaged:
                        entry.note_write(entry.number_write(src.nbytes), failed=False)
                    return _DONE
            _settle(ahead)

    def map(self, key: TensorKey) -> Buffer:
        """Return the key's own buffer."""
        entry = self._entry(key)
        if entry.nbytes:
            with entry.lock:
                return entry.require_lease().buffer
        if self._is_on_device and self._device is not None:
            return self._device.allocate(0)
        return HostBuffer(np.zeros(0, np.uint8))

    def discard(self, key: TensorKey) -> None:
        """Forget `key` and release its lease, after the copies of it that are in flight."""
        with self._lock:
            self._require_open()
            entry = self.entries.pop(key, None)
            if entry is None:
                raise KeyAbsentError(f"{self.name}: no key {key}")
            self._nbytes -= entry.nbytes
            self._allocated_nbytes -= align_up(entry.nbytes)
        entry.retire()

    def flush(self) -> Completion:
        """Return the completion of all copies in flight: memory is as durable as it gets."""
        with self._lock:
            self._require_open()
            if self._device is None:
                return _DONE
            entries = tuple(self.entries.values())
        copies = [copy for entry in entries for copy in tuple(entry.copies)]
        return AllSettled(copies) if copies else _DONE

    def close(self) -> None:
        """Wait for the copies in flight and release every lease; nothing in a forked child. A
        second call waits for the first."""
        if not self._lock.is_ours:
            return
        with self._lock:
            self._closed = True
        self._ending.run(self._end)

    def _end(self) -> None:
        for entry in self.entries.values():
            entry.retire()
        self.entries.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"{self.name}: the tier was closed")

    def _entry(self, key: TensorKey) -> Entry:
        with self._lock:
            self._require_open()
            entry = self.entries.get(key)
        if entry is None:
            raise KeyAbsentError(f"{self.name}: no key {key}")
        return entry

    def _leased(self, key: TensorKey, nbytes: int) -> Lease:
        try:
            return self._pool.lease_nowait(nbytes)
        except BudgetError as exc:
            raise TierFullError(
                errno.ENOSPC,
                f"{self.name}: no room for {key} of {nbytes} bytes ({format_nbytes(nbytes)}): "
                f"{exc}; raise the budget or discard keys",
            ) from exc

    def _submit(self, entry: Entry, buffer: Buffer, span: range, *, is_write: bool) -> Completion:
        """Let the device copy between `buffer` and the bytes `span` of the entry."""
        with entry.lock:
            if not entry.nbytes or self._device is None:
                return _DONE
            lease = entry.require_lease()
            if entry.damaged and not is_write:
                return CompletedTransfer(entry.corruption())
            if not buffer.nbytes:
                return _DONE
            stored = lease.buffer.part(span.start, buffer.nbytes)
            dst, src = (stored, buffer) if is_write else (buffer, stored)
            copy = self._device.copy(dst, src)
            mark = entry.number_write(buffer.nbytes) if is_write else None
            return TrackedCopy(entry, copy, span=span, mark=mark)


def _settle(copies: Iterable[TrackedCopy]) -> None:
    for copy in copies:
        copy.settle()


def _stored(entry: Entry) -> Any:
    """Return the bytes as a numpy array."""
    return entry.require_lease().buffer.array if entry.nbytes else np.zeros(0, np.uint8)


def _extent(entry: Entry) -> Extent:
    return Extent(nbytes=entry.nbytes, allocated_nbytes=align_up(entry.nbytes))
