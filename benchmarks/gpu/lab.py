"""The device under test, and ways to reach its memory that do not go through zinf's copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.device import Device
from zinf_core.testing import host_buffer, seeded_order
from zinf_core.testing.simulated import SimulatedDevice
from zinf_storage.allocators import PinnedAllocator
from zinf_torch.compute import Compute

_CALIBRATION_CYCLES = 20_000_000


class Lab(Protocol):
    """One device, real or simulated."""

    name: str
    is_simulated: bool
    device: Device
    compute: str | Device
    """What `zinf_torch.Runtime` is given."""
    torch_device: torch.device

    def tensor(self, buffer: Buffer) -> torch.Tensor:
        """Return the bytes of device memory as a flat uint8 tensor for compute."""
        ...

    def pinned(self, nbytes: int) -> Buffer:
        """Return `nbytes` (>= 0) of host memory registered with the device.

        If pinning is refused there is a warning, and the memory is ordinary.
        """
        ...

    def side_stream(self) -> Any:
        """Return a context in which compute is submitted to a stream of its own."""
        ...

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy, so that what is submitted next happens late."""
        ...

    def synchronize(self) -> None:
        """Wait for everything submitted for compute."""
        ...

    def fill(self, buffer: Buffer, data: bytes) -> None:
        """Make the bytes of `buffer` `data`; waits for no copy of zinf's."""
        ...

    def contents(self, buffer: Buffer) -> bytes:
        """Return the bytes of `buffer` as they are now; waits for no copy of zinf's."""
        ...

    def fail_next_copy(self) -> bool:
        """Make the next copy fail; False if that cannot be arranged."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class CudaLab:
    """The first CUDA device, with torch's allocator, as a Runtime has it."""

    is_simulated = False
    compute: str | Device = "cuda:0"

    def __init__(self) -> None:
        """Make a context. Raises ConfigError if the device cannot be used."""
        import cupy  # noqa: PLC0415 - only where there is a device

        self._compute = Compute.of("cuda:0")
        if self._compute.memory is None:
            raise RuntimeError("compute on cuda:0 without device memory")
        self.device: Device = self._compute.memory
        self.torch_device = self._compute.device
        self.name = torch.cuda.get_device_name(self.torch_device)
        self._runtime = cupy.cuda.runtime
        self._cycles_per_s = self._measure_clock()

    def tensor(self, buffer: Buffer) -> torch.Tensor:
        """Return the bytes as a tensor on the device."""
        return self._compute.tensor(buffer)

    def pinned(self, nbytes: int) -> Buffer:
        """Register a mapping of its own."""
        return PinnedAllocator(self.device).allocate(max(nbytes, 1)).resized(nbytes)

    def side_stream(self) -> Any:
        """Return a context with a new stream, which does not wait for the default stream."""
        return torch.cuda.stream(torch.cuda.Stream(self.torch_device))

    def delay(self, seconds: float) -> None:
        """Submit a kernel that spins."""
        torch.cuda._sleep(int(seconds * self._cycles_per_s))  # noqa: SLF001 - torch's own tests' way

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.torch_device)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        """Copy on the legacy stream, for which zinf's streams do not wait by themselves."""
        if buffer.space is not MemorySpace.DEVICE:
            buffer.array[:] = np.frombuffer(data, np.uint8)
        elif data:
            source = np.frombuffer(data, np.uint8)
            kind = self._runtime.memcpyHostToDevice
            self._runtime.memcpy(buffer.address, source.ctypes.data, len(data), kind)
            self._runtime.streamSynchronize(0)  # memcpy may return once the bytes are staged

    def contents(self, buffer: Buffer) -> bytes:
        """Copy on the legacy stream, which does not wait for zinf's streams."""
        if buffer.space is not MemorySpace.DEVICE:
            return bytes(buffer.array.tobytes())
        found = np.empty(buffer.nbytes, np.uint8)
        if buffer.nbytes:
            kind = self._runtime.memcpyDeviceToHost
            self._runtime.memcpy(found.ctypes.data, buffer.address, buffer.nbytes, kind)
        return found.tobytes()

    def fail_next_copy(self) -> bool:
        """Return False: hardware does not fail to order."""
        return False

    def close(self) -> None:
        """Do nothing: the context ends with the process."""

    def _measure_clock(self) -> float:
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # noqa: SLF001 - see `delay`
        self.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # noqa: SLF001 - see `delay`
        self.synchronize()
        return _CALIBRATION_CYCLES / (time.perf_counter() - start)


class SimulatedLab:
    """`SimulatedDevice` in place of hardware: it checks this script, and nothing about a GPU."""

    is_simulated = True
    name = "simulated device"
    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 1) -> None:
        """Start a device whose copies happen late, in an order drawn by `seed`."""
        torch.set_num_threads(1)  # its models are tiny
        self._device = SimulatedDevice(order=seeded_order(seed))
        self.device: Device = self._device
        self.compute: str | Device = self._device

    def tensor(self, buffer: Buffer) -> torch.Tensor:
        """Return the bytes as a tensor the CPU computes in."""
        return torch.from_numpy(self._device.view(buffer))

    def pinned(self, nbytes: int) -> Buffer:
        """Return memory that calls itself pinned.

        It is not registered: a simulated copy does not keep its buffers, as CudaDevice's do, and
        some laws drop a buffer in flight, which would unregister it under the copy.
        """
        return HostBuffer(host_buffer(nbytes).memory, nbytes, space=MemorySpace.HOST_PINNED)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Do nothing: what is computed is computed at once."""
        yield

    def delay(self, seconds: float) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def fill(self, buffer: Buffer, data: bytes) -> None:
        """Write the bytes; raises while a copy of them is pending."""
        self._array(buffer)[:] = np.frombuffer(data, np.uint8)

    def contents(self, buffer: Buffer) -> bytes:
        """Return the bytes; raises while a copy of them is pending."""
        return bytes(self._array(buffer).tobytes())

    def fail_next_copy(self) -> bool:
        """Have the next copy fail after half of its bytes."""
        self._device.fail_next()
        return True

    def close(self) -> None:
        """End the device's thread."""
        self._device.close()

    def _array(self, buffer: Buffer) -> Any:
        on_device = buffer.space is MemorySpace.DEVICE
        return self._device.view(buffer) if on_device else buffer.array


def open_lab(*, simulate: bool) -> Lab:
    """Return the lab of the first CUDA device, or a simulated one."""
    return SimulatedLab() if simulate else CudaLab()
