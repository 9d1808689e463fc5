"""What the robustness tests share: a model, its loop, what is in use, and child processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zinf_torch as zt

ROOT = Path(__file__).parents[2]


def num_fds() -> int:
    """Return the number of open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def mlp(width: int = 24) -> nn.Module:
    """Return a small model with its seed; its parameters have different sizes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width),
        nn.Tanh(),
        nn.Linear(width, 2 * width),
        nn.LayerNorm(2 * width),
        nn.Linear(2 * width, 8),
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 3, seed: int = 1
) -> list[float]:
    """Train on random data and return the losses: plain PyTorch."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(4, 8, generator=generator)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_plain(num_steps: int = 3) -> list[float]:
    """Return the losses of `mlp` in plain PyTorch."""
    model = mlp()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), num_steps=num_steps)


def train_on(runtime: zt.Runtime, num_steps: int = 3) -> list[float]:
    """Return the losses of `mlp` on `runtime`."""
    model = runtime.attach(mlp())
    optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    return train(model, optimizer, num_steps=num_steps)


def idle_nbytes(runtime: zt.Runtime) -> dict[str, int]:
    """Return the leased bytes once nothing runs and nothing is resident that lives elsewhere."""
    gc.collect()
    runtime.pager.evict_all()
    return {name: usage.leased_nbytes for name, usage in runtime.usage().items()}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's state as plain tensors."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail unless both have the same names and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def run_python(
    source: str, *args: str | os.PathLike[str], flags: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `source` in a fresh interpreter that finds zinf and the tests, and return its output."""
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *flags, "-c", source, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )
