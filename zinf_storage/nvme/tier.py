"""NvmeTier: named bytes in a folder, written by shadow paging and committed by a manifest.

[Note: shadow paging] A write goes to a fresh extent; the page table flips to it when all its bytes
landed; the old extent is freed when no read in flight and no committed manifest refers to it. So a
failed write leaves the old bytes, and a crash at any point leaves the last flush, complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.device import Device
from zinf_core.errors import TierClosedError, TierError, TierFullError, TierLockedError
from zinf_core.keys import Extent, TensorKey
from zinf_core.runtime.manifest import Manifest
from zinf_core.tier import Prefetch, validate_reserve, validate_transfer
from zinf_core.units import PAGE_NBYTES
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme.commit import Committer
from zinf_storage.nvme.engine import FileEngine, choose_engine
from zinf_storage.nvme.folder import Folder, FolderKind, FolderState
from zinf_storage.nvme.maker import NvmeMaker
from zinf_storage.nvme.manifest_room import ManifestRoom
from zinf_storage.nvme.mover import BlockMover
from zinf_storage.nvme.options import DirectIo, NvmeOptions
from zinf_storage.nvme.pages import Page, PageTable, extent_of
from zinf_storage.nvme.posix import FileAccess, io_error, supports_direct
from zinf_storage.nvme.segments import SegmentStore
from zinf_storage.nvme.syscalls import SystemCalls
from zinf_storage.owner_lock import OwnerLock
from zinf_storage.transfers.ending import Ending
from zinf_storage.transfers.scheduler import TransferScheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What an open tier consists of."""

    folder: Folder
    segments: SegmentStore
    table: PageTable
    committer: Committer
    scheduler: TransferScheduler[Page]
    found: FolderState
    engine: FileEngine | None
    """None: read and write calls move the bytes."""


