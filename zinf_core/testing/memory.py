"""DictTier: the smallest tier that keeps every law, over a dict of bytes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import KeyAbsentError, KeyExistsError, TierClosedError, TierFullError
from zinf_core.keys import Extent, TensorKey
from zinf_core.tier import validate_reserve, validate_transfer

UNWRITTEN: Final = 0xC3
"""Byte a reserved key reads as before it is written: never zero, so that nobody relies on it."""

HOST_ONLY: Final = TierCapabilities(memory_spaces=frozenset({MemorySpace.HOST}))


class DictTier:
    """Tier whose every transfer happens at submit, under one lock that guards the dict.

    An oracle for other tiers and the inner tier of the wrappers; it shares no code with them.
    With a `medium`, `flush` copies everything into it and the next `DictTier` on it starts there.
    """

    def __init__(
        self,
        name: str = "dict",
        *,
        capacity_nbytes: int | None = None,
        capabilities: TierCapabilities = HOST_ONLY,
        medium: dict[TensorKey, bytes] | None = None,
    ) -> None:
        """Open empty, or with what `medium` holds. `capacity_nbytes` None means unbounded."""
        self.name = name
        self.capabilities = replace(capabilities, persistent=medium is not None, mappable=False)
        self._capacity_nbytes = capacity_nbytes
        self._medium = medium
        self._stored: dict[TensorKey, bytes] = dict(medium or {})
        self._closed = False
        self._lock = threading.Lock()

    def usage(self) -> TierUsage:
        """Return what is stored now."""
        with self._lock:
            self._check_open()
            nbytes = self._stored_nbytes()
            return TierUsage(
                num_keys=len(self._stored),
                nbytes=nbytes,
                allocated_nbytes=nbytes,
                capacity_nbytes=self._capacity_nbytes,
            )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Make room for `nbytes` under `key`, as `Tier.reserve`."""
        with self._lock:
            self._check_open()
            validate_reserve(self.name, key, nbytes)
            if key in self._stored:
                raise KeyExistsError(f"{self.name}: {key} is reserved already; discard it first")
            if self._capacity_nbytes is not None:
                room = self._capacity_nbytes - self._stored_nbytes()
                if nbytes > room:
                    raise TierFullError(
                        errno.ENOSPC,
                        f"{self.name}: no room for {nbytes} bytes of {key}, {room} left; discard "
                        "keys or open the tier with a larger capacity_nbytes",
                    )
            self._stored[key] = bytes([UNWRITTEN]) * nbytes
            return _extent(nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return where `key` lies. Raises KeyAbsentError."""
        with self._lock:
            return _extent(len(self._bytes_of(key)))

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            self._check_open()
            return iter(list(self._stored))

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Fill `dst` from `key` at `offset`, at once."""
        with self._lock:
            stored = self._bytes_of(key)
            self._validate(key, len(stored), dst, offset)
            dst.array[:] = np.frombuffer(stored, np.uint8, dst.nbytes, offset) if dst.nbytes else 0
        return CompletedTransfer()

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Replace bytes of `key` from `offset` by those of `src`, at once."""
        with self._lock:
            stored = self._bytes_of(key)
            self._validate(key, len(stored), src, offset)
            end = offset + src.nbytes
            self._stored[key] = stored[:offset] + src.array.tobytes() + stored[end:]
        return CompletedTransfer()

    def discard(self, key: TensorKey) -> None:
        """Forget `key`. Raises KeyAbsentError."""
        with self._lock:
            self._bytes_of(key)
            del self._stored[key]

    def flush(self) -> Completion:
        """Copy everything to the medium, if there is one."""
        with self._lock:
            self._check_open()
            if self._medium is not None:
                self._medium.clear()
                self._medium.update(self._stored)
        return CompletedTransfer()

    def close(self) -> None:
        """Forget everything that was not flushed."""
        with self._lock:
            self._closed = True
            self._stored.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"{self.name}: the tier was closed; open it again")

    def _bytes_of(self, key: TensorKey) -> bytes:
        self._check_open()
        if key not in self._stored:
            raise KeyAbsentError(f"{self.name}: holds no {key}; reserve it first")
        return self._stored[key]

    def _stored_nbytes(self) -> int:
        return sum(map(len, self._stored.values()))

    def _validate(self, key: TensorKey, nbytes: int, buffer: Buffer, offset: int) -> None:
        validate_transfer(self.name, key, nbytes, buffer, offset, capabilities=self.capabilities)


def _extent(nbytes: int) -> Extent:
    return Extent(nbytes=nbytes, allocated_nbytes=nbytes)
