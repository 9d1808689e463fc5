"""Faults of client optimizers (P95): any class of `torch.optim`, and any other."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from faults.support import (
    assert_same,
    batch,
    check_same,
    copied,
    mlp,
    on_plain,
    on_tightest,
    square_loss,
    states,
    train,
    update,
    values,
)
from zinf_core.errors import UnsupportedError
from zinf_core.units import PAGE_NBYTES

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampened": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}),
    "Adagrad decayed": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "Adam maximize": (torch.optim.Adam, {"lr": 0.01, "maximize": True}),
    "Adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "Adam fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01, "t0": 2}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def _run(world: Any, make: Callable[[Any, nn.Module], Any], num_steps: int = 5) -> Any:
    """Train an mlp whose last layer is idle in step 1; return everything there is."""
    model = world.attach(mlp(8, 2))
    optimizer = make(world, model)
    record: list[Any] = []
    for step in range(num_steps):
        part = model[:2] if step == 1 else model
        record += [update(square_loss(part, step), optimizer), values(model)]
    return record, states(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p95_torchs_optimizers(tmp_path: Path, name: str) -> None:
    """P95: with offload, only a built-in Adam is accepted."""
    optimizer_class, options = OPTIMIZERS[name]

    def make(world: Any, model: nn.Module) -> Any:
        return world.optimizer(optimizer_class, model.parameters(), **copied(options))

    check_same(lambda world: _run(world, make), tmp_path)


def test_p95_muon(tmp_path: Path) -> None:
    """P95: the same for an optimizer that takes matrices only and mixes all their elements."""

    def script(world: Any) -> Any:
        model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 8, bias=False))
        world.attach(model)
        optimizer = world.optimizer(torch.optim.Muon, model.parameters(), lr=0.01)
        losses = train(model, optimizer, 4, lambda m, s: m(batch(s, 4, 8)).square().mean())
        return losses, values(model), states(optimizer)

    check_same(script, tmp_path)


class Nested(torch.optim.Optimizer):
    """Keeps a tensor, numbers, text, None, and tensors in lists and dicts; counts its steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.num_steps = 0
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.num_steps += 1
        for group in self.param_groups:
            group["seen"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["num"], state["name"], state["nothing"] = 0, "new", None
                    state["mean"] = torch.zeros_like(param)
                    state["history"] = []
                    state["by_kind"] = {"max": param.grad.abs().clone(), "signs": (1, [2.0])}
                state["num"] += 1
                state["name"] = f"step {self.num_steps}"
                state["mean"].lerp_(param.grad, 0.5)
                state["history"] = [*state["history"], param.grad.clone()][-2:]
                torch.maximum(
                    state["by_kind"]["max"], param.grad.abs(), out=state["by_kind"]["max"]
                )
                direction = state["mean"] + sum(state["history"])
                param.sub_(direction / (1 + state["by_kind"]["max"]), alpha=group["lr"])


class Factored(torch.optim.Optimizer):
    """Keeps the means of squares of rows and columns: states of other shapes than the weight."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                square = param.grad.square() + 1e-8
                state = self.state[param]
                if param.ndim < 2:
                    state["full"] = state.get("full", 0.0) + square
                    scale = state["full"]
                else:
                    state["row"] = state.get("row", 0.0) + square.mean(-1)
                    state["column"] = state.get("column", 0.0) + square.mean(-2)
                    scale = state["row"][..., None] * state["column"] / state["row"].mean()
                param.sub_(param.grad / scale.sqrt(), alpha=group["lr"])


class Eager(torch.optim.Optimizer):
    """Allocates its state when it is constructed, from the values of the weights."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["anchor"] = torch.full_like(param, 0.5)
                self.state[param]["step"] = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] += 1
                state["anchor"].lerp_(param, 0.1)
                param.sub_(param.grad + 0.1 * (param - state["anchor"]), alpha=group["lr"])


class Shrinking(torch.optim.Optimizer):
    """State that changes its shape, its dtype and its keys from step to step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                num = state["num"] = state.get("num", 0) + 1
                state["window"] = param.grad.flatten()[: 8 - num].to(
                    torch.float64 if num % 2 else torch.float32
                )
                if num % 2:
                    state["odd"] = param.grad.clone()
                else:
                    del state["odd"]
                param.sub_(param.grad + state["window"].mean().float(), alpha=group["lr"])


@pytest.mark.parametrize("optimizer_class", [Nested, Factored, Eager, Shrinking])
def test_p95_optimizers_of_others(tmp_path: Path, optimizer_class: Any) -> None:
    """P95: state that is no tensor, nested, of other shapes, or made by the constructor."""

    def make(world: Any, model: nn.Module) -> Any:
        return world.optimizer(optimizer_class, model.parameters(), lr=0.05)

    # What grows after the first step cannot be foreseen by set-up.
    check_same(lambda world: _run(world, make, 6), tmp_path, host=8 * PAGE_NBYTES)


def test_p95_counters_of_the_optimizer_itself(tmp_path: Path) -> None:
    """P95: a count in the group or on the object advances once per sub-group instead of step."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3))
        optimizer = world.optimizer(Nested, model.parameters())
        train(model, optimizer, 3, square_loss)
        names = {state["name"] for state in optimizer.state_dict()["state"].values()}
        return optimizer.param_groups[0]["seen"], names, values(model)

    assert check_same(script, tmp_path, host=8 * PAGE_NBYTES)[:2] == (3, {"step 3"})


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.1),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "Warmup": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_p95_schedulers(tmp_path: Path, name: str) -> None:
    """P95: a scheduler refuses the optimizer, warns, or its rates are not used."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}]
        optimizer = world.optimizer(torch.optim.Adam, groups, lr=0.01)
        scheduler = SCHEDULERS[name](optimizer)
        record = []
        for step in range(6):
            record += [update(square_loss(model, step), optimizer), scheduler.get_last_lr()]
            scheduler.step()
        rates = [copied(group["lr"]) for group in optimizer.param_groups]
        return record, rates, values(model), scheduler.state_dict()["last_epoch"]

    check_same(script, tmp_path)


def test_p95_reduce_on_plateau_and_hooks(tmp_path: Path) -> None:
    """P95: step hooks run once per sub-group, or not at all."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for step in range(4):
            update(square_loss(model, step), optimizer)
            scheduler.step(float(step))
        return calls, optimizer.param_groups[0]["lr"], values(model)

    assert check_same(script, tmp_path)[0] == ["before", "after"] * 4