class NvmeTier:
    """Stores keys in segment files of one folder, which it locks until `close`.

    While it is open it keeps room for the next manifest (8 KiB and more, as there are more keys),
    so that a flush succeeds on a drive that is full.

    Thread-safe; a tier belongs to the process that opened it, a forked child cannot use it. It has
    `options.num_threads` threads that move blocks and two more, from `open` to `close`. Reads go
    before prefetch and writes, which share the rest; see [Note: lanes]. Besides the files it takes
    256 KiB of host memory per thread, and with a device two pages of that; kvikio, where it goes
    through host memory, another `io_nbytes` per thread.

    Bytes written from device memory do not pass through the host and have no checksum: damage to
    them on the drive is not found, `verify_reads` or not. All others keep theirs; where one is due
    to be checked, the read goes through host memory, also into device memory.
    """

    def __init__(
        self, name: str, parts: _Parts, *, options: NvmeOptions, calls: SystemCalls
    ) -> None:
        """Take over opened parts; use `open`."""
        self._name = name
        self._parts = parts
        self._options = options
        self._calls = calls
        what = f"{name} at {parts.folder.path}"
        self._lock = OwnerLock(parts.scheduler.lock, what=what)
        self._is_open = True
        """False from the first `close` on: nothing new is taken, what was submitted goes on."""
        self._ending = Ending()
        self._capabilities = TierCapabilities(
            memory_spaces=_memory_spaces(parts.engine),
            offset_align=PAGE_NBYTES,
            address_align=PAGE_NBYTES,
            preferred_io_nbytes=options.io_nbytes,
            max_in_flight=options.num_threads,
            persistent=True,
        )

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], *, name: str = "nvme",
        options: NvmeOptions | None = None, calls: SystemCalls | None = None,
        device: Device | None = None, engine: FileEngine | None = None,
    ) -> NvmeTier:  # fmt: skip
        """Open `folder`, creating it if missing; the keys of its last flush are there again.

        With a CUDA `device` its memory is read into and written from where kvikio can; `engine`
        replaces what `options.engine` would choose for it. Destroys nothing (law 14); `found` says
        what was there. Blocks. Raises ConfigError, before it touches the folder, if the engine
        asked for cannot be used; TierLockedError if another tier has the folder open,
        CorruptDataError if its manifest or a segment is damaged, TierFullError if what it holds
        exceeds `options.capacity_nbytes`, TransferError if the system refuses the folder, a file
        or a thread.
        """
        options, calls = options or NvmeOptions(), calls or SystemCalls()
        engine = engine or choose_engine(options, device)
        opened = Folder.open(folder, calls=calls)
        try:
            parts = _opened_parts(opened, name, options, calls, engine)
        except BaseException as exc:
            opened.unlock()
            if isinstance(exc, OSError) and not isinstance(exc, TierError):
                raise io_error(exc, f"{name}: open", opened.path, needed=0, calls=calls) from exc
            raise
        return cls(name, parts, options=options, calls=calls)

    @property
    def name(self) -> str:
        """Name used in messages and statistics."""
        return self._name

    @property
    def capabilities(self) -> TierCapabilities:
        """Host memory, and device memory with an engine that reaches it; offsets and addresses by
        pages, any length, persistent."""
        return self._capabilities

    @property
    def found(self) -> FolderState:
        """What `open` found in the folder."""
        return self._parts.found

    @property
    def path_taken(self) -> str:
        """How bytes travel: ``posix-direct``, ``posix-buffered``, ``gds`` (drive to device), or
        ``gds-compat`` (kvikio, through host memory); the latter two with ``, buffered`` if the
        file system has no direct I/O, all with ``, not preallocated`` if it could not give the
        segments their blocks in advance."""
        segments, engine = self._parts.segments, self._parts.engine
        path = "posix-direct" if segments.direct else "posix-buffered"
        if engine is not None:
            path = engine.path_taken if segments.direct else f"{engine.path_taken}, buffered"
        return path if segments.is_preallocated else f"{path}, not preallocated"

    def usage(self) -> TierUsage:
        """Return what is stored now."""
        with self._lock:
            self._require_open()
            return TierUsage(
                num_keys=len(self._parts.table),
                nbytes=self._parts.table.nbytes,
                allocated_nbytes=self._parts.segments.allocated_nbytes,
                capacity_nbytes=self._options.capacity_nbytes,
            )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Take an extent for `key`, and see that the largest key can still be overwritten.

        May block on creating a segment file. Raises KeyExistsError, RangeError, TierFullError, or
        TransferError if the system refuses a new segment for another reason than room.
        """
        with self._lock:
            self._require_open()
            validate_reserve(self._name, key, nbytes)
            return extent_of(self._parts.table.reserve(key, nbytes))

    def stat(self, key: TensorKey) -> Extent:
        """Return where `key` lies now; every overwrite moves it. Raises KeyAbsentError."""
        with self._lock:
            return extent_of(self._page(key))

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            self._require_open()
            return iter([page.key for page in self._parts.table])

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Submit a read; it sees the bytes of the last write that ended before. See `Tier`.

        Uses `dst` up to its next page boundary if it has the capacity.
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

        A write of part of a key copies the rest of it to the new extent: write whole keys where
        speed matters. May block on creating a segment file.
        """
        with self._lock:
            page = self._valid_page(key, src, offset)
            return self._parts.scheduler.submit_write(page, src, offset)

    def discard(self, key: TensorKey) -> None:
        """Forget `key`. Its room is free when no transfer and no commit needs it any more."""
        with self._lock:
            self._require_open()
            self._parts.table.discard(key)

    def flush(self) -> Completion:
        """Submit a commit: exactly what was submitted before is what the next open finds."""
        with self._lock:
            self._require_open()
            return self._parts.scheduler.submit_commit()

    def reclaim(self) -> int:
        """Delete segment files that a killed process left and no manifest names. Blocks.

        Returns the bytes freed. Raises TransferError.
        """
        folder = self._parts.folder
        with self._lock:
            self._require_open()
            mine = self._parts.segments.numbers() | self._parts.committer.named_segments()
            try:
                left_over = {n: s for n, s in folder.segment_sizes().items() if n not in mine}
                for number in left_over:
                    folder.segment_path(number).unlink()
            except OSError as exc:
                what = f"{self._name}: deleting left-over segments"
                raise io_error(exc, what, folder.path, needed=0, calls=self._calls) from exc
            return sum(left_over.values())

    def close(self) -> None:
        """Settle everything, end the workers, unlock the folder. Blocks; twice is fine.

        What was not flushed is gone: segments that no manifest names are deleted.
        """
        if not self._lock.is_ours:
            return
        with self._lock:
            self._is_open = False
        self._ending.run(self._end)

    def _end(self) -> None:
        parts = self._parts
        parts.scheduler.drain()
        parts.scheduler.shutdown()
        try:
            parts.segments.close(keep=parts.committer.named_segments())
        finally:
            parts.folder.unlock()

    def remove(self) -> None:
        """Close, then delete the tier's files, and the folders that `open` made. Blocks.

        Raises TierLockedError if another tier opened the folder meanwhile, TransferError. A forked
        child deletes nothing.
        """
        if not self._lock.is_ours:
            return
        self.close()
        folder = self._parts.folder
        try:
            folder.remove_files(self._calls)
        except TierLockedError:
            raise
        except OSError as exc:
            what = f"{self._name}: removing the tier"
            raise io_error(exc, what, folder.path, needed=0, calls=self._calls) from exc

    def _require_open(self) -> None:
        if not self._is_open:
            raise TierClosedError(f"{self._name} at {self._parts.folder.path}: it was closed")

    def _page(self, key: TensorKey) -> Page:
        self._require_open()
        return self._parts.table.page(key)

    def _valid_page(self, key: TensorKey, buffer: Buffer, offset: int) -> Page:
        page = self._page(key)
        validate_transfer(
            self._name, key, page.nbytes, buffer, offset, capabilities=self._capabilities
        )
        return page


