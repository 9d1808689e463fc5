"""Host buffers: what they accept, and who is seen to reference their memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from zinf_core.buffers import Buffer, BufferAllocator, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import ConfigError
from zinf_storage.allocators import PageAlignedAllocator

VIEWS: dict[str, Callable[[HostBuffer], Any]] = {
    "the array": lambda buffer: buffer.array,
    "a slice": lambda buffer: buffer.array[10:20],
    "a view of a view": lambda buffer: buffer.array[:4096].view(np.float32).reshape(32, -1)[3],
    "an element's view": lambda buffer: buffer.array[5:6].reshape(()),
    "a memoryview": lambda buffer: memoryview(buffer.array)[100:],
    "a tensor": lambda buffer: torch.from_numpy(buffer.array),
    "a view of a tensor": lambda buffer: torch.from_numpy(buffer.array).view(torch.float32)[7:],
    "a tensor's storage": lambda buffer: torch.from_numpy(buffer.array).untyped_storage(),
    "a tensor's array": lambda buffer: torch.from_numpy(buffer.array[8:]).numpy(),
    "all the memory": lambda buffer: buffer.memory,
    "a slice of all the memory": lambda buffer: buffer.memory[4096:],
    "a ctypes array": lambda buffer: (ctypes.c_uint8 * 16).from_buffer(buffer.array),
    "a container": lambda buffer: {"deep": [(buffer.array[::2],)]},
}


def allocated(nbytes: int = 5000) -> HostBuffer:
    return PageAlignedAllocator().allocate(nbytes)


def test_protocols() -> None:
    """Catches a member of a protocol that the built-in parts lack."""
    assert isinstance(allocated(), Buffer)
    allocator: BufferAllocator = PageAlignedAllocator()
    assert allocated().space is allocator.space is MemorySpace.HOST


def test_sizes_and_address() -> None:
    """Catches capacity taken for size: transfers would move padding."""
    buffer = allocated(5000)
    assert (buffer.nbytes, buffer.capacity_nbytes) == (5000, 8192)
    assert (buffer.array.nbytes, buffer.memory.nbytes) == (5000, 8192)
    assert buffer.address == buffer.array.ctypes.data
    assert buffer.address % 4096 == 0


@pytest.mark.parametrize("name", VIEWS)
def test_whoever_holds_a_view_is_seen_until_it_dies(name: str) -> None:
    """Catches memory handed out again while somebody still looks at it, and memory that stays
    taken after the last view died."""
    buffer = allocated(8000)
    assert not buffer.is_shared()
    view = VIEWS[name](buffer)
    assert buffer.is_shared()
    del view
    gc.collect(0)
    assert not buffer.is_shared()


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_seen_by_later_uses_of_the_memory(name: str) -> None:
    """Catches a resized buffer that forgets the views made through the one before."""
    buffer = allocated(8000)
    view = VIEWS[name](buffer)
    smaller = buffer.resized(10)
    assert buffer.is_shared()
    del buffer
    assert smaller.is_shared()
    del view
    gc.collect(0)
    assert not smaller.is_shared()


def test_a_copy_is_no_view() -> None:
    """Catches counting what does not alias the memory."""
    buffer = allocated()
    array = buffer.array
    kept = [array.copy(), array.tobytes(), array[3], torch.tensor(array)]
    del array
    assert not buffer.is_shared()
    assert len(kept) == 4


def test_resized_is_the_same_memory() -> None:
    """Catches a copy, and a size beyond the capacity."""
    buffer = allocated(5000)
    buffer.array[:] = 7
    other = buffer.resized(8192)
    other.array[0] = 9
    assert (other.nbytes, other.capacity_nbytes, other.address) == (8192, 8192, buffer.address)
    assert buffer.array[:2].tolist() == [9, 7]
    with pytest.raises(ConfigError, match="8193 bytes do not fit an array of 8192"):
        buffer.resized(8193)


def test_an_empty_buffer() -> None:
    """Catches a division or an index on keys of no bytes."""
    buffer = HostBuffer(np.zeros(0, np.uint8))
    assert (buffer.nbytes, buffer.capacity_nbytes, buffer.array.tolist()) == (0, 0, [])


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (np.zeros(8, np.float32), "uint8"),
        (np.zeros((2, 4), np.uint8), "one-dimensional"),
        (np.zeros(16, np.uint8)[::2], "contiguous"),
        (np.frombuffer(bytes(8), np.uint8), "writable"),
    ],
)
def test_unfit_memory_is_refused(memory: Any, reason: str) -> None:
    """Catches memory a transfer would misread, or crash on when it writes."""
    with pytest.raises(ConfigError, match=reason):
        HostBuffer(memory)


def test_an_array_shorter_than_its_use_is_refused() -> None:
    """Catches a transfer past the end of the memory."""
    with pytest.raises(ConfigError, match="9 bytes do not fit an array of 8"):
        HostBuffer(np.zeros(8, np.uint8), 9)
