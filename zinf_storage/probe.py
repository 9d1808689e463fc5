"""Probe: what a folder's file system offers to direct I/O, found by trying it."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from zinf_core.errors import ConfigError
from zinf_core.units import PAGE_NBYTES

_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_NBYTES: Final = 256
_STX_DIO_MEM_ALIGN: Final = 152
"""Byte offset within struct statx; the offset alignment follows it."""


class IoPath(enum.Enum):
    """Way bytes take between a buffer and a file."""

    POSIX_DIRECT = "posix-direct"
    """O_DIRECT: past the page cache."""
    POSIX_BUFFERED = "posix-buffered"
    """Through the page cache, because the file system refuses O_DIRECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAlignment:
    """What the kernel says direct I/O on a file needs (statx, STATX_DIOALIGN)."""

    memory_nbytes: int
    offset_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProbe:
    """What one folder offers."""

    path: Path
    filesystem: str
    """Type, e.g. ``"ext4"``; ``"unknown"`` where the mount table does not tell."""
    mount_point: Path | None
    free_nbytes: int
    """Free for this user."""
    total_nbytes: int
    is_writable: bool
    io_path: IoPath | None
    """None where nothing can be written."""
    refusal: str | None
    """Why direct I/O, or writing at all, was refused; None when it was not."""
    alignment: DirectAlignment | None
    """None where the kernel does not say."""


def probe_path(path: Path) -> PathProbe:
    """Return what the folder at `path` offers. Writes one page to a file there and removes it.

    Raises ConfigError if `path` is not a folder that can be looked at.
    """
    path = path.absolute()
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {problem}; name a folder on the drive to probe")
    usage = shutil.disk_usage(path)
    mount_point, filesystem = _find_mount(path)
    io_path: IoPath | None = None
    alignment = None
    try:
        with _scratch_file(path) as name:
            refusal = _try_direct(name)
            io_path = IoPath.POSIX_BUFFERED if refusal else IoPath.POSIX_DIRECT
            alignment = read_direct_alignment(name)
    except OSError as exc:
        refusal = f"cannot write: {exc.strerror or exc}"
    return PathProbe(
        path=path,
        filesystem=filesystem,
        mount_point=mount_point,
        free_nbytes=usage.free,
        total_nbytes=usage.total,
        is_writable=io_path is not None,
        io_path=io_path,
        refusal=refusal,
        alignment=alignment,
    )


def read_direct_alignment(path: Path) -> DirectAlignment | None:
    """Return the alignment direct I/O on the file at `path` needs, or None if nothing tells.

    The kernel tells from Linux 6.1 on, for some file systems; zeros mean direct I/O is refused.
    """
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    result = ctypes.create_string_buffer(_STATX_NBYTES)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        failed = statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result)
    finally:
        os.close(fd)
    mask = ctypes.c_uint32.from_buffer(result).value
    if failed or not mask & _STATX_DIOALIGN:
        return None
    memory, offset = (ctypes.c_uint32 * 2).from_buffer(result, _STX_DIO_MEM_ALIGN)
    return DirectAlignment(memory_nbytes=memory, offset_nbytes=offset)


@contextmanager
def _scratch_file(folder: Path) -> Iterator[Path]:
    """Create an empty file in `folder`; it is gone afterwards."""
    fd, name = tempfile.mkstemp(prefix=".zinf-probe-", dir=folder)
    os.close(fd)
    try:
        yield Path(name)
    finally:
        Path(name).unlink()


def _try_direct(path: Path) -> str | None:
    """Write and read one page of the file at `path` with O_DIRECT; return why that failed.

    Raises OSError if the drive is full or broken, whichever way it is written.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return "this system has no O_DIRECT"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct)
    except OSError as exc:
        return f"open: {exc.strerror}"
    try:
        with mmap.mmap(-1, PAGE_NBYTES) as page:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
    except OSError as exc:
        return f"transfer of one page: {exc.strerror}"
    finally:
        os.close(fd)
    return None


def _find_mount(path: Path) -> tuple[Path | None, str]:
    """Return (mount point, file system type) of the deepest mount that holds `path`."""
    resolved = path.resolve()
    best: tuple[Path | None, str] = (None, "unknown")
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        is_deeper = best[0] is None or len(point.parts) >= len(best[0].parts)
        if resolved.is_relative_to(point) and is_deeper:
            best = (point, mount.fstype)
    return best
