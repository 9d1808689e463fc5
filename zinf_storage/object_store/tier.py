"""ObjectTier: named bytes in an object store, below one prefix, committed by a manifest.

[Note: parts] A key is cut into parts, each an object of its own that is put once, whole, in one
request, and never changed. Parts travel side by side; a write of some bytes replaces the parts it
touches and shares the rest. Multipart uploads would give the same parallelism, but what a killed
process leaves of them is billed, is seen by no list of objects, and cannot be aborted through
obstore; left-over parts are ordinary objects, which `found` counts and `reclaim` deletes.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.errors import TierClosedError, TierFullError
from zinf_core.keys import Extent, TensorKey
from zinf_core.tier import Prefetch, validate_reserve, validate_transfer
from zinf_storage.object_store import lease, manifest, pages
from zinf_storage.object_store.bucket import Bucket
from zinf_storage.object_store.commit import Committer
from zinf_storage.object_store.lease import WriterLease
from zinf_storage.object_store.maker import ObjectMaker
from zinf_storage.object_store.options import ObjectOptions
from zinf_storage.object_store.pages import Page, PageTable, extent_of
from zinf_storage.object_store.sweep import Sweeper
from zinf_storage.object_store.transfer import PartMover
from zinf_storage.owner_lock import OwnerLock
from zinf_storage.transfers.ending import Ending
from zinf_storage.transfers.scheduler import TransferScheduler

_FOLDERS: Final = (manifest.FOLDER, pages.FOLDER, lease.FOLDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundObjects:
    """What an open found below the prefix. Nothing of it was changed."""

    num_keys: int
    """Keys of the last flush."""
    nbytes: int
    """Logical bytes of those keys."""
    num_left_over: int
    """Objects of killed processes that no manifest names; `reclaim` deletes them."""
    left_over_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What an open tier consists of."""

    bucket: Bucket
    lease: WriterLease
    table: PageTable
    sweeper: Sweeper
    scheduler: TransferScheduler[Page]
    found: FoundObjects


