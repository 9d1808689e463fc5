"""The real kvikio under NvmeTier, on a machine without a GPU: see `libcuda_double`.

Each mode is one process, since kvikio cannot be loaded twice nor its driver exchanged.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from libcuda_double import build_double

from zinf_core.units import MiB

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATHS = (ROOT, HERE, ROOT / "tests" / "conformance")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed"
    ),
]


def run_child(mode: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return what `kvikio_child` found. Skips where there is no compiler."""
    build_double(folder)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), *filter(None, sys.path)]),
        # With the double's device and /run/udev kvikio would start cuFile, which never returns.
        "KVIKIO_COMPAT_MODE": "ON",
    }
    command = [sys.executable, str(HERE / "kvikio_child.py"), mode, str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module", params=["host", "device"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a whole run found, one for all tests of a mode."""
    return {
        "mode": request.param,
        **run_child(request.param, tmp_path_factory.mktemp(request.param)),
    }


def test_the_kit_passes(report: dict[str, Any]) -> None:
    """Catches an engine that breaks a law with real futures, on host memory or on memory that
    only the driver can reach."""
    assert report["failures"] == {}
    assert report["machine"] is None
    spaces = {"host": ["host"], "device": ["device", "host"]}
    assert report["memory_spaces"] == spaces[report["mode"]]
    assert report["left_fds"] == 0


def test_kvikio_moved_the_bytes_and_the_path_says_how(report: dict[str, Any]) -> None:
    """Catches a tier that says gds and uses read calls, or says gds where the host is in between;
    device memory must have been copied by the driver, host memory must not."""
    assert report["path_taken"] == "gds-compat"
    assert report["num_threads"] >= 4
    assert (report["num_device_copies"] > 100) == (report["mode"] == "device")
    if "bytes_moved" not in report:
        pytest.skip("this kvikio has no SummaryMonitor")
    assert report["bytes_moved"] > 50 * MiB
    assert report["backends"]["POSIX"] == report["bytes_moved"]


def test_faults_have_names(report: dict[str, Any]) -> None:
    """Catches kvikio's bare RuntimeErrors let through, or given a wrong errno."""
    expected = {
        "missing": r"FileNotFoundError: .*No such file",
        "past the end": r"OSError: \[Errno 5\].*EOF",
        "read-only memory": r"InternalError: .*8192 bytes into read-only memory",
        "closed": r"PermissionError: ",
        "no room": r"TierFullError: \[Errno 27\] .*offset \d+ needs \d+ bytes .*segment-00000",
        "room again": None,
        "cut": r"CorruptDataError: .*was cut to 8192 bytes",
        "not cut": None,
        "segment missing": r"CorruptDataError: .*is missing",
    }
    assert report["faults"].keys() == expected.keys()
    for fault, pattern in expected.items():
        found = report["faults"][fault]
        assert found is None if pattern is None else re.match(pattern, found), f"{fault}: {found}"


def test_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    """Catches ENOSPC from kvikio reported as some I/O error."""
    found = run_child("host", tmp_path, str(small_disk))["full disk"]
    assert re.match(r"TierFullError: \[Errno 28\] .*No space left.*bytes are free there", found)
