"""FreshFolder: an empty folder for one run, which the next run deletes if this one was killed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from zinf_storage.file_lock import lock_file

_PREFIX: Final = ".zinf-bench-"
_NAME: Final = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")


class FreshFolder:
    """A folder inside `parent`, locked while its run lives; where a file system has no locks, what
    killed runs left stays."""

    def __init__(self, parent: Path) -> None:
        """Delete what killed runs left in `parent`, then make the folder. Raises OSError."""
        _delete_left_over(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).absolute()
            if self._lock():
                return

    def _lock(self) -> bool:
        """Return whether the folder is ours: not if another run, which took it for a left-over
        before it was locked, is deleting it."""
        try:
            self._fd = _opened(self.path)
        except FileNotFoundError:
            return False
        try:
            is_ours = lock_file(self._fd, self.path)
        except BlockingIOError:
            is_ours = False
        except OSError:
            # No locks there.
            is_ours = True
        if not is_ours:
            os.close(self._fd)
        return is_ours

    def remove(self) -> None:
        """Delete the folder and what is in it. Blocks. Raises OSError."""
        try:
            shutil.rmtree(self.path)
        finally:
            os.close(self._fd)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _delete_left_over(parent: Path) -> None:
    for path in parent.iterdir():
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            fd = _opened(path)
        except OSError:
            continue
        try:
            if lock_file(fd, path):
                shutil.rmtree(path)
        except OSError:
            # Its run lives, or it cannot be known, or it is somebody else's.
            continue
        finally:
            os.close(fd)
