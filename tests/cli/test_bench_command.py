"""``zinf bench``, run for real on small data: folders, memory, third parties' tiers, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zinf_core.cli import EXIT_INTERRUPTED, main
from zinf_core.errors import ConfigError, TransferError
from zinf_storage.bench.disk import IN_MEMORY, Verdict
from zinf_storage.bench.fio import Fio
from zinf_storage.bench.grid import Cell, Operation, Order
from zinf_storage.bench.interrupt import stop_on_interrupt
from zinf_storage.bench.report import Report, TierReport, from_json, to_json
from zinf_storage.nvme.posix import SegmentFile
from zinf_storage.probe import IoPath, probe_path
from zinf_storage.profile import load_profile

Install = Callable[..., None]
MiB = 1 << 20
TINY = ("--quick", "--size", "1MiB", "--seconds", "0.3", "--no-fio")

PLAIN = '''
import os, threading
from pathlib import Path
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer
from zinf_core.errors import KeyAbsentError
from zinf_core.keys import Extent


class PlainTier:
    """One buffered file per key: everything stays in the page cache."""

    name = "plain"
    capabilities = TierCapabilities(memory_spaces=frozenset({MemorySpace.HOST}), persistent=True)

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.sizes = {}

    def usage(self):
        total = sum(self.sizes.values())
        return TierUsage(num_keys=len(self.sizes), nbytes=total, allocated_nbytes=total)

    def path(self, key):
        return self.folder / str(key).replace("/", "_")

    def reserve(self, key, nbytes):
        self.sizes[key] = nbytes
        with open(self.path(key), "wb") as file:
            file.truncate(nbytes)
        return Extent(nbytes=nbytes, allocated_nbytes=nbytes)

    def stat(self, key):
        return Extent(nbytes=self.sizes[key], allocated_nbytes=self.sizes[key])

    def keys(self):
        return iter(list(self.sizes))

    def read_into(self, key, dst, *, offset=0):
        with open(self.path(key), "rb", buffering=0) as file:
            os.preadv(file.fileno(), [dst.array.data], offset)
        return CompletedTransfer()

    def write_from(self, key, src, *, offset=0):
        with open(self.path(key), "r+b", buffering=0) as file:
            os.pwritev(file.fileno(), [src.array.data], offset)
        return CompletedTransfer()

    def discard(self, key):
        del self.sizes[key]
        self.path(key).unlink()

    def flush(self):
        return CompletedTransfer()

    def close(self):
        pass


def open_plain(url, *, capacity_nbytes):
    return PlainTier(url.path)
'''

TELLING = '''
from zinf_core.registry import open_tier


class Telling:
    """An nvme tier that says when it is first read from, so that a test knows the moment."""

    def __init__(self, tier):
        self.tier = tier
        self.told = False

    def __getattr__(self, name):
        return getattr(self.tier, name)

    def read_into(self, key, dst, *, offset=0):
        if not self.told:
            self.told = True
            print("reading", flush=True)
        return self.tier.read_into(key, dst, offset=offset)


def open_telling(url, *, capacity_nbytes):
    return Telling(open_tier(f"nvme://{url.path}", capacity_nbytes=capacity_nbytes))


class DeviceOnly(Telling):
    @property
    def capabilities(self):
        from dataclasses import replace
        from zinf_core.capabilities import MemorySpace
        return replace(self.tier.capabilities, memory_spaces=frozenset({MemorySpace.DEVICE}))


def open_device_only(url, *, capacity_nbytes):
    return DeviceOnly(open_tier(f"nvme://{url.path}", capacity_nbytes=capacity_nbytes))
'''


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's profiles out of the tests, and the tests' out of the user's."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder on a drive that takes direct I/O."""
    made = tmp_path / "drive"
    made.mkdir()
    probe = probe_path(made)
    if probe.filesystem in IN_MEMORY or probe.io_path is not IoPath.POSIX_DIRECT:
        pytest.skip(f"{probe.filesystem} is no drive that takes direct I/O")
    return made


def bench(*arguments: str) -> int:
    return main(["bench", "tiers", *arguments])


def measured(path: Path) -> Report:
    return from_json(path.read_text(encoding="utf-8"))


def verdicts(tier: TierReport) -> set[Verdict]:
    return {cell.verdict for cell in tier.cells}


