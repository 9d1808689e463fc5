"""CudaDevice on a stand-in for cupy, and every name of cupy it uses on the real package."""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import fake_cupy
import numpy as np
import pytest
from fake_cupy import FakeCuda, fake_module
from nvme_helpers import buffer_of, key, noise

import zinf_storage.cuda
import zinf_storage.cuda_copies
from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.device import Device
from zinf_core.errors import (
    BudgetError,
    BudgetTooSmallError,
    ConfigError,
    InternalError,
    RangeError,
    TransferError,
    TransferTimeoutError,
    UnsupportedBufferError,
)
from zinf_core.registry import open_tier
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import TierSuite
from zinf_core.tier import Tier
from zinf_core.units import GiB, MiB
from zinf_storage.cuda import CudaBuffer, CudaDevice, cuda_problem
from zinf_storage.device import DeviceTier
from zinf_storage.machine import Cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the stand-in where the driver and cupy are looked for."""
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake_module(cuda))
    there = Cuda(num_devices=1, driver="13.0", problem=None)
    monkeypatch.setattr(zinf_storage.cuda, "probe_cuda", lambda: there)
    return cuda


@pytest.fixture
def device(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(0)


def device_of(cuda: FakeCuda, device: CudaDevice, data: bytes) -> CudaBuffer:
    buffer = device.allocate(len(data))
    cuda.view(buffer)[:] = np.frombuffer(data, np.uint8)
    return buffer


def test_it_is_a_device(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches a method renamed away from the protocol, or sizes rounded beyond pages."""
    assert isinstance(device, Device)
    assert (device.name, device.space) == ("cuda:0", MemorySpace.DEVICE)
    buffer = device.allocate(33 * MiB + 1)
    assert (buffer.nbytes, buffer.capacity_nbytes) == (33 * MiB + 1, 33 * MiB + 4096)
    assert buffer.array.shape == (33 * MiB + 1,)
    assert sum(map(len, cuda.device_memory.values())) == 33 * MiB + 4096
    nothing = device.allocate(0)
    assert (nothing.nbytes, nothing.address, nothing.capacity_nbytes) == (0, 0, 0)


