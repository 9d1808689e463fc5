"""Long runs, closing, killed runs and deleted models: nothing grows and nothing stays behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import zinf_torch as zt
from robustness.support import mlp, num_fds, run_python, train, train_on, train_plain
from zinf_core.errors import ConfigError, TierLockedError, TransferError
from zinf_core.units import KiB, MiB

DEVICE, HOST = 32 * KiB, 64 * KiB


def open_runtime(folder: Path, **options: object) -> zt.Runtime:
    """Return a runtime in which `mlp` does not fit the device."""
    return zt.Runtime(device=DEVICE, host=HOST, nvme=folder, **options)


@pytest.mark.slow
def test_two_hundred_steps_keep_nothing(tmp_path: Path) -> None:
    """Catches a descriptor, thread, buffer or object that every step leaves behind. The weights are
    so large that a buffer leaked per step would show in the memory of the process."""

    def in_use() -> tuple[int, int, int]:
        gc.collect()
        return num_fds(), threading.active_count(), len(gc.get_objects())

    def run(num_steps: int) -> None:
        for step in range(num_steps):
            x = torch.ones(2, 128) * step
            (model(x).square().mean() * 1e-3).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)

    with zt.Runtime(device=192 * KiB, host=512 * KiB, nvme=tmp_path / "z") as runtime:
        model = runtime.attach(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        run(50)
        before, resident = in_use(), psutil.Process().memory_info().rss
        on_disk = runtime.pager.tiers["nvme"].usage().allocated_nbytes
        run(200)
        after = in_use()
        grown = psutil.Process().memory_info().rss - resident
        assert runtime.pager.tiers["nvme"].usage().allocated_nbytes <= on_disk + MiB
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 100
    assert grown < 8 * MiB  # one page of a weight per step would be 25 MiB


def test_closing_removes_what_was_made(tmp_path: Path) -> None:
    """Catches files, or a folder, that stay after a run, and a folder of the user's, or a file in
    it, that is deleted (FAULTS P11)."""
    made = tmp_path / "parent" / "made"
    with open_runtime(made) as runtime:
        train_on(runtime, 1)
        assert any(made.iterdir())
    assert not made.exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    for _ in range(3):
        with open_runtime(mine) as runtime:
            train_on(runtime, 1)
        assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert (mine / "thesis.txt").read_text() == "precious"


def test_a_file_put_there_meanwhile_is_kept(tmp_path: Path) -> None:
    """Catches the deletion of a folder made by the run, with somebody else's file in it."""
    folder = tmp_path / "z"
    with open_runtime(folder) as runtime:
        train_on(runtime, 1)
        (folder / "note.txt").write_text("keep")
    assert [path.name for path in folder.iterdir()] == ["note.txt"]


def test_closed_runtime_says_so(tmp_path: Path) -> None:
    """Catches a hang, or an obscure error, in what is called after closing; twice is fine."""
    runtime = open_runtime(tmp_path / "z")
    runtime.close()
    runtime.close()
    with pytest.raises(ConfigError, match="this runtime is closed; make a new one"):
        runtime.attach(mlp())


def test_closing_after_an_error_keeps_the_error(tmp_path: Path) -> None:
    """Catches an exception of the block that is hidden by one of closing, or files that stay."""
    with pytest.raises(ZeroDivisionError), open_runtime(tmp_path / "z") as runtime:  # noqa: PT012
        train_on(runtime, 1)
        1 / 0  # noqa: B018
    assert not (tmp_path / "z").exists()


def test_closing_that_fails_as_well(tmp_path: Path) -> None:
    """Catches an error of the block that is hidden by one of closing, one of closing that nobody
    hears of, and threads or locks that stay because of it."""
    folder = tmp_path / "z"
    in_the_way = folder / "segment-99999.zinf"  # a folder by the name of one of our files
    with pytest.raises(ZeroDivisionError) as caught, open_runtime(folder) as runtime:  # noqa: PT012
        train_on(runtime, 1)
        in_the_way.mkdir()
        1 / 0  # noqa: B018
    assert any("closing the runtime failed as well" in note for note in caught.value.__notes__)
    assert str(folder) in caught.value.__notes__[0]
    with pytest.raises(TransferError, match=re.escape(str(folder))):
        open_runtime(folder).close()
    in_the_way.rmdir()
    with open_runtime(folder) as runtime:
        assert train_on(runtime) == train_plain()