def test_p95_closures(tmp_path: Path) -> None:
    """P95: `step(closure)` does not run the closure, or runs it without gradients."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.Adam, model.parameters(), lr=0.05)
        losses = []
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = square_loss(model, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        return losses, values(model), states(optimizer)

    check_same(script, tmp_path)


def test_p95_groups_that_come_later(tmp_path: Path) -> None:
    """P95: `add_param_group` in the middle of training, unfreezing, and a rate of its own."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3))
        model[2].requires_grad_(False)
        optimizer = world.optimizer(torch.optim.AdamW, model[0].parameters(), lr=0.05)
        losses = train(model, optimizer, 2, square_loss)
        optimizer.zero_grad()
        model.zero_grad()
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
        losses += train(model, optimizer, 2, square_loss)
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        losses += train(model, optimizer, 2, square_loss)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [model[0].weight]})
        sizes = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        return losses, values(model), states(optimizer), sizes

    check_same(script, tmp_path)


@pytest.mark.parametrize("name", ["SGD momentum", "Adam amsgrad", "Adafactor", "ASGD"])
def test_p95_state_into_plain_torch_and_back(tmp_path: Path, name: str) -> None:
    """P95: a state dict that only the product can read."""
    optimizer_class, options = OPTIMIZERS[name]

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(optimizer_class, model.parameters(), **options)
        losses = train(model, optimizer, 2, square_loss)
        plain = mlp(8, 2)
        plain.load_state_dict(values(model))
        plain_optimizer = optimizer_class(plain.parameters(), **options)
        plain_optimizer.load_state_dict(copied(optimizer.state_dict()))
        losses += train(plain, plain_optimizer, 2, square_loss)
        again = world.attach(mlp(8, 2))
        again.load_state_dict(values(plain))
        optimizer = world.optimizer(optimizer_class, again.parameters(), lr=7.0)
        optimizer.load_state_dict(copied(plain_optimizer.state_dict()))
        losses += train(again, optimizer, 2, square_loss)
        return losses, values(again), states(optimizer), optimizer.param_groups[0]["lr"]

    check_same(script, tmp_path)


def test_p95_state_read_and_edited_by_hand(tmp_path: Path) -> None:
    """P95: `optimizer.state[p]` shows placeholders; edits of it are lost."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.Adam, model.parameters(), lr=0.05)
        train(model, optimizer, 2, square_loss)
        weight = model[0].weight
        norms = [optimizer.state[p]["exp_avg"].norm().item() for p in model.parameters()]
        optimizer.state[weight]["exp_avg"].zero_()
        optimizer.state[weight]["exp_avg_sq"][0] = 1.0
        optimizer.state[weight]["step"] -= 1
        optimizer.state.pop(model[2].bias)
        losses = train(model, optimizer, 2, square_loss)
        return norms, losses, values(model), states(optimizer)

    check_same(script, tmp_path, device=2 * PAGE_NBYTES)


def test_p95_wrong_options_and_parameters_raise_as_in_torch(tmp_path: Path) -> None:
    """P95: errors of the class are swallowed or replaced."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 1))
        messages = []
        for arguments in (
            {"params": model.parameters(), "lr": -1.0},
            {"params": [], "lr": 0.1},
            {"params": [{"params": [model[0].weight]}, {"params": [model[0].weight]}]},
        ):
            with pytest.raises(ValueError, match=r".") as caught:
                world.optimizer(torch.optim.AdamW, **arguments)
            messages.append(str(caught.value))
        return messages

    assert_same(on_tightest(script, tmp_path), on_plain(script))


def test_p95_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    """P95: LBFGS needs all parameters at once; it must be refused at set-up, not go wrong."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 1))
        with pytest.raises(UnsupportedError, match="LBFGS"):
            world.optimizer(torch.optim.LBFGS, model.parameters())
        return math.pi

    assert on_tightest(script, tmp_path) == math.pi
