"""ChunkedTier: keys cut into chunks that lie on one or several inner tiers.

[Note: crash safety] Nothing that a committed index refers to is ever overwritten or discarded, on
whichever inner tier it lies. So opening after a crash finds exactly the last flush, on all of them
together, and gives back what no index refers to. See the notes on versions and on the commit.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from zinf_core.buffers import Buffer
from zinf_core.capabilities import TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.errors import TierClosedError
from zinf_core.keys import Extent, TensorKey
from zinf_core.tier import Prefetch, Tier, validate_reserve, validate_transfer
from zinf_storage.chunked.inners import inner_names
from zinf_storage.chunked.meter import CodecCounters
from zinf_storage.chunked.names import MARK_LENGTH
from zinf_storage.chunked.opening import OpenedParts, open_parts
from zinf_storage.chunked.options import ChunkedOptions
from zinf_storage.chunked.table import Entry
from zinf_storage.owner_lock import OwnerLock
from zinf_storage.transfers.ending import Ending


def _new_mark() -> str:
    return uuid.uuid4().hex[:MARK_LENGTH]


class ChunkedTier:
    """Stores keys as chunks on inner tiers, which it owns and closes.

    Depending on its options it stripes (several inner tiers, each gets its share of the chunks),
    checks (a checksum of every chunk, verified on every read) or compresses (checked as well).

    A key's room is taken on the inner tiers when it is reserved, at its full size, so that its
    first write cannot fail for room. A chunk that is stored compressed then gives back what it
    does not need. An overwrite needs room besides for the chunks it replaces, until it ends, and
    until the next flush for those of the last one; if there is none it raises TierFullError and
    leaves the old bytes.

    Memory: `num_threads` areas of one chunk, and three more each with a codec, allocated at open;
    what the codec's library takes for a chunk while it works on it; about 600 bytes for each
    chunk stored; during a flush, about 50 more. Threads: `num_threads` and two more, until
    `close`.

    Thread-safe; a tier belongs to the process that opened it, a forked child cannot use it.
    """

    def __init__(self, parts: OpenedParts) -> None:
        """Take over opened parts; use `open`."""
        self._parts = parts
        self._name = parts.tier_name
        self._lock = OwnerLock(parts.scheduler.lock, what=self._name)
        self._reserving = threading.Lock()
        """Held while inner tiers are asked for room: else two threads get half of the last each."""
        self._is_open = True
        """False from the first `close` on: nothing new is taken, what was submitted goes on."""
        self._ending = Ending()

    @classmethod
    def open(
        cls, inner: Sequence[Tier], *, options: ChunkedOptions | None = None,
        name: str | None = None, labels: Sequence[str] | None = None,
        new_mark: Callable[[], str] = _new_mark,
    ) -> ChunkedTier:  # fmt: skip
        """Open over `inner`, which are closed with this tier, also if opening fails; messages call
        each of them by its label, or its name. Blocks.

        If all of them are persistent, the keys of the last flush are there again. `new_mark`
        draws eight hexadecimal digits that no other tier has. Raises ConfigError if they cannot be
        used together, hold something else, or were written with other settings; CorruptDataError
        if the index or a chunk it names is damaged or gone; TransferError, TierFullError.
        """
        options = options or ChunkedOptions()
        with ExitStack() as stack:
            for tier in reversed(inner):
                stack.callback(tier.close)
            name = name or f"{options.scheme}({','.join(tier.name for tier in inner)})"
            names = inner_names(labels or [tier.name for tier in inner])
            parts = open_parts(
                inner, names=names, options=options, tier_name=name, new_mark=new_mark
            )
            stack.pop_all()
        return cls(parts)

    @property
    def name(self) -> str:
        """Name used in messages and statistics, with those of the inner tiers."""
        return self._name

    @property
    def capabilities(self) -> TierCapabilities:
        """What all inner tiers can do; see `derived_capabilities`."""
        return self._parts.capabilities

    @property
    def path_taken(self) -> str:
        """Each inner tier's part of the bytes, in percent, and how its bytes travel."""
        inners = self._parts.inners
        total = sum(inners.shares)
        paths = [
            f"{100 * share / total:.0f} % {tier.name}: {getattr(tier, 'path_taken', 'direct call')}"
            for tier, share in zip(inners.tiers, inners.shares, strict=True)
        ]
        return "; ".join(paths)

    @property
    def counters(self) -> CodecCounters:
        """What the codec saved and cost since the tier was opened."""
        return self._parts.meter.counters

    @property
    def ratio(self) -> float:
        """Plain bytes per stored byte of everything written that is stored now; 1 if nothing is."""
        with self._lock:
            self._require_open()
            plain, stored = self._parts.table.written_nbytes()
        return plain / stored if stored else 1.0

    def usage(self) -> TierUsage:
        """Return what is stored now; allocated bytes and capacity are the inner tiers' sums."""
        with self._lock:
            self._require_open()
            num_keys, nbytes = len(self._parts.table), self._parts.table.nbytes
        inner = self._parts.inners.usage()
        return TierUsage(
            num_keys=num_keys,
            nbytes=nbytes,
            allocated_nbytes=inner.allocated_nbytes,
            capacity_nbytes=inner.capacity_nbytes,
        )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Take room for every chunk of `key` on the inner tiers, at its full size. May block.

        Raises KeyExistsError, RangeError, TierFullError, TransferError.
        """
        parts = self._parts
        with self._lock:
            self._require_open()
            validate_reserve(self._name, key, nbytes)
            parts.table.begin_reserve(key)
            parts.scheduler.enter()
        cells = None
        try:
            with self._reserving:
                cells = parts.inners.reserve_key(key, nbytes, chunk_nbytes=parts.table.chunk_nbytes)
        finally:
            with self._lock:
                parts.table.end_reserve(key, nbytes, cells)
            self._leave()
        return Extent(nbytes=nbytes, allocated_nbytes=nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key` and what its chunks take on the inner tiers, before their
        padding. Raises KeyAbsentError."""
        with self._lock:
            entry = self._entry(key)
            allocated = sum(chunk.cell.nbytes for chunk in entry.version.chunks)
            return Extent(nbytes=entry.nbytes, allocated_nbytes=allocated)

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            self._require_open()
            return iter([entry.key for entry in self._parts.table])

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Submit a read; it sees the bytes of the last write that ended before. See `Tier`."""
        with self._lock:
            entry = self._valid_entry(key, dst, offset)
            return self._parts.scheduler.submit_read(entry, dst, offset)

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        """Submit a read that `read_into` overtakes and that can be given up; else the same.

        See `SupportsPrefetch`. Waiting for it promotes it.
        """
        with self._lock:
            entry = self._valid_entry(key, dst, offset)
            return self._parts.scheduler.submit_prefetch(entry, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Submit a write. See `Tier`; a failed one leaves the old bytes of all chunks.

        Only the chunks it touches are written anew; one of which it covers a part is read and
        merged first.
        """
        with self._lock:
            entry = self._valid_entry(key, src, offset)
            return self._parts.scheduler.submit_write(entry, src, offset)

    def discard(self, key: TensorKey) -> None:
        """Forget `key`. Its room is given back when no transfer and no commit needs it any more;
        may block on that."""
        parts = self._parts
        with self._lock:
            self._require_open()
            parts.table.discard(key)
            parts.scheduler.enter()
        self._leave()

    def flush(self) -> Completion:
        """Submit a commit: exactly what was submitted before is what the next open finds.

        If an inner tier is not persistent, neither is this one, and there is nothing to commit.
        """
        with self._lock:
            self._require_open()
            return self._parts.scheduler.submit_commit()

    def reclaim(self) -> int:
        """Delete what killed processes left on the inner tiers; return its bytes. Blocks."""
        with self._lock:
            self._require_open()
        return self._parts.inners.reclaim()

    def close(self) -> None:
        """Settle everything, end the workers, close the inner tiers. Blocks; twice is fine.

        What was not flushed is given back.
        """
        self._end(self._parts.inners.close)

    def remove(self) -> None:
        """Close, and remove the inner tiers with all they hold. Blocks."""
        self._end(self._parts.inners.remove)

    def _end(self, end_inners: Callable[[], None]) -> None:
        if not self._lock.is_ours:
            return
        with self._lock:
            self._is_open = False
        self._ending.run(partial(self._end_with, end_inners))

    def _end_with(self, end_inners: Callable[[], None]) -> None:
        parts = self._parts
        parts.scheduler.drain()
        parts.scheduler.shutdown()
        try:
            if not self.capabilities.persistent:
                self._empty()
        finally:
            end_inners()

    def _leave(self) -> None:
        """Give unused cells back, and let what waited for the room begin. May block."""
        parts = self._parts
        with self._lock:
            give_back = parts.machinery.giving_back()
        give_back()
        with self._lock:
            parts.scheduler.leave()

    def _empty(self) -> None:
        """Leave nothing behind on inner tiers that outlast this one."""
        parts = self._parts
        with self._lock:
            cells = [chunk.cell for entry in parts.table for chunk in entry.version.chunks]
        parts.inners.discard(
            cell for cell in cells if parts.inners.tiers[cell.inner].capabilities.persistent
        )

    def _require_open(self) -> None:
        if not self._is_open:
            raise TierClosedError(f"{self._name}: the tier was closed")

    def _entry(self, key: TensorKey) -> Entry:
        self._require_open()
        return self._parts.table.entry(key)

    def _valid_entry(self, key: TensorKey, buffer: Buffer, offset: int) -> Entry:
        entry = self._entry(key)
        validate_transfer(
            self._name, key, entry.nbytes, buffer, offset, capabilities=self.capabilities
        )
        return entry
