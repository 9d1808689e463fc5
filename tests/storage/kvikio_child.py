"""Runs the real kvikio on the libcuda double and prints what came of it as JSON.

Usage: ``kvikio_child.py host|device FOLDER [DISK]``. LD_LIBRARY_PATH must name the double. In
`host` mode the driver is not initialized, so that there is no device; in `device` mode kvikio moves
memory that only the double can reach. With DISK, a small file system, only filling that is tried.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvikio
import kvikio.defaults
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from libcuda_double import LIBRARY
from nvme_helpers import num_fds
from test_kit_nvme import DIRECT, SMALL_BLOCKS, NvmeSuite

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.device import Device
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import Operation, failures_of, host_buffer, machine_for
from zinf_core.tier import Tier
from zinf_core.units import MiB, align_up
from zinf_storage.nvme import Engine, NvmeTier, SystemCalls
from zinf_storage.nvme.engine import DirectFile, FileEngine
from zinf_storage.nvme.kvikio_file import open_gds

DEVICE_NBYTES = 512 * MiB
KEY = TensorKey.of("w", StateKind.PARAM)
GDS = replace(DIRECT, engine=Engine.GDS)
SMALL_GDS = replace(SMALL_BLOCKS, engine=Engine.GDS)


class DeviceArray:
    """What cupy arrays show kvikio."""

    def __init__(self, memory: DoubleMemory, offset: int, nbytes: int) -> None:
        self.memory = memory
        self.offset = offset
        self.__cuda_array_interface__ = {
            "data": (memory.device.base + offset, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


class DoubleMemory:
    """One allocation; given back when the last array over it dies."""

    def __init__(self, device: DoubleDevice, capacity: int) -> None:
        self.device = device
        self.offset = device.take(capacity)
        weakref.finalize(self, device.give, self.offset, capacity)


class DoubleBuffer:
    space = MemorySpace.DEVICE

    def __init__(self, memory: DoubleMemory, offset: int, nbytes: int, capacity: int) -> None:
        self.array = DeviceArray(memory, offset, nbytes)
        self.nbytes = nbytes
        self.capacity_nbytes = capacity

    @property
    def address(self) -> int:
        return self.array.memory.device.base + self.array.offset

    def is_shared(self) -> bool:
        return False

    def resized(self, nbytes: int) -> DoubleBuffer:
        return DoubleBuffer(self.array.memory, self.array.offset, nbytes, self.capacity_nbytes)

    def part(self, start: int, nbytes: int) -> DoubleBuffer:
        end = start + nbytes
        assert 0 <= start <= end <= self.nbytes
        last = self.capacity_nbytes if end == self.nbytes else end
        return DoubleBuffer(self.array.memory, self.array.offset + start, nbytes, last - start)


class DoubleDevice:
    """A `Device` whose memory the CPU cannot touch; its copies go through the double's mapping."""

    name = "cuda:0"
    space = MemorySpace.DEVICE

    def __init__(self) -> None:
        double = ctypes.CDLL(LIBRARY)
        double.zinf_double_device.restype = double.zinf_double_shadow.restype = ctypes.c_void_p
        double.zinf_double_device.argtypes = [ctypes.c_size_t]
        self.base: int = double.zinf_double_device(DEVICE_NBYTES)
        shadow = (ctypes.c_uint8 * DEVICE_NBYTES).from_address(double.zinf_double_shadow())
        self.shadow = np.frombuffer(shadow, np.uint8)
        self.num_copies: Callable[[], int] = double.zinf_double_num_copies
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, capacity: int) -> int:
        if self._free.get(capacity):
            return self._free[capacity].pop()
        self._end += capacity
        assert self._end <= DEVICE_NBYTES
        return self._end - capacity

    def give(self, offset: int, capacity: int) -> None:
        self._free.setdefault(capacity, []).append(offset)

    def allocate(self, nbytes: int) -> DoubleBuffer:
        capacity = align_up(max(nbytes, 1))
        memory = DoubleMemory(self, capacity)
        return DoubleBuffer(memory, memory.offset, nbytes, capacity)

    def view(self, buffer: Buffer) -> np.ndarray:
        if buffer.space is not MemorySpace.DEVICE:
            return buffer.array
        return self.shadow[buffer.array.offset :][: buffer.nbytes]

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        self.view(dst)[:] = self.view(src)
        return CompletedTransfer()

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


class FlakyEngine:
    """The real engine, of which an armed transfer fails once with kvikio's words."""

    def __init__(self, inner: FileEngine) -> None:
        self.inner = inner
        self.path_taken = inner.path_taken
        self.device = inner.device
        self.armed: set[Operation] = set()

    def open(self, path: Path) -> DirectFile:
        return FlakyFile(self, self.inner.open(path))


class FlakyFile:
    def __init__(self, engine: FlakyEngine, inner: Any) -> None:
        self._engine = engine
        self._inner = inner
        self.close = inner.close

    def read(self, memory: Any, offset: int) -> None:
        self._fail(Operation.READ)
        self._inner.read(memory, offset)

    def write(self, memory: Any, offset: int) -> None:
        self._fail(Operation.WRITE)
        self._inner.write(memory, offset)

    def _fail(self, operation: Operation) -> None:
        if operation in self._engine.armed:
            self._engine.armed.remove(operation)
            raise OSError(errno.EIO, "Input/output error (kvikio: armed)")