def test_bytes_go_there_and_back(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches directions, lengths or addresses mixed up."""
    data = noise(10_000)
    there, across, back = device.allocate(10_000), device.allocate(10_000), buffer_of(b"\0" * 9_000)
    device.copy(there, buffer_of(data)).wait()
    device.copy(across, there).wait()
    device.copy(back, across.part(500, 9_000)).wait()
    assert back.array.tobytes() == data[500:9_500]
    assert cuda.current_devices == []


def test_a_copy_waits_for_compute(cuda: FakeCuda) -> None:
    """Catches a write-back of bytes that a kernel in the queue has still to make."""
    compute = cuda.new_stream(non_blocking=True)
    device = CudaDevice(0, compute_stream=lambda: compute.ptr)
    page, back = device_of(cuda, device, b"old!"), buffer_of(b"\0\0\0\0")
    compute.enqueue(lambda: cuda.view(page).__setitem__(slice(None), ord("n")))
    device.copy(back, page).wait()
    assert back.array.tobytes() == b"nnnn"


def test_the_legacy_stream_is_compute_by_default(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches copies ordered after nothing because our streams do not wait for stream 0."""
    page, back = device_of(cuda, device, b"old!"), buffer_of(b"\0\0\0\0")
    cuda.streams[0].enqueue(lambda: cuda.view(page).__setitem__(slice(None), ord("n")))
    device.copy(back, page).wait()
    assert back.array.tobytes() == b"nnnn"
    assert all(stream.non_blocking for ptr, stream in cuda.streams.items() if ptr)


def test_directions_are_ordered_where_they_share_memory(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches a read of a page overtaking the write before it, on the other stream."""
    page, back = device_of(cuda, device, b"old!"), buffer_of(b"\0\0\0\0")
    first = device.copy(page, buffer_of(b"new!"))
    device.copy(back, page).wait()
    assert back.array.tobytes() == b"new!"
    again = buffer_of(b"\0\0\0\0")
    last = device.copy(again, page)
    device.copy(page, buffer_of(b"last")).wait()
    for copy in (first, last):
        copy.wait()
    assert again.array.tobytes() == b"new!"


def test_directions_do_not_wait_for_each_other(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches both directions of the bus on one stream."""
    one, other = device_of(cuda, device, b"1111"), device_of(cuda, device, b"2222")
    early = device.copy(buffer_of(b"\0\0\0\0"), one)
    device.copy(other, buffer_of(b"new!")).wait()
    assert not early.done()
    early.wait()


def test_buffers_live_until_the_copy_is_done(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches memory given back to the pool, or kept for ever, around a copy."""
    before = len(cuda.device_memory)
    copy = device.copy(device.allocate(4096), buffer_of(b"x" * 4096))
    gc.collect()
    assert len(cuda.device_memory) == before + 1
    copy.wait()
    del copy
    assert len(cuda.device_memory) == before


def test_a_timeout_does_not_give_the_copy_up(
    cuda: FakeCuda, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a timeout that hangs, polls, or forgets its thread."""
    go, num_threads = threading.Event(), threading.active_count()
    monkeypatch.setattr(fake_cupy, "POLLS", 1000)
    synchronize = device._synchronize
    monkeypatch.setattr(device, "_synchronize", lambda event: (go.wait(), synchronize(event)))
    page = device.allocate(4)
    copy = device.copy(page, buffer_of(b"data"))
    for timeout_s in (0.0, 0.01, 0.01):
        with pytest.raises(TransferTimeoutError, match="host -> device"):
            copy.wait(timeout_s)
    assert threading.active_count() == num_threads + 1
    go.set()
    copy.wait(timeout_s=5)
    assert cuda.view(page).tobytes() == b"data"


@pytest.mark.parametrize("call", ["memcpyAsync", "eventCreate", "eventRecord"])
def test_failing_calls_fail_the_wait(cuda: FakeCuda, device: CudaDevice, call: str) -> None:
    """Catches an error of the environment raised by submit (law 10), or unmapped."""
    cuda.refuse[call] = 999
    copy = device.copy(device.allocate(4), buffer_of(b"data"))
    assert copy.done()
    for _ in range(2):
        with pytest.raises(TransferError, match="cuda:0: copy of 4 bytes, host -> device failed"):
            copy.wait()


@pytest.mark.parametrize("call", ["eventQuery", "eventSynchronize"])
@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_failing_waits_are_transfer_errors(
    cuda: FakeCuda, device: CudaDevice, call: str, timeout_s: float | None
) -> None:
    """Catches an error that only the first wait reports, or that ends a thread unseen."""
    copy = device.copy(device.allocate(4), buffer_of(b"data"))
    cuda.refuse[call] = 700
    for _ in range(2):
        with pytest.raises(TransferError, match="as it was told to"):
            copy.wait(timeout_s)
    assert copy.done()


def test_registering_is_mapped_to_our_errors(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches errors of the driver that nobody catches, and a fallback that hides a bug."""
    device.register(4096, 8192)
    assert cuda.registered == {4096: 8192}
    with pytest.raises(InternalError, match="0x1000 is registered already"):
        device.register(4096, 8192)
    device.unregister(4096)
    with pytest.raises(InternalError, match="nothing is pinned at 0x1000"):
        device.unregister(4096)
    cuda.refuse["hostRegister"] = 2
    with pytest.raises(BudgetError, match="cuda:0 refused to pin 8192 bytes"):
        device.register(4096, 8192)
    cuda.refuse["hostUnregister"] = 4
    with pytest.raises(TransferError, match="cannot unpin"):
        device.unregister(4096)


def test_memory_of_another_allocator(cuda: FakeCuda) -> None:
    """Catches torch's memory asked for on the wrong stream, never given back, or given twice."""
    memory = {1 << 40: 8192}
    taken: list[tuple[int, int, int]] = []

    def malloc(nbytes: int, index: int, stream: int) -> int:
        taken.append((nbytes, index, stream))
        return 1 << 40

    cuda.num_devices = 2
    device = CudaDevice(1, malloc=malloc, free=memory.pop, compute_stream=lambda: 77)
    buffer = device.allocate(5000)
    assert (buffer.address, taken) == (1 << 40, [(8192, 1, 77)])
    view = buffer.array
    del buffer
    assert memory
    del view
    assert not memory
    with pytest.raises(ConfigError, match="malloc and free, or neither"):
        CudaDevice(0, malloc=malloc)


def test_a_full_device_is_a_budget_error(cuda: FakeCuda, device: CudaDevice) -> None:
    """Catches cupy's MemoryError, or torch's RuntimeError, instead of bytes and a remedy."""
    with pytest.raises(BudgetError, match=r"cuda:0 refused 68157440 bytes \(65.00 MiB\)"):
        device.allocate(65 * MiB)

    def refuse(nbytes: int, index: int, stream: int) -> int:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(BudgetError, match="CUDA out of memory"):
        CudaDevice(0, malloc=refuse, free=print).allocate(1)


def test_bad_copies_are_refused(device: CudaDevice) -> None:
    """Catches arguments that CUDA would take."""
    with pytest.raises(RangeError, match="4 bytes into 5 bytes"):
        device.copy(device.allocate(5), buffer_of(b"data"))
    with pytest.raises(UnsupportedBufferError):
        device.copy(buffer_of(b"...."), buffer_of(b"data"))
    device.copy(device.allocate(0), buffer_of(b"")).wait()


def test_devices_that_are_not_there(cuda: FakeCuda) -> None:
    """Catches a wrong number noticed only by the first copy."""
    for index in (-1, 1):
        with pytest.raises(ConfigError, match="CUDA sees 1 devices"):
            CudaDevice(index)
    cuda.refuse["getDeviceCount"] = 35
    with pytest.raises(ConfigError, match="cuda:0 cannot be used"):
        CudaDevice(0)


def test_problems_are_told_in_order(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a missing package reported as a missing device, or the other way round."""
    assert cuda_problem() is None
    cuda.num_devices = 0
    assert cuda_problem() == "needs a CUDA device; cupy sees none"
    gone = Cuda(num_devices=0, driver="12.8", problem="no driver: libcuda.so.1")
    monkeypatch.setattr(zinf_storage.cuda, "probe_cuda", lambda: gone)
    assert cuda_problem() == "needs a CUDA device: no driver: libcuda.so.1"
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda_problem() == 'needs cupy; pip install "zinf[cuda12]"'
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=re.escape('pip install "zinf[cuda13]"')):
        CudaDevice(0)


def test_tiers_by_url(cuda: FakeCuda) -> None:
    """Catches device memory or pinned memory that no URL leads to."""
    tier = open_tier("device://cuda", capacity_nbytes=4 * MiB)
    assert (tier.name, tier.path_taken) == ("device cuda:0", "device cuda:0")
    assert tier.usage().capacity_nbytes == 4 * MiB
    tier.close()
    with pytest.raises(BudgetTooSmallError, match=r"32.00 MiB are free.*2.00 GiB"):
        open_tier("device://cuda:0")
    cuda.memory_nbytes = 8 * GiB
    tier = open_tier("device://cuda:0")
    assert tier.usage().capacity_nbytes == 2 * GiB
    tier.close()
    host = open_tier("host://", capacity_nbytes=4 * MiB)
    assert host.path_taken == "host-pinned"
    assert host.capabilities.takes(MemorySpace.DEVICE)
    host.reserve(key(0), 5000)
    assert list(cuda.registered.values()) == [8192]
    host.close()
    del host
    gc.collect()
    assert cuda.registered == {}


class TestDeviceTierOnCuda(TierSuite):
    """The laws, through the streams and events of the stand-in."""

    @pytest.fixture(autouse=True)
    def _cuda(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def open_tier(self, folder: Path) -> Tier:
        self.device = CudaDevice(0)
        pool = BufferPool("device", budget_nbytes=16 * MiB, allocator=self.device)
        return DeviceTier("device", pool=pool, device=self.device)

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.device.allocate(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        self.cuda.view(buffer)[:] = np.frombuffer(data, np.uint8)

    def contents(self, buffer: Buffer) -> bytes:
        return self.cuda.view(buffer).tobytes()


MODULES = (zinf_storage.cuda, zinf_storage.cuda_copies)
ROOTS = {"cupy": "", "self._cupy": "", "cuda": "cuda.", "runtime": "cuda.runtime."}


def names_used() -> set[str]:
    """Return the dotted names below cupy that the two modules use, from their source."""
    found = set()
    for module in MODULES:
        source = Path(module.__file__).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            for root, prefix in ROOTS.items():
                if re.fullmatch(rf"{re.escape(root)}(\.\w+)+", text):
                    found.add(prefix + text.removeprefix(root + "."))
    return found - {"cuda.num_devices", "cuda.driver", "cuda.problem", "cuda.driver or"}


def test_names_are_found() -> None:
    """Catches a scan of the source that finds nothing."""
    assert {"cuda.runtime.memcpyAsync", "cuda.Event", "ndarray", "cuda.UnownedMemory"} <= (
        names_used()
    )


def test_the_stand_in_has_the_names(cuda: FakeCuda) -> None:
    """Catches a name that neither the stand-in nor the test against cupy knows."""
    assert [name for name in sorted(names_used()) if not _has(sys.modules["cupy"], name)] == []


SIGNATURES = {
    "eventRecord": "(intptr_t event, intptr_t stream)",
    "getDeviceCount": "()",
    "hostRegister": "(intptr_t ptr, size_t size, unsigned int flags)",
    "hostUnregister": "(intptr_t ptr)",
    "memGetInfo": "()",
    "memcpyAsync": "(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)",
}


def test_cupy_has_the_names() -> None:
    """Catches a name or an argument order that only the stand-in has."""
    cupy = pytest.importorskip("cupy")
    assert [name for name in sorted(names_used()) if not _has(cupy, name)] == []
    for name, signature in SIGNATURES.items():
        assert (getattr(cupy.cuda.runtime, name).__doc__ or "").startswith(name + signature)
    assert cupy.cuda.PythonFunctionAllocator.malloc
    runtime = cupy.cuda.runtime
    assert (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost) == (1, 2)
    assert runtime.memcpyDeviceToDevice == 3
    for name in ("record", "synchronize", "done"):
        assert hasattr(cupy.cuda.Event, name)
    for name in ("wait_event", "__enter__", "__exit__"):
        assert hasattr(cupy.cuda.Stream, name)
    for name in ("ptr", "mem", "__add__"):
        assert hasattr(cupy.cuda.MemoryPointer, name)
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    assert issubclass(runtime.CUDARuntimeError, RuntimeError)


VIEWS: list[Callable[[CudaBuffer], object]] = [
    lambda b: b.array,
    lambda b: b.array[:10],
    lambda b: b.array[5:10],
    lambda b: b.array[5:10][1:],
    lambda b: b.array.data,
    lambda b: b.array.data.mem,
    lambda b: b.part(3, 5),
    lambda b: b.resized(10),
]


@pytest.fixture
def unbacked() -> CudaBuffer:
    """Return a buffer of cupy's own objects over an address that nobody may touch."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(1 << 40, 8192, None, device_id=0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    del memory
    buffer = CudaBuffer(cupy, pointer, 5000, 8192)
    del pointer
    return buffer


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_cupy_memory_are_references(
    unbacked: CudaBuffer, view: Callable[[CudaBuffer], object]
) -> None:
    """Catches a page handed to the next key while a cupy view or a tensor still shows it."""
    assert not unbacked.is_shared()
    held = view(unbacked)
    assert unbacked.is_shared()
    del held
    assert not unbacked.is_shared()


def test_cupy_buffers_keep_addresses_and_sizes(unbacked: CudaBuffer) -> None:
    """Catches offsets counted from the wrong start."""
    part = unbacked.part(1000, 4000)
    assert (part.address, part.nbytes, part.capacity_nbytes) == ((1 << 40) + 1000, 4000, 7192)
    inner = part.part(10, 20)
    assert (inner.address, inner.capacity_nbytes) == ((1 << 40) + 1010, 20)
    assert inner.array.data.ptr == inner.address
    assert unbacked.resized(8192).nbytes == 8192
    with pytest.raises(RangeError):
        unbacked.part(4000, 1001)
    with pytest.raises(RangeError):
        unbacked.resized(8193)


def _has(module: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True
