"""Folders: made with their parents, and gone again as far as nobody put anything into them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zinf_core.errors import ConfigError


def folder_path(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of `folder`, links followed. Raises ConfigError for text that no
    path can be, OSError for links in a circle."""
    try:
        return Path(folder).resolve()
    except ValueError as exc:
        raise ConfigError(f"{os.fspath(folder)!r} is no path: {exc}") from exc
    except RuntimeError as exc:  # how Python before 3.13 reports links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from exc


def make_folder(path: Path) -> tuple[Path, ...]:
    """Create `path` (mode 0700) and its parents; return those that were missing, deepest first.

    Raises OSError; nothing is left of the attempt then.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        missing.append(folder)
    if not missing and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file of that name is in the way")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except BaseException:
        remove_empty(missing)
        raise
    return tuple(missing)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of `folders`, deepest first, that are there and have nothing in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
