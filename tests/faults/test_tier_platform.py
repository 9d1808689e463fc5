"""Faults of machines that lack something, on every kind of tier, and of tuning (P78, P91, P92)."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zinf_torch as zt
from faults.children import PRELUDE, run_child
from faults.places import ON_DISK, PLACES, homes_at, opened
from faults.support import assert_same, mlp, on_plain, square_loss, train, values
from zinf_core.cli import main
from zinf_core.testing import seeded_order
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.units import PAGE_NBYTES, parse_nbytes
from zinf_storage.nvme import NvmeOptions, NvmeTier
from zinf_storage.probe import IoPath, probe_path

SIZES = {"device": 4 * PAGE_NBYTES, "host": 16 * PAGE_NBYTES}

ABSENT = {
    "object://file://{folder}/o": ('"zinf[object]"', "obstore"),
    "compressed://[nvme://{folder}/c]": ('"zinf[compress]"', "zstandard"),
    "compressed://[nvme://{folder}/c]?codec=lz4": ('"zinf[compress]"', "lz4"),
    "compressed://[nvme://{folder}/c]?codec=blosc2": ('"zinf[compress]"', "blosc2"),
    "nvme://{folder}/g?engine=gds": ('"zinf[cuda13]"', "kvikio"),
    "device://cuda:0": ('"zinf[cuda13]"', "cupy"),
}
"""URL -> the extra and the package that its refusal must name."""

NOTHING = """
import builtins, errno, io, os, socket, subprocess, sys
from importlib import metadata

def refuse(*args, **kwargs):
    raise AssertionError(f"nothing may be started or reached here: {args[:1]}")

subprocess.Popen = os.system = os.posix_spawn = os.fork = refuse
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse

ABSENT = ("blosc2", "cupy", "kvikio", "lz4", "lz4.block", "matplotlib", "obstore", "triton",
          "zstandard")
sys.modules.update(dict.fromkeys(ABSENT))
really_version = metadata.version

def version(name):
    if name.partition("-")[0] in ABSENT:
        raise metadata.PackageNotFoundError(name)
    return really_version(name)

metadata.version = version

HIDDEN = ("/etc/machine-id", "/var/lib/dbus", "/run/udev", "/proc/self/cgroup", "/sys/",
          "/proc/sys/kernel/random", "/proc/self/ns", "/proc/cpuinfo", "/proc/driver")

def hiding(real):
    def call(path, *args, **kwargs):
        if str(path).startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return real(path, *args, **kwargs)
    return call

builtins.open = io.open = hiding(io.open)
os.stat, os.lstat, os.readlink = map(hiding, (os.stat, os.lstat, os.readlink))
really_open = os.open
refused = []

def open_(path, flags, *args, **kwargs):
    if flags & os.O_DIRECT:
        refused.append(str(path))
        raise OSError(errno.EINVAL, "Invalid argument", path)
    return hiding(really_open)(path, flags, *args, **kwargs)

os.open = open_
"""
"""Stands before everything else: a machine without packages, programs, network, direct I/O and
what Linux tells about itself."""

TRAIN = """
import contextlib, warnings
from zinf_core.cli import main
from zinf_core.errors import ConfigError
from zinf_core.registry import open_tier

def run(runtime=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    if runtime is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = runtime.optimizer(torch.optim.AdamW, runtime.attach(model).parameters(),
                                      lr=0.01)
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 8), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

home = f"checksummed://[striped://[throttled://[nvme://{folder}/a]?bytes_per_s=1GB][nvme://{folder}/b]]"
plain, paged, paths, said = run(), {}, {}, []
for name, settings in {
    "nvme": dict(nvme=folder / "z"),
    "wrapped": dict(parameters=home, gradients=home, optimizer_states=home),
    "host": {},
}.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with zt.Runtime(device="8KiB", host="64KiB", **settings) as runtime:
            paged[name] = run(runtime)
            paths |= runtime.paths()
    said += [str(warning.message) for warning in caught]

