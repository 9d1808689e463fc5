"""Tiers by URL, one of every kind that runs here, and looking at them from outside."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
import torch

from zinf_core.buffers import HostBuffer
from zinf_core.keys import TensorKey
from zinf_core.registry import open_tier
from zinf_core.tier import Tier
from zinf_core.units import PAGE_NBYTES
from zinf_storage.allocators import PageAlignedAllocator

ON_DISK: Final[Mapping[str, str]] = {
    "nvme": "nvme://{folder}/a",
    "nvme buffered": "nvme://{folder}/a?direct=never&io_nbytes=8KiB&verify_reads=1",
    "object": "object://file://{folder}/a?part_nbytes=64KiB&num_threads=2",
    "striped": "striped://[nvme://{folder}/a][nvme://{folder}/b]?shares=2,1&chunk_nbytes=64KiB",
    "zstd": "compressed://[nvme://{folder}/a]?codec=zstd&chunk_nbytes=64KiB",
    "lz4": "compressed://[nvme://{folder}/a]?codec=lz4&shuffle=2&chunk_nbytes=256KiB",
    "blosc2": "compressed://[nvme://{folder}/a]?codec=blosc2&shuffle=4",
    "checksummed": "checksummed://[nvme://{folder}/a]?chunk_nbytes=64KiB",
    "throttled": "throttled://[nvme://{folder}/a]?bytes_per_s=10GB",
    "nested": "checksummed://[striped://[compressed://[object://file://{folder}/a]]"
    "[nvme://{folder}/b]?shares=1,2&chunk_nbytes=64KiB]?chunk_nbytes=64KiB",
}
"""``{folder}`` stands for a folder of the test's; all of them are persistent."""
IN_MEMORY: Final[Mapping[str, str]] = {
    "host": "host://",
    "memory objects": "object://memory:///states",
    "zstd in memory": "compressed://[host://]?codec=zstd&chunk_nbytes=64KiB",
}
PLACES: Final[Mapping[str, str]] = {**ON_DISK, **IN_MEMORY}


def homes_at(home: str) -> dict[str, str]:
    """Return the settings of a runtime that keep every state at `home`."""
    return dict.fromkeys(("parameters", "gradients", "optimizer_states"), home)


@contextmanager
def opened(url: str) -> Iterator[Tier]:
    """Open the tier at `url` and close it again."""
    tier = open_tier(url)
    try:
        yield tier
    finally:
        tier.close()


def buffer_of(data: bytes) -> HostBuffer:
    buffer = PageAlignedAllocator().allocate(max(len(data), 1)).resized(len(data))
    buffer.array[:] = np.frombuffer(data, np.uint8)
    return buffer


def store(tier: Tier, key: TensorKey, data: bytes) -> None:
    tier.reserve(key, len(data))
    tier.write_from(key, buffer_of(data)).wait(timeout_s=30)


def stored(tier: Tier, key: TensorKey) -> bytes:
    """Return all bytes of `key`."""
    buffer = buffer_of(b"\xa5" * tier.stat(key).nbytes)
    tier.read_into(key, buffer).wait(timeout_s=30)
    return buffer.array.tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a plain tensor, one after the other."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def files_below(folder: Path) -> list[Path]:
    """Return everything below `folder` but folders."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def allocated_nbytes(folder: Path) -> int:
    """Return the bytes that the files below `folder` take on the drive."""
    total = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):  # a tier may be deleting what it replaced
            total += 512 * path.stat().st_blocks
    return total


def cached_nbytes(folder: Path) -> int:
    """Return the bytes of the files below `folder` that are in the page cache."""
    return sum(_cached_nbytes(path) for path in files_below(folder))


def _cached_nbytes(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        resident = (ctypes.c_ubyte * ((size + PAGE_NBYTES - 1) // PAGE_NBYTES))()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = libc.mincore(address, ctypes.c_size_t(size), resident)
        del start
        assert failed == 0, os.strerror(ctypes.get_errno())
        return PAGE_NBYTES * sum(flag & 1 for flag in resident)


# obstore opens three descriptors for its runtime, once per process: not in the test that is first.
open_tier(IN_MEMORY["memory objects"]).close()
