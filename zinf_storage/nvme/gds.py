"""GdsEngine: segment files through kvikio, from and to device memory without a host copy.

[Note: gds] `kvikio.CuFile` is used for everything the tier moves, host memory included. Its futures
keep neither the memory nor the file alive and know nothing of streams, so `GdsFile` holds all three
until the future's result is there, and the tier waits for the device before it submits. Its errors
are RuntimeErrors with a text; `os_error` finds the errno in it.

kvikio may itself go through host memory (no GPUDirect Storage in the kernel, or a file system that
has none): the path taken is ``gds-compat`` then. Its own staging memory is one buffer of a
request's size per thread.

Without a device the engine moves host memory only; that is how it is tried where there is no GPU.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from zinf_core.device import Device
from zinf_core.errors import InternalError
from zinf_storage.nvme.memory import DeviceSpan, Span

_REASONS: Final = tuple(
    sorted(((os.strerror(number), number) for number in errno.errorcode), key=lambda r: -len(r[0]))
)
"""What the system calls its errors, the longest first: some are the beginning of others."""

_BUILD_PATH: Final = re.compile(r"/\S*/kvikio/cpp/\S*/")
"""Where kvikio's authors compile it; every message has it."""


class IoFuture(Protocol):
    """What `kvikio.IOFuture` has."""

    def get(self) -> int:
        """Wait for the transfer and return its bytes, once. Raises RuntimeError."""
        ...


class CuFile(Protocol):
    """What `GdsFile` uses of `kvikio.CuFile`."""

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> IoFuture:
        """Start to read `size` bytes into `buf`, in tasks of `task_size` bytes."""
        ...

    def pwrite(self, buf: Any, size: int, file_offset: int, task_size: int) -> IoFuture:
        """Start to write `size` bytes of `buf`, in tasks of `task_size` bytes."""
        ...

    def close(self) -> None:
        """Close the file; nothing may be in flight."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GdsEngine:
    """Opens segment files with kvikio; made by `zinf_storage.nvme.kvikio_file.open_gds`."""

    open_file: Callable[[Path], CuFile] = field(repr=False)
    """Opens an existing file for reading and writing; raises RuntimeError."""
    path_taken: str
    """``gds``, or ``gds-compat`` where kvikio goes through host memory."""
    device: Device | None
    """Device whose memory is moved; None: host memory only."""
    task_nbytes: int
    """Bytes that one of kvikio's threads moves at a time."""

    def open(self, path: Path) -> GdsFile:
        """Open the existing file `path`. Raises OSError."""
        try:
            file = self.open_file(path)
        except RuntimeError as exc:
            raise os_error(exc) from exc
        return GdsFile(file, task_nbytes=self.task_nbytes)


class GdsFile:
    """One file opened by kvikio. Thread-safe, apart from `close`."""

    def __init__(self, file: CuFile, *, task_nbytes: int) -> None:
        """Take over `file`, which is open for reading and writing."""
        self._file = file
        self._task_nbytes = task_nbytes

    def read(self, memory: Span, offset: int) -> None:
        """Fill all of `memory` from `offset`. See `DirectFile`.

        Raises InternalError for memory that must not be written: kvikio would write it.
        """
        if isinstance(memory, memoryview) and memory.readonly:
            raise InternalError(f"read of {memory.nbytes} bytes into read-only memory")
        self._move(self._file.pread, memory, offset)

    def write(self, memory: Span, offset: int) -> None:
        """Write all of `memory` at `offset`. See `DirectFile`."""
        self._move(self._file.pwrite, memory, offset)

    def close(self) -> None:
        """Close the file. Nothing may be in flight. Raises OSError."""
        try:
            self._file.close()
        except RuntimeError as exc:
            raise os_error(exc) from exc

    def _move(self, submit: Callable[..., IoFuture], memory: Span, offset: int) -> None:
        array = memory.buffer.array if isinstance(memory, DeviceSpan) else memory
        try:
            future = submit(array, memory.nbytes, offset, self._task_nbytes)
            # Until here returns, this frame is what keeps the array alive.
            count = future.get()
        except RuntimeError as exc:
            raise os_error(exc) from exc
        except (TypeError, ValueError, OverflowError) as exc:
            raise InternalError(f"kvikio refused {memory.nbytes} bytes at {offset}: {exc}") from exc
        if count != memory.nbytes:
            raise OSError(errno.EIO, f"kvikio moved {count} of {memory.nbytes} bytes")


def os_error(exc: RuntimeError) -> OSError:
    """Return the error that kvikio's text tells of; EIO if it names none that the system has."""
    text = _BUILD_PATH.sub("", " ".join(str(exc).split()))
    number = next((number for reason, number in _REASONS if reason in text), errno.EIO)
    return OSError(number, f"{os.strerror(number)} (kvikio: {text})")
