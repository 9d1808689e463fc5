"""benchmarks/gpu_check.py without a GPU: on a simulated device, refused, interrupted, sabotaged."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.testing import DictTier
from zinf_core.testing.simulated import SimulatedDevice

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"
SECTIONS = ("facts", "kit", "train", "races", "rates-copy", "rates-drive")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a way to import the script's modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"gpu.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpu"]:
        del sys.modules[name]


def start(*args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and what was printed; nothing may be printed to stderr."""
    with process:
        out, errors = process.communicate(timeout=230)
    assert errors == ""
    return process.returncode, out


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_whole_script_on_a_simulated_device(tmp_path: Path) -> None:
    """Catches a script that breaks where it cannot be tried: on a machine lent for minutes."""
    path = tmp_path / "result.json"
    args = ("--simulate", "--quick", "--json", str(path), "--folder", str(tmp_path))
    code, out = finish(start(*args))
    result = json.loads(path.read_text())
    failed = [item for s in result["sections"] for item in s["items"] if item["status"] == "fail"]
    assert failed == []
    assert code == 0
    assert [section["name"] for section in result["sections"]] == list(SECTIONS)
    assert {section["status"] for section in result["sections"]} == {"ran"}
    assert result["simulated"] is True
    assert "proves nothing about a GPU" in result["verdict"]
    assert out.splitlines()[1].startswith("SIMULATED")
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"], "files are left behind"


@pytest.mark.slow
def test_without_cuda_nothing_is_run(tmp_path: Path) -> None:
    """Catches a pass, or a traceback, where nothing was checked."""
    code, out = finish(start("--json", str(tmp_path / "result.json")))
    assert code == 2
    assert out.startswith("Nothing was run: it needs ")
    assert all(f"\n  {name}" in out for name in SECTIONS)
    assert list(tmp_path.iterdir()) == []


def test_list() -> None:
    """Catches sections that nobody can find out about."""
    code, out = finish(start("--list"))
    assert code == 0
    assert tuple(line.split()[0] for line in out.splitlines()) == SECTIONS


def test_simulation_is_no_result() -> None:
    """Catches simulated figures between measured ones."""
    path = BENCHMARKS / "results" / "gpu-simulated.json"
    with start("--simulate", "--json", str(path)) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no measurements" in errors
    assert not path.exists()


@pytest.mark.slow
def test_interrupt_writes_what_there_is(tmp_path: Path) -> None:
    """Catches minutes on a lent machine lost by Ctrl-C, and sections that go on after it."""
    path = tmp_path / "result.json"
    process = start("--simulate", "--json", str(path), "--folder", str(tmp_path))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("  ok"):
            break
    process.send_signal(signal.SIGINT)
    code, _ = finish(process)
    assert code == 130
    result = json.loads(path.read_text())
    assert result["verdict"].partition(": ")[2].partition("INTERRUPTED")[1]
    assert [section["status"] for section in result["sections"]] == ["ran", "interrupted"]
    assert result["sections"][1]["items"], "the item that was seen is missing"
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"], "files are left behind"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kit_without_pytest(tmp_path: Path) -> None:
    """Catches an import of the kit's tools where they may be missing."""
    hidden = "import sys\nfor name in ('pytest', 'hypothesis'):\n    sys.modules[name] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = tmp_path / "result.json"
    args = ("--simulate", "--only", "kit", "--json", str(path), "--folder", str(tmp_path))
    code, _ = finish(start(*args, PYTHONPATH=str(tmp_path)))
    items = json.loads(path.read_text())["sections"][0]["items"]
    assert code == 0
    assert "pytest and hypothesis not installed" in items[0]["text"]
    assert [item["status"] for item in items] == ["info", *["pass"] * 7, "skip"]


SECTION = """
import json, os, signal, sys, time
fd = int(sys.argv[sys.argv.index("--fd") + 1])
def say(**record):
    os.write(fd, json.dumps(record).encode() + b"\\n")
say(event="item", name="first", status="pass", text="", data={})
say(event="at", name="second")
"""