KILLED = """
import os, signal, sys
from robustness.support import mlp
import torch, zinf_torch as zt

runtime = zt.Runtime(device=32768, host=65536, nvme=sys.argv[1])
model = runtime.attach(mlp())
optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_killed_run_is_reclaimed(tmp_path: Path) -> None:
    """Catches files of a killed run that fill the disk for ever, are read by the next run, or lock
    it out (FAULTS P11)."""
    folder = tmp_path / "z"
    assert run_python(KILLED, folder).returncode == -9
    left = sum(path.stat().st_size for path in folder.iterdir())
    assert left > 0
    with pytest.warns(UserWarning, match="left by a run that was killed") as caught:
        runtime = open_runtime(folder)
    assert str(folder) in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points at the line that opened the runtime"
    with runtime:
        assert sum(path.stat().st_size for path in folder.iterdir()) < left
        assert train_on(runtime) == train_plain()
    assert list(folder.iterdir()) == []  # the folder was there before this run


def test_left_overs_with_warnings_as_errors(tmp_path: Path) -> None:
    """Catches a folder that stays locked, by nobody, because opening it was refused."""
    folder = tmp_path / "z"
    folder.mkdir()
    (folder / "segment-00000.zinf").write_bytes(bytes(8192))
    with pytest.raises(UserWarning, match=r"reclaimed 8\.00 KiB left by a run that was killed"):
        open_runtime(folder)
    with open_runtime(folder) as runtime:
        assert train_on(runtime) == train_plain()


SECOND = """
import sys
import zinf_torch as zt
from zinf_core.errors import TierLockedError

try:
    zt.Runtime(device=32768, host=65536, nvme=sys.argv[1])
except TierLockedError as refusal:
    print(refusal)
"""


@pytest.mark.slow
def test_second_process_on_a_folder_is_refused(tmp_path: Path) -> None:
    """Catches two runs that overwrite each other's states, and a refusal that does not say which
    process to look for."""
    folder = tmp_path / "z"
    with open_runtime(folder) as runtime:
        second = run_python(SECOND, folder)
        assert second.stderr == ""
        assert f"{folder} is in use by process {os.getpid()};" in second.stdout
        assert train_on(runtime) == train_plain()


def test_second_runtime_on_a_folder_is_refused(tmp_path: Path) -> None:
    """Catches a lock that only other processes see, and a refused one that harms the first: closing
    frees the folder for the next."""
    with open_runtime(tmp_path / "z") as runtime:
        with pytest.raises(TierLockedError, match=f"is in use by process {os.getpid()};"):
            open_runtime(tmp_path / "z")
        assert train_on(runtime) == train_plain()
    with open_runtime(tmp_path / "z") as runtime:
        assert train_on(runtime) == train_plain()


def test_runtimes_side_by_side(tmp_path: Path) -> None:
    """Catches state that is shared between runtimes where each must have its own."""
    with open_runtime(tmp_path / "a") as first, open_runtime(tmp_path / "b") as second:
        pairs = []
        for runtime in (first, second):
            model = runtime.attach(mlp())
            pairs.append((model, runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)))
        plain = mlp()
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for seed in range(3):
            expected = train(plain, plain_optimizer, num_steps=1, seed=seed)
            for model, optimizer in pairs:
                assert train(model, optimizer, num_steps=1, seed=seed) == expected
        both = nn.Sequential(*(model for model, _ in pairs))
        assert both(torch.ones(2, 8)).shape == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "del runtime"])
def test_interpreter_exits_without_close(tmp_path: Path, ending: str) -> None:
    """Catches worker threads that keep the interpreter alive, and destructors that fail or write to
    stderr when modules are torn down."""
    source = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", ending)
    done = run_python(source, tmp_path / "z")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may reclaim what the first run left, or find nothing
        runtime = open_runtime(tmp_path / "z")
    with runtime:
        assert train_on(runtime) == train_plain()


@pytest.mark.slow
def test_uncaught_error_is_shown_and_the_process_ends(tmp_path: Path) -> None:
    """Catches a run that hangs, or hides the traceback, when user code fails without `with`."""
    source = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "1 / 0")
    done = run_python(source, tmp_path / "z")
    assert done.returncode == 1
    assert re.search(r"ZeroDivisionError: division by zero\s*$", done.stderr)
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_deleted_models_make_room(tmp_path: Path, tier: str) -> None:
    """Catches states of a model and an optimizer that were deleted and still take room: the host
    budget has room for two of the five models."""
    homes = dict.fromkeys(("parameters", "gradients", "optimizer_states"), tier)
    room = 400 * KiB if tier == "host" else HOST
    with zt.Runtime(device=64 * KiB, host=room, nvme=tmp_path / "z", **homes) as runtime:
        used = []
        for _ in range(5):
            assert train_on(runtime, 2) == train_plain(2)
            gc.collect()
            used.append(runtime.pager.tiers[tier].usage())
        assert len({usage.num_keys for usage in used}) == 1
        assert len({usage.nbytes for usage in used}) == 1
