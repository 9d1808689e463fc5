"""Section facts: what is here, and whether torch, cupy and kvikio share memory as zinf expects."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu.report import CheckFailed, Report, Skipped
from gpu.settings import Settings

from zinf_core.units import PAGE_NBYTES, format_nbytes
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.machine import NVIDIA_FS, UDEV, probe_cuda, read_memory
from zinf_torch.compute import Compute

_PACKAGES = (
    "torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "kvikio-cu13", "kvikio-cu12",
    "nvidia-cufile", "cuda-pathfinder", "ml-dtypes", "pytest", "hypothesis", "rich", "psutil",
)  # fmt: skip
_PROBE = Path(__file__).with_name("kvikio_probe.py")
_PROBE_S = 10.0
_DRIVER = Path("/proc/driver/nvidia/version")


def run(report: Report, settings: Settings) -> None:
    """Note the facts, then try the things that nobody has seen on a GPU."""
    for name, text in _facts(settings.folder):
        report.note(name, text)
    if not settings.simulate:
        for name, check in _CHECKS.items():
            with report.item(name) as finding:
                finding.text = check()
    _probe_kvikio(report, settings)


def _facts(folder: Path) -> Iterator[tuple[str, str]]:
    cuda, memory = probe_cuda(), read_memory()
    yield "system", f"Python {platform.python_version()}, {platform.platform()}, {_cpus()} CPUs"
    yield "packages", ", ".join(_versions())
    yield (
        "CUDA",
        (
            f"driver supports {cuda.driver or 'nothing'}, {cuda.num_devices} devices"
            f"{f', {cuda.problem}' if cuda.problem else ''}; torch built for {torch.version.cuda}"
        ),
    )
    if _DRIVER.exists():
        yield "driver", _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        yield (
            "GPU",
            f"{about.name}, {format_nbytes(about.total_memory)}, cc {about.major}.{about.minor}",
        )
    for path in (UDEV, NVIDIA_FS):
        yield str(path), "is there" if path.exists() else "is not there"
    yield "torch.cuda.Stream.__cuda_stream__", _has(torch.cuda.Stream, "__cuda_stream__")
    yield "torch.distributed.all_gather_single", _has(torch.distributed, "all_gather_single")
    limit = memory.lockable_nbytes
    yield "RLIMIT_MEMLOCK", "unlimited" if limit is None else format_nbytes(limit)
    group = memory.cgroup_limit_nbytes
    yield "cgroup memory limit", "none" if group is None else format_nbytes(group)
    yield "memory", f"{format_nbytes(memory.available_nbytes)} available"
    yield "huge pages", memory.huge_pages
    yield f"direct I/O at {folder.parent}", _direct(folder)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _has(thing: object, name: str) -> str:
    return "is there" if hasattr(thing, name) else "is not there"


def _direct(folder: Path) -> str:
    page = PageAlignedAllocator().allocate(PAGE_NBYTES)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        except OSError as exc:
            return f"no: {exc.strerror}"
        try:
            os.pwrite(fd, page.array.data, 0)
        except OSError as exc:
            return f"no: {exc.strerror}"
        finally:
            os.close(fd)
    return "yes"


def _registered() -> str:
    """A registered mapping is pinned memory to torch."""
    compute = Compute.of("cuda:0")
    buffer = compute.host_allocator().allocate(5 * PAGE_NBYTES)
    tensor = torch.from_numpy(buffer.array)
    if not tensor.is_pinned():
        raise CheckFailed(f"torch does not see it as pinned; its space is {buffer.space}")
    return "is_pinned() is True"


def _views() -> str:
    """Torch sees zinf's device memory without a copy, and torch's as zinf's allocator made it."""
    compute = Compute.of("cuda:0")
    before = torch.cuda.memory_allocated()
    buffer = compute.allocator().allocate(PAGE_NBYTES)
    grown = torch.cuda.memory_allocated() - before
    tensor = compute.tensor(buffer)
    if tensor.data_ptr() != buffer.address or grown < PAGE_NBYTES:
        raise CheckFailed(f"tensor at {tensor.data_ptr():#x}, buffer at {buffer.address:#x}")
    if not buffer.is_shared():
        raise CheckFailed("the buffer does not know of the tensor over it")
    half = tensor.view(torch.bfloat16)[7:]
    del tensor
    if not buffer.is_shared():
        raise CheckFailed("the buffer does not know of a view of a tensor over it")
    del half
    if buffer.is_shared():
        raise CheckFailed("the buffer is shared after its tensors died")
    return f"same address; torch counts {grown} bytes for {PAGE_NBYTES}; is_shared() follows"


def _bf16() -> str:
    """The two ways to show bf16 to cupy."""
    cupy = importlib.import_module("cupy")
    tensor = torch.arange(8, device="cuda:0").to(torch.bfloat16)
    words = cupy.asarray(tensor.view(torch.int16))
    if not bool((torch.as_tensor(words, device="cuda:0") == tensor.view(torch.int16)).all()):
        raise CheckFailed("int16 views differ")
    try:
        other = str(cupy.from_dlpack(tensor).dtype)
    except Exception as exc:  # noqa: BLE001 - a fact about cupy, not about zinf
        other = f"{type(exc).__name__}: {exc}"
    return f"as int16: same; from_dlpack: {other}"


def _streams() -> str:
    """Cupy takes torch's stream."""
    cupy = importlib.import_module("cupy")
    stream = torch.cuda.Stream()
    try:
        found = cupy.cuda.Stream.from_external(stream)
    except Exception as exc:
        raise Skipped(f"Stream.from_external: {type(exc).__name__}: {exc}") from exc
    if found.ptr != stream.cuda_stream:
        raise CheckFailed(f"{found.ptr:#x} is not {stream.cuda_stream:#x}")
    return "Stream.from_external works"


_CHECKS: dict[str, Callable[[], str]] = {
    "registered memory": _registered,
    "device memory as tensors": _views,
    "bf16 between torch and cupy": _bf16,
    "streams between torch and cupy": _streams,
}


def _probe_kvikio(report: Report, settings: Settings) -> None:
    """Try kvikio in each mode, and say whether the other sections may use it (mode AUTO)."""
    if settings.no_kvikio:
        report.note("kvikio", settings.no_kvikio, no_kvikio=settings.no_kvikio)
        return
    reason = ""
    with tempfile.TemporaryDirectory(dir=settings.folder) as place:
        for mode in ("AUTO", "ON", "OFF"):
            with report.item(f"kvikio, mode {mode}") as finding:
                finding.data, problem = _probe(mode, place, min(_PROBE_S, report.left_s))
                if mode == "AUTO":
                    reason = problem and f"kvikio does not work here: {problem}"
                if problem:
                    raise Skipped(problem)
                finding.text = json.dumps(finding.data)
    report.note("kvikio", reason or "may be used", no_kvikio=reason)


def _probe(mode: str, place: str, seconds: float) -> tuple[dict[str, Any], str]:
    """Return what one mode gave, and what is wrong with it."""
    command = [sys.executable, str(_PROBE), mode, place]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=place, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"did not return within {seconds:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"ended with exit code {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = [name for name in ("host", "device") if found.get(name) == "different"]
    return found, f"other bytes came back: {', '.join(wrong)} memory" if wrong else ""
