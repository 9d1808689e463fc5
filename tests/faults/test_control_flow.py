"""Faults of hooks, traces and control flow (P15 to P29)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from faults.support import (
    batch,
    check_same,
    gradients,
    mlp,
    square_loss,
    states,
    train,
    update,
    values,
)


class Branching(nn.Module):
    """Runs `a` or `b`, then `c`, as `choose(step, x)` says."""

    def __init__(self, choose: Callable[[int, torch.Tensor], bool]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.choose = choose

    def loss(self, step: int) -> torch.Tensor:
        x = batch(step, 3, 6)
        h = self.a(x) if self.choose(step, x) else self.b(x)
        return self.c(h).square().mean()


CHOICES: dict[str, Callable[[int, torch.Tensor], bool]] = {
    "step": lambda step, _: step % 2 == 0,
    "data": lambda _, x: x.sum().item() > 0,
    "late": lambda step, _: step < 7,
}


@pytest.mark.parametrize("choice", CHOICES)
def test_p15_a_branch_that_changes(tmp_path: Path, choice: str) -> None:
    """P15: a fetch left in flight when a branch changes; weight decay on a module not run."""

    def script(world: Any) -> Any:
        model = world.attach(Branching(CHOICES[choice]))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1, weight_decay=0.1)
        record = []
        for step in range(10):
            before = values(model)
            loss = model.loss(step)
            loss.backward()
            is_idle = {name: grad is None for name, grad in gradients(model).items()}
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after = values(model)
            assert {n for n in after if torch.equal(after[n], before[n])} == {
                name for name, idle in is_idle.items() if idle
            }
            assert sum(is_idle.values()) == 2
            record.append((loss.detach(), after))
        return record, states(optimizer)

    check_same(script, tmp_path)


def test_p15_train_and_eval_run_other_modules(tmp_path: Path) -> None:
    """P15: evaluation takes another way through the model, between forward and backward, too."""

    def script(world: Any) -> Any:
        model = world.attach(Branching(lambda _step, _x: model.training))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        record = []
        for step in range(6):
            loss = model.train().loss(step)
            with torch.no_grad():
                record.append(model.eval().loss(step).clone())
            record.append(update(loss, optimizer))
        return record, values(model)

    check_same(script, tmp_path)


class Experts(nn.Module):
    """Top-1 routing: the gate's weight of the chosen expert multiplies its output."""

    def __init__(self, num_experts: int = 4, dim: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))
        with torch.no_grad():
            self.gate.weight.copy_(torch.eye(num_experts, dim) * 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            idx = (chosen == index).nonzero().flatten()
            if idx.numel():
                out[idx] = expert(x[idx]) * weights[idx, index, None]
        return out


def _tokens_for(experts: list[int], step: int) -> torch.Tensor:
    return F.one_hot(torch.tensor(experts), 6) * 3 + 0.1 * batch(step, len(experts), 6)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_p16_an_idle_expert(tmp_path: Path, optimizer_class: Any) -> None:
    """P16: a hang or an error if an expert gets no token; the gate is not updated."""

    def script(world: Any) -> Any:
        model = world.attach(Experts())
        optimizer = world.optimizer(optimizer_class, model.parameters(), lr=0.05, weight_decay=0.1)
        at_start = values(model.experts[3])
        record = []
        for step in range(10):
            used = [0, 1, 2, 1] if step < 5 else [3, 0, 3, 2]
            loss = model(_tokens_for(used, step)).square().mean()
            record.append(update(loss, optimizer))
            now = values(model.experts[3])
            is_unchanged = all(torch.equal(now[name], at_start[name]) for name in now)
            assert is_unchanged == (step < 5)
        return record, values(model)

    check_same(script, tmp_path)


@pytest.mark.parametrize("used", [[], [2, 2, 2]], ids=["no token at all", "one expert takes all"])
def test_p16_all_but_one_expert_idle(tmp_path: Path, used: list[int]) -> None:
    """P16: as above, when no expert runs, and when one takes everything, in turns."""

    def script(world: Any) -> Any:
        model = world.attach(Experts())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.05)
        record = []
        for step in range(4):
            tokens = _tokens_for([0, 1, 2, 3] if step % 2 else used or [0], step)
            tokens = tokens if step % 2 else tokens[: len(used)]
            loss = model(tokens).square().sum() + model.gate.weight.square().mean()
            record.append(update(loss, optimizer))
        return record, values(model)

    check_same(script, tmp_path)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, depth: int = 12) -> torch.Tensor:
        for _ in range(depth):
            x = torch.tanh(self.layer(x))
        return x


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, depth: int = 4) -> torch.Tensor:
        return x if depth == 0 else torch.tanh(self.up(self(torch.tanh(self.down(x)), depth - 1)))


