"""Section rates-copy: host to device and back, and what pinning costs."""

from __future__ import annotations

import gc
import mmap
import statistics
import time
from collections.abc import Callable

import numpy as np
import psutil
import torch
from gpu.lab import Lab, open_lab
from gpu.report import Report
from gpu.rounds import measure
from gpu.settings import Settings

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.units import GiB, KiB, MiB, format_nbytes
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator

_SIZES = (64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB)
_QUICK_SIZES = (64 * KiB, 4 * MiB)
_BATCH_NBYTES = 256 * MiB
_MAX_COPIES = 64
_ODD_NBYTES = 33_000_000
"""Just above a power of two: an allocator that rounds up takes twice as much."""
_IN, _OUT = "host to device", "device to host"


def run(report: Report, settings: Settings) -> None:
    """Measure the copies size by size, then both directions at once, then pinning."""
    lab = open_lab(simulate=settings.simulate)
    sizes = _QUICK_SIZES if settings.quick or settings.simulate else _SIZES
    rounds = 3 if settings.quick else 7
    try:
        for nbytes in sizes:
            for direction in (_IN, _OUT):
                with report.item(
                    f"{direction}, {format_nbytes(nbytes)}", is_check=False
                ) as finding:
                    finding.text, finding.data = _copies(lab, nbytes, direction, rounds)
        with report.item("both directions at once", is_check=False) as finding:
            finding.text, finding.data = _both(lab, sizes[-1] // 4, rounds)
        arena = 32 * MiB if settings.quick else GiB
        for huge in (True, False):
            with report.item(
                f"pinning, {'huge' if huge else 'small'} pages", is_check=False
            ) as finding:
                finding.text, finding.data = _pinning(lab, arena, huge=huge)
        with report.item(f"an arena of {_ODD_NBYTES} bytes", is_check=False) as finding:
            finding.text, finding.data = _growth(lab)
    finally:
        lab.close()


def _size(*, huge: bool) -> str:
    return "huge" if huge else "small"


def _copies(lab: Lab, nbytes: int, direction: str, rounds: int) -> tuple[str, dict[str, object]]:
    count = max(1, min(_MAX_COPIES, _BATCH_NBYTES // nbytes))
    registered = PinnedAllocator(lab.device).allocate(nbytes)
    pageable = PageAlignedAllocator().allocate(nbytes)
    on_device = lab.device.allocate(nbytes)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=not lab.is_simulated)
    plain = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.ones(nbytes, dtype=torch.uint8, device=lab.torch_device)
    for buffer in (registered, pageable):
        buffer.array[:] = 1
    contestants = {
        "zinf, registered": _zinf(lab, registered, on_device, direction, count),
        "torch, pin_memory": _torch(lab, pinned, target, direction, count),
        "zinf, pageable": _zinf(lab, pageable, on_device, direction, count),
        "torch, pageable": _torch(lab, plain, target, direction, count),
    }
    rates = measure(contestants, nbytes=count * nbytes, rounds=rounds)
    text = "; ".join(f"{name} {rates.text(name)}" for name in contestants)
    ratio = rates.ratio("zinf, registered", "torch, pin_memory")
    data = {**rates.data(), "space": registered.space.value, "num_copies": count}
    return f"{text}; {ratio}", data


def _zinf(lab: Lab, host: Buffer, device: Buffer, direction: str, count: int) -> Callable[[], None]:
    dst, src = (device, host) if direction == _IN else (host, device)

    def move() -> None:
        copies = [lab.device.copy(dst, src) for _ in range(count)]
        _wait(copies)

    return move


def _torch(
    lab: Lab, host: torch.Tensor, device: torch.Tensor, direction: str, count: int
) -> Callable[[], None]:
    dst, src = (device, host) if direction == _IN else (host, device)

    def move() -> None:
        for _ in range(count):
            dst.copy_(src, non_blocking=True)
        lab.synchronize()

    return move


def _wait(copies: list[Completion]) -> None:
    for copy in reversed(copies):
        copy.wait()


def _both(lab: Lab, nbytes: int, rounds: int) -> tuple[str, dict[str, object]]:
    """Copy in and out at once, in other memory: two streams, two copy engines."""
    count = max(1, min(_MAX_COPIES, _BATCH_NBYTES // nbytes))
    allocator = PinnedAllocator(lab.device)
    hosts = [allocator.allocate(nbytes) for _ in range(2)]
    devices = [lab.device.allocate(nbytes) for _ in range(2)]
    for host, device in zip(hosts, devices, strict=True):
        host.array[:] = 1
        lab.device.copy(device, host).wait()

    def both() -> None:
        copies = []
        for _ in range(count):
            copies.append(lab.device.copy(devices[0], hosts[0]))
            copies.append(lab.device.copy(hosts[1], devices[1]))
        _wait(copies)

    rates = measure({"sum of both": both}, nbytes=2 * count * nbytes, rounds=rounds)
    return f"{rates.text('sum of both')} in copies of {format_nbytes(nbytes)}", rates.data()


def _pinning(lab: Lab, nbytes: int, *, huge: bool) -> tuple[str, dict[str, object]]:
    """Time registering an arena whose pages are there, and one whose pages are not."""
    data: dict[str, object] = {"nbytes": nbytes}
    parts = []
    for touched in (False, True):
        pinned_s, unpinned_s = [], []
        for _ in range(3):
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
            memory = np.frombuffer(mapping, np.uint8)
            address = int(memory.ctypes.data)
            if touched:
                memory[::4096] = 1
            start = time.perf_counter()
            lab.device.register(address, nbytes)
            middle = time.perf_counter()
            lab.device.unregister(address)
            pinned_s.append((middle - start) * GiB / nbytes)
            unpinned_s.append((time.perf_counter() - middle) * GiB / nbytes)
            del memory
        state = "touched" if touched else "untouched"
        data[state] = {"register_s_per_gib": pinned_s, "unregister_s_per_gib": unpinned_s}
        parts.append(
            f"{state}: {statistics.median(pinned_s):.3f} s/GiB to pin, "
            f"{statistics.median(unpinned_s):.3f} s/GiB to unpin"
        )
    return "; ".join(parts), data


def _growth(lab: Lab) -> tuple[str, dict[str, object]]:
    """Compare what the system gives with what was asked, for zinf's memory and for torch's."""
    ours, kept = _grown(lambda: PinnedAllocator(lab.device).allocate(_ODD_NBYTES))
    del kept
    theirs, _kept = _grown(
        lambda: torch.ones(_ODD_NBYTES, dtype=torch.uint8, pin_memory=not lab.is_simulated)
    )
    data: dict[str, object] = {"asked": _ODD_NBYTES, "zinf": ours, "torch": theirs}
    if not lab.is_simulated and hasattr(torch.cuda, "host_memory_stats"):
        stats = torch.cuda.host_memory_stats()
        data["torch_host_memory"] = {k: v for k, v in stats.items() if k.endswith("bytes.current")}
    text = "; ".join(
        f"{name}: resident {grown['rss'] / _ODD_NBYTES:.2f} x, available "
        f"{grown['available'] / _ODD_NBYTES:.2f} x"
        for name, grown in (("zinf", ours), ("torch", theirs))
    )
    return text + f"; torch says {data.get('torch_host_memory', 'nothing')}", data


def _grown(take: Callable[[], object]) -> tuple[dict[str, int], object]:
    """Return how much less memory there is after `take`, and what it took."""
    process = psutil.Process()
    gc.collect()
    rss, available = process.memory_info().rss, psutil.virtual_memory().available
    kept = take()
    return {
        "rss": process.memory_info().rss - rss,
        "available": available - psutil.virtual_memory().available,
    }, kept
