"""Scripts run in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PRELUDE = """
import json, os, resource, sys
from pathlib import Path
import torch
from torch import nn
import zinf_torch as zt

torch.set_num_threads(1)
folder = Path(sys.argv[1])

def report(**facts):
    print(json.dumps(facts))
"""


def run_child(
    script: str,
    folder: Path,
    *,
    prelude: str = PRELUDE,
    environment: dict[str, str] | None = None,
    limit_s: float = 110.0,
) -> dict[str, Any]:
    """Run `prelude` + `script` with `folder` as argument; return what it reported.

    `environment` replaces the whole environment but PYTHONPATH. Fails if the process does, and
    kills it when `limit_s` is over: a hang is a failure.
    """
    variables = dict(os.environ if environment is None else environment)
    variables["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + script, str(folder)],
        env=variables, cwd=folder, timeout=limit_s, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