refusals = {}
for url in URLS:
    try:
        open_tier(url.format(folder=folder)).close()
    except ConfigError as exc:
        refusals[url] = str(exc)

def told(*arguments):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(["doctor", *arguments, str(folder)]) == 0
    return text.getvalue()

report(plain=plain, paged=paged, paths=paths, said=said, refusals=refusals, refused=refused,
       doctor=json.loads(told("--json")), lines=told().splitlines(), files=os.listdir(folder))
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_p91_p92_a_machine_that_has_nothing(tmp_path: Path) -> None:
    """P91, P92: a package, a program, a file of the system or direct I/O without which the first
    byte cannot be swapped, or is swapped wrongly; and a refusal that says nothing of use."""
    environment = {"PATH": "/nowhere", "HOME": "/dev/null", "ATEN_CPU_CAPABILITY": "default"}
    script = TRAIN.replace("URLS", repr(list(ABSENT)))
    nothing = run_child(script, tmp_path, prelude=NOTHING + PRELUDE, environment=environment)
    assert nothing["paged"] == dict.fromkeys(("nvme", "wrapped", "host"), nothing["plain"])
    assert nothing["refused"], "direct I/O was not even tried"
    on_disk = [path for home, path in nothing["paths"].items() if "nvme" in home]
    assert len(on_disk) == 2
    assert all("posix-buffered" in path for path in on_disk)
    assert not any("direct" in path for path in on_disk)
    assert len(nothing["said"]) <= 2, "one warning for a run, at most"
    assert list(nothing["refusals"]) == list(ABSENT)
    for url, words in ABSENT.items():
        for word in ("pip install", *words):
            assert word in nothing["refusals"][url]
    assert nothing["files"] == [], "a tier that was refused left something"
    lines = nothing["lines"]
    assert "storage: O_DIRECT: refused: open: Invalid argument" in lines
    assert "storage: path taken: posix-buffered" in lines
    assert any("refuses O_DIRECT" in line for line in lines if line.startswith("advice"))
    assert any(line.startswith("device: gds: not available") for line in lines)
    for extra, package in ABSENT.values():
        line = next(line for line in lines if line.startswith(f"versions: {package}"))
        assert "not installed" in line
        assert f"pip install {extra}" in line
    assert nothing["doctor"]["memory"]["cgroup_limit_nbytes"] is None
    assert nothing["doctor"]["memory"]["huge_pages"] == "unknown"


@pytest.mark.parametrize("lockable_nbytes", [0, 8 * PAGE_NBYTES])
@pytest.mark.parametrize("home", ["host", "nvme", "zstd", "object"])
def test_p92_pinning_is_refused(tmp_path: Path, home: str, lockable_nbytes: int) -> None:
    """P92: a run that dies, or gives other numbers, where memory cannot be pinned, at once or
    after a few pages of it; and a warning for every buffer."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(16))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.05)
        return train(model, optimizer, 3, square_loss), values(model)

    place = PLACES[home].format(folder=tmp_path) if home in ON_DISK else home
    sizes = {**SIZES, "host": 32 * PAGE_NBYTES}
    torch.manual_seed(0)
    with (
        warnings.catch_warnings(record=True) as caught,
        SimulatedDevice(order=seeded_order(3), lockable_nbytes=lockable_nbytes) as device,
        zt.Runtime(**sizes, nvme=tmp_path / "z", compute=device, **homes_at(place)) as runtime,
    ):
        warnings.simplefilter("always")
        found = script(runtime)
        assert device.registered_nbytes <= lockable_nbytes
    (warning,) = caught
    assert "could not be pinned for sim:0" in str(warning.message)
    assert "ulimit -l" in str(warning.message)
    assert_same(found, on_plain(script))


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on a drive whose rate can be measured, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "drive"
    folder.mkdir()
    probe = probe_path(folder)
    if probe.filesystem == "tmpfs" or probe.io_path is not IoPath.POSIX_DIRECT:
        pytest.skip(f"{probe.filesystem} is no drive that takes direct I/O")
    return folder


def _bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``zinf bench tiers`` prints about the drive of `folder`."""
    quick = ("--quick", "--size", "1MiB", "--seconds", "0.2", "--no-fio")
    assert main(["bench", "tiers", f"nvme://{folder}", *quick]) == 0
    return capsys.readouterr().out


