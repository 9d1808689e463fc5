"""Disk: whether the drive moved the bytes, or the page cache did, by the kernel's own counters."""

from __future__ import annotations

import ctypes
import enum
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zinf_core.units import PAGE_NBYTES, format_nbytes
from zinf_storage.bench.sample import Sample

_SYS_CACHESTAT: Final = 451
"""The same number on every architecture; Linux 6.5 and later."""
_MIN_MOVED: Final = 0.9
"""Part of the bytes that the drive must have moved."""
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems whose files are page cache and nothing else."""


class Verdict(enum.Enum):
    """What a rate is a rate of."""

    DISK = "disk"
    """The drive moved the bytes."""
    CACHED = "cached"
    """The page cache moved some of them: not a rate of the drive."""
    UNVERIFIED = "unverified"
    """There are files, but this kernel does not tell who moved the bytes."""
    NO_FILES = "no files"
    """The tier has no local files: memory, a device or another machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoCounters:
    """What the storage layer moved for this process, in bytes (/proc/self/io)."""

    read_nbytes: int
    write_nbytes: int
    """Counted when a page becomes dirty, so only what left the page cache was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """Bytes of some files in the page cache."""

    cached_nbytes: int
    unsettled_nbytes: int
    """Dirty or being written back: not on the drive yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counters at one moment; None where the kernel does not tell."""

    counters: IoCounters | None
    cache: CacheState | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Verdict on one sample."""

    verdict: Verdict
    moved_nbytes: int | None
    """Bytes the drive moved meanwhile; None where nothing tells."""
    reason: str = ""
    """Why the number is not one of the drive, and what to do; empty if it is."""


class DiskWatch:
    """Watches the files below some paths. Not thread-safe."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        filesystem: str,
        read_counters: Callable[[], IoCounters | None] | None = None,
    ) -> None:
        """Watch the files below `paths`, of a `filesystem` of this type. No paths: a tier without
        files, of which nothing can be said."""
        self._paths = tuple(paths)
        self._filesystem = filesystem
        self._read_counters = read_counters or read_io_counters

    def look(self) -> Snapshot:
        """Return the counters now."""
        if not self._paths:
            return Snapshot(counters=None, cache=None)
        return Snapshot(counters=self._read_counters(), cache=read_cache_state(self._paths))

    def judge(self, before: Snapshot, after: Snapshot, sample: Sample) -> Judgement:
        """Return who moved the bytes of `sample`, measured between the two looks."""
        if not self._paths:
            return Judgement(verdict=Verdict.NO_FILES, moved_nbytes=None)
        if self._filesystem in IN_MEMORY:
            reason = (
                f"{self._filesystem} is memory, whichever way it is written; name a folder on a "
                "drive"
            )
            return Judgement(verdict=Verdict.CACHED, moved_nbytes=0, reason=reason)
        if before.counters is None or after.counters is None:
            reason = "/proc/self/io does not tell who moved the bytes; run where it can be read"
            return Judgement(verdict=Verdict.UNVERIFIED, moved_nbytes=None, reason=reason)
        read = after.counters.read_nbytes - before.counters.read_nbytes
        written = after.counters.write_nbytes - before.counters.write_nbytes
        if before.cache is not None and after.cache is not None:
            written += before.cache.unsettled_nbytes - after.cache.unsettled_nbytes
        reason = _missing("read", sample.read_nbytes, read)
        reason = reason or _missing("written", sample.written_nbytes, written)
        return Judgement(
            verdict=Verdict.CACHED if reason else Verdict.DISK,
            moved_nbytes=max(read, 0) + max(written, 0),
            reason=reason,
        )


def read_io_counters(path: Path = Path("/proc/self/io")) -> IoCounters | None:
    """Return this process's counters, or None where the kernel keeps none or hides them."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = {name: int(number) for name, _, number in (line.partition(":") for line in lines)}
    if "read_bytes" not in counts or "write_bytes" not in counts:
        return None
    return IoCounters(read_nbytes=counts["read_bytes"], write_nbytes=counts["write_bytes"])


def read_cache_state(paths: Sequence[Path]) -> CacheState | None:
    """Return what of the files below `paths` is in the page cache, None if nothing tells.

    Kernels before 6.5 do not say which pages are dirty; there all of them count as unsettled.
    """
    cached = unsettled = 0
    for file in _files(paths):
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # A tier may delete its files at any moment.
            continue
        try:
            pages = _cachestat(fd) or _mincore(fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        cached += pages[0] * PAGE_NBYTES
        unsettled += pages[1] * PAGE_NBYTES
    return CacheState(cached_nbytes=cached, unsettled_nbytes=unsettled)


def _missing(what: str, nbytes: int, moved: int) -> str:
    """Return what is wrong if the drive moved too few of `nbytes`, empty if it is not."""
    if moved >= nbytes * _MIN_MOVED:
        return ""
    return (
        f"the drive moved {format_nbytes(max(moved, 0))} of {format_nbytes(nbytes)} {what}, the "
        "page cache the rest; use direct I/O on a file system that allows it"
    )


def _files(paths: Sequence[Path]) -> list[Path]:
    found = []
    for path in paths:
        if path.is_dir():
            found += [item for item in path.rglob("*") if item.is_file()]
        elif path.is_file():
            found.append(path)
    return found


def _cachestat(fd: int) -> tuple[int, int] | None:
    """Return (pages cached, pages dirty or being written back), None if there is no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole = (ctypes.c_uint64 * 2)(0, 0)
    result = (ctypes.c_uint64 * 5)()
    if libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT), ctypes.c_int(fd), whole, result, ctypes.c_uint(0)
    ):
        number = ctypes.get_errno()
        if number in {errno.ENOSYS, errno.EPERM}:
            return None
        raise OSError(number, os.strerror(number))
    return result[0], result[1] + result[2]


def _mincore(fd: int) -> tuple[int, int]:
    """Return (pages resident, the same): which of them are dirty is not known."""
    size = os.fstat(fd).st_size
    if not size:
        return 0, 0
    num_pages = -(-size // PAGE_NBYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(
        None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0)
    )
    if address in {None, ctypes.c_void_p(-1).value}:
        raise OSError(ctypes.get_errno(), "mmap failed")
    flags = (ctypes.c_ubyte * num_pages)()
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
            raise OSError(ctypes.get_errno(), "mincore failed")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    resident = sum(flag & 1 for flag in flags)
    return resident, resident
