"""ManifestRoom: blocks on the drive for the next manifest.

[Note: manifest room] A commit must not fail because the drive is full, for it is what frees room.
So the file that a manifest is staged in is there before it is needed, with its blocks. With the
manifest in force it takes twice what a manifest of the reserved keys can need: a commit turns the
one into the other, and what it frees is enough to have room for the next.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from zinf_core.units import PAGE_NBYTES, align_up
from zinf_storage.nvme.folder import Folder
from zinf_storage.nvme.posix import io_error, preallocate, require_free
from zinf_storage.nvme.syscalls import SystemCalls

_MAX_NBYTES: Final = 1 << 60
"""More than any file system has; keeps sizes within what system calls take."""


class ManifestRoom:
    """Keeps room for manifests of the size last required; `Folder.unlock` gives it back.

    `require` and `prefer` are called under the tier's lock, `in_use` without it. The lock guards
    the staged file.
    """

    def __init__(self, folder: Folder, *, tier_name: str, calls: SystemCalls) -> None:
        """Start without room."""
        self._folder = folder
        self._tier_name = tier_name
        self._calls = calls
        self._limit_nbytes = 0
        """Bytes that a manifest may have."""
        self._is_lacking = False
        """Whether there was no room after the last commit, or at open."""
        self._lock = threading.Lock()

    def require(self, nbytes: int) -> None:
        """Have room for manifests of `nbytes`. May block on a commit.

        Raises TierFullError, TransferError; the room is as it was then.
        """
        limit = _rounded(nbytes)
        if limit <= self._limit_nbytes and not self._is_lacking:
            return
        with self._lock:
            limit = max(limit, self._limit_nbytes)
            try:
                self._take(limit)
            except OSError as exc:
                what = f"{self._tier_name}: room to commit one more key"
                path = self._folder.staged_path
                raise io_error(exc, what, path, needed=2 * limit, calls=self._calls) from exc
            self._limit_nbytes, self._is_lacking = limit, False

    def prefer(self, nbytes: int) -> None:
        """Have room for manifests of `nbytes` if there is any. Blocks."""
        with self._lock:
            self._limit_nbytes = max(_rounded(nbytes), self._limit_nbytes)
            self._renew()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the block stage and publish a manifest, then take room for the next. Blocks."""
        with self._lock:
            try:
                yield
            finally:
                self._renew()

    def _renew(self) -> None:
        try:
            self._take(self._limit_nbytes)
        except OSError:
            # Whoever reserves or commits next is told, if it is still so.
            self._is_lacking = True
        else:
            self._is_lacking = False

    def _take(self, limit: int) -> None:
        """See that the staged file has its blocks. Raises OSError; it is as it was then."""
        path, calls = self._folder.staged_path, self._calls
        wanted = 2 * limit - min(align_up(_size(self._folder.manifest_path)), limit)
        held = _size(path)
        if wanted <= held:
            return
        if wanted > _MAX_NBYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        require_free(path, wanted - held, calls=calls)
        fd = calls.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            preallocate(fd, wanted, calls)
        except OSError:
            with suppress(OSError):
                calls.ftruncate(fd, held)
            raise
        finally:
            os.close(fd)


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def _rounded(nbytes: int) -> int:
    """Return the next power of two, so that the room grows seldom."""
    return 1 << (max(nbytes, PAGE_NBYTES) - 1).bit_length()
