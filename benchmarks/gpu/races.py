"""Section races: copies between compute on side streams, with data that shows a missing wait."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from gpu.lab import Lab, open_lab
from gpu.report import CheckFailed, Finding, Report, Skipped
from gpu.settings import Settings
from gpu.staged import StagedEngine

from zinf_core.buffers import Buffer
from zinf_core.errors import TransferTimeoutError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.tier import Tier
from zinf_core.units import KiB, MiB
from zinf_storage.allocators import PinnedAllocator
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier
from zinf_storage.nvme import Engine, NvmeOptions, NvmeTier

_CPU = torch.device("cpu")
_NBYTES = MiB
_RING = 2
_TIMEOUT_S = 20.0
_DELAY_S = 0.0005
"""How late a kernel comes: several times what a copy of _NBYTES takes."""
_KEY = TensorKey.of("raced", StateKind.PARAM)


def run(report: Report, settings: Settings) -> None:
    """Try every order in which a copy and compute can meet."""
    lab = open_lab(simulate=settings.simulate)
    rounds = 20 if settings.quick else 200
    checks: dict[str, Callable[[Lab, int], str]] = {
        "copies in, consumed on a side stream, ring of two": _consume,
        "copies out, right behind the kernel that produces": _produce,
        "out and in of the same memory without a wait": _there_and_back,
        "four threads, a side stream each": _threads,
        "memory freed and used again between copies": _reuse,
        "host memory pinned and unpinned between copies": _pinning,
        "a pool of two leases, handed on under kernels": _leases,
        "DeviceTier and HostTier under kernels": _memory_tiers,
        "waits that time out": _timeouts,
    }
    try:
        for name, check in checks.items():
            with report.item(name) as finding:
                finding.text = check(lab, rounds)
        with report.item("NvmeTier with device memory under kernels") as finding:
            _nvme(lab, max(rounds // 4, 4), settings.folder, finding)
    finally:
        lab.close()


def _consume(lab: Lab, rounds: int) -> str:
    """Refill a buffer while the kernel that reads its last bytes is late."""
    ring = [lab.device.allocate(_NBYTES) for _ in range(_RING)]
    sources = [lab.pinned(_NBYTES) for _ in range(_RING)]
    found: list[torch.Tensor] = []
    with lab.side_stream():
        for number in range(rounds):
            slot = number % _RING
            lab.fill(sources[slot], _pattern(number))
            lab.device.copy(ring[slot], sources[slot]).wait(timeout_s=_TIMEOUT_S)
            lab.fill(sources[slot], b"\xff" * _NBYTES)
            lab.delay(_DELAY_S)
            found.append(_digest(lab, ring[slot]))
        _expect(lab, found)
    return f"{rounds} copies of {_NBYTES // KiB} KiB"


def _produce(lab: Lab, rounds: int) -> str:
    """Copy out what a late kernel writes, without waiting for the kernel."""
    source, target = lab.device.allocate(_NBYTES), lab.pinned(_NBYTES)
    with lab.side_stream():
        for number in range(rounds):
            words = lab.tensor(source).view(torch.int64)
            lab.delay(_DELAY_S)
            words.fill_(number)
            lab.device.copy(target, source).wait(timeout_s=_TIMEOUT_S)
            words.fill_(-1)
            _equal(_words(lab, target), number, f"round {number}")
    lab.synchronize()  # torch gives the memory to the next check, on another stream
    return f"{rounds} copies of {_NBYTES // KiB} KiB"


def _there_and_back(lab: Lab, rounds: int) -> str:
    """In, across, out, and in again, ordered by the memory they share."""
    device = lab.device
    first, second = device.allocate(_NBYTES), device.allocate(_NBYTES)
    source, target, other = (lab.pinned(_NBYTES) for _ in range(3))
    for number in range(rounds):
        lab.fill(source, _words_of(number))
        lab.fill(other, _words_of(-number))
        copies = [
            device.copy(first, source),
            device.copy(second, first),
            device.copy(target, second),
            device.copy(second, other),
        ]
        for copy in reversed(copies):
            copy.wait(timeout_s=_TIMEOUT_S)
        _equal(_words(lab, target), number, f"round {number}, out")
        device.copy(target, second).wait(timeout_s=_TIMEOUT_S)
        _equal(_words(lab, target), -number, f"round {number}, in after out")
    return f"{5 * rounds} copies"


def _threads(lab: Lab, rounds: int) -> str:
    """Several threads at once, each as `_consume`."""
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(_consume, lab, rounds) for _ in range(4)]:
            future.result(timeout=60)
    return f"{4 * rounds} copies"


def _reuse(lab: Lab, rounds: int) -> str:
    """Free a buffer under a late kernel; torch gives its memory to the next user."""
    source = lab.pinned(_NBYTES)
    found: list[torch.Tensor] = []
    with lab.side_stream():
        for number in range(rounds):
            buffer = lab.device.allocate(_NBYTES)
            lab.fill(source, _pattern(number))
            lab.device.copy(buffer, source).wait(timeout_s=_TIMEOUT_S)
            lab.delay(_DELAY_S)
            found.append(_digest(lab, buffer))
            del buffer
            torch.empty(_NBYTES, dtype=torch.uint8, device=lab.torch_device).fill_(0xEE)
        _expect(lab, found)
    return f"{rounds} buffers"


def _pinning(lab: Lab, rounds: int) -> str:
    """Pin, copy in both directions, unpin, in sizes that are no power of two."""
    for number in range(max(rounds // 4, 4)):
        nbytes = 4096 * (1 + 37 * number % 300) + 8
        source, target = lab.pinned(nbytes), lab.pinned(nbytes)
        buffer = lab.device.allocate(nbytes)
        lab.fill(source, bytes([number % 251]) * nbytes)
        inward, outward = lab.device.copy(buffer, source), lab.device.copy(target, buffer)
        outward.wait(timeout_s=_TIMEOUT_S)
        inward.wait(timeout_s=_TIMEOUT_S)
        if lab.contents(target) != bytes([number % 251]) * nbytes:
            raise CheckFailed(f"round {number}: {nbytes} bytes came back changed")
    return f"{2 * max(rounds // 4, 4)} mappings"


def _leases(lab: Lab, rounds: int) -> str:
    """Release a lease while a kernel still reads it; the next user fills it at once."""
    pool = BufferPool("raced", budget_nbytes=_RING * _NBYTES, allocator=lab.device)
    source = lab.pinned(_NBYTES)
    found: list[torch.Tensor] = []
    with lab.side_stream():
        for number in range(rounds):
            lease = pool.lease_nowait(_NBYTES)
            lab.fill(source, _pattern(number))
            lab.device.copy(lease.buffer, source).wait(timeout_s=_TIMEOUT_S)
            lab.delay(_DELAY_S)
            found.append(_digest(lab, lease.buffer))
            lease.release()
        _expect(lab, found)
    pool.trim()
    return f"{rounds} leases of {_RING} buffers"


def _memory_tiers(lab: Lab, rounds: int) -> str:
    """Write what a late kernel produces, read into what a late kernel still reads."""
    budget = 4 * _NBYTES
    device_pool = BufferPool("raced", budget_nbytes=budget, allocator=lab.device)
    host_pool = BufferPool("raced", budget_nbytes=budget, allocator=PinnedAllocator(lab.device))
    tiers: list[Tier] = [
        DeviceTier("device", pool=device_pool, device=lab.device),
        HostTier("host", pool=host_pool, device=lab.device),
    ]
    for tier in tiers:
        try:
            _tier(lab, tier, rounds)
        finally:
            tier.close()
    return f"{4 * rounds} transfers"


def _nvme(lab: Lab, rounds: int, folder: Path, finding: Finding) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        tier = NvmeTier.open(
            place,
            options=NvmeOptions(engine=Engine.POSIX, segment_nbytes=16 * MiB),
            engine=StagedEngine(device=lab.device),
        )
        try:
            _tier(lab, tier, rounds)
        finally:
            tier.close()
    finding.text = f"{2 * rounds} transfers, {tier.path_taken}"


def _tier(lab: Lab, tier: Tier, rounds: int) -> None:
    tier.reserve(_KEY, _NBYTES)
    source, target = lab.device.allocate(_NBYTES), lab.device.allocate(_NBYTES)
    found: list[torch.Tensor] = []
    with lab.side_stream():
        for number in range(rounds):
            words = lab.tensor(source).view(torch.int64)
            lab.delay(_DELAY_S)
            words.copy_(_tensor_of(number, lab.torch_device))
            tier.write_from(_KEY, source).wait(timeout_s=_TIMEOUT_S)
            words.fill_(-1)
            tier.read_into(_KEY, target).wait(timeout_s=_TIMEOUT_S)
            lab.delay(_DELAY_S)
            found.append(_digest(lab, target))
        _expect(lab, found)


def _timeouts(lab: Lab, rounds: int) -> str:
    """Give up waiting for a late copy, several times, and then see it done."""
    if lab.is_simulated:
        raise Skipped("a simulated copy happens as soon as it is waited for")
    source, target = lab.device.allocate(_NBYTES), lab.pinned(_NBYTES)
    before = threading.active_count()
    with lab.side_stream():
        for number in range(max(rounds // 50, 2)):
            lab.delay(0.1)
            lab.tensor(source).view(torch.int64).fill_(number)
            copy = lab.device.copy(target, source)
            for _ in range(3):
                _expect_timeout(copy.wait)
            copy.wait(timeout_s=_TIMEOUT_S)
            _equal(_words(lab, target), number, f"round {number}")
    lab.synchronize()
    if threading.active_count() > before:
        raise CheckFailed(f"{threading.active_count() - before} threads are left")
    return f"{3 * max(rounds // 50, 2)} waits of 2 ms for copies that come after 100 ms"


def _expect_timeout(wait: Callable[[float], None]) -> None:
    try:
        wait(0.002)
    except TransferTimeoutError:
        return
    raise CheckFailed("a wait of 2 ms returned although the copy was 100 ms late")


def _pattern(number: int) -> bytes:
    return _tensor_of(number).numpy().tobytes()


def _tensor_of(number: int, device: torch.device = _CPU) -> torch.Tensor:
    """Return _NBYTES of 64-bit words, different in every position and round."""
    words = torch.arange(_NBYTES // 8, dtype=torch.int64, device=device)
    return words * (2 * number + 1) + number


def _digest(lab: Lab, buffer: Buffer) -> torch.Tensor:
    """Submit a kernel that reads all of `buffer`; return its sum, first and last word."""
    words = lab.tensor(buffer).view(torch.int64)
    return torch.stack([words.sum(), words[0], words[-1]])


def _expect(lab: Lab, found: list[torch.Tensor]) -> None:
    """Raise CheckFailed unless digest number i is that of pattern number i."""
    lab.synchronize()
    for number, digest in enumerate(found):
        words = _tensor_of(number)
        expected = [int(words.sum()), int(words[0]), int(words[-1])]
        if digest.tolist() != expected:
            raise CheckFailed(f"round {number}: kernel saw {digest.tolist()}, not {expected}")


def _words_of(number: int) -> bytes:
    return np.full(_NBYTES // 8, number, np.int64).tobytes()


def _words(lab: Lab, buffer: Buffer) -> np.ndarray:
    return np.frombuffer(lab.contents(buffer), np.int64)


def _equal(words: np.ndarray, number: int, what: str) -> None:
    wrong = int((words != number).sum())
    if wrong:
        raise CheckFailed(f"{what}: {wrong} of {len(words)} words are not {number}")
