"""Compute: the device torch computes on, and its memory as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from zinf_core.buffers import Buffer, BufferAllocator
from zinf_core.capabilities import MemorySpace
from zinf_core.device import Device
from zinf_core.errors import BudgetTooSmallError, ConfigError
from zinf_core.units import format_nbytes
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator


@runtime_checkable
class SimulatedMemory(Device, Protocol):
    """A device whose memory the CPU computes in, as `zinf_core.testing.SimulatedDevice`."""

    def view(self, buffer: Buffer) -> Any:
        """Return the bytes of `buffer` as a numpy array."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Where parameters are when an operation runs on them."""

    device: torch.device
    """What parameters show."""
    memory: Device | None
    """None: torch computes in host memory."""

    @classmethod
    def of(cls, compute: str | torch.device | Device) -> Compute:
        """Return compute on ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a simulated device.

        Raises ConfigError if torch does not see the device, or cupy is missing.
        """
        if isinstance(compute, SimulatedMemory):
            return cls(device=torch.device("cpu"), memory=compute)
        if not isinstance(compute, str | torch.device):
            raise ConfigError(f'compute = {compute!r} is no device; write "cpu" or "cuda:0"')
        try:
            device = torch.device(compute)
        except RuntimeError as exc:
            raise ConfigError(f'compute = {compute!r} is no device; write "cpu" or "cuda"') from exc
        if device.type == "cpu":
            return cls(device=torch.device("cpu"), memory=None)
        if device.type != "cuda":
            raise ConfigError(f'compute = {compute!r}: zinf computes on "cpu" and "cuda"')
        return _cuda(device)

    def allocator(self) -> BufferAllocator:
        """Return the source of memory for resident pages."""
        return PageAlignedAllocator() if self.memory is None else self.memory

    def host_allocator(self) -> BufferAllocator:
        """Return the source of host memory, which the device copies from and to."""
        return PageAlignedAllocator() if self.memory is None else PinnedAllocator(self.memory)

    def tensor(self, buffer: Buffer) -> torch.Tensor:
        """Return the bytes of `buffer` as a flat uint8 tensor over its memory."""
        if buffer.space is not MemorySpace.DEVICE:
            return torch.from_numpy(buffer.array)
        if isinstance(self.memory, SimulatedMemory):
            return torch.from_numpy(self.memory.view(buffer))
        return torch.as_tensor(buffer.array, device=self.device)

    def check_room(self, nbytes: int) -> None:
        """Raise BudgetTooSmallError if a device with memory of its own has less than `nbytes`
        free."""
        if self.device.type != "cuda":
            return
        free_nbytes, _ = torch.cuda.mem_get_info(self.device)
        if nbytes > free_nbytes:
            raise BudgetTooSmallError(
                f"device budget of {format_nbytes(nbytes)} exceeds the "
                f"{format_nbytes(free_nbytes)} free on {self.device}; lower it"
            )


def _cuda(device: torch.device) -> Compute:
    if not torch.cuda.is_available():
        raise ConfigError(
            f'compute = "{device}": torch sees no CUDA device; install a CUDA build of torch, or '
            'write "cpu"'
        )
    index = device.index if ":" in str(device) else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f'compute = "{device}": there are {torch.cuda.device_count()} devices')
    from zinf_storage.cuda import CudaDevice  # noqa: PLC0415 - cupy is optional

    memory = CudaDevice(
        index,
        malloc=torch.cuda.caching_allocator_alloc,
        free=torch.cuda.caching_allocator_delete,
        compute_stream=lambda: torch.cuda.current_stream(index).cuda_stream,
    )
    return Compute(device=torch.device("cuda", index), memory=memory)
