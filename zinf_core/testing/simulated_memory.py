"""Memory of a simulated device: numpy behind it, nothing that numpy can reach in front."""

from __future__ import annotations

import mmap
import sys
from typing import Any, Final

import numpy as np

from zinf_core.buffers import Buffer, ByteArray
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import RangeError, UnsupportedError

POISON: Final = 0xFF
"""Byte of device memory that nothing was copied to, and of destinations until their copy happens:
NaN in every floating-point type."""

_DEVICE_BASE: Final = 1 << 60
"""Distance of a buffer's address from where its bytes lie: no CPU instruction and no system call
accepts the sum."""


class SimulatedArray:
    """What `SimulatedBuffer.array` is: it has a length and can be cut, and that is all.

    Like a cupy array it raises when numpy wants its bytes.
    """

    __slots__ = ("__weakref__", "_backing")

    def __init__(self, backing: ByteArray) -> None:
        """Stand for the bytes of `backing`."""
        self._backing = backing

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._backing.nbytes

    @property
    def shape(self) -> tuple[int]:
        """``(nbytes,)``."""
        return (self._backing.nbytes,)

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """Bytes."""
        return self._backing.dtype

    def __len__(self) -> int:
        return self._backing.nbytes

    def __getitem__(self, index: object) -> SimulatedArray:
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise _untouchable()
        return SimulatedArray(self._backing[index])

    def __setitem__(self, index: object, value: object) -> None:
        raise _untouchable()

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        raise _untouchable()


class SimulatedBuffer:
    """Device memory of a `SimulatedDevice`, which alone makes them and looks behind them."""

    __slots__ = ("_backing", "_nbytes", "array", "device")

    space: MemorySpace = MemorySpace.DEVICE

    def __init__(self, device: object, backing: ByteArray, nbytes: int) -> None:
        """Stand for the first `nbytes` of `backing`, memory of `device`.

        As for HostBuffer, the base of `backing` must not be an array. Raises RangeError if it is
        too short.
        """
        if nbytes > backing.nbytes:
            raise RangeError(f"{nbytes} bytes do not fit {backing.nbytes} bytes of device memory")
        self.device = device
        self._backing = backing
        self._nbytes = nbytes
        self.array = SimulatedArray(backing[:nbytes])

    @classmethod
    def allocate(cls, device: object, nbytes: int, capacity_nbytes: int) -> SimulatedBuffer:
        """Return a buffer on a private mapping of its own, filled with POISON."""
        if not capacity_nbytes:
            return cls(device, np.frombuffer(bytearray(), np.uint8), nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, capacity_nbytes, flags=flags)
        backing: ByteArray = np.frombuffer(memoryview(mapping), np.uint8)
        backing[:] = POISON
        return cls(device, backing, nbytes)

    @property
    def backing(self) -> ByteArray:
        """The bytes; only for `SimulatedDevice.view`, which knows whether they may be seen."""
        return self._backing[: self._nbytes]

    @property
    def address(self) -> int:
        """Address on the device, page aligned for a whole allocation; 0 if it has no memory."""
        return _address(self._backing) + _DEVICE_BASE if self._backing.nbytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes a transfer moves."""
        return self._nbytes

    @property
    def capacity_nbytes(self) -> int:
        """Bytes that belong to the buffer, padding included."""
        return self._backing.nbytes

    def is_shared(self) -> bool:
        """Return whether a view of `SimulatedDevice.view`, or a tensor over it, is still held.

        Counted as in `HostBuffer.is_shared`. Copies in flight do not count: whoever submitted
        them has to keep the lease.
        """
        return sys.getrefcount(self.array) > 2 or sys.getrefcount(self._backing) > 3

    def resized(self, nbytes: int) -> SimulatedBuffer:
        """Return a buffer over the same memory for another use of at most its capacity."""
        return SimulatedBuffer(self.device, self._backing, nbytes)

    def part(self, start: int, nbytes: int) -> SimulatedBuffer:
        """Return a buffer over `nbytes` from byte `start` on. Raises RangeError outside it."""
        end = start + nbytes
        if start < 0 or nbytes < 0 or end > self._nbytes:
            raise RangeError(f"bytes {start} to {end} lie outside a buffer of {self._nbytes}")
        last = self._backing.nbytes if end == self._nbytes else end
        return SimulatedBuffer(self.device, self._backing[start:last], nbytes)


class MemoryRange:
    """One side of a copy in flight.

    Keeps the memory mapped, and is no reference that `is_shared` would count: a lease released
    under a copy is given to the next user at once, and the copy then ruins what that one does.
    """

    __slots__ = ("_array", "label", "start", "stop")

    def __init__(self, buffer: Buffer) -> None:
        """Stand for the `nbytes` of `buffer`, in the host's or the simulated device's memory."""
        array: ByteArray = (
            buffer.backing if isinstance(buffer, SimulatedBuffer) else np.asarray(buffer.array)
        )
        self.start = _address(array)
        self.stop = self.start + array.nbytes
        self.label = f"{buffer.space.value} {buffer.address:#x}"
        self._array: ByteArray = np.asarray(_Anchored(array))

    @property
    def array(self) -> ByteArray:
        """The bytes, to be used when the copy happens."""
        return self._array

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether the range shares a byte with ``[start, stop)``."""
        return self.start < stop and start < self.stop


class _Anchored:
    """Memory of an array by address, and whatever keeps it mapped."""

    __slots__ = ("__array_interface__", "_anchor")

    def __init__(self, array: ByteArray) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (_address(array), False),
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        anchor: Any = array
        while isinstance(anchor, np.ndarray) and anchor.base is not None:
            anchor = anchor.base
        self._anchor: object = anchor


def _address(array: ByteArray) -> int:
    return int(array.ctypes.data)


def _untouchable() -> UnsupportedError:
    return UnsupportedError(
        "the CPU cannot reach device memory; copy it with Device.copy, or look at it in a test "
        "with SimulatedDevice.view"
    )
