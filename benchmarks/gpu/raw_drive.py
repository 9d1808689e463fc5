"""One file moved by plain system calls on a few threads, and torch's copies: what the drive and the
bus give without zinf."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from gpu.lab import Lab

_THREADS = 4
_BLOCK_NBYTES = 1 << 20
_PAGE_NBYTES = 4096


class RawDrive:
    """Keys of `key_nbytes` end to end in one file. Blocks of 1 MiB, four threads."""

    def __init__(self, path: Path, lab: Lab, *, key_nbytes: int, num_keys: int) -> None:
        """Create the file, past the page cache if the file system can, with all its blocks."""
        self._lab = lab
        self._key_nbytes = key_nbytes
        self._num_keys = num_keys
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.path_taken = "direct"
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(path, flags, 0o600)
            self.path_taken = "buffered"
        os.posix_fallocate(self._fd, 0, key_nbytes * num_keys)
        self._threads = ThreadPoolExecutor(_THREADS)
        self._stage = [_page_aligned(key_nbytes, pin=not lab.is_simulated) for _ in range(num_keys)]

    def close(self) -> None:
        """Close the file and end the threads."""
        self._threads.shutdown()
        os.close(self._fd)

    def write(self, views: Sequence[memoryview]) -> None:
        """Write every key from host memory."""
        _finish(self._submit(os.pwritev, views, range(self._num_keys)))

    def read(self, views: Sequence[memoryview]) -> None:
        """Read every key into host memory."""
        _finish(self._submit(os.preadv, views, range(self._num_keys)))

    def write_device(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write every key from device memory: the copy of one while others are written."""
        views = [stage.numpy().data for stage in self._stage]
        blocks: list[Future[int]] = []
        for index, tensor in enumerate(tensors):
            self._stage[index].copy_(tensor, non_blocking=True)
            self._lab.synchronize()
            blocks += self._submit(os.pwritev, views, [index])
        _finish(blocks)

    def read_device(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read every key into device memory: the copy of one while others are read."""
        views = [stage.numpy().data for stage in self._stage]
        keys = [self._submit(os.preadv, views, [index]) for index in range(self._num_keys)]
        for index, (blocks, tensor) in enumerate(zip(keys, tensors, strict=True)):
            _finish(blocks)
            tensor.copy_(self._stage[index], non_blocking=True)
        self._lab.synchronize()

    def _submit(
        self,
        call: Callable[[int, list[memoryview], int], int],
        views: Sequence[memoryview],
        keys: Sequence[int],
    ) -> list[Future[int]]:
        nbytes = self._key_nbytes
        return [
            self._threads.submit(
                call, self._fd, [views[key][at : at + _BLOCK_NBYTES]], key * nbytes + at
            )
            for key in keys
            for at in range(0, nbytes, _BLOCK_NBYTES)
        ]


def _finish(blocks: Sequence[Future[int]]) -> None:
    for block in blocks:
        if block.result() != _BLOCK_NBYTES:
            raise OSError(f"a block of {_BLOCK_NBYTES} bytes was cut short")


def _page_aligned(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return `nbytes` of torch's host memory that begins with a page, as direct I/O wants it."""
    whole = torch.ones(nbytes + _PAGE_NBYTES, dtype=torch.uint8, pin_memory=pin)
    start = -whole.data_ptr() % _PAGE_NBYTES
    return whole[start : start + nbytes]
