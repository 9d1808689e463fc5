"""fp32 training on every combination of homes, at the tightest budgets, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from parity.models import Transformer, transformer_loss
from parity.support import (
    TIERS,
    Outcome,
    Recipe,
    assert_same,
    build,
    home_nbytes,
    outcome,
    refused,
    tightest,
    train,
    train_plain,
    train_tightest,
)
from zinf_core.errors import BudgetTooSmallError
from zinf_core.units import PAGE_NBYTES, MiB

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
}


def recipe(
    name: str, *, num_steps: int, accumulation: int = 1, clip: float | None = None
) -> Recipe:
    """Return the recipe that trains the transformer with the optimizer called `name`."""
    optimizer, options = OPTIMIZERS[name]
    return Recipe(
        build=Transformer,
        batch_loss=transformer_loss,
        optimizer=optimizer,
        options=options,
        num_states=2 if name == "adamw" else 1,
        num_steps=num_steps,
        accumulation=accumulation,
        clip=clip,
    )


@cache
def plain(name: str, num_steps: int, accumulation: int = 1, clip: float | None = None) -> Outcome:
    """Return what plain PyTorch gives, computed once per session."""
    return train_plain(recipe(name, num_steps=num_steps, accumulation=accumulation, clip=clip))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_states", TIERS)
@pytest.mark.parametrize("parameters", TIERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_homes(tmp_path: Path, optimizer: str, parameters: str, optimizer_states: str) -> None:
    """Catches a home whose bytes go stale, are lost or are read before they were written, a state
    that is reset or mixed up between parameters, and a budget that set-up accepts and a step of
    training breaks."""
    found = train_tightest(
        recipe(optimizer, num_steps=20),
        tmp_path / "z",
        parameters=parameters,
        optimizer_states=optimizer_states,
    )
    assert_same(found, plain(optimizer, 20))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", TIERS)
@pytest.mark.parametrize("optimizer_states", TIERS)
@pytest.mark.parametrize("parameters", TIERS)
def test_three_homes(
    tmp_path: Path, parameters: str, optimizer_states: str, gradients: str
) -> None:
    """Catches a gradient that is overwritten instead of added to, not scaled by clipping on one
    tier, or left over for the next step."""
    options: dict[str, Any] = {"num_steps": 2, "accumulation": 4, "clip": 0.5}
    found = train_tightest(
        recipe("adamw", **options),
        tmp_path / "z",
        parameters=parameters,
        optimizer_states=optimizer_states,
        gradients=gradients,
    )
    assert_same(found, plain("adamw", **options))


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (1, 0.5), (4, None)])
@pytest.mark.parametrize("gradients", TIERS)
def test_accumulating_and_clipping(
    tmp_path: Path, gradients: str, accumulation: int, clip: float | None
) -> None:
    """Catches clipping or accumulation that is right only when both are used."""
    options: dict[str, Any] = {"num_steps": 3, "accumulation": accumulation, "clip": clip}
    found = train_tightest(recipe("sgd", **options), tmp_path / "z", gradients=gradients)
    assert_same(found, plain("sgd", **options))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_everything_in_memory(tmp_path: Path, tier: str, optimizer: str, accumulation: int) -> None:
    """Catches states used in place that alias each other, or an update applied to a copy."""
    options: dict[str, Any] = {"num_steps": 3, "accumulation": accumulation, "clip": 0.5}
    homes = dict.fromkeys(("parameters", "gradients", "optimizer_states"), tier)
    found = train_tightest(recipe(optimizer, **options), tmp_path / "z", **homes)
    assert_same(found, plain(optimizer, **options))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_homes_by_name(tmp_path: Path, optimizer: str) -> None:
    """Catches a tier chosen per runtime where it must be chosen per tensor (FAULTS P111)."""
    options: dict[str, Any] = {"num_steps": 3, "accumulation": 2, "clip": 0.5}
    homes = {
        "parameters": {"blocks.0.*": "nvme", "blocks.1.*": "host", "*": "device"},
        "gradients": {"*.weight": "host", "*.bias": "device", "*": "nvme"},
        "optimizer_states": {"*.up.*": "device", "embed*": "host", "*": "nvme"},
    }
    with zt.Runtime(device=MiB, host=MiB, nvme=tmp_path / "z", **homes) as runtime:
        torch.manual_seed(0)
        model = runtime.attach(Transformer())
        used = recipe(optimizer, **options)
        streamed = runtime.optimizer(used.optimizer, model.parameters(), **used.options)
        found = outcome(train(used, model, streamed), model, streamed)
    assert_same(found, plain(optimizer, **options))


@pytest.mark.parametrize("device", [PAGE_NBYTES, MiB], ids=["evicted", "resident"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluating_between_steps(
    tmp_path: Path, mode: Callable[[], AbstractContextManager[None]], device: int
) -> None:
    """Catches a page brought in without gradients, or in inference mode, which cannot be edited or
    trained while it stays resident (FAULTS P07, P29)."""
    used = recipe("adamw", num_steps=1)

    def run(
        model: nn.Module, optimizer: torch.optim.Optimizer, evict: Callable[[], None]
    ) -> list[float]:
        trace = []
        for _ in range(3):
            evict()  # so that evaluating fetches
            with mode():
                trace.append(transformer_loss(model.eval(), torch.Generator()).item())
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
            model.train()
            trace += train(used, model, optimizer)
        return trace

    plain_model = build(used)
    plain_optimizer = used.optimizer(plain_model.parameters(), **used.options)
    expected = run(plain_model, plain_optimizer, lambda: None)
    with tightest(used, tmp_path / "z", device=device) as (runtime, model, optimizer):
        assert run(model, optimizer, runtime.pager.evict_all) == expected


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", ["device", "host"])
def test_named_least_is_least(tmp_path: Path, tier: str, name: str) -> None:
    """Catches a refusal that asks for more than is needed: a page less must be refused as well."""
    used = recipe("adamw", num_steps=1)
    homes = dict.fromkeys(("parameters", "optimizer_states"), tier)
    with tightest(used, tmp_path / "z", **homes) as (runtime, _, _):
        least = {name: usage.budget_nbytes for name, usage in runtime.usage().items()}
    fixed = home_nbytes(used, name, homes)
    short = {**least, name: least[name] - 4096}
    assert short[name] >= fixed
    with zt.Runtime(nvme=tmp_path / "z", **short, **homes) as runtime:
        torch.manual_seed(0)
        model = Transformer()
        with pytest.raises(BudgetTooSmallError) as refusal:  # noqa: PT012
            runtime.attach(model)
            runtime.optimizer(used.optimizer, model.parameters(), **used.options)
        assert refused(refusal.value) == (name, least[name])
