"""An engine of the nvme tier that takes device memory and needs no kvikio.

Each request goes through page-aligned host memory and a copy by the device, as kvikio does where
there is no GPUDirect Storage. It exercises what the tier does for device memory on any machine:
waiting for compute, cutting buffers, ragged ends.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zinf_core.device import Device
from zinf_core.testing.faults import Operation
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme.memory import DeviceSpan, Span


@dataclass
class Faults:
    """Which operation fails next, once."""

    armed: set[Operation] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, operation: Operation) -> bool:
        """Have the next `operation` fail; return True."""
        with self.lock:
            self.armed.add(operation)
        return True

    def check(self, operation: Operation) -> None:
        """Raise OSError if `operation` is to fail."""
        with self.lock:
            failing = operation in self.armed
            self.armed.discard(operation)
        if failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@dataclass(frozen=True, kw_only=True)
class StagedEngine:
    """Opens files whose requests are staged in host memory."""

    device: Device
    faults: Faults = field(default_factory=Faults)
    path_taken: str = "staged by this script"

    def open(self, path: Path) -> StagedFile:
        """Open the existing file `path`. Raises OSError."""
        return StagedFile(path, self.device, self.faults)


class StagedFile:
    """One open file. Thread-safe, apart from `close`."""

    def __init__(self, path: Path, device: Device, faults: Faults) -> None:
        """Open `path` for reading and writing, past the page cache if that is possible."""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, flags)
        self._device = device
        self._faults = faults

    def read(self, memory: Span, offset: int) -> None:
        """Fill all of `memory` from `offset`."""
        self._faults.check(Operation.READ)
        if not isinstance(memory, DeviceSpan):
            self._move(os.preadv, memory, offset)
            return
        stage = PageAlignedAllocator().allocate(memory.nbytes)
        self._move(os.preadv, stage.array.data, offset)
        self._device.copy(memory.buffer, stage).wait()

    def write(self, memory: Span, offset: int) -> None:
        """Write all of `memory` at `offset`."""
        self._faults.check(Operation.WRITE)
        if not isinstance(memory, DeviceSpan):
            self._move(os.pwritev, memory, offset)
            return
        stage = PageAlignedAllocator().allocate(memory.nbytes)
        self._device.copy(stage, memory.buffer).wait()
        self._move(os.pwritev, stage.array.data, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int
    ) -> None:
        done = 0
        while done < view.nbytes:
            count = call(self._fd, [view[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "the file ends early")
            done += count
