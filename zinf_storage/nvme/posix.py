"""SegmentFile: exact reads and writes of one file, and the errors they can end in."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zinf_core.errors import CorruptDataError, TierError, TierFullError, TransferError
from zinf_core.units import PAGE_NBYTES, format_nbytes
from zinf_storage.nvme.syscalls import SystemCalls

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean the device, the quota or the file size limit is used up."""
_NOT_SUPPORTED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_MAX_STALLS: Final = 8
"""Calls in a row that may move nothing before a transfer is given up."""


def io_error(exc: OSError, what: str, path: Path, *, needed: int, calls: SystemCalls) -> TierError:
    """Return the error of our tree for `exc`; `needed` bytes were to be moved or allocated."""
    number = exc.errno or errno.EIO
    reason = os.strerror(number)
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


@dataclass(slots=True, kw_only=True)
class SegmentFile:
    """An open segment file. Reads and writes may run in any number of threads."""

    path: Path
    fd: int
    nbytes: int
    direct: bool
    """Opened with O_DIRECT: offsets, lengths and addresses must be whole pages."""
    preallocated: bool
    """False where the file system has no fallocate: then a full disk shows up at a write."""
    calls: SystemCalls = field(repr=False)

    @classmethod
    def create(cls, path: Path, nbytes: int, *, direct: bool, calls: SystemCalls) -> SegmentFile:
        """Create `path`, which must not exist, with room for `nbytes`. Blocks.

        Raises OSError; no file is left behind then.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = calls.open(path, flags, 0o600)
        try:
            preallocated = _preallocate(fd, nbytes, calls)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return cls(
            path=path, fd=fd, nbytes=nbytes, direct=direct, preallocated=preallocated, calls=calls
        )

    @classmethod
    def open(cls, path: Path, nbytes: int, *, direct: bool, calls: SystemCalls) -> SegmentFile:
        """Open the existing file `path`. Raises OSError."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        fd = calls.open(path, flags)
        return cls(path=path, fd=fd, nbytes=nbytes, direct=direct, preallocated=True, calls=calls)

    def read_exact(self, view: memoryview, offset: int, what: str) -> None:
        """Fill `view` from `offset`. Blocks.

        Raises CorruptDataError if the file ends before, TransferError otherwise; both say `what`.
        """
        done = stalls = 0
        while done < len(view):
            try:
                count = self.calls.preadv(self.fd, [view[done:]], offset + done)
            except BlockingIOError as exc:
                stalls = self._stalled(stalls, what, offset, len(view), exc)
                continue
            except OSError as exc:
                raise self._error(exc, what, offset + done, len(view) - done) from exc
            if done + count < len(view):
                self._require_bytes(offset + len(view), what)
            count = self._whole(count, len(view) - done)
            stalls = 0 if count else self._stalled(stalls, what, offset, len(view), None)
            done += count
        if not self.direct:
            self.drop_cached(offset, len(view))

    def write_exact(self, view: memoryview, offset: int, what: str) -> None:
        """Write all of `view` at `offset`. Blocks.

        Raises TierFullError if there is no room, TransferError otherwise; both say `what`.
        """
        done = stalls = 0
        while done < len(view):
            try:
                count = self.calls.pwritev(self.fd, [view[done:]], offset + done)
            except BlockingIOError as exc:
                stalls = self._stalled(stalls, what, offset, len(view), exc)
                continue
            except OSError as exc:
                raise self._error(exc, what, offset + done, len(view) - done) from exc
            count = self._whole(count, len(view) - done)
            stalls = 0 if count else self._stalled(stalls, what, offset, len(view), None)
            done += count
        if not self.direct:
            # The bytes just written are still dirty: this starts writing them back, and drops
            # those of earlier writes that have become clean.
            self.drop_cached(0, 0)

    def sync(self, what: str) -> None:
        """Make everything written so far durable. Blocks. Raises TransferError, TierFullError."""
        try:
            self.calls.fdatasync(self.fd)
        except OSError as exc:
            raise self._error(exc, what, 0, self.nbytes) from exc
        if not self.direct:
            self.drop_cached(0, 0)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to forget cached pages of a range; 0, 0 means the whole file."""
        try:
            self.calls.fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            # Advice only: without it the page cache grows and the kernel trims it.
            return

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def _whole(self, count: int, wanted: int) -> int:
        # A short direct transfer can only go on from a page boundary.
        return count - count % PAGE_NBYTES if self.direct and count < wanted else count

    def _require_bytes(self, end: int, what: str) -> None:
        size = os.fstat(self.fd).st_size
        if size < end:
            raise CorruptDataError(
                f"{what} failed: {self.path} was cut to {size} bytes, byte {end - 1} is needed; "
                "restore the file from a copy"
            )

    def _stalled(
        self, stalls: int, what: str, offset: int, nbytes: int, exc: BlockingIOError | None
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
        return io_error(exc, place, self.path, needed=nbytes, calls=self.calls)


def _free_nbytes(folder: Path, calls: SystemCalls) -> int | None:
    try:
        stats = calls.statvfs(folder)
    except OSError:
        return None
    # Some network file systems report no blocks at all.
    return int(stats.f_bavail * stats.f_frsize) if stats.f_blocks else None


def _preallocate(fd: int, nbytes: int, calls: SystemCalls) -> bool:
    try:
        calls.fallocate(fd, 0, nbytes)
    except OSError as exc:
        if exc.errno not in _NOT_SUPPORTED:
            raise
        calls.ftruncate(fd, nbytes)
        return False
    return True
