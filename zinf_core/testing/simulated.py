"""SimulatedDevice: a device without the hardware, that shows every missing wait."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from zinf_core.buffers import Buffer, ByteArray
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import (
    InternalError,
    RangeError,
    TransferError,
    TransferTimeoutError,
    UnsupportedBufferError,
)
from zinf_core.testing.deferred import Order, latest
from zinf_core.testing.registrations import Registrations
from zinf_core.testing.simulated_memory import POISON, MemoryRange, SimulatedBuffer
from zinf_core.units import align_up

_POLLS_UNTIL_DONE: Final = 8


class SimulatedDevice:
    """A `zinf_core.device.Device` whose memory is numpy's and whose copies are late.

    A copy poisons its destination when it is submitted and reads its source only when it happens,
    on a thread of the device: when someone waits for it, after `polls_until_done` calls of `done`
    (callers that poll are not stuck), or at `close`. Copies submitted before it may happen first,
    in the order drawn by `order`; copies that share memory keep the order of their submission.
    Copies in flight keep memory mapped but do not count as its users, see `MemoryRange`.

    The CPU reaches device memory through `view` only, which raises while a copy of it is pending.
    Mistakes with registered memory raise as well, where hardware would corrupt memory or fail at
    random; see `Registrations`.

    Thread-safe: one lock guards the copies. `close` it, or use it in a ``with`` statement.
    """

    def __init__(
        self,
        name: str = "sim:0",
        *,
        order: Order = latest,
        polls_until_done: int = _POLLS_UNTIL_DONE,
        lockable_nbytes: int | None = None,
    ) -> None:
        """Start without copies or threads. `register` refuses more than `lockable_nbytes`."""
        self._name = name
        self._order = order
        self._polls_until_done = polls_until_done
        self._registrations = Registrations(name, lockable_nbytes=lockable_nbytes)
        self._lock = threading.RLock()  # the collector may unregister memory while we hold it
        self._pending: list[_Copy] = []
        self._num_copies = 0
        self._num_failing = 0
        self._closed = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"zinf-{name}")

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self._name

    @property
    def space(self) -> MemorySpace:
        """MemorySpace.DEVICE."""
        return MemorySpace.DEVICE

    @property
    def num_pending(self) -> int:
        """Copies submitted that have not happened."""
        with self._lock:
            return len(self._pending)

    @property
    def num_copies(self) -> int:
        """Copies submitted so far."""
        with self._lock:
            return self._num_copies

    @property
    def registered_nbytes(self) -> int:
        """Bytes of host memory registered now."""
        return self._registrations.nbytes

    def allocate(self, nbytes: int) -> SimulatedBuffer:
        """Return poisoned device memory, of whole pages; of none for 0 bytes."""
        self._require_open()
        return SimulatedBuffer.allocate(self, nbytes, align_up(nbytes))

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        """Keep a copy for later. Raises as `Device.copy`; RangeError also if the two overlap."""
        self._validate(dst, src)
        with self._lock:
            self._require_open()
            self._num_copies += 1
            if not dst.nbytes:
                return CompletedTransfer()
            item = _Copy(self, self._num_copies, dst=MemoryRange(dst), src=MemoryRange(src))
            item.fails = self._num_failing > 0
            self._num_failing -= item.fails
            self._pending.append(item)
            self._poison()
            return item

    def view(self, buffer: Buffer) -> ByteArray:
        """Return the bytes of `buffer`, for what computes on the device and for tests.

        Views, and tensors made from them, count in `buffer.is_shared`. Raises InternalError if a
        copy from or to these bytes is pending, or if they are not this device's.
        """
        bytes_ = self._own(buffer).backing
        start = int(bytes_.ctypes.data)
        with self._lock:
            for item in self._pending:
                if item.touches(start, start + bytes_.nbytes):
                    raise InternalError(
                        f"{self._name}: {buffer.nbytes} bytes at {buffer.address:#x} are used "
                        f"before {item.what} is done; wait for its completion first"
                    )
        return bytes_

    def register(self, address: int, nbytes: int) -> None:
        """Note that `nbytes` at `address` are pinned. Raises as `Registrations.add`."""
        self._registrations.add(address, nbytes)

    def unregister(self, address: int) -> None:
        """Forget what `register` noted. Raises InternalError if it is not there, if it was
        unmapped before, or if a copy of it is pending."""
        with self._lock:
            found = self._registrations.find(address)
            for item in self._pending:
                if item.touches(found.start, found.stop):
                    raise InternalError(
                        f"{self._name}: host memory at {address:#x} is unregistered before "
                        f"{item.what} is done"
                    )
            self._registrations.remove(address)

    def fail_next(self, count: int = 1) -> None:
        """Let the next `count` copies fail with TransferError after half of their bytes."""
        with self._lock:
            self._num_failing += count

    def close(self) -> None:
        """Let pending copies happen and end the thread; a second call does nothing.

        Memory stays valid; `view` and `unregister` still work. Raises InternalError if registered
        memory was unmapped.
        """
        with self._lock:
            self._closed = True
            while left := [item for item in self._pending if not item.released]:
                self._release(left[self._order(len(left))])
        self._executor.shutdown()
        self._registrations.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InternalError(f"{self._name}: the device was closed")

    def _own(self, buffer: Buffer) -> SimulatedBuffer:
        if isinstance(buffer, SimulatedBuffer) and buffer.device is self:
            return buffer
        raise InternalError(f"{self._name}: {type(buffer).__name__} is not memory of this device")

    def _validate(self, dst: Buffer, src: Buffer) -> None:
        if dst.nbytes != src.nbytes:
            raise RangeError(f"{self._name}: copy of {src.nbytes} bytes into {dst.nbytes} bytes")
        for buffer in (dst, src):
            foreign = not isinstance(buffer, SimulatedBuffer) or buffer.device is not self
            if foreign and buffer.space is MemorySpace.DEVICE:
                raise UnsupportedBufferError(f"{self._name}: memory of another device")
        if MemorySpace.DEVICE not in (dst.space, src.space):
            raise UnsupportedBufferError(f"{self._name}: neither side of the copy is on the device")
        start, stop = src.address, src.address + src.nbytes
        if dst.nbytes and dst.address < stop and start < dst.address + dst.nbytes:
            raise RangeError(f"{self._name}: source and destination overlap at {dst.address:#x}")

    def _poison(self) -> None:
        """Poison destinations, except those that an earlier copy still reads or writes."""
        for item in self._pending:
            if not item.poisoned and not any(self._before(item)):
                item.poison()

    def _before(self, item: _Copy) -> Iterator[_Copy]:
        """Iterate over the pending copies that have to happen before `item`."""
        for other in self._pending:
            if other is item:
                return
            if other.conflicts(item):
                yield other

    def _until(self, target: _Copy) -> None:
        """Release drawn copies until `target` is among them."""
        with self._lock:
            while not target.released:
                others = [c for c in self._pending if not c.released and c is not target]
                self._release([target, *others][self._order(len(others) + 1)])

    def _release(self, item: _Copy) -> None:
        """Give `item` to the thread, after what has to happen before it."""
        if not item.released:
            item.released = True
            for other in list(self._before(item)):
                self._release(other)
            self._executor.submit(self._happen, item)

    def _happen(self, item: _Copy) -> None:
        item.move()
        with self._lock:
            self._pending.remove(item)
            self._poison()
        item.settle()

    def _poll(self, item: _Copy) -> bool:
        with self._lock:
            item.num_polls += 1
            if item.num_polls >= self._polls_until_done:
                self._until(item)
        return item.happened


class _Copy:
    """One copy in flight; the device's lock guards its flags."""

    def __init__(
        self, device: SimulatedDevice, number: int, *, dst: MemoryRange, src: MemoryRange
    ) -> None:
        self.what = f"copy {number} of {dst.stop - dst.start} bytes, {src.label} -> {dst.label},"
        self.fails = False
        self.poisoned = False
        self.released = False
        self.num_polls = 0
        self._device = device
        self._sides: tuple[MemoryRange, MemoryRange] | None = (dst, src)
        self._happened = threading.Event()
        self._error: Exception | None = None

    @property
    def happened(self) -> bool:
        return self._happened.is_set()

    def touches(self, start: int, stop: int) -> bool:
        return any(side.overlaps(start, stop) for side in self._sides or ())

    def conflicts(self, later: _Copy) -> bool:
        """Return whether `later` must not overtake this copy."""
        if self._sides is None or later._sides is None:
            return False
        dst, src = self._sides
        to, from_ = later._sides
        return (
            dst.overlaps(to.start, to.stop)
            or dst.overlaps(from_.start, from_.stop)
            or src.overlaps(to.start, to.stop)
        )

    def poison(self) -> None:
        self.poisoned = True
        if self._sides is not None:
            self._sides[0].array[:] = POISON

    def move(self) -> None:
        """Move the bytes, or half of them if the copy is to fail."""
        if self._sides is not None:
            dst, src = self._sides
            nbytes = dst.array.nbytes // 2 if self.fails else dst.array.nbytes
            dst.array[:nbytes] = src.array[:nbytes]
        if self.fails:
            self._error = TransferError(errno.EIO, f"{self.what} failed as it was told to")

    def settle(self) -> None:
        """Let go of the memory, and then of those who wait."""
        self._sides = None
        self._happened.set()

    def done(self) -> bool:
        return self._device._poll(self)  # noqa: SLF001 - the two classes are one unit

    def wait(self, timeout_s: float | None = None) -> None:
        is_poll = timeout_s is not None and timeout_s <= 0
        if not is_poll:
            self._device._until(self)  # noqa: SLF001 - the two classes are one unit
        arrived = self.done() if is_poll else self._happened.wait(timeout_s)
        if not arrived:
            raise TransferTimeoutError(f"{self.what} is not done after {timeout_s} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
