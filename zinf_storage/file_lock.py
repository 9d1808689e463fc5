"""File lock: tells the files and folders of living processes from those of dead ones."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_file(fd: int, path: Path) -> bool:
    """Lock the open file or folder `fd` and return whether it is still what lies at `path`.

    The lock ends with the process, however that ends. Raises BlockingIOError if somebody has it,
    OSError where the file system knows no locks.
    """
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def unlock_file(fd: int) -> None:
    """Unlock and close `fd`."""
    # Closing alone would leave the lock with a forked child that inherited it.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
