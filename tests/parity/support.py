"""Plain PyTorch as the oracle: one training loop for both sides, and the tightest budgets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zinf_torch as zt
from zinf_core.errors import BudgetTooSmallError
from zinf_core.units import align_up

TIERS = ("device", "host", "nvme")
BatchLoss = Callable[[nn.Module, torch.Generator], torch.Tensor]
"""Draws a batch and returns the loss of the model on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained and how; the same for plain PyTorch and for zinf."""

    build: Callable[[], nn.Module]
    batch_loss: BatchLoss
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    num_steps: int = 4
    accumulation: int = 1
    clip: float | None = None
    num_states: int = 2
    """Tensors of the parameter's shape the optimizer keeps for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What training gave."""

    trace: list[float]
    """Losses and gradient norms, in the order in which they appeared."""
    weights: dict[str, torch.Tensor]
    states: dict[Any, dict[str, Any]]
    """The optimizer's states, by parameter number."""


def build(recipe: Recipe) -> nn.Module:
    """Return the model of the recipe with its seed."""
    torch.manual_seed(0)
    return recipe.build()


def train(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train and return losses and norms: the loop a user of plain PyTorch writes."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    trace = []
    for _ in range(recipe.num_steps):
        for _ in range(recipe.accumulation):
            loss = recipe.batch_loss(model, generator) / recipe.accumulation
            loss.backward()
            trace.append(loss.item())
        if recipe.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            trace.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return trace


def outcome(trace: list[float], model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    """Collect what is compared, as plain tensors."""
    states = optimizer.state_dict()["state"]
    return Outcome(
        trace=trace,
        weights={name: value.clone() for name, value in model.state_dict().items()},
        states={
            number: {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
            for number, state in states.items()
        },
    )


def train_plain(recipe: Recipe) -> Outcome:
    """Return what plain PyTorch gives."""
    model = build(recipe)
    optimizer = recipe.optimizer(model.parameters(), **recipe.options)
    return outcome(train(recipe, model, optimizer), model, optimizer)


def train_tightest(recipe: Recipe, folder: Path, **homes: Any) -> Outcome:
    """Return what zinf gives at the tightest budgets it accepts, which it must have kept."""
    with tightest(recipe, folder, **homes) as (runtime, model, optimizer):
        result = outcome(train(recipe, model, optimizer), model, optimizer)
        for name, usage in runtime.usage().items():
            assert usage.peak_nbytes <= usage.budget_nbytes, name
    assert not folder.exists()
    return result


@contextmanager
def tightest(
    recipe: Recipe, folder: Path, *, device: int = 4096, host: int = 4096, **homes: Any
) -> Iterator[tuple[zt.Runtime, nn.Module, torch.optim.Optimizer]]:
    """Set up at the tightest budgets that are accepted, found from the refusals.

    `device` and `host` are where the search begins, without what lives there for good.
    """
    budgets = {
        "device": device + home_nbytes(recipe, "device", homes),
        "host": host + home_nbytes(recipe, "host", homes),
    }
    while True:
        with ExitStack() as stack:
            runtime = stack.enter_context(zt.Runtime(nvme=folder, **budgets, **homes))
            try:
                model = runtime.attach(build(recipe))
                optimizer = runtime.optimizer(
                    recipe.optimizer, model.parameters(), **recipe.options
                )
            except BudgetTooSmallError as refusal:
                budgets = raised(budgets, refusal)
                continue
            yield runtime, model, optimizer
            return


def refused(refusal: BudgetTooSmallError) -> tuple[str, int]:
    """Return the budget a refusal is about and the least bytes it asks for."""
    match = re.search(r"Set (device|host) to at least (\d+) bytes", str(refusal))
    assert match is not None, refusal
    return match[1], int(match[2])


def raised(budgets: Mapping[str, int], refusal: BudgetTooSmallError) -> dict[str, int]:
    """Return the budgets with the refused one at the least bytes the refusal asks for."""
    name, least = refused(refusal)
    assert least > budgets[name], refusal
    return {**budgets, name: least}


def home_nbytes(recipe: Recipe, tier: str, homes: Mapping[str, Any]) -> int:
    """Return the bytes of states that live on `tier` for good, in whole pages; fp32 only."""
    params = list(build(recipe).parameters())
    copies = {"parameters": 1, "gradients": 1, "optimizer_states": recipe.num_states}
    total = sum(num for kind, num in copies.items() if homes.get(kind, "nvme") == tier)
    return total * sum(align_up(4 * param.numel()) for param in params)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Fail unless both are equal to the last bit."""
    assert found.trace == expected.trace
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    assert found.states.keys() == expected.states.keys()
    for number, state in expected.states.items():
        assert found.states[number].keys() == state.keys()
        for name, value in state.items():
            other = found.states[number][name]
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
            assert same, (number, name)
