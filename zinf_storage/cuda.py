"""CudaDevice: memory, streams and events of a CUDA device. The only module that imports cupy."""

from __future__ import annotations

import errno
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import (
    BudgetError,
    ConfigError,
    InternalError,
    RangeError,
    TransferError,
    UnsupportedBufferError,
)
from zinf_core.units import align_up, format_nbytes
from zinf_storage.cuda_copies import CopyLane, CudaCopy
from zinf_storage.machine import probe_cuda

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""
_ALREADY_REGISTERED: Final = 712
_NOT_REGISTERED: Final = 713


def cuda_problem() -> str | None:
    """Return why no CUDA device can be used, as the rest of a sentence; None when one can.

    cupy is imported only if the driver sees a device.
    """
    cuda = probe_cuda()
    if importlib.util.find_spec("cupy") is None:
        extra = "cuda12" if (cuda.driver or "").startswith("12.") else "cuda13"
        return f'needs cupy; pip install "zinf[{extra}]"'
    if cuda.problem is not None:
        return f"needs a CUDA device: {cuda.problem}"
    try:
        cupy = _load_cupy()
    except ConfigError as exc:
        return f"needs cupy: {exc}"
    return None if cupy.cuda.is_available() else "needs a CUDA device; cupy sees none"


class CudaDevice:
    """A `zinf_core.device.Device` on one CUDA device.

    Copies to the device and copies from it have a stream each, so that both directions of the bus
    are in use; both wait for what was submitted to the compute stream before. Copies with pinned
    memory run by themselves; with other host memory `copy` blocks until the bytes are staged.

    Thread-safe: one lock guards the streams and their copies in flight.
    """

    def __init__(
        self,
        index: int,
        *,
        malloc: Callable[[int, int, int], int] | None = None,
        free: Callable[[int], None] | None = None,
        compute_stream: Callable[[], int] | None = None,
    ) -> None:
        """Use device number `index`.

        Memory comes from ``malloc(nbytes, index, stream)``, an address, and goes back with
        ``free(address)``; by default from cupy's pool. `compute_stream` returns the address of
        the stream that is current for compute in the calling thread; by default the legacy stream.

        Raises ConfigError without cupy, for a device that is not there, or for only one of
        `malloc` and `free`.
        """
        if (malloc is None) != (free is None):
            raise ConfigError(f"cuda:{index}: give malloc and free, or neither")
        self._cupy = _load_cupy()
        self._index = index
        self._compute_stream = compute_stream or _legacy_stream
        self._lock = threading.Lock()
        try:
            count = self._cupy.cuda.runtime.getDeviceCount()
        except RuntimeError as exc:
            raise ConfigError(f"cuda:{index} cannot be used: {exc}") from exc
        if not 0 <= index < count:
            raise ConfigError(f"cuda:{index} is not there; CUDA sees {count} devices")
        with self._current():
            self._to_device = CopyLane(self._cupy)
            self._from_device = CopyLane(self._cupy)
        if malloc is None or free is None:
            self._malloc = self._cupy.get_default_memory_pool().malloc
        else:
            take, give = malloc, free
            self._malloc = self._cupy.cuda.PythonFunctionAllocator(
                lambda nbytes, device: take(nbytes, device, self._compute_stream()),
                lambda address, device: give(address),
            ).malloc

    @property
    def name(self) -> str:
        """``"cuda:0"``."""
        return f"cuda:{self._index}"

    @property
    def space(self) -> MemorySpace:
        """MemorySpace.DEVICE."""
        return MemorySpace.DEVICE

    def read_memory(self) -> tuple[int, int]:
        """Return (bytes free on the device, bytes it has)."""
        with self._current():
            free_nbytes, total_nbytes = self._cupy.cuda.runtime.memGetInfo()
        return int(free_nbytes), int(total_nbytes)

    def allocate(self, nbytes: int) -> CudaBuffer:
        """Return `nbytes` of device memory, its capacity whole pages; no memory for 0 bytes.

        The memory goes back when the last array or tensor over it dies. Raises BudgetError if the
        device has no room.
        """
        capacity = align_up(nbytes)
        cuda = self._cupy.cuda
        if not capacity:
            nothing = cuda.UnownedMemory(0, 0, None, device_id=self._index)
            return CudaBuffer(self._cupy, cuda.MemoryPointer(nothing, 0), 0, 0)
        try:
            # cupy hands a freed block to the next user of the same stream only: here, to us, whose
            # copies wait for the compute that may still use it.
            with self._current(), self._to_device.stream:
                pointer = self._malloc(capacity)
        except (MemoryError, RuntimeError) as exc:
            raise BudgetError(
                f"{self.name} refused {capacity} bytes ({format_nbytes(capacity)}): {exc}; lower "
                "the device budget or free memory"
            ) from exc
        return CudaBuffer(self._cupy, pointer, nbytes, capacity)

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        """Submit a copy of all bytes of `src` to `dst`, as `Device.copy`.

        A timeout of the completion's `wait` costs a thread, which ends with the copy.
        """
        if dst.nbytes != src.nbytes:
            raise RangeError(f"{self.name}: copy of {src.nbytes} bytes into {dst.nbytes} bytes")
        if MemorySpace.DEVICE not in (dst.space, src.space):
            raise UnsupportedBufferError(f"{self.name}: neither side of the copy is on the device")
        if not dst.nbytes:
            return CompletedTransfer()
        compute_stream = self._compute_stream()
        lanes = self._to_device, self._from_device
        lane, other = lanes if dst.space is MemorySpace.DEVICE else lanes[::-1]
        copy = CudaCopy(dst, src, name=self.name, synchronize=self._synchronize)
        try:
            with self._lock, self._current():
                lane.follow(compute_stream)
                lane.follow_copies(other, copy)
                lane.submit(copy, self._kind(dst, src))
        except RuntimeError as exc:
            return CompletedTransfer(copy.failure(exc))
        return copy

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory. Raises BudgetError if it is refused, InternalError if it is pinned."""
        try:
            with self._current():
                self._cupy.cuda.runtime.hostRegister(address, nbytes, _PORTABLE)
        except RuntimeError as exc:
            if getattr(exc, "status", None) == _ALREADY_REGISTERED:
                raise InternalError(f"{self.name}: {address:#x} is registered already") from exc
            raise BudgetError(f"{self.name} refused to pin {nbytes} bytes: {exc}") from exc

    def unregister(self, address: int) -> None:
        """Unpin host memory. Raises InternalError if nothing was pinned at `address`."""
        try:
            with self._current():
                self._cupy.cuda.runtime.hostUnregister(address)
        except RuntimeError as exc:
            if getattr(exc, "status", None) == _NOT_REGISTERED:
                raise InternalError(f"{self.name}: nothing is pinned at {address:#x}") from exc
            raise TransferError(
                errno.EIO, f"{self.name}: cannot unpin memory at {address:#x}: {exc}"
            ) from exc

    def _synchronize(self, event: Any) -> None:
        with self._current():
            event.synchronize()

    def _kind(self, dst: Buffer, src: Buffer) -> int:
        runtime = self._cupy.cuda.runtime
        if dst.space is not MemorySpace.DEVICE:
            return int(runtime.memcpyDeviceToHost)
        if src.space is not MemorySpace.DEVICE:
            return int(runtime.memcpyHostToDevice)
        return int(runtime.memcpyDeviceToDevice)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make this the calling thread's device."""
        with self._cupy.cuda.Device(self._index):
            yield


