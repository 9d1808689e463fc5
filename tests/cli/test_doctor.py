"""Doctor: what is found about drive, memory and packages, and how it is told."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zinf_core.cli import main
from zinf_core.errors import ConfigError
from zinf_storage import probe
from zinf_storage.machine import Cuda, Package, gds_problem, probe_cuda, read_cgroup_limit
from zinf_storage.probe import DirectAlignment, IoPath, probe_path


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_probe_agrees_with_the_system(tmp_path: Path) -> None:
    """Catches a wrong mount, free space of another drive, and a scratch file that stays behind."""
    folder = tmp_path / "a b ü"
    folder.mkdir()
    found = probe_path(folder)
    line = subprocess.run(
        ["df", "--output=fstype,target", "-B1", str(folder)], check=True, capture_output=True
    ).stdout.split()
    assert found.filesystem == line[-2].decode()
    assert str(found.mount_point) == line[-1].decode()
    assert found.total_nbytes == shutil.disk_usage(folder).total
    assert found.is_writable
    assert (found.io_path is IoPath.POSIX_DIRECT) == (found.refusal is None)
    assert list(folder.iterdir()) == []


def test_direct_alignment_is_what_direct_io_needs(tmp_path: Path) -> None:
    """Catches a wrong field of struct statx: what it names must do, half a block must be refused.

    Some drives take memory aligned to less than they name, so that is not tried.
    """
    file = tmp_path / "f"
    file.write_bytes(bytes(8192))
    found = probe.read_direct_alignment(file)
    if found is None:
        assert probe_path(tmp_path).alignment is None
        return
    assert isinstance(found, DirectAlignment)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        with probe.mmap.mmap(-1, 8192) as memory, memoryview(memory) as view:
            length, start = found.offset_nbytes, found.memory_nbytes
            with view[:length] as part:
                assert os.preadv(fd, [part], length) == length
            with view[: length // 2] as part, pytest.raises(OSError, match="nvalid"):
                os.preadv(fd, [part], length // 2)
            with view[start : start + length] as part:
                assert os.preadv(fd, [part], length) == length
    finally:
        os.close(fd)


def test_a_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches buffered I/O reported as direct, and a descriptor lost when a transfer is refused."""

    def refuse(fd: int, buffers: object, offset: int) -> int:
        raise OSError(22, "Invalid argument")

    num_open = num_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        found = probe_path(tmp_path)
    assert found.io_path is IoPath.POSIX_BUFFERED
    assert found.refusal == "transfer of one page: Invalid argument"
    assert num_descriptors() == num_open
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_probed(tmp_path: Path) -> None:
    """Catches a traceback for a typing slip, and a read-only place reported as usable."""
    with pytest.raises(ConfigError, match="does not exist"):
        probe_path(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        probe_path(tmp_path / "file")
    found = probe_path(Path("/proc"))
    assert (found.filesystem, found.mount_point) == ("proc", Path("/proc"))
    assert not found.is_writable
    assert found.io_path is None
    assert found.refusal is not None


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "500"}, 500),
        ("0::/\n", {"memory.max": "77"}, 77),
        ("0::/a\n", {}, None),
        ("5:cpu:/x\n4:memory,hugetlb:/a\n", {"memory/a/memory.limit_in_bytes": "900"}, 900),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_cgroup_limit(
    membership: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    """Catches budgets above what the container may use: a parent's limit, or version 1's."""
    (tmp_path / "membership").write_text(membership, encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert read_cgroup_limit(tmp_path / "membership", tmp_path / "root") == limit
    assert read_cgroup_limit(tmp_path / "absent", tmp_path / "root") is None


def test_cuda_and_gds_reasons() -> None:
    """Catches a probe that raises without a driver, and a reason that hides the one before it."""
    absent = probe_cuda("libzinf-no-such-driver.so.1")
    assert absent.num_devices == 0
    assert absent.problem is not None
    assert absent.problem.startswith("no driver: libzinf-no-such-driver.so.1")
    present = Cuda(num_devices=1, driver="13.0", problem=None)
    kvikio = Package(name="kvikio-cu13", version=None, purpose="GDS", extra="cuda13")
    assert gds_problem(absent, ()) == "no CUDA device"
    problem = gds_problem(present, (kvikio,))
    assert problem is not None
    assert "kvikio is not installed" in problem


def test_json_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a report that loses facts between its two forms, or markup that eats `[torch]`."""
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["storage"]["path"] == str(tmp_path)
    assert report["storage"]["io_path"] in {"posix-direct", "posix-buffered"}
    assert {"host", "nvme"} <= set(report["tiers"])
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert report["memory"]["lockable_nbytes"] == (
        None if lockable == resource.RLIM_INFINITY else lockable
    )
    assert main(["doctor", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"storage: path: {tmp_path}" in lines
    assert f"storage: path taken: {report['storage']['io_path']}" in lines
    assert any(line.startswith("versions: torch: ") for line in lines)
    assert all("\x1b" not in line for line in lines)


def test_terminal_tables_show_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches markup that swallows text in square brackets, such as the extra to install."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("zinf_storage.cli.find_packages", lambda: (MISSING_TORCH,))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert 'pip install "zinf[torch]" brings torch' in out
    assert str(tmp_path) in out


MISSING_TORCH = Package(name="torch", version=None, purpose="training", extra="torch")
