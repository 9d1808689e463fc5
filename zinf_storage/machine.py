"""Machine: which packages, memory and devices are here, without importing anything heavy."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil

_NO_CGROUP_LIMIT: Final = 1 << 60
"""Version 1 of cgroups writes a number near 2**63 for "none"."""

UDEV: Final = Path("/run/udev")
"""kvikio does not try cuFile without this folder."""
NVIDIA_FS: Final = Path("/proc/driver/nvidia-fs")
"""There while the kernel module of GPUDirect Storage is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One optional or required distribution."""

    name: str
    version: str | None
    """None: not installed."""
    purpose: str
    extra: str | None
    """Extra of zinf that brings it; None for what zinf always has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory this process may use, in bytes."""

    total_nbytes: int
    available_nbytes: int
    cgroup_limit_nbytes: int | None
    """Least limit of this process's control group and its parents; None: unlimited."""
    lockable_nbytes: int | None
    """RLIMIT_MEMLOCK; None: unlimited."""
    huge_pages: str
    """Transparent huge pages: ``always``, ``madvise``, ``never`` or ``unknown``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What the CUDA driver says."""

    num_devices: int
    driver: str | None
    """CUDA version the driver supports, e.g. ``"13.0"``."""
    problem: str | None
    """Why no device can be used; None when one can."""


_PACKAGES: Final = (
    (("numpy",), "arrays", None),
    (("msgpack",), "manifests", None),
    (("xxhash",), "checksums", None),
    (("rich",), "terminal output", None),
    (("torch",), "training", "torch"),
    (("transformers",), "Hugging Face models", "hf"),
    (("gguf",), "GGUF files", "hf"),
    (("safetensors",), "model folders", "hf"),
    (("cupy-cuda13x", "cupy-cuda12x"), "device memory", "cuda13"),
    (("kvikio-cu13", "kvikio-cu12"), "GPUDirect Storage", "cuda13"),
    (("obstore",), "object stores", "object"),
    (("zstandard",), "compressed tiers, codec zstd", "compress"),
    (("lz4",), "compressed tiers, codec lz4", "compress"),
    (("blosc2",), "compressed tiers, codec blosc2", "compress"),
    (("matplotlib",), "charts of benchmarks", "bench"),
)


def find_packages() -> tuple[Package, ...]:
    """Return the packages zinf can use, installed or not. Imports none of them."""
    return tuple(
        _find_package(names, purpose=purpose, extra=extra) for names, purpose, extra in _PACKAGES
    )


def python_version() -> str:
    """Return e.g. ``"CPython 3.11.7"``."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def read_memory() -> Memory:
    """Return the memory limits of this process."""
    memory = psutil.virtual_memory()
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        total_nbytes=memory.total,
        available_nbytes=memory.available,
        cgroup_limit_nbytes=read_cgroup_limit(),
        lockable_nbytes=None if lockable == resource.RLIM_INFINITY else lockable,
        huge_pages=_read_huge_pages(),
    )


def read_cgroup_limit(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the least memory limit in bytes of this process's control groups, or None.

    Both versions of cgroups are understood; a group's parents limit it, too. `membership` and
    `root` are parameters so that a test can lay out any hierarchy.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            limits += _read_limits(root, group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _read_limits(root / "memory", group, "memory.limit_in_bytes")
    return min(limits, default=None)


def probe_cuda(library: str = "libcuda.so.1") -> Cuda:
    """Return what the CUDA driver called `library` says; creates no context."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as exc:
        return Cuda(num_devices=0, driver=None, problem=f"no driver: {exc}")
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    text = f"{version.value // 1000}.{version.value % 1000 // 10}"
    status = driver.cuInit(0)
    if status:
        return Cuda(num_devices=0, driver=text, problem=f"cuInit failed with status {status}")
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    problem = None if count.value else "the driver sees no device"
    return Cuda(num_devices=count.value, driver=text, problem=problem)


def gds_problem(cuda: Cuda, packages: tuple[Package, ...]) -> str | None:
    """Return why GPUDirect Storage cannot be used, the first reason first; None if it may work.

    With the last two reasons kvikio works, through host memory.
    """
    if cuda.problem is not None:
        return "no CUDA device"
    if not any(pkg.version for pkg in packages if pkg.name.startswith("kvikio")):
        return 'kvikio is not installed; pip install "zinf[cuda13]" or "zinf[cuda12]"'
    if not UDEV.is_dir():
        return f"{UDEV} is missing, without which kvikio goes through host memory"
    if not NVIDIA_FS.exists():
        return "the kernel module nvidia-fs is not loaded; kvikio goes through host memory"
    return None


def peak_rss_nbytes() -> int:
    """Return the most physical memory this process has held, in bytes (ru_maxrss)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _find_package(names: tuple[str, ...], *, purpose: str, extra: str | None) -> Package:
    """Return the first of several distributions of one thing that is installed."""
    for name in names:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return Package(name=name, version=version, purpose=purpose, extra=extra)
    return Package(name=names[0], version=None, purpose=purpose, extra=extra)


def _read_limits(root: Path, group: str, filename: str) -> list[int]:
    """Return the limits written in `group` below `root`, and in each of its parents."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    limits: list[int] = []
    for depth in range(len(parts) + 1):
        limit = _read_limit(root.joinpath(*parts[:depth], filename))
        if limit is not None:
            limits.append(limit)
    return limits


def _read_limit(path: Path) -> int | None:
    """Return the number in the file at `path`; None if absent or "no limit"."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if not text.isdigit():
        return None
    return int(text) if int(text) < _NO_CGROUP_LIMIT else None


def _read_huge_pages(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> str:
    """Return the word in brackets, as in ``always [madvise] never``."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    chosen = [word.strip("[]") for word in words if word.startswith("[")]
    return chosen[0] if chosen else "unknown"
