"""What the NVMe tests share: bytes, buffers, and system calls that fail or wait when told to."""

from __future__ import annotations

import os
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from zinf_core.buffers import HostBuffer
from zinf_core.keys import StateKind, TensorKey
from zinf_core.units import align_up
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme import NvmeOptions, NvmeTier, SystemCalls

SMALL = NvmeOptions(io_nbytes=8192, segment_nbytes=1 << 20, num_threads=2)
"""Small requests, so that a few pages make several blocks."""


def num_fds() -> int:
    """Return the open descriptors of this process, the one used for looking included."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def key(index: int) -> TensorKey:
    return TensorKey.of(f"layers.{index}.weight", StateKind.PARAM)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(1000 * nbytes + seed).randbytes(nbytes)


def buffer_of(data: bytes) -> HostBuffer:
    buffer = PageAlignedAllocator().allocate(max(len(data), 1)).resized(len(data))
    buffer.array[:] = np.frombuffer(data, np.uint8)
    return buffer


def exact_buffer_of(data: bytes) -> HostBuffer:
    """Return a page-aligned buffer whose capacity ends with its bytes; see `is_guard_intact`."""
    whole = PageAlignedAllocator().allocate(len(data) + 4096).memory
    whole[:] = 0x5A
    whole[: len(data)] = np.frombuffer(data, np.uint8)
    return HostBuffer(whole[: len(data)])


def is_guard_intact(buffer: HostBuffer) -> bool:
    """Return whether the memory behind an exact buffer is as it was."""
    whole = buffer.memory.base
    return isinstance(whole, np.ndarray) and bool((whole[buffer.nbytes :] == 0x5A).all())


def write(tier: NvmeTier, which: TensorKey, data: bytes, offset: int = 0) -> None:
    tier.write_from(which, buffer_of(data), offset=offset).wait(timeout_s=30)


def store(tier: NvmeTier, which: TensorKey, data: bytes) -> None:
    tier.reserve(which, len(data))
    write(tier, which, data)


def read(tier: NvmeTier, which: TensorKey) -> bytes:
    buffer = buffer_of(b"\xa5" * tier.stat(which).nbytes)
    tier.read_into(which, buffer).wait(timeout_s=30)
    return buffer.array.tobytes()


def flush(tier: NvmeTier) -> None:
    tier.flush().wait(timeout_s=30)


@contextmanager
def opened(
    folder: Path, options: NvmeOptions = SMALL, calls: SystemCalls | None = None
) -> Iterator[NvmeTier]:
    tier = NvmeTier.open(folder, options=options, calls=calls)
    try:
        yield tier
    finally:
        tier.close()


def unaccounted_nbytes(tier: NvmeTier) -> int:
    """Return bytes of the segments that are neither free nor a key's: 0 after a flush."""
    segments = tier._parts.segments
    held = sum(align_up(tier.stat(k).nbytes) for k in list(tier.keys()))
    return segments.allocated_nbytes - segments.free_nbytes - held


def segment_of(tier: NvmeTier, which: TensorKey) -> tuple[Path, int]:
    """Return the file and the offset in it where a key begins."""
    extent = tier.stat(which)
    return tier._parts.folder.segment_path(extent.segment), extent.offset


class FailingCalls:
    """System calls one of which fails, once, at its n-th call after `arm`. Counts all calls."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.failed_in: set[str] = set()
        """Functions that the failed call was made in."""
        self._armed: tuple[str, int, OSError | int] | None = None
        self._lock = threading.Lock()

    def arm(self, name: str, failure: OSError | int, *, nth: int = 0) -> None:
        """Fail with an error, or, for an int, move at most that many bytes."""
        with self._lock:
            self._armed = (name, self.counts.get(name, 0) + nth, failure)

    @property
    def fired(self) -> bool:
        return self._armed is None

    def calls(self) -> SystemCalls:
        return SystemCalls(
            **{
                field.name: self._wrapped(field.name, field.default)
                for field in fields(SystemCalls)
            }
        )

    def _wrapped(self, name: str, real: Callable) -> Callable:
        def call(*args: object) -> int:
            with self._lock:
                number = self.counts.get(name, 0)
                self.counts[name] = number + 1
                self.log.append(name)
                failure = None
                if self._armed and self._armed[:2] == (name, number):
                    failure, self._armed = self._armed[2], None
                    self.failed_in = {frame.name for frame in traceback.extract_stack()}
            if isinstance(failure, OSError):
                raise failure
            if isinstance(failure, int):
                fd, (view,), offset = args
                moved = real(fd, [view[: align_up(failure)]], offset) if failure else 0
                return min(moved, failure)
            return real(*args)

        return call


class Gate:
    """Holds reads, writes or syncs of the tier until opened."""

    def __init__(self) -> None:
        self._open = {name: threading.Event() for name in ("preadv", "pwritev", "fdatasync")}
        self.entered = {name: threading.Event() for name in self._open}
        for event in self._open.values():
            event.set()

    def hold(self, name: str) -> None:
        self._open[name].clear()
        self.entered[name].clear()

    def release(self, name: str) -> None:
        self._open[name].set()

    def calls(self) -> SystemCalls:
        return SystemCalls(
            preadv=self._wrapped("preadv", os.preadv),
            pwritev=self._wrapped("pwritev", os.pwritev),
            fdatasync=self._wrapped("fdatasync", os.fdatasync),
        )

    def _wrapped(self, name: str, real: Callable) -> Callable:
        def call(*args: object) -> int:
            self.entered[name].set()
            assert self._open[name].wait(timeout=30)
            return real(*args)

        return call
