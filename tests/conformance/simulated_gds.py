"""kvikio without kvikio: files over host memory and a simulated device, late and unforgiving."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from zinf_core.testing.faults import Operation
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.testing.simulated_memory import SimulatedArray, SimulatedBuffer
from zinf_storage.nvme.gds import GdsEngine

POISON = 0xEE
TASK_NBYTES = 4096


@dataclass
class GdsFaults:
    """Which transfer fails next, once; and what was done wrong with kvikio's objects."""

    armed: set[Operation] = field(default_factory=set)
    mistakes: list[str] = field(default_factory=list)
    num_device_transfers: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def failing(self, operation: Operation) -> bool:
        with self.lock:
            found = operation in self.armed
            self.armed.discard(operation)
            return found


class SimulatedCuFile:
    """What `GdsFile` uses of `kvikio.CuFile`.

    A transfer happens when its future is asked for the result, and a destination is poison until
    then. As in kvikio, a future keeps neither its memory nor its file alive: it is a mistake to
    drop the memory before, to close the file before, or to ask twice.
    """

    def __init__(self, path: Path, device: SimulatedDevice, faults: GdsFaults) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise RuntimeError(f"Unable to open file at: file.cpp:1: {exc.strerror}") from exc
        self._device = device
        self.faults = faults
        self._num_in_flight = 0
        self._closed = False

    def pread(self, buf: object, size: int, file_offset: int, task_size: int) -> SimulatedFuture:
        memory = self._memory(buf, size, file_offset, task_size)
        memory[:] = POISON
        return SimulatedFuture(self, buf, Operation.READ, file_offset)

    def pwrite(self, buf: object, size: int, file_offset: int, task_size: int) -> SimulatedFuture:
        self._memory(buf, size, file_offset, task_size)
        return SimulatedFuture(self, buf, Operation.WRITE, file_offset)

    def close(self) -> None:
        if self._num_in_flight:
            self.faults.mistakes.append(f"closed with {self._num_in_flight} transfers in flight")
        self._closed = True
        os.close(self._fd)

    def _memory(self, buf: object, size: int, offset: int, task_size: int) -> np.ndarray:
        memory = self.bytes_of(buf)
        if memory.nbytes != size or task_size % 4096 or offset % 4096 or size % 4096:
            self.faults.mistakes.append(f"{size} bytes at {offset} are not whole pages")
        with self.faults.lock:
            self._num_in_flight += 1
            self.faults.num_device_transfers += isinstance(buf, SimulatedArray)
        return memory

    def bytes_of(self, buf: object) -> np.ndarray:
        """Return the bytes behind an argument; raises while a copy of them is pending."""
        if isinstance(buf, SimulatedArray):
            return self._device.view(SimulatedBuffer(self._device, buf._backing, buf.nbytes))
        return np.frombuffer(buf, np.uint8)

    def happen(self, operation: Operation, buf: object, offset: int) -> int:
        with self.faults.lock:
            self._num_in_flight -= 1
        if self._closed:
            raise RuntimeError(
                "KvikIO failure at: posix_io.hpp:1: POSIX error: Bad file descriptor"
            )
        memory = self.bytes_of(buf)
        if self.faults.failing(operation):
            os.pwrite(self._fd, memory[: memory.nbytes // 2], offset)
            raise RuntimeError("KvikIO failure at: posix_io.hpp:2: POSIX error: Input/output error")
        if operation is Operation.WRITE:
            return os.pwrite(self._fd, memory, offset)
        if os.preadv(self._fd, [memory], offset) < memory.nbytes:
            raise RuntimeError("KvikIO failure at: posix_io.hpp:3: POSIX error on pread: EOF")
        return memory.nbytes


class SimulatedFuture:
    """What `kvikio.IOFuture` is for us."""

    def __init__(
        self, file: SimulatedCuFile, buf: object, operation: Operation, offset: int
    ) -> None:
        self._file: SimulatedCuFile | None = file
        self._buf = weakref.ref(buf)
        self._operation = operation
        self._offset = offset

    def get(self) -> int:
        file, self._file = self._file, None
        if file is None:
            raise RuntimeError("No associated state")
        buf = self._buf()
        if buf is None:
            file.faults.mistakes.append("memory was dropped while a transfer of it was in flight")
            raise RuntimeError("no memory")
        return file.happen(self._operation, buf, self._offset)


def simulated_gds(device: SimulatedDevice, faults: GdsFaults) -> GdsEngine:
    """Return the engine of the nvme tier, over `device` instead of kvikio."""
    return GdsEngine(
        open_file=lambda path: SimulatedCuFile(path, device, faults),
        path_taken="gds",
        device=device,
        task_nbytes=TASK_NBYTES,
    )
