"""The one door to kvikio: imports it when it is asked for, sets it up, opens files with it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final

from zinf_core.device import Device
from zinf_core.errors import ConfigError
from zinf_storage.machine import UDEV, Cuda, probe_cuda
from zinf_storage.nvme.gds import CuFile, GdsEngine
from zinf_storage.nvme.options import NvmeOptions

_REMEDY: Final = "or use engine=posix"


def is_cuda(device: Device) -> bool:
    """Return whether kvikio may reach the memory of `device`."""
    return device.name.startswith("cuda:")


def open_gds(options: NvmeOptions, device: Device | None) -> GdsEngine:
    """Return the engine for `options`, on host memory and on that of `device` if there is one.

    Sets kvikio up for the whole process and for good: at least `options.num_threads` threads,
    direct I/O, staging buffers of one request; compatibility mode where there is no GPU, since
    cuFile then never returns. Raises ConfigError that says what is missing; nothing was opened.
    """
    cuda = probe_cuda()
    if device is not None and not is_cuda(device):
        raise ConfigError(f"engine = gds: {device.name} is no CUDA device; name one, {_REMEDY}")
    if device is not None and cuda.problem is not None:
        raise ConfigError(
            f"engine = gds on {device.name}: no CUDA device can be used ({cuda.problem}); install "
            f"the NVIDIA driver, {_REMEDY}"
        )
    kvikio = _import_kvikio()
    _set_up(kvikio, options, cuda)
    _require_host_io(kvikio)
    return GdsEngine(
        open_file=partial(_open_file, kvikio),
        path_taken=_path_taken(kvikio, device),
        device=device,
        task_nbytes=options.io_nbytes,
    )


def _import_kvikio() -> Any:
    try:
        import kvikio  # noqa: PLC0415 - absent on most machines, and slow to import
        import kvikio.cufile_driver  # noqa: PLC0415
        import kvikio.defaults  # noqa: PLC0415
    except Exception as exc:
        raise ConfigError(
            f'engine = gds needs kvikio; pip install "zinf[cuda13]" or "zinf[cuda12]", {_REMEDY}: '
            f"{type(exc).__name__}: {exc}"
        ) from exc
    return kvikio


def _set_up(kvikio: Any, options: NvmeOptions, cuda: Cuda) -> None:
    defaults = kvikio.defaults
    try:
        if cuda.problem is not None:
            defaults.set("compat_mode", kvikio.CompatMode.ON)
        if defaults.get("num_threads") < options.num_threads:
            defaults.set("num_threads", options.num_threads)
        defaults.set({"auto_direct_io_read": True, "auto_direct_io_write": True})
        if defaults.get("bounce_buffer_size") > options.io_nbytes:
            defaults.set("bounce_buffer_size", options.io_nbytes)
    except (KeyError, AttributeError) as exc:
        raise ConfigError(
            f"engine = gds: kvikio {kvikio.__version__} does not know {exc}; upgrade it, {_REMEDY}"
        ) from exc


def _require_host_io(kvikio: Any) -> None:
    """Move a few bytes: kvikio asks the driver what kind of memory each pointer is.

    Not if kvikio was told to use cuFile or nothing, which cannot do it on a file in memory.
    """
    if kvikio.defaults.get("compat_mode") == kvikio.CompatMode.OFF:
        return
    fd = os.memfd_create("zinf-kvikio")
    found = bytearray(4)
    try:
        os.write(fd, b"zinf")
        with kvikio.CuFile(f"/proc/self/fd/{fd}", "r") as file:
            file.pread(found, len(found), 0).get()
    except RuntimeError as exc:
        raise ConfigError(
            f"engine = gds: kvikio cannot read a file here: {exc}; install the NVIDIA driver, "
            f"{_REMEDY}"
        ) from exc
    finally:
        os.close(fd)


def _path_taken(kvikio: Any, device: Device | None) -> str:
    mode = kvikio.defaults.get("compat_mode")
    if device is None or mode == kvikio.CompatMode.ON or not UDEV.is_dir():
        return "gds-compat"
    try:
        # Under P2PDMA without nvidia-fs the driver says no as well: this may claim too little.
        is_direct = kvikio.cufile_driver.get("is_gds_available")
    except RuntimeError:
        is_direct = False
    return "gds" if is_direct else "gds-compat"


def _open_file(kvikio: Any, path: Path) -> CuFile:
    file: CuFile = kvikio.CuFile(path, "r+")
    return file
