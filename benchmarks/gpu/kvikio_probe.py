"""One round trip through kvikio in one compatibility mode, in a process that may hang.

Usage: python kvikio_probe.py ON|AUTO|OFF FOLDER; prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_NBYTES = 1 << 20


def main(mode: str, folder: str) -> None:
    """Write and read from host and device memory, and print which backend moved the bytes."""
    import kvikio  # noqa: PLC0415 - may raise anything where libraries are missing
    import kvikio.cufile_driver  # noqa: PLC0415
    import kvikio.defaults  # noqa: PLC0415

    kvikio.defaults.set("compat_mode", getattr(kvikio.CompatMode, mode))
    monitor = kvikio.SummaryMonitor() if hasattr(kvikio, "SummaryMonitor") else None
    found: dict[str, object] = {"version": kvikio.__version__}
    expected = np.arange(_NBYTES, dtype=np.uint32).astype(np.uint8)
    path = Path(folder) / f"kvikio-{mode}"
    found["host"] = _round_trip(kvikio, path, expected, np.empty_like(expected))
    import cupy  # noqa: PLC0415 - after the host part, which does not need it

    if cupy.cuda.is_available():
        source = cupy.empty(_NBYTES, cupy.uint8)
        source.set(expected)
        cupy.cuda.runtime.deviceSynchronize()  # kvikio waits for no stream
        found["device"] = _round_trip(kvikio, path, source, cupy.empty_like(source))
    try:
        found["is_gds_available"] = kvikio.cufile_driver.get("is_gds_available")
    except RuntimeError as exc:
        found["is_gds_available"] = f"unknown: {exc}"
    if monitor is not None:
        backends = monitor.get().by_backend
        found["bytes_by_backend"] = {n: b["bytes_transferred"] for n, b in backends.items()}
    sys.stdout.write("\n" + json.dumps(found))


def _round_trip(kvikio: Any, path: Path, source: Any, target: Any) -> str:
    """Return ``same`` or ``different``."""
    with kvikio.CuFile(path, "w") as file:
        file.pwrite(source, _NBYTES, 0).get()
    with kvikio.CuFile(path, "r") as file:
        file.pread(target, _NBYTES, 0).get()
    path.unlink()
    return "same" if bool((source == target).all()) else "different"


if __name__ == "__main__":
    main(*sys.argv[1:])
