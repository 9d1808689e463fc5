"""Device: the memory of the device that computes, as storage sees it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from zinf_core.buffers import Buffer, BufferAllocator
from zinf_core.completion import Completion


@runtime_checkable
class Device(BufferAllocator, Protocol):
    """Allocates memory of MemorySpace.DEVICE and copies between it and host memory.

    Thread-safe. Addresses of its buffers mean nothing to the CPU. `allocate` returns an empty
    buffer without memory for 0 bytes.
    """

    @property
    def name(self) -> str:
        """Name used in messages and URLs, e.g. ``"cuda:0"``."""
        ...

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        """Submit a copy of all bytes of `src` to `dst`, of the same length; one of the two, or
        both, in device memory. Never blocks on the copy.

        It happens after everything that was submitted to the device for compute before this call,
        on the stream that is current for compute in the calling thread. Both buffers belong to the
        device until the completion is done; what is submitted for compute after `wait` sees the
        copy. Copies that share memory happen in the order of their submission, others in any
        order. Raises RangeError for different lengths, UnsupportedBufferError if no buffer is in
        device memory; `wait` raises TransferError.
        """
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` of host memory at `address` (page aligned), so that copies with it need no
        staging and do not hold up the CPU. Slow: once per long-lived mapping. Raises BudgetError
        if the system refuses to lock the memory."""
        ...

    def unregister(self, address: int) -> None:
        """Unpin what `register` pinned at `address`; call it before the memory is unmapped."""
        ...