class KvikioSuite(NvmeSuite):
    options = GDS

    def __init__(self, device: DoubleDevice | None) -> None:
        self.device = device
        self.engine = FlakyEngine(open_gds(self.options, device))

    def open_tier(self, folder: Path) -> Tier:
        self.folder = folder
        return NvmeTier.open(folder, options=self.options, engine=self.engine)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        self.engine.armed.add(operation)
        return True

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.device.allocate(nbytes) if self.device else host_buffer(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        array = self.device.view(buffer) if self.device else buffer.array
        array[:] = np.frombuffer(data, np.uint8)

    def contents(self, buffer: Buffer) -> bytes:
        return bytes((self.device.view(buffer) if self.device else buffer.array).tobytes())


def machine_error(suite: KvikioSuite) -> str | None:
    """Return what the state machine found wrong."""
    machine = machine_for(
        lambda folder: NvmeTier.open(folder, options=SMALL_GDS, device=suite.device),
        make_buffer=suite.make_buffer,
        fill=suite.fill,
        contents=suite.contents,
    )
    found = settings(
        max_examples=8, stateful_step_count=25, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return outcome(lambda: run_state_machine_as_test(machine, settings=found))


def outcome(call: Callable[[], object]) -> str | None:
    """Return the error that `call` raises, in one line."""
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - reported
        return f"{type(exc).__name__}: {exc}".replace("\n", " ")
    return None


def faults(suite: KvikioSuite, folder: Path) -> dict[str, str | None]:
    """Return what each fault, made by the system, is reported as."""
    engine = open_gds(GDS, suite.device)
    found = {"missing": outcome(lambda: engine.open(folder / "absent"))}
    path = folder / "file"
    path.write_bytes(bytes(8192))
    file = engine.open(path)
    whole = host_buffer(8192)
    found["past the end"] = outcome(lambda: file.read(whole.array.data, 4096))
    found["read-only memory"] = outcome(lambda: file.read(memoryview(bytes(8192)), 0))
    file.close()
    found["closed"] = outcome(lambda: file.write(whole.array.data, 0))
    found |= _tier_faults(suite, folder / "tier")
    return found


def _tier_faults(suite: KvikioSuite, folder: Path) -> dict[str, str | None]:
    tier = NvmeTier.open(folder, options=GDS, device=suite.device)
    nbytes = 2 * MiB
    buffer = suite.make_buffer(nbytes)
    tier.reserve(KEY, nbytes)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB // 2, limits[1]))
    found = {"no room": outcome(tier.write_from(KEY, buffer).wait)}
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["room again"] = outcome(tier.write_from(KEY, buffer).wait)
    tier.flush().wait()
    segment = folder / "segment-00000.zinf"
    size = segment.stat().st_size
    with segment.open("rb+") as file:
        file.truncate(8192)
    found["cut"] = outcome(tier.read_into(KEY, buffer).wait)
    with segment.open("rb+") as file:
        file.truncate(size)
    found["not cut"] = outcome(tier.read_into(KEY, suite.make_buffer(8192)).wait)
    tier.close()
    segment.unlink()
    found["segment missing"] = outcome(
        lambda: NvmeTier.open(folder, options=GDS, device=suite.device)
    )
    return found


def full_disk_error(suite: KvikioSuite, folder: Path) -> str | None:
    """Return what a write is reported as on a file system that filled up after the reserve."""

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    options = replace(SMALL_GDS, segment_nbytes=4096)
    calls = SystemCalls(fallocate=refuse)
    tier = NvmeTier.open(folder, options=options, calls=calls, device=suite.device)
    tier.reserve(KEY, 65536)
    outcome(lambda: (folder / "junk").write_bytes(bytes(MiB)))
    error = outcome(tier.write_from(KEY, suite.make_buffer(65536)).wait)
    tier.close()
    return error


def main(mode: str, folder: Path, disk: Path | None = None) -> None:
    warnings.simplefilter("error")
    device: DoubleDevice | None = DoubleDevice() if mode == "device" else None
    assert device is None or isinstance(device, Device)
    monitor = kvikio.SummaryMonitor() if hasattr(kvikio, "SummaryMonitor") else None
    before = num_fds()
    suite = KvikioSuite(device)
    if disk is not None:
        sys.stdout.write(json.dumps({"full disk": full_disk_error(suite, disk)}))
        return
    tier = NvmeTier.open(folder / "look", options=GDS, device=device)
    report: dict[str, object] = {
        "path_taken": tier.path_taken,
        "memory_spaces": sorted(space.value for space in tier.capabilities.memory_spaces),
    }
    tier.close()
    report["failures"] = failures_of(suite, folder / "kit")
    report["machine"] = machine_error(suite)
    report["faults"] = faults(suite, folder)
    report["left_fds"] = num_fds() - before
    report["num_device_copies"] = device.num_copies() if device else 0
    report["num_threads"] = kvikio.defaults.get("num_threads")
    if monitor is not None:
        summary = monitor.get()
        report["bytes_moved"] = summary.bytes_transferred
        report["backends"] = {
            name: found["bytes_transferred"] for name, found in summary.by_backend.items()
        }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