def _memory_spaces(engine: FileEngine | None) -> frozenset[MemorySpace]:
    if engine is None or engine.device is None:
        return frozenset({MemorySpace.HOST})
    return frozenset({MemorySpace.HOST, MemorySpace.DEVICE})


def _opened_parts(
    folder: Folder, name: str, options: NvmeOptions, calls: SystemCalls, engine: FileEngine | None
) -> _Parts:
    direct = options.direct is DirectIo.AUTO and _probe_direct(folder, name, calls)
    access = FileAccess(direct=direct, calls=calls, engine=engine)
    segments = SegmentStore(folder, tier_name=name, options=options, access=access)
    room = ManifestRoom(folder, tier_name=name, calls=calls)
    committer = Committer(folder, segments, room, tier_name=name, calls=calls)
    table = PageTable(segments, room, tier_name=name, options=options)
    manifest = committer.load()
    found = _described(folder, manifest)
    _require_budget(folder, name, manifest, options)
    try:
        if manifest is not None:
            for segment in manifest.segments:
                segments.open_existing(segment)
            committer.adopt(manifest, table.restore(manifest))
        maker = NvmeMaker(
            table,
            mover=BlockMover(
                segments,
                num_threads=options.num_threads,
                device=engine.device if engine else None,
            ),
            committer=committer,
            options=options,
        )
        scheduler = TransferScheduler(maker, tier_name=name, num_threads=options.num_threads)
    except BaseException:
        segments.close(keep=segments.numbers())
        raise
    return _Parts(
        folder=folder, segments=segments, table=table, committer=committer, scheduler=scheduler,
        found=found, engine=engine,
    )  # fmt: skip


def _probe_direct(folder: Folder, name: str, calls: SystemCalls) -> bool:
    page = PageAlignedAllocator().allocate(PAGE_NBYTES).memory.data
    try:
        return supports_direct(folder.lock_path, calls, page)
    except OSError as exc:
        what = f"{name}: trying direct I/O"
        raise io_error(exc, what, folder.lock_path, needed=0, calls=calls) from exc


def _described(folder: Folder, manifest: Manifest | None) -> FolderState:
    named = {segment.number for segment in manifest.segments} if manifest else set()
    left_over = [n for number, n in folder.segment_sizes().items() if number not in named]
    if manifest is not None:
        return FolderState(
            kind=FolderKind.COMMITTED,
            num_keys=len(manifest.entries),
            nbytes=sum(entry.nbytes for entry in manifest.entries),
            left_over_nbytes=sum(left_over),
        )
    kind = FolderKind.LEFT_OVER if left_over else FolderKind.FRESH
    return FolderState(kind=kind, left_over_nbytes=sum(left_over))


def _require_budget(
    folder: Folder, name: str, manifest: Manifest | None, options: NvmeOptions
) -> None:
    held = sum(segment.nbytes for segment in manifest.segments) if manifest else 0
    if options.capacity_nbytes is not None and held > options.capacity_nbytes:
        raise TierFullError(
            errno.ENOSPC,
            f"{name}: {folder.path} holds {held} bytes, capacity_nbytes = "
            f"{options.capacity_nbytes}; raise it or remove the folder",
        )