class ObjectTier:
    """Stores keys as objects below one prefix, on which it holds the writer's lease until `close`.

    Scratch memory: at most `num_threads` times (`part_nbytes` + 1 MiB); a part's worth only while
    a write of some bytes of a part is under way. A local folder is written through the page cache,
    as obstore does. Up to 16 replaced parts wait to be deleted. Thread-safe; a tier belongs to the
    process that opened it, a forked child cannot use it.
    """

    def __init__(self, name: str, parts: _Parts, *, options: ObjectOptions) -> None:
        """Take over opened parts; use `open`."""
        self._name = name
        self._parts = parts
        self._options = options
        what = f"{name} at {parts.bucket.url}"
        self._lock = OwnerLock(parts.scheduler.lock, what=what)
        self._is_open = True
        """False from the first `close` on: nothing new is taken, what was submitted goes on."""
        self._ending = Ending()
        self._capabilities = TierCapabilities(
            memory_spaces=frozenset({MemorySpace.HOST}),
            preferred_io_nbytes=options.part_nbytes,
            max_in_flight=options.num_threads,
            persistent=parts.bucket.is_persistent,
        )

    @classmethod
    def open(
        cls, bucket: Bucket, *, name: str = "object", options: ObjectOptions | None = None
    ) -> ObjectTier:
        """Open what is below the prefix of `bucket`; the keys of its last flush are there again.

        Destroys nothing (law 14); `found` says what was there. Blocks. Raises TierLockedError if
        another process may be writing there, CorruptDataError if the manifest is damaged,
        TierFullError if what it holds exceeds `options.capacity_nbytes`, TransferError if the
        store cannot be reached or refuses, or the system refuses a thread.
        """
        options = options or ObjectOptions()
        try:
            held = WriterLease.acquire(bucket, tier_name=name, evict=options.evict_lease)
            try:
                parts = _opened_parts(bucket, held, name, options)
            except BaseException:
                held.release()
                raise
        except BaseException:
            bucket.tidy(_FOLDERS)
            raise
        return cls(name, parts, options=options)

    @property
    def name(self) -> str:
        """Name used in messages and statistics."""
        return self._name

    @property
    def capabilities(self) -> TierCapabilities:
        """Host memory, any offset and length; persistent unless the store is ``memory://``."""
        return self._capabilities

    @property
    def found(self) -> FoundObjects:
        """What `open` found below the prefix."""
        return self._parts.found

    @property
    def path_taken(self) -> str:
        """How bytes travel: ``obstore-s3``, ``obstore-gcs``, ``obstore-azure``,
        ``obstore-local`` or ``obstore-memory``."""
        return f"obstore-{self._parts.bucket.kind}"

    def usage(self) -> TierUsage:
        """Return what is stored now. Objects that only wait to be deleted are not counted."""
        with self._lock:
            self._require_open()
            return TierUsage(
                num_keys=len(self._parts.table),
                nbytes=self._parts.table.nbytes,
                allocated_nbytes=self._parts.table.allocated_nbytes,
                capacity_nbytes=self._options.capacity_nbytes,
            )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Note `key`, and see that the largest key can still be overwritten. Never blocks.

        Raises KeyExistsError, RangeError, TierFullError.
        """
        with self._lock:
            self._require_open()
            validate_reserve(self._name, key, nbytes)
            return extent_of(self._parts.table.reserve(key, nbytes))

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key`. Raises KeyAbsentError."""
        with self._lock:
            return extent_of(self._page(key))

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            self._require_open()
            return iter([page.key for page in self._parts.table])

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Submit a read; it sees the bytes of the last write that ended before. See `Tier`.

        One request for each part touched. Parts read whole are checked against their checksum.
        """
        with self._lock:
            page = self._valid_page(key, dst, offset)
            return self._parts.scheduler.submit_read(page, dst, offset)

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        """Submit a read that `read_into` overtakes and that can be given up; else the same.

        See `SupportsPrefetch`. Waiting for it promotes it.
        """
        with self._lock:
            page = self._valid_page(key, dst, offset)
            return self._parts.scheduler.submit_prefetch(page, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Submit a write. See `Tier`; a failed one leaves the old bytes.

        Parts covered in full are put from the memory of `src`; of others the old bytes are read
        first. `wait` may raise TierFullError at `capacity_nbytes`.
        """
        with self._lock:
            page = self._valid_page(key, src, offset)
            return self._parts.scheduler.submit_write(page, src, offset)

    def discard(self, key: TensorKey) -> None:
        """Forget `key`. Its objects are deleted when no transfer and no commit needs them."""
        with self._lock:
            self._require_open()
            self._parts.table.discard(key)

    def flush(self) -> Completion:
        """Submit a commit: exactly what was submitted before is what the next open finds.

        `wait` raises TierLockedError if another process took the prefix over, and TransferError
        also if old objects could not be deleted, although the commit itself succeeded.
        """
        with self._lock:
            self._require_open()
            return self._parts.scheduler.submit_commit()

    def reclaim(self) -> int:
        """Delete objects that killed processes left and no manifest names. Blocks.

        Returns their bytes. Raises TransferError.
        """
        parts, doing = self._parts, f"{self._name}: reclaiming"
        listed = parts.bucket.names(pages.FOLDER, doing=doing)
        with self._lock:
            self._require_open()
            left_over = {name: n for name, n in listed.items() if name not in parts.table.live}
        parts.bucket.delete(left_over, doing=doing)
        return sum(left_over.values())

    def close(self) -> None:
        """Settle everything, end the workers, give the lease back. Blocks; twice is fine.

        What was not flushed is gone: its objects are deleted. Raises TransferError if they or the
        lease cannot be; the tier is closed then all the same.
        """
        if not self._lock.is_ours:
            return
        with self._lock:
            self._is_open = False
        self._ending.run(self._end)

    def _end(self) -> None:
        self._parts.scheduler.drain()
        self._parts.scheduler.shutdown()
        self._abandon()

    def remove(self) -> None:
        """Close, then delete every object of the tier, and none of somebody else's. Blocks.

        Raises TransferError. A forked child deletes nothing.
        """
        if not self._lock.is_ours:
            return
        self.close()
        bucket, doing = self._parts.bucket, f"{self._name}: removing the tier"
        for folder in _FOLDERS:
            bucket.delete(bucket.names(folder, doing=doing), doing=doing)
        bucket.tidy(_FOLDERS)

    def _abandon(self) -> None:
        """Delete what no manifest names, and the lease, though one of the two may fail."""
        parts = self._parts
        with self._lock:
            for key in [page.key for page in parts.table]:
                parts.table.discard(key)
        try:
            parts.sweeper.sweep()
        finally:
            parts.lease.release()
            parts.bucket.tidy(_FOLDERS)

    def _require_open(self) -> None:
        if not self._is_open:
            raise TierClosedError(f"{self._name} at {self._parts.bucket.url}: it was closed")

    def _page(self, key: TensorKey) -> Page:
        self._require_open()
        return self._parts.table.page(key)

    def _valid_page(self, key: TensorKey, buffer: Buffer, offset: int) -> Page:
        page = self._page(key)
        validate_transfer(
            self._name, key, page.version.nbytes, buffer, offset, capabilities=self._capabilities
        )
        return page


def _opened_parts(bucket: Bucket, held: WriterLease, name: str, options: ObjectOptions) -> _Parts:
    table = PageTable(
        tier_name=name,
        session=held.id,
        part_nbytes=options.part_nbytes,
        capacity_nbytes=options.capacity_nbytes,
    )
    committer = Committer(bucket, tier_name=name)
    last = committer.load()
    if last is not None:
        committer.adopt(table.restore(last.entries).values())
    if table.lacking_nbytes(0):
        raise TierFullError(
            errno.ENOSPC,
            f"{name}: {bucket.url} holds {table.allocated_nbytes} bytes, capacity_nbytes = "
            f"{options.capacity_nbytes}; raise it or use another prefix",
        )
    listed = bucket.names(pages.FOLDER, doing=f"{name}: open")
    left_over = [nbytes for part, nbytes in listed.items() if part not in table.live]
    found = FoundObjects(
        num_keys=len(table),
        nbytes=table.nbytes,
        num_left_over=len(left_over),
        left_over_nbytes=sum(left_over),
    )
    lock = threading.Lock()
    sweeper = Sweeper(table, bucket, lock=lock, tier_name=name)
    maker = ObjectMaker(
        table,
        mover=PartMover(bucket, verify_reads=options.verify_reads),
        committer=committer,
        sweeper=sweeper,
        lock=lock,
    )
    scheduler = TransferScheduler(
        maker, tier_name=name, num_threads=options.num_threads, upkeep=sweeper.due
    )
    return _Parts(
        bucket=bucket, lease=held, table=table, sweeper=sweeper, scheduler=scheduler, found=found
    )
