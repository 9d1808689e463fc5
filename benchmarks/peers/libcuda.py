"""A libcuda that has no device, so that kvikio does host I/O on a machine without a GPU.

kvikio asks the driver of every pointer whether it is host memory; "not initialized" means yes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

NAMES = (
    "cuInit", "cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuDeviceGet",
    "cuDeviceGetAttribute", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease", "cuCtxCreate", "cuCtxDestroy", "cuCtxGetCurrent",
    "cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuPointerGetAttribute",
    "cuPointerGetAttributes", "cuMemGetAddressRange", "cuMemHostAlloc", "cuMemFreeHost",
    "cuMemHostRegister", "cuMemHostUnregister", "cuMemcpyAsync", "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync", "cuMemcpyBatchAsync", "cuStreamCreate", "cuStreamDestroy",
    "cuStreamSynchronize", "cuLaunchHostFunc", "cuEventCreate", "cuEventDestroy", "cuEventQuery",
    "cuEventRecord", "cuEventSynchronize",
)  # fmt: skip
"""Entries that kvikio looks up, each under several versions."""


def build(folder: Path) -> Path:
    """Compile ``libcuda.so.1`` to `folder`, for LD_LIBRARY_PATH. Raises RuntimeError."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("no C compiler to make a libcuda with")
    source, library = folder / "libcuda.c", folder / "libcuda.so.1"
    lines = ["int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"]
    lines += [
        f"int {name}{version}(void) {{ return 3; }}"
        for name in NAMES
        for version in ("", "_v2", "_v3", "_v4")
    ]
    source.write_text("\n".join(lines) + "\n", encoding="ascii")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"no libcuda: {done.stderr.strip()}")
    return library
