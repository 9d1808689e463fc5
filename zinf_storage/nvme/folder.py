"""Folder: the tier's own files in one folder, and the lock that keeps other processes out."""

from __future__ import annotations

import enum
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zinf_core.errors import TierLockedError, TransferError
from zinf_storage.file_lock import lock_file, unlock_file
from zinf_storage.folders import folder_path, make_folder, remove_empty
from zinf_storage.nvme.syscalls import SystemCalls

MANIFEST_NAME: Final = "manifest.zinf"
LOCK_NAME: Final = "lock.zinf"
_SEGMENT_PATTERN: Final = re.compile(r"segment-(\d{5,9})\.zinf")
_MAX_LOCK_ATTEMPTS: Final = 16


class FolderKind(enum.Enum):
    """What an open found."""

    FRESH = "fresh"
    """No file of ours."""
    LEFT_OVER = "left_over"
    """Segment files without a manifest: garbage of a process that was killed."""
    COMMITTED = "committed"
    """A manifest; its keys are there again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderState:
    """What an open found in the folder. Nothing of it was changed."""

    kind: FolderKind
    num_keys: int = 0
    """Keys of the committed manifest."""
    nbytes: int = 0
    """Logical bytes of those keys."""
    left_over_nbytes: int = 0
    """Bytes of segment files that no manifest names; `reclaim` deletes them."""


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"segment-{number:05d}.zinf"


def segment_number(name: str) -> int | None:
    """Return the number in a segment's file name, None if it is no such name."""
    match = _SEGMENT_PATTERN.fullmatch(name)
    number = int(match[1]) if match else -1
    return number if match and segment_name(number) == name else None


class Folder:
    """One folder, locked for this tier from `open` to `unlock`. Touches its own file names only."""

    def __init__(self, path: Path, *, made: tuple[Path, ...], lock_fd: int) -> None:
        """Take over the descriptor of the locked lock file; see `open`."""
        self.path = path
        self._made = made
        """Folders that `open` made, deepest first."""
        self._lock_fd: int | None = lock_fd

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, calls: SystemCalls) -> Folder:
        """Create `folder` if it is missing (mode 0700) and lock it.

        Raises TierLockedError if a tier, here or in another process, holds it; TransferError if
        it cannot be created or written, ConfigError for text that no path can be.
        """
        made: tuple[Path, ...] = ()
        path = Path(folder)
        try:
            path = folder_path(folder)
            made = make_folder(path)
            return cls(path, made=made, lock_fd=_lock(path, calls))
        except TierLockedError:
            raise
        except OSError as exc:
            remove_empty(made)
            raise TransferError(
                exc.errno or errno.EIO,
                f"cannot use {path} as a storage folder: {exc.strerror}; name a folder on a "
                "mounted drive that this user may write",
            ) from exc

    @property
    def manifest_path(self) -> Path:
        """Where the committed manifest lies."""
        return self.path / MANIFEST_NAME

    @property
    def lock_path(self) -> Path:
        """Where the lock file lies."""
        return self.path / LOCK_NAME

    def segment_path(self, number: int) -> Path:
        """Return where segment `number` lies."""
        return self.path / segment_name(number)

    def segment_sizes(self) -> dict[int, int]:
        """Return number -> bytes of the segment files there now. Raises OSError."""
        found = ((segment_number(entry.name), entry) for entry in self.path.iterdir())
        return {number: entry.lstat().st_size for number, entry in found if number is not None}

    def unlock(self) -> None:
        """Give the folder free, without the file for the next manifest, and remove it if `open`
        made it and nothing was kept in it; a second call does nothing."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is None:
            return
        try:
            self.staged_path.unlink(missing_ok=True)
            if self._made and [entry.name for entry in self.path.iterdir()] == [LOCK_NAME]:
                self.lock_path.unlink()
                remove_empty(self._made)
        except OSError:
            # Something stays, on a drive that has other troubles.
            return
        finally:
            unlock_file(fd)

    def remove_files(self, calls: SystemCalls) -> None:
        """Delete our files, and the folder if we created it and nothing else is in it.

        Call after `unlock`. Raises TierLockedError if another tier took the folder meanwhile.
        """
        if not self.path.is_dir():
            return
        fd = _lock(self.path, calls)
        try:
            for number in self.segment_sizes():
                self.segment_path(number).unlink()
            self.manifest_path.unlink(missing_ok=True)
            self.staged_path.unlink(missing_ok=True)
            self.lock_path.unlink(missing_ok=True)
        finally:
            os.close(fd)
        remove_empty(self._made)

    @property
    def staged_path(self) -> Path:
        """Where a manifest is written before it takes its place."""
        return self.path / (MANIFEST_NAME + ".tmp")


def _lock(folder: Path, calls: SystemCalls) -> int:
    path = folder / LOCK_NAME
    for _ in range(_MAX_LOCK_ATTEMPTS):
        fd = calls.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if lock_file(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError as exc:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise TierLockedError(
                errno.EAGAIN,
                f"{folder} is in use by process {holder}; close that tier or use another folder",
            ) from exc
        except BaseException:
            os.close(fd)
            raise
        # `remove` of another tier deleted the file between our open and our lock.
        os.close(fd)
    raise OSError(errno.EAGAIN, f"{path} keeps being replaced")