class CudaBuffer:
    """Device memory behind one cupy byte array."""

    __slots__ = ("_capacity_nbytes", "_cupy", "_nbytes", "_pointer", "array")

    space: MemorySpace = MemorySpace.DEVICE

    def __init__(self, cupy: Any, pointer: Any, nbytes: int, capacity_nbytes: int) -> None:
        """Take the first `nbytes` of `capacity_nbytes` at `pointer`, a cupy MemoryPointer.

        Raises RangeError if they do not fit.
        """
        if nbytes > capacity_nbytes:
            raise RangeError(f"{nbytes} bytes do not fit {capacity_nbytes} bytes of device memory")
        self._cupy = cupy
        self._pointer = pointer
        self._nbytes = nbytes
        self._capacity_nbytes = capacity_nbytes
        self.array: Any = cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=pointer)

    @property
    def address(self) -> int:
        """Address on the device; 0 if there is no memory."""
        return int(self._pointer.ptr)

    @property
    def nbytes(self) -> int:
        """Bytes a transfer moves."""
        return self._nbytes

    @property
    def capacity_nbytes(self) -> int:
        """Bytes that belong to the buffer, padding included."""
        return self._capacity_nbytes

    def is_shared(self) -> bool:
        """Return whether an array or a foreign tensor still references the memory.

        Views refer to `array`, or to the memory through a pointer of their own. Ours are two
        references to the array (attribute, argument), three to its pointer (attribute, argument,
        the array's) and two to the memory (the pointer's, argument).
        """
        return (
            sys.getrefcount(self.array) > 2
            or sys.getrefcount(self._pointer) > 3
            or sys.getrefcount(self._pointer.mem) > 2
        )

    def resized(self, nbytes: int) -> CudaBuffer:
        """Return a buffer over the same memory for another use of at most its capacity."""
        return CudaBuffer(self._cupy, self._pointer, nbytes, self._capacity_nbytes)

    def part(self, start: int, nbytes: int) -> CudaBuffer:
        """Return a buffer over `nbytes` from byte `start` on. Raises RangeError outside it."""
        end = start + nbytes
        if start < 0 or nbytes < 0 or end > self._nbytes:
            raise RangeError(f"bytes {start} to {end} lie outside a buffer of {self._nbytes}")
        last = self._capacity_nbytes if end == self._nbytes else end
        return CudaBuffer(self._cupy, self._pointer + start, nbytes, last - start)


def _load_cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415 - cupy is optional
    except ImportError as exc:
        raise ConfigError(
            f'CUDA devices need cupy; pip install "zinf[cuda13]" or "zinf[cuda12]" ({exc})'
        ) from exc
    return cupy


def _legacy_stream() -> int:
    return 0