def _options(tier: Any) -> tuple[int, int]:
    assert isinstance(tier, NvmeTier)
    return tier._options.io_nbytes, tier._options.num_threads


@pytest.mark.slow
def test_p78_what_is_printed_can_be_pasted_and_is_used(
    drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P78: nobody knows which values to set; the tool prints some that no URL takes, or keeps them
    where no run looks; a value of the user's is overruled."""
    out = _bench(drive, capsys)
    pasted = re.search(r"ready to paste: (\S+)$", out, re.MULTILINE)
    best = re.search(r"best options: requests of (.+?), (\d+) threads", out)
    share = re.search(r"the defaults reach (\d+)% of that", out)
    kept = re.search(r"kept for later runs: (\S+)$", out, re.MULTILINE)
    assert pasted
    assert best
    assert kept
    assert share
    assert int(share[1]) > 0
    tuned = (parse_nbytes(best[1].replace(" ", ""), what="best"), int(best[2]))
    with opened(pasted[1]) as tier:
        assert _options(tier) == tuned
    profile = Path(kept[1])
    data = json.loads(profile.read_text(encoding="utf-8"))
    assert (data["io_nbytes"], data["num_threads"]) == tuned
    # Values that neither the defaults nor the measurement can be.
    profile.write_text(json.dumps({**data, "io_nbytes": 77 * PAGE_NBYTES, "num_threads": 3}))
    url = f"nvme://{drive}/a"
    with opened(url) as tier:
        assert _options(tier) == (77 * PAGE_NBYTES, 3)
    with opened(f"{url}?num_threads=1") as tier:
        assert _options(tier) == (77 * PAGE_NBYTES, 1)
    with opened(f"checksummed://[striped://[{url}][nvme://{drive}/b?io_nbytes=8KiB]]") as tier:
        striped = tier._parts.inners.tiers[0]
        assert [_options(inner) for inner in striped._parts.inners.tiers] == [
            (77 * PAGE_NBYTES, 3),
            (8192, 3),
        ]
    with zt.Runtime(**SIZES, nvme=drive / "z", parameters=f"{url}2") as runtime:
        assert _options(runtime.pager.tiers["nvme"]) == (77 * PAGE_NBYTES, 3)
        assert _options(runtime.pager.tiers[f"{url}2"]) == (77 * PAGE_NBYTES, 3)
    profile.unlink()
    default = NvmeOptions()
    with opened(url) as tier:
        assert _options(tier) == (default.io_nbytes, default.num_threads)


@pytest.mark.slow
def test_p78_p92_a_home_that_cannot_be_written(
    drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P78, P92: minutes of measuring lost, or a run that dies or complains, because a cache cannot
    be kept under the home folder."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    for home in ("/dev/null", "/proc", str(drive / "absent")):
        monkeypatch.setenv("HOME", home)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with zt.Runtime(**SIZES, nvme=drive / "z") as runtime:
                default = NvmeOptions()
                found = _options(runtime.pager.tiers["nvme"])
                assert found == (default.io_nbytes, default.num_threads)
    monkeypatch.setenv("HOME", "/proc")
    quick = ("--quick", "--size", "1MiB", "--seconds", "0.2", "--no-fio")
    assert main(["bench", "tiers", f"nvme://{drive}", *quick]) != 0
    printed = capsys.readouterr()
    assert "ready to paste: " in printed.out
    assert "the profile cannot be kept at /proc/.cache" in printed.err
    assert "set XDG_CACHE_HOME" in printed.err
