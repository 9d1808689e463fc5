"""Faults of the files that tiers keep: saves that collide, left-overs, killed runs (P10, P11)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from faults.children import ROOT
from faults.places import (
    ON_DISK,
    allocated_nbytes,
    bytes_of,
    files_below,
    homes_at,
    opened,
    stored,
)
from faults.support import mlp, square_loss, train
from zinf_core.errors import TierLockedError
from zinf_core.keys import StateKind
from zinf_core.tier import Tier
from zinf_core.units import PAGE_NBYTES, MiB

SIZES = {"device": 4 * PAGE_NBYTES, "host": 16 * PAGE_NBYTES}


def _start(world: Any = None) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer; plain ones without a runtime."""
    torch.manual_seed(0)
    model = mlp(8)
    if world is None:
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    world.attach(model)
    return model, world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)


def _train(world: Any = None) -> list[float]:
    model, optimizer = _start(world)
    return [loss.item() for loss in train(model, optimizer, 3, square_loss)]


def _weights_on(tier: Tier) -> dict[str, bytes]:
    keys = [key for key in tier.keys() if key.kind is StateKind.PARAM]  # noqa: SIM118
    return {key.name: stored(tier, key) for key in keys}


def _weights_of(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(param) for name, param in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("place", ON_DISK)
def test_p10_the_second_save_wins(tmp_path: Path, place: str) -> None:
    """P10: a save that refuses, or mixes with, what the one before left under the same name; one
    that takes what was not saved any more; and saves each of which takes room for good."""
    url = ON_DISK[place].format(folder=tmp_path)
    plain, plain_optimizer = _start()
    used = []
    with (
        opened(url) as tier,
        zt.Runtime(**SIZES, tiers={"saved": tier}, **homes_at("saved")) as runtime,
    ):
        model, optimizer = _start(runtime)
        for _ in range(4):
            train(model, optimizer, 2, square_loss)
            runtime.pager.evict_all()
            first, second = tier.flush(), tier.flush()
            second.wait()
            first.wait()
            used.append(allocated_nbytes(tmp_path))
            train(plain, plain_optimizer, 2, square_loss)
        expected = _weights_of(plain)
        train(model, optimizer, 1, square_loss)
        runtime.pager.evict_all()
        assert _weights_on(tier) != expected
    with opened(url) as tier:
        assert _weights_on(tier) == expected
    assert used[3] <= max(used[:3]) + 4 * PAGE_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("place", ON_DISK)
def test_p11_runs_leave_nothing(tmp_path: Path, place: str) -> None:
    """P11: files that pile up, run after run, also after an error; and files or folders of the
    user's that are taken for the run's."""
    url = ON_DISK[place].format(folder=tmp_path / "made")
    (tmp_path / "thesis.txt").write_text("precious")
    expected = _train()
    used = []
    for number in range(3):
        with ExitStack() as stack:
            if number == 2:
                stack.enter_context(pytest.raises(ZeroDivisionError))
            runtime = stack.enter_context(zt.Runtime(**SIZES, **homes_at(url)))
            assert _train(runtime) == expected
            runtime.pager.evict_all()
            used.append(allocated_nbytes(tmp_path))
            assert used[-1] > 0
            1 / (2 - number)
        assert [path.name for path in files_below(tmp_path)] == ["thesis.txt"]
    assert max(used) - min(used) < MiB
    assert [path.name for path in tmp_path.iterdir() if path.name != "made"] == ["thesis.txt"]


EVERYWHERE = """
import os, signal, sys
from pathlib import Path
import torch
import zinf_torch as zt
from faults.places import ON_DISK, homes_at
from faults.support import mlp, square_loss, train

torch.set_num_threads(1)
held = []
for place, url in ON_DISK.items():
    home = url.format(folder=Path(sys.argv[1]) / place)
    runtime = zt.Runtime(device=16384, host=65536, **homes_at(home))
    model = runtime.attach(mlp(8))
    optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.5)
    train(model, optimizer, 1, square_loss)
    square_loss(model, 1).backward()
    held.append((runtime, model, optimizer))
"""
"""Trains on every place and stops in the middle of a step."""

KILL = """
for _, _, optimizer in held:
    optimizer.step()  # its last writes are in flight
os.kill(os.getpid(), signal.SIGKILL)
"""

OPEN = """
import json, sys
from pathlib import Path
from faults.places import ON_DISK
from zinf_core.errors import TierLockedError
from zinf_core.registry import open_tier

refusals = {}
for place, url in ON_DISK.items():
    try:
        open_tier(url.format(folder=Path(sys.argv[1]) / place))
    except TierLockedError as exc:
        refusals[place] = str(exc)
print(json.dumps(refusals))
"""


def _run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `source` in a process of its own; a hang is a failure."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run(
        [sys.executable, "-c", source, str(folder)],
        env=variables, cwd=folder, timeout=110, text=True, capture_output=True, check=False,
    )  # fmt: skip


def _used_below(folder: Path) -> dict[str, int]:
    return {place: allocated_nbytes(folder / place) for place in ON_DISK}


@pytest.mark.slow
@pytest.mark.multiproc
def test_p11_after_runs_that_were_not_closed(tmp_path: Path) -> None:
    """P11: files of runs that ended in the middle which the next one reads, which keep it out, or
    which add up, with nothing said about them. One run ends without closing, one is killed."""
    ended = _run(EVERYWHERE, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    left_by_one = _used_below(tmp_path)
    killed = _run(EVERYWHERE + KILL, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left_by_two = _used_below(tmp_path)
    expected = _train()
    for place, text in ON_DISK.items():
        assert 0 < left_by_two[place] < left_by_one[place] + MiB, place
        url = text.format(folder=tmp_path / place)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runtime = zt.Runtime(**SIZES, **homes_at(url))
        with runtime:
            assert _train(runtime) == expected, place
            runtime.pager.evict_all()
            assert allocated_nbytes(tmp_path / place) < left_by_one[place] + MiB, place
        assert files_below(tmp_path / place) == []
        said = rf"{re.escape(url)}: reclaimed [\d.]+ [KM]iB left by a run that was killed"
        assert all(re.fullmatch(said, str(warning.message)) for warning in caught), place
        assert len(caught) == 1 or not text.startswith(("nvme", "object", "throttled")), place


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, zt.Runtime]]:
    """Return a runtime on every place."""
    with ExitStack() as stack:
        yield {
            place: stack.enter_context(
                zt.Runtime(**SIZES, **homes_at(url.format(folder=tmp_path / place)))
            )
            for place, url in ON_DISK.items()
        }


@pytest.mark.slow
@pytest.mark.multiproc
def test_p11_two_runs_on_one_place(tmp_path: Path, running: dict[str, zt.Runtime]) -> None:
    """P11: two runs, in one process or two, that delete or overwrite each other's files; and a
    refusal that does not say who is there."""
    models = {place: _start(runtime) for place, runtime in running.items()}
    other = _run(OPEN, tmp_path)
    assert other.stderr == ""
    refusals = json.loads(other.stdout)
    assert list(refusals) == list(ON_DISK)
    for place, refusal in refusals.items():
        assert re.search(rf"is in use by process {os.getpid()}\b", refusal), refusal
        assert f"{tmp_path / place}/" in refusal
        home = ON_DISK[place].format(folder=tmp_path / place)
        with pytest.raises(TierLockedError, match=rf"in use by process {os.getpid()}\b"):
            zt.Runtime(**SIZES, **homes_at(home))
    expected = _train()
    for model, optimizer in models.values():
        assert [loss.item() for loss in train(model, optimizer, 3, square_loss)] == expected