@pytest.mark.parametrize("model_class", [Repeated, Recursive])
def test_p20_a_layer_used_many_times(tmp_path: Path, model_class: Callable[[], nn.Module]) -> None:
    """P20: hook counters that assume one call per pass; a depth that varies."""

    def script(world: Any) -> Any:
        model = world.attach(model_class())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses = train(
            model, optimizer, 5, lambda m, s: m(batch(s, 2, 16), 12 - 3 * (s % 3)).square().mean()
        )
        return losses, values(model)

    check_same(script, tmp_path)


def test_p20_a_scalar_cubed(tmp_path: Path) -> None:
    """P20: one use of w counted where there are three: d(w*w*w*x)/dw = 12 at w = 2, x = 1."""

    def script(world: Any) -> Any:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([2.0]))})
        model = world.attach(model)
        w = model["w"]
        (w * w * w * torch.ones(1)).sum().backward()
        return w.grad.clone()

    assert check_same(script, tmp_path).tolist() == [12.0]


def test_p20_second_derivatives(tmp_path: Path) -> None:
    """P20: d2(w**3)/dw2 = 6w = 12 at w = 2; the graph itself uses the parameter again."""

    def script(world: Any) -> Any:
        model = world.attach(nn.ParameterDict({"w": nn.Parameter(torch.tensor([2.0]))}))
        w = model["w"]
        (first,) = torch.autograd.grad((w * w * w).sum(), w, create_graph=True)
        first.sum().backward()
        return first.detach().clone(), w.grad.clone()

    expected = check_same(script, tmp_path)
    assert [value.tolist() for value in expected] == [[12.0], [12.0]]


class MakesParameter(nn.Module):
    def __init__(self, *, register: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register = register

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = nn.Parameter(torch.ones(4))
        if self.register:
            self.t = t
        self.seen = t
        return self.lin(x) * t.sum()


@pytest.mark.parametrize("register", [False, True])
def test_p22_a_parameter_made_in_forward(tmp_path: Path, register: bool) -> None:
    """P22: a parameter nobody announced has no attributes of ours; it is a plain leaf."""

    def script(world: Any) -> Any:
        model = world.attach(MakesParameter(register=register))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        record = []
        for step in range(3):
            loss = model(batch(step, 2, 4)).square().mean()
            record.append(update(loss, optimizer))
            record.append(model.seen.grad.clone())
            assert type(model.seen) is nn.Parameter
        return record, values(model)

    check_same(script, tmp_path)


def test_p22_a_lazy_layer_made_in_the_first_forward(tmp_path: Path) -> None:
    """P22: a whole layer that appears at run time, attached and optimized from then on."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(4, 1))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        record = []
        for step in range(4):
            if step == 2:
                model.append(nn.Linear(4, 4))
                world.attach(model)
                optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.01})
            record.append(update(square_loss(model, step), optimizer))
        return record, values(model), states(optimizer)

    check_same(script, tmp_path)


def _with_modes() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))


def test_p28_backward_in_eval_mode(tmp_path: Path) -> None:
    """P28: the mode of a module taken as a sign that no backward comes."""

    def script(world: Any) -> Any:
        model = world.attach(_with_modes())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        losses = train(model.eval(), optimizer, 3, square_loss)
        return losses, values(model)

    check_same(script, tmp_path)


def test_p28_parts_in_eval_mode_and_a_switch_before_backward(tmp_path: Path) -> None:
    """P28: frozen statistics in a model in training; the mode changes between the passes."""

    def script(world: Any) -> Any:
        model = world.attach(_with_modes())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        record = []
        for step in range(4):
            model.train(step % 2 == 0)
            model[1].eval()
            loss = square_loss(model, step)
            model.train(step % 2 == 1)
            record.append(update(loss, optimizer))
        return record, values(model)

    check_same(script, tmp_path)


def test_p29_inference_mode_between_training_steps(tmp_path: Path) -> None:
    """P29: buffers made in inference mode are needed by autograd later."""

    def script(world: Any) -> Any:
        model = world.attach(mlp())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        record = []
        for step in range(3):
            with torch.inference_mode():
                record.append(model(batch(step, 2, 8)).clone())
            record.append(update(square_loss(model, step), optimizer))
            with torch.no_grad():
                record.append(model(batch(step, 2, 8)).clone())
            record.append(update(square_loss(model, step), optimizer))
        return [item.clone() for item in record], values(model)

    check_same(script, tmp_path)


def test_p29_everything_is_first_done_in_inference_mode(tmp_path: Path) -> None:
    """P29: attaching, reading values and gradients, or a first use inside inference mode."""

    def script(world: Any) -> Any:
        with torch.inference_mode():
            world.attach(model := _plain_outside_inference())
            optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
            seen = [param.sum().item() for param in model.parameters()]
        losses = train(model, optimizer, 2, square_loss)
        square_loss(model, 2).backward()
        with torch.inference_mode():
            seen += [param.grad.abs().sum().item() for param in model.parameters()]
            seen += [value.sum().item() for value in model.state_dict().values()]
        optimizer.step()
        return seen, losses, values(model)

    check_same(script, tmp_path)


def _plain_outside_inference() -> nn.Module:
    with torch.inference_mode(mode=False):
        return mlp()
