"""SegmentFile: exact reads and writes of one file, and the errors they can end in."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zinf_core.errors import (
    NO_ROOM,
    CorruptDataError,
    InternalError,
    TierError,
    TierFullError,
    TransferError,
)
from zinf_core.units import PAGE_NBYTES, format_nbytes
from zinf_storage.nvme.engine import DirectFile, FileEngine
from zinf_storage.nvme.memory import DeviceSpan, Span
from zinf_storage.nvme.syscalls import SystemCalls

_NOT_SUPPORTED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_MAX_STALLS: Final = 8
"""Calls in a row that may move nothing before a transfer is given up."""


def io_error(exc: OSError, what: str, path: Path, *, needed: int, calls: SystemCalls) -> TierError:
    """Return the error of our tree for `exc`; `needed` bytes were to be moved or allocated."""
    number = exc.errno or errno.EIO
    reason = exc.strerror or os.strerror(number)
    if number not in NO_ROOM:
        return TransferError(number, f"{what} failed at {path}: {reason}")
    free_nbytes = _free_nbytes(path.parent, calls)
    free = "the free space is unknown"
    if free_nbytes is not None:
        free = f"{free_nbytes} bytes are free there"
    return TierFullError(
        number,
        f"{what} needs {needed} bytes ({format_nbytes(needed)}) at {path}: {reason}; {free}. "
        "Free space, raise the quota, or use another folder",
    )


def require_free(path: Path, nbytes: int, *, calls: SystemCalls) -> None:
    """Raise OSError (ENOSPC) unless `nbytes` are free beside `path`, or nobody knows.

    An allocation that is bound to fail would take all the room there is, from everybody, first.
    """
    free_nbytes = _free_nbytes(path.parent, calls)
    if free_nbytes is not None and free_nbytes < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def preallocate(fd: int, nbytes: int, calls: SystemCalls) -> bool:
    """Give an open file its size and its blocks; return False where the file system gives only
    the size. Raises OSError."""
    try:
        calls.fallocate(fd, 0, nbytes)
    except OSError as exc:
        if exc.errno not in _NOT_SUPPORTED:
            raise
        calls.ftruncate(fd, nbytes)
        return False
    return True


def supports_direct(probe: Path, calls: SystemCalls, page: memoryview) -> bool:
    """Return whether the file system of the existing file `probe` does direct I/O by pages.

    Raises OSError for anything but a refusal.
    """
    try:
        fd = calls.open(probe, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            calls.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno in _NOT_SUPPORTED:
            return False
        raise
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccess:
    """How segment files are opened and their bytes moved."""

    direct: bool
    """With O_DIRECT: offsets, lengths and addresses must be whole pages."""
    calls: SystemCalls = field(repr=False)
    engine: FileEngine | None = None
    """None: `calls` move the bytes."""


@dataclass(slots=True, kw_only=True)
class SegmentFile:
    """An open segment file. Reads and writes may run in any number of threads."""

    path: Path
    fd: int
    nbytes: int
    preallocated: bool
    """False where the file system has no fallocate: then a full disk shows up at a write."""
    access: FileAccess
    moves: DirectFile | None = None
    """The same file as the engine opened it; None if there is no engine."""

    @classmethod
    def create(cls, path: Path, nbytes: int, *, access: FileAccess) -> SegmentFile:
        """Create `path`, which must not exist, with room for `nbytes`. Blocks.

        Raises OSError; no file is left behind then.
        """
        fd = _opened(path, os.O_CREAT | os.O_EXCL, access)
        moves: DirectFile | None = None
        try:
            preallocated = preallocate(fd, nbytes, access.calls)
            moves = access.engine.open(path) if access.engine else None
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return cls(
            path=path, fd=fd, nbytes=nbytes, preallocated=preallocated, access=access, moves=moves
        )

    @classmethod
    def open(cls, path: Path, nbytes: int, *, access: FileAccess) -> SegmentFile:
        """Open the existing file `path`. Raises OSError."""
        fd = _opened(path, os.O_NOFOLLOW, access)
        try:
            moves = access.engine.open(path) if access.engine else None
        except BaseException:
            os.close(fd)
            raise
        return cls(path=path, fd=fd, nbytes=nbytes, preallocated=True, access=access, moves=moves)

    def read_exact(self, memory: Span, offset: int, what: str) -> None:
        """Fill `memory` from `offset`. Blocks.

        Raises CorruptDataError if the file ends before, TransferError otherwise; both say `what`.
        """
        done = stalls = 0
        nbytes = memory.nbytes
        while done < nbytes:
            try:
                count = self._read_some(memory[done:], offset + done)
            except (BlockingIOError, InterruptedError) as exc:
                stalls = self._stalled(stalls, what, offset, nbytes, exc)
                continue
            except OSError as exc:
                if self.moves is not None:
                    self._require_bytes(offset + nbytes, what)
                raise self._error(exc, what, offset + done, nbytes - done) from exc
            if done + count < nbytes:
                self._require_bytes(offset + nbytes, what)
            count = self._whole(count, nbytes - done)
            stalls = 0 if count else self._stalled(stalls, what, offset, nbytes, None)
            done += count
        if not self.access.direct:
            self.drop_cached(offset, nbytes)

    def write_exact(self, memory: Span, offset: int, what: str) -> None:
        """Write all of `memory` at `offset`. Blocks.

        Raises TierFullError if there is no room, TransferError otherwise; both say `what`.
        """
        done = stalls = 0
        nbytes = memory.nbytes
        while done < nbytes:
            try:
                count = self._write_some(memory[done:], offset + done)
            except (BlockingIOError, InterruptedError) as exc:
                stalls = self._stalled(stalls, what, offset, nbytes, exc)
                continue
            except OSError as exc:
                raise self._error(exc, what, offset + done, nbytes - done) from exc
            count = self._whole(count, nbytes - done)
            stalls = 0 if count else self._stalled(stalls, what, offset, nbytes, None)
            done += count
        if not self.access.direct:
            # The bytes just written are still dirty: this starts writing them back, and drops
            # those of earlier writes that have become clean.
            self.drop_cached(0, 0)

    def sync(self, what: str) -> None:
        """Make everything written so far durable. Blocks. Raises TransferError, TierFullError."""
        try:
            self.access.calls.fdatasync(self.fd)
        except OSError as exc:
            raise self._error(exc, what, 0, self.nbytes) from exc
        if not self.access.direct:
            self.drop_cached(0, 0)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to forget cached pages of a range; 0, 0 means the whole file."""
        try:
            self.access.calls.fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            # Advice only: without it the page cache grows and the kernel trims it.
            return

    def close(self) -> None:
        """Close the descriptors. Nothing may be in flight."""
        try:
            if self.moves is not None:
                self.moves.close()
        finally:
            os.close(self.fd)

    def _read_some(self, memory: Span, offset: int) -> int:
        if self.moves is not None:
            self.moves.read(memory, offset)
            return memory.nbytes
        return self.access.calls.preadv(self.fd, [_reachable(memory)], offset)

    def _write_some(self, memory: Span, offset: int) -> int:
        if self.moves is not None:
            self.moves.write(memory, offset)
            return memory.nbytes
        return self.access.calls.pwritev(self.fd, [_reachable(memory)], offset)

    def _whole(self, count: int, wanted: int) -> int:
        # A short direct transfer can only go on from a page boundary.
        return count - count % PAGE_NBYTES if self.access.direct and count < wanted else count

    def _require_bytes(self, end: int, what: str) -> None:
        size = os.fstat(self.fd).st_size
        if size < end:
            raise CorruptDataError(
                f"{what} failed: {self.path} was cut to {size} bytes, byte {end - 1} is needed; "
                "restore the file from a copy"
            )

    def _stalled(
        self, stalls: int, what: str, offset: int, nbytes: int, exc: OSError | None
    ) -> int:
        if stalls + 1 < _MAX_STALLS:
            return stalls + 1
        raise TransferError(
            errno.EAGAIN,
            f"{what} failed at {self.path}: {nbytes} bytes at offset {offset} made no progress "
            f"in {_MAX_STALLS} attempts",
        ) from exc

    def _error(self, exc: OSError, what: str, offset: int, nbytes: int) -> TierError:
        place = f"{what} of {nbytes} bytes at file offset {offset}"
        return io_error(exc, place, self.path, needed=nbytes, calls=self.access.calls)


def _opened(path: Path, flags: int, access: FileAccess) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if access.direct else 0)
    mode = (0o600,) if flags & os.O_CREAT else ()
    return access.calls.open(path, flags, *mode)


def _reachable(memory: Span) -> memoryview:
    if isinstance(memory, DeviceSpan):
        raise InternalError(f"{memory.nbytes} bytes of device memory in a system call")
    return memory


def _free_nbytes(folder: Path, calls: SystemCalls) -> int | None:
    try:
        stats = calls.statvfs(folder)
    except OSError:
        return None
    # Some network file systems report no blocks at all.
    return int(stats.f_bavail * stats.f_frsize) if stats.f_blocks else None