@pytest.mark.parametrize(
    ("ending", "status", "text"),
    [
        ("say(event='end')", "ran", ""),
        pytest.param(
            "print('about to hang', flush=True); time.sleep(600)",
            "timeout",
            "stopped after 3 s, at second; it wrote: about to hang",
            marks=pytest.mark.slow,
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV, at second"),
        ("raise SystemExit('gone')", "crash", "exit code 1, at second; it wrote: gone"),
        (
            "import subprocess; subprocess.Popen(['sleep', '600']); say(event='end')",
            "ran",
            "",
        ),
    ],
)
def test_section_that_ends_badly(
    gpu: Any, tmp_path: Path, ending: str, status: str, text: str
) -> None:
    """Catches a hang of a driver that stops the whole run, and a crash that passes."""
    script = tmp_path / "section.py"
    script.write_text(SECTION + ending)
    seen: list[dict[str, Any]] = []
    outcome = gpu("children").run_section("some", [str(script)], cap_s=3.0, show=seen.append)
    assert [item["name"] for item in seen] == ["first"] == [i["name"] for i in outcome.items]
    assert outcome.status == status
    assert text in outcome.text
    assert outcome.num_failed == (status in {"timeout", "crash"})


class Records(list[dict[str, Any]]):
    """What a report of `gpu.report` said, read from its pipe."""

    def __init__(self, gpu: Any) -> None:
        super().__init__()
        self._reading, self._writing = os.pipe()
        self.report = gpu("report").Report(self._writing, seconds=60)

    def collect(self) -> Records:
        os.close(self._writing)
        with os.fdopen(self._reading) as lines:
            self.extend(json.loads(line) for line in lines)
        return self

    def statuses(self) -> dict[str, str]:
        return {item["name"]: item["status"] for item in self if item["event"] == "item"}


def test_items_fail_alone(gpu: Any) -> None:
    """Catches an error in one item that ends the section, and a skip that passes."""
    records = Records(gpu)
    report, module = records.report, gpu("report")
    with report.item("good") as finding:
        finding.text = "fine"
    with report.item("broken"):
        raise KeyError("x")
    with report.item("skipped"):
        raise module.Skipped("no such thing here")
    with report.item("wrong"):
        raise module.CheckFailed("1 is not 2")
    with report.item("measured", is_check=False):
        pass
    assert records.collect().statuses() == {
        "good": "pass",
        "broken": "fail",
        "skipped": "skip",
        "wrong": "fail",
        "measured": "info",
    }


class ForgetfulTier(DictTier):
    """A tier in memory that loses the last byte of every write but the smallest."""

    def write_from(self, key: Any, src: Buffer, *, offset: int = 0) -> Completion:
        short = src.part(0, src.nbytes - 1) if src.nbytes > 1 else src
        return super().write_from(key, short, offset=offset)


class DictDoor:
    def peek(self, tier: Any, key: Any) -> bytes:
        return tier._stored[key]

    def poke(self, tier: Any, key: Any, data: bytes) -> bool:
        tier._stored[key] = data
        return True


@pytest.mark.slow
@pytest.mark.parametrize("with_kit", [True, False], ids=["kit", "plain"])
def test_broken_tier_fails(gpu: Any, tmp_path: Path, with_kit: bool) -> None:
    """Catches a section kit that passes whatever the tier does, and one that names no law."""
    kit, rigs, lab = gpu("kit"), gpu("rigs"), gpu("lab").SimulatedLab()
    rig = rigs.Rig(
        name="forgetful",
        lab=lab,
        make=rigs.host_buffer,
        open=lambda folder: ForgetfulTier(capacity_nbytes=16 << 20),
        door=DictDoor(),
    )
    settings = gpu("settings").Settings(simulate=True, quick=True, folder=tmp_path, no_kvikio="no")
    records, finding = Records(gpu), gpu("report").Finding()
    named = "test_law_01_written_is_read" if with_kit else "sizes"
    with pytest.raises(gpu("report").CheckFailed, match=named):
        kit._check(rig, tmp_path, records.report, finding, settings, missing=not with_kit)
    lab.close()
    records.collect()


class HastyDevice(SimulatedDevice):
    """A device whose completions are done before the copy is."""

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        super().copy(dst, src)
        return CompletedTransfer()


@pytest.mark.parametrize(
    "name", ["_consume", "_produce", "_there_and_back", "_threads", "_leases", "_memory_tiers"]
)
def test_missing_wait_fails(gpu: Any, name: str) -> None:
    """Catches a section races that passes whatever the device does."""
    lab = gpu("lab").SimulatedLab()
    hasty = lab.device = lab._device = HastyDevice()
    with pytest.raises(Exception, match=r"before copy|are not|kernel saw|threads"):
        getattr(gpu("races"), name)(lab, 3)
    hasty.close()


def test_one_wrong_bit_fails(gpu: Any) -> None:
    """Catches a comparison with a tolerance, of values, or of the last step only."""
    training, oracle, report = gpu("training"), gpu("oracle"), gpu("report")
    torch = importlib.import_module("torch")

    def trace(first: float) -> Any:
        steps = [torch.tensor([first, 2.0]), torch.tensor([3.0, 4.0])]
        return oracle.Trace(losses=[1.0], norms=[2.0], weights=[{"w": step} for step in steps])

    def finding() -> Any:
        return report.Finding(data={"peaks": {"device": 1}, "budgets": {"device": 2}})

    training._compare(trace(0.0), trace(0.0), finding())
    with pytest.raises(report.CheckFailed, match="w differs after step 1"):
        training._compare(trace(-0.0), trace(0.0), finding())
    other = trace(0.0)
    other.norms = [2.0000000000000004]
    with pytest.raises(report.CheckFailed, match="norms"):
        training._compare(other, trace(0.0), finding())
