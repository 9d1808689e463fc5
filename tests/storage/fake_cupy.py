"""A stand-in for cupy: streams and events that do their work late, in host memory.

`test_cuda_module.py` checks that the real package has every name used here. Work on a stream
happens in order, and as late as it may: when an event behind it is synchronized, or was asked
`POLLS` times whether it is done. Two streams are ordered only by the events one waits for.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import numpy as np

POLLS = 3


class CudaError(RuntimeError):
    """As cupy's CUDARuntimeError: a RuntimeError with a status."""

    def __init__(self, status: int, text: str = "as it was told to") -> None:
        super().__init__(text)
        self.status = status


class OutOfMemoryError(MemoryError):
    pass


@dataclass
class Scope:
    """Context manager that counts how deep it is entered."""

    depth: int = 0

    def __enter__(self) -> Self:
        self.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Memory:
    def __init__(self, address: int, size: int, give: Callable[[], None] | None = None) -> None:
        self.ptr, self.size, self._give = address, size, give

    def __del__(self) -> None:
        if self._give is not None:
            self._give()


class MemoryPointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


class Array:
    def __init__(self, shape: tuple[int], *, dtype: object, memptr: MemoryPointer) -> None:
        self.shape, self.dtype, self.data, self.nbytes = shape, dtype, memptr, shape[0]


@dataclass
class FakeCuda:
    """State behind the functions: streams, registered memory, and what is to fail."""

    num_devices: int = 1
    memory_nbytes: int = 64 << 20
    refuse: dict[str, int] = field(default_factory=dict)
    """Status that the next call of a name fails with."""
    registered: dict[int, int] = field(default_factory=dict)
    current_devices: list[int] = field(default_factory=list)
    taken: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {0: Stream(self, 0)}
        self.events: dict[int, Event] = {}
        self.stream_scope = Scope()
        self.device_memory: dict[int, mmap.mmap] = {}

    def check(self, name: str) -> None:
        if name in self.refuse:
            raise CudaError(self.refuse.pop(name))

    def new_stream(self, *, non_blocking: bool) -> Stream:
        stream = self.streams[len(self.streams)] = Stream(self, len(self.streams))
        stream.non_blocking = non_blocking
        return stream

    def malloc(self, nbytes: int) -> MemoryPointer:
        assert self.current_devices
        in_use = sum(map(len, self.device_memory.values()))
        if in_use + nbytes > self.memory_nbytes:
            raise OutOfMemoryError(f"{nbytes} bytes")
        mapping = mmap.mmap(-1, nbytes)
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self.device_memory[address] = mapping
        return MemoryPointer(Memory(address, nbytes, lambda: self.free(address)), 0)

    def free(self, address: int) -> None:
        del self.device_memory[address]

    def python_allocator(
        self, malloc: Callable[[int, int], int], free: Callable[[int, int], None]
    ) -> SimpleNamespace:
        def take(nbytes: int) -> MemoryPointer:
            device = self.current_devices[-1]
            address = malloc(nbytes, device)
            return MemoryPointer(Memory(address, nbytes, lambda: free(address, device)), 0)

        return SimpleNamespace(malloc=take)

    def memcpy_async(self, dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        self.check("memcpyAsync")
        assert self.current_devices
        assert kind in (1, 2, 3)
        self.streams[stream].enqueue(lambda: ctypes.memmove(dst, src, nbytes))

    def event_record(self, event: int, stream: int) -> None:
        assert self.current_devices
        self.events[event].record(self.streams[stream])

    def host_register(self, address: int, nbytes: int, flags: int) -> None:
        self.check("hostRegister")
        assert self.current_devices
        assert flags == 1
        if address in self.registered:
            raise CudaError(712)
        self.registered[address] = nbytes

    def host_unregister(self, address: int) -> None:
        self.check("hostUnregister")
        assert self.current_devices
        if address not in self.registered:
            raise CudaError(713)
        del self.registered[address]

    def view(self, buffer: Any) -> np.ndarray:
        """Return the bytes of device memory."""
        raw = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.address)
        return np.frombuffer(raw, np.uint8)


class Device(Scope):
    def __init__(self, cuda: FakeCuda, index: int) -> None:
        super().__init__()
        self._cuda, self._index = cuda, index

    def __enter__(self) -> Self:
        self._cuda.current_devices.append(self._index)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._cuda.current_devices.pop()


class Stream(Scope):
    def __init__(self, cuda: FakeCuda, ptr: int) -> None:
        super().__init__()
        self._cuda, self.ptr = cuda, ptr
        self._queue: deque[Callable[[], object]] = deque()

    def enqueue(self, work: Callable[[], object]) -> None:
        with self._cuda.lock:
            self._queue.append(work)

    def wait_event(self, event: Event) -> None:
        stream, mark = event.place
        self.enqueue(lambda: stream is not None and stream.run_to(mark))

    def run_to(self, mark: object) -> None:
        """Do the work up to `mark`, if it is still to be done."""
        while mark in self._queue:
            self._queue.popleft()()


class Event:
    def __init__(self, cuda: FakeCuda, **flags: bool) -> None:
        cuda.check("eventCreate")
        self._cuda, self.flags, self.ptr = cuda, flags, 1000 + len(cuda.events)
        self._num_polls = 0
        self.place: tuple[Stream | None, Callable[[], None]] = (None, lambda: None)
        cuda.events[self.ptr] = self

    def record(self, stream: Stream) -> None:
        self._cuda.check("eventRecord")

        def mark() -> None:
            return

        self.place = (stream, mark)
        stream.enqueue(mark)

    @property
    def done(self) -> bool:
        self._cuda.check("eventQuery")
        stream, mark = self.place
        with self._cuda.lock:
            self._num_polls += 1
            if stream is not None and self._num_polls >= POLLS:
                stream.run_to(mark)
            return stream is None or mark not in stream._queue

    def synchronize(self) -> None:
        self._cuda.check("eventSynchronize")
        assert self._cuda.current_devices
        stream, mark = self.place
        with self._cuda.lock:
            if stream is not None:
                stream.run_to(mark)


def fake_module(cuda: FakeCuda) -> ModuleType:
    """Return a module to be put into `sys.modules` as cupy."""

    def count() -> int:
        cuda.check("getDeviceCount")
        return cuda.num_devices

    def unowned(ptr: int, size: int, owner: object, device_id: int) -> Memory:
        return Memory(ptr, size)

    module: Any = ModuleType("cupy")
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    module.uint8 = np.uint8
    module.ndarray = Array
    module.get_default_memory_pool = lambda: SimpleNamespace(malloc=cuda.malloc)
    module.cuda = SimpleNamespace(
        Device=lambda index: Device(cuda, index),
        Event=lambda **flags: Event(cuda, **flags),
        MemoryPointer=MemoryPointer,
        PythonFunctionAllocator=cuda.python_allocator,
        Stream=cuda.new_stream,
        UnownedMemory=unowned,
        is_available=lambda: cuda.num_devices > 0,
        runtime=SimpleNamespace(
            eventRecord=cuda.event_record,
            getDeviceCount=count,
            hostRegister=cuda.host_register,
            hostUnregister=cuda.host_unregister,
            memGetInfo=lambda: (cuda.memory_nbytes // 2, cuda.memory_nbytes),
            memcpyAsync=cuda.memcpy_async,
            memcpyDeviceToDevice=3,
            memcpyDeviceToHost=2,
            memcpyHostToDevice=1,
        ),
    )
    found: ModuleType = module
    return found