@pytest.mark.slow
def test_a_drive_and_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a report without a part of what was promised, files that stay, and a profile that
    is not what was chosen."""
    out, chart = tmp_path / "out.json", tmp_path / "out.png"
    url = f"nvme://{folder}"
    assert bench(url, "host://", *TINY, "--json", str(out), "--chart", str(chart)) == 0
    report = measured(out)
    assert from_json(to_json(report)) == report
    nvme, host = report.tiers
    assert verdicts(nvme) == {Verdict.DISK}
    assert verdicts(host) == {Verdict.NO_FILES}
    assert nvme.path_taken.startswith("posix-direct")
    assert nvme.url == url
    kinds = {(cell.cell.operation, cell.cell.order) for cell in nvme.cells}
    assert {operation for operation, _ in kinds} == set(Operation)
    assert {order for _, order in kinds} == set(Order)
    tuning = nvme.tuning
    assert tuning is not None
    chosen = tuning.chosen
    assert f"io_nbytes={chosen.io_nbytes // 1024}KiB" in tuning.url or (
        f"io_nbytes={chosen.io_nbytes // MiB}MiB" in tuning.url
    )
    kept = load_profile(folder)
    assert kept is not None
    assert (kept.io_nbytes, kept.num_threads) == (chosen.io_nbytes, chosen.num_threads)
    assert kept.read.bytes_per_s > 0
    assert list(folder.iterdir()) == []
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert chart.stat().st_size > 50_000
    lines = capsys.readouterr().out.splitlines()
    assert f"{url}: ready to paste: {tuning.url}" in lines
    assert any("the defaults reach" in line for line in lines)
    assert any(line.startswith("host://: sequential read, 64 KiB, depth 1: ") for line in lines)
    again = tmp_path / "again.svg"
    assert main(["bench", "chart", str(out), str(again)]) == 0
    assert again.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.slow
def test_cached_numbers_are_refused(
    folder: Path, tmp_path: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a number of the page cache reported as one of the drive."""
    install("plain", PLAIN, "[zinf.tiers]\nplain = plain:open_plain\n")
    out, chart = tmp_path / "out.json", tmp_path / "out.png"
    url = f"plain://{folder}"
    assert bench(url, *TINY, "--json", str(out), "--chart", str(chart)) == 0
    (tier,) = measured(out).tiers
    assert verdicts(tier) == {Verdict.CACHED}
    for cell in tier.cells:
        assert cell.bytes_per_s is cell.p50_s is cell.p99_s is cell.cpu_share is None
        assert "the page cache" in cell.reason
    assert 'bytes_per_s": {' not in out.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "GB/s" not in printed
    assert "cached: not reported as a disk number" in printed
    assert "use direct I/O" in printed
    assert chart.exists()
    assert load_profile(folder) is None
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_buffered_nvme_tier(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a refused cell with a number, and what a forced detour measured kept for runs that
    do not take it. The tier drops what it moved, so the drive does move most of the bytes."""
    out = tmp_path / "out.json"
    assert bench(f"nvme://{folder}?direct=never", *TINY, "--json", str(out)) == 0
    (tier,) = measured(out).tiers
    assert tier.path_taken.startswith("posix-buffered")
    for cell in tier.cells:
        assert (cell.bytes_per_s is None) == (cell.verdict is Verdict.CACHED)
    assert load_profile(folder) is None
    if tier.tuning is not None:
        assert "the URL forces direct" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_buffered_nvme_tier_that_leaves_pages_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the page cache's numbers reported where a tier's advice to drop pages is ignored,
    as some file systems ignore it."""
    monkeypatch.setattr(SegmentFile, "drop_cached", lambda self, offset, nbytes: None)
    out = tmp_path / "out.json"
    assert bench(f"nvme://{folder}?direct=never", *TINY, "--json", str(out)) == 0
    (tier,) = measured(out).tiers
    assert verdicts(tier) == {Verdict.CACHED}
    assert tier.tuning is None


@pytest.mark.slow
def test_tmpfs_is_no_drive(
    shm_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches memory reported as a very fast drive, whether or not it takes direct I/O."""
    out = tmp_path / "out.json"
    assert bench(f"nvme://{shm_folder}", *TINY, "--json", str(out)) == 0
    (tier,) = measured(out).tiers
    assert verdicts(tier) == {Verdict.CACHED}
    assert tier.filesystem == "tmpfs"
    assert tier.tuning is None
    assert "tmpfs is memory, not a drive" in capsys.readouterr().out
    assert list(shm_folder.iterdir()) == []


@pytest.mark.slow
def test_tables_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a table that loses a size or a depth."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert bench("host://", "--quick", "--size", "64MiB", "--seconds", "0.2", "--no-fio") == 0
    out = capsys.readouterr().out
    for word in ("sequential read, GB/s", "random write", "depth 16", "4 KiB", "16 MiB"):
        assert word in out


@pytest.mark.slow
def test_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches minutes of measuring lost to a missing package."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    out, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert bench("host://", *TINY, "--json", str(out), "--chart", str(chart)) == 2
    assert measured(out).tiers[0].cells
    assert not chart.exists()
    captured = capsys.readouterr()
    assert captured.err.count('pip install "zinf[bench]"') == 2  # before and after
    assert "GB/s" in captured.out


@pytest.mark.slow
def test_one_tier_that_fails_spares_the_others(
    folder: Path, tmp_path: Path, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches numbers lost because a later tier cannot be measured."""
    entry = "[zinf.tiers]\ndeviceonly = telling:open_device_only\n"
    install("telling", TELLING, entry)
    out = tmp_path / "out.json"
    urls = (f"deviceonly://{folder}", "host://")
    assert bench(*urls, *TINY, "--json", str(out)) == 2
    assert [tier.url for tier in measured(out).tiers] == ["host://"]
    assert "takes no host memory" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch:///a",), "no installed package offers nosuch://"),
        (("host://", "throttled://[nosuch:///a]"), "no installed package offers nosuch://"),
        (("nvme:///proc",), "cannot write in /proc"),
        (("nvme:///proc/x/y",), "cannot write in /proc"),
        (("nvme://{tmp}", "--size", "1000TiB"), "measuring needs"),
        (("host://", "--size", "1000TiB"), "measuring needs"),
        (("host://", "--size", "1KiB"), "is less than"),
        (("host://", "--size", "many"), "is not a size"),
        (("host://", "--seconds", "0"), "is not a time"),
        (("host://", "--seconds", "nan"), "is not a time"),
        (("host://", "--json", "{tmp}/absent/out.json"), "cannot write"),
        (("host://", "--chart", "{tmp}"), "cannot write"),
        (("host://", "--chart", "{tmp}/out"), "its ending is none of"),
        (("host://", "--chart", "{tmp}/out.xyz"), "its ending is none of"),
        (("host://", "--chart", "{tmp}/png"), "its ending is none of"),
        (("nvme://{tmp}/%00",), "a zero byte in its path"),
        (("nvme://{tmp}/" + "a" * 300,), "File name too long"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own_cache: Path,
) -> None:
    """Catches a traceback, or minutes of work, before a no that was certain."""
    own_cache.mkdir()  # matplotlib keeps a list of fonts there
    before = sorted(tmp_path.iterdir())
    texts = [argument.format(tmp=tmp_path) for argument in arguments]
    assert bench(*texts, "--no-fio") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert sorted(tmp_path.iterdir()) == before


def test_no_room(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a drive filled to the last byte before the refusal."""
    assert bench(f"nvme://{small_disk}", *TINY) == 2
    error = capsys.readouterr().err
    assert "measuring needs 2097152 bytes (2.00 MiB)" in error
    assert "has 262144 (256.00 KiB)" in error
    assert list(small_disk.iterdir()) == []


@contextmanager
def reading(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the benchmark in a process of its own; yield when it has begun to measure."""
    command = [
        sys.executable, "-m", "zinf_core.cli", "bench", "tiers", *arguments, "--quick",
        "--size", "8MiB", "--seconds", "600", "--no-fio",
    ]  # fmt: skip
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "reading\n"
            yield child
        finally:
            child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "/new/deep"])
def test_what_a_killed_run_left_is_deleted_by_the_next(
    folder: Path, install: Install, place: str
) -> None:
    """Catches gigabytes of test data that stay for good, in a folder that was there or one that
    was not; and those of a run that lives taken for left over."""
    install("telling", TELLING, "[zinf.tiers]\ntelling = telling:open_telling\n")
    (folder / "precious").write_text("x", encoding="utf-8")
    with reading(f"telling://{folder}{place}") as child:
        assert bench(f"nvme://{folder}", *TINY) == 0
        assert len(list(folder.iterdir())) == 2, "that of the living run is still there"
        child.kill()
        child.wait(timeout=60)
    assert len(list(folder.iterdir())) == 2
    assert bench(f"nvme://{folder}{place}", *TINY) == 0
    assert [path.name for path in folder.iterdir()] == ["precious"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_cleanly(
    folder: Path, tmp_path: Path, install: Install, number: signal.Signals
) -> None:
    """Catches files left on the drive, and the rounds before an interrupt thrown away."""
    install("telling", TELLING, "[zinf.tiers]\ntelling = telling:open_telling\n")
    out = tmp_path / "out.json"
    with reading(f"telling://{folder}", "--json", str(out)) as child:
        assert list(folder.iterdir())
        child.send_signal(number)
        rest, _ = child.communicate(timeout=60)
    assert child.returncode == EXIT_INTERRUPTED
    assert list(folder.iterdir()) == []
    (tier,) = measured(out).tiers
    assert not tier.is_complete
    assert "incomplete" in rest


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_is_a_yardstick(folder: Path, tmp_path: Path) -> None:
    """Catches options that fio refuses, and a file of its that stays."""
    out = tmp_path / "out.json"
    arguments = ("--quick", "--size", "32MiB", "--seconds", "0.3", "--json", str(out))
    assert bench(f"nvme://{folder}", *arguments) == 0
    (tier,) = measured(out).tiers
    assert {reference.cell.nbytes for reference in tier.references} == {MiB, 4 * MiB}
    for reference in tier.references:
        assert reference.fio_bytes_per_s.median > 1e6
        assert reference.ratio.num_samples == 3
    assert list(folder.iterdir()) == []


def test_fio_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback because of somebody else's program, and one taken for fio that is not."""
    cell = Cell(operation=Operation.READ, order=Order.RANDOM, nbytes=4096, depth=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Fio.find() is None
    program = tmp_path / "fio"
    for script, message in (
        ("echo 'cannot allocate' >&2; exit 1", "cannot allocate"),
        ("echo '{\"jobs\": []}'", "gave no report"),
        ("echo nothing", "gave no report"),
    ):
        program.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo fio-9 && exit\n{script}\n")
        program.chmod(0o755)
        found = Fio.find()
        assert found is not None
        assert found.version == "fio-9"
        with pytest.raises(TransferError, match=message):
            found.measure(cell, tmp_path / "file", 4096, seconds=0.1)
    program.write_text("#!/bin/sh\nexit 3\n")
    assert Fio.find() is None


def test_without_fio_there_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a comparison that is left out without a word."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench("host://", "--quick", "--size", "64KiB", "--seconds", "0.01") == 0
    assert "apt-get install fio" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2, "tiers": []}'])
def test_reports_that_are_none(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a chart drawn of something else, and a traceback for a wrong file."""
    path = tmp_path / "in.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="benchmark report"):
        from_json(text)
    assert main(["bench", "chart", str(path), str(tmp_path / "out.png")]) == 2
    assert "benchmark report" in capsys.readouterr().err
    assert main(["bench", "chart", str(tmp_path / "no"), "out.png"]) == 2
    assert not (tmp_path / "out.png").exists()


def test_handlers_are_put_back() -> None:
    """Catches a Ctrl-C that nobody hears any more after the benchmark, and ``nohup`` undone."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert bench("host://", "--quick", "--size", "64KiB", "--seconds", "0.01", "--no-fio") == 0
    assert [signal.getsignal(number) for number in numbers] == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_interrupt() as should_stop:
            signal.raise_signal(signal.SIGHUP)
            assert not should_stop()
            signal.raise_signal(signal.SIGTERM)
            assert should_stop()
    finally:
        signal.signal(signal.SIGHUP, before[2])


def test_a_busy_machine_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches numbers of a machine with other work passed off as those of the drive."""
    for load in (0.0, 1000.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        arguments = ("--quick", "--size", "64KiB", "--seconds", "0.01", "--no-fio")
        assert bench("host://", *arguments) == 0
        assert ("the machine was busy" in capsys.readouterr().out) == (load > 0)


def test_json_is_plain(tmp_path: Path) -> None:
    """Catches a report that only our own reader can read."""
    out = tmp_path / "out.json"
    arguments = ("--quick", "--size", "64KiB", "--seconds", "0.01", "--no-fio")
    assert bench("host://", *arguments, "--json", str(out)) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["schema"] == 1
    named = {"cpu", "num_cores", "memory_nbytes", "kernel", "python", "load"}
    assert set(data["machine"]) == named
    (cell, *_) = data["tiers"][0]["cells"]
    assert cell["cell"] == {
        "operation": "read", "order": "sequential", "nbytes": 4096, "depth": 1,
    }  # fmt: skip
    assert set(cell["bytes_per_s"]) == {"least", "median", "most", "num_samples"}
