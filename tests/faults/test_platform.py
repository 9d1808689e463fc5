"""Faults of machines without compilers, devices, launchers or networks (P91, P94)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.children import PRELUDE, ROOT, run_child

BARE = """
import builtins, socket, subprocess

def refuse(*args, **kwargs):
    raise AssertionError(f"nothing may be started or reached here: {args[:1]}")

subprocess.Popen = os.system = os.posix_spawn = refuse
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
for name in ("cupy", "kvikio", "libaio", "triton", "numba", "transformers", "safetensors", "gguf"):
    sys.modules.setdefault(name, None)
"""

TRAIN = """
def losses(world_optimizer, model):
    optimizer = world_optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    found = []
    for step in range(3):
        loss = model(torch.full((2, 8), 1.0 + step)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

plain = losses(lambda cls, params, **options: cls(params, **options), model())
with zt.Runtime(device="8KiB", host="64KiB", nvme=folder / "z") as runtime:
    paged = losses(runtime.optimizer, runtime.attach(model()))
    path = runtime.paths()["nvme"]
"""


REPORT = """
found = dict(plain=plain, paged=paged, path=path, modules=list(sys.modules))

import contextlib, io
from zinf_core.cli import main

text = io.StringIO()
with contextlib.redirect_stdout(text):
    code = main(["doctor", "--json", str(folder)])
plain_text = io.StringIO()
with contextlib.redirect_stdout(plain_text):
    main(["doctor", str(folder)])
report(**found, code=code, found=json.loads(text.getvalue()), text=plain_text.getvalue())
"""


@pytest.fixture(scope="module")
def bare_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train and ask for a report where PATH is an empty folder, there is no other variable, and
    starting a process or reaching the network is an error."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "empty").mkdir()
    return run_child(BARE + TRAIN + REPORT, folder, environment={"PATH": str(folder / "empty")})


@pytest.mark.slow
def test_p91_nothing_is_built_and_nothing_foreign_is_needed(bare_machine: dict[str, Any]) -> None:
    """P91: a system library and a compiler are needed before the first byte can be swapped."""
    assert bare_machine["paged"] == bare_machine["plain"]
    assert bare_machine["path"].startswith("posix-")
    builders = {"torch.utils.cpp_extension", "distutils", "setuptools", "triton.compiler"}
    assert not set(bare_machine["modules"]) & builders


@pytest.mark.slow
def test_p91_the_report_says_which_path_and_why(bare_machine: dict[str, Any]) -> None:
    """P91: nobody can tell which backend is used, and why not another."""
    found = bare_machine["found"]
    assert bare_machine["code"] == 0
    assert "posix-" in json.dumps(found["storage"])
    assert "posix-" in bare_machine["text"]
    assert found["gds_problem"] or found["cuda"]["num_devices"] > 0
    assert found["gds_problem"] is None or found["gds_problem"] in bare_machine["text"]


SCRIPT = """
import sys
import torch
import zinf_torch as zt

model = torch.nn.Linear(8, 8)
with zt.Runtime(device="8KiB", host="64KiB", nvme=sys.argv[1]) as runtime:
    runtime.attach(model)
    optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    print("trained", torch.distributed.is_initialized())
"""


@pytest.mark.slow
def test_p94_a_plain_script(tmp_path: Path) -> None:
    """P94: without a launcher, its variables, a device or a network nothing runs: the script of
    the README, started as ``python script.py`` with an empty environment."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py", "scratch"],
        env={"PYTHONPATH": str(ROOT)},
        cwd=tmp_path, timeout=110, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "trained False\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
def test_p94_importing_is_harmless(tmp_path: Path) -> None:
    """P94: importing touches a device, reads the environment, starts threads or writes files."""
    script = """
import threading
before = (dict(os.environ), threading.active_count(), torch.get_default_dtype(),
          torch.is_grad_enabled(), torch.initial_seed(), torch.nn.Module.__init__)
import zinf_core, zinf_storage, zinf_torch, zinf_storage.nvme
after = (dict(os.environ), threading.active_count(), torch.get_default_dtype(),
         torch.is_grad_enabled(), torch.initial_seed(), torch.nn.Module.__init__)
report(same=before == after, cuda=torch.cuda.is_initialized(), files=os.listdir(folder))
"""
    prelude = PRELUDE.replace("import zinf_torch as zt\n", "")
    facts = run_child(script, tmp_path, prelude=prelude)
    assert facts == {"same": True, "cuda": False, "files": []}


@pytest.mark.slow
def test_p94_variables_of_a_launcher_are_not_obeyed_unasked(tmp_path: Path) -> None:
    """P94: left-over variables of a launcher make a single process wait for others."""
    variables = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "x", "MASTER_ADDR": "no.such.host"}
    facts = run_child(TRAIN + "report(plain=plain, paged=paged)", tmp_path, environment=variables)
    assert facts["paged"] == facts["plain"]
