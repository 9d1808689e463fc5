"""Faults of gradients that user code reads, edits and hooks (P99, P100)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from faults.support import (
    batch,
    check_same,
    gradients,
    mlp,
    square_loss,
    states,
    update,
    values,
)

GradEdit = Callable[[nn.Module, torch.Tensor], Any]

GRAD_EDITS: dict[str, GradEdit] = {
    "mul_": lambda _, p: p.grad.mul_(2),
    "add noise": lambda _, p: p.grad.add_(torch.ones(p.shape) * 0.125),
    "zero_": lambda m, p: p.grad.zero_() if p is m[0].weight else None,
    "data": lambda _, p: p.grad.data.mul_(0.5),
    "index": lambda _, p: p.grad.__setitem__(0, 1.0),
    "view": lambda _, p: p.grad.view(-1)[::2].mul_(3.0),
    "numpy": lambda _, p: p.grad.numpy().__imul__(2),
    "copy_": lambda _, p: p.grad.copy_(torch.full(p.shape, 0.25)),
    "assign": lambda _, p: setattr(p, "grad", torch.full(p.shape, 0.25)),
    "assign a product": lambda _, p: setattr(p, "grad", p.grad * 2),
    "assign itself": lambda _, p: setattr(p, "grad", p.grad),
    "in place operator": lambda _, p: setattr(p, "grad", p.grad.__itruediv__(4)),
    "data assigned": lambda _, p: setattr(p.grad, "data", p.grad * 2),
    "None": lambda m, p: setattr(p, "grad", None) if p is m[2].bias else None,
    "del": lambda m, p: p.__delattr__("grad") if p is m[2].bias else None,
    "foreach": lambda m, p: (
        torch._foreach_mul_([q.grad for q in m.parameters()], 0.5) if p is m[0].weight else None
    ),
    "detach_ and masked": lambda _, p: p.grad.detach_().masked_fill_(p.grad > 0, 0.0),
    "clamp out=": lambda _, p: torch.clamp(p.grad, -0.01, 0.01, out=p.grad),
    "sign of another": lambda m, p: p.grad.mul_(m[0].bias.grad.sum().sign()),
}


@pytest.mark.parametrize("edit", GRAD_EDITS)
def test_p99_gradients_are_seen_and_edits_count(tmp_path: Path, edit: str) -> None:
    """P99: `p.grad` is None between backward and step, or edits of it have no effect."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.Adam, model.parameters(), lr=0.05)
        record: list[Any] = []
        for step in range(3):
            loss = square_loss(model, step)
            loss.backward()
            record.append(gradients(model))
            with torch.no_grad():
                for param in model.parameters():
                    GRAD_EDITS[edit](model, param)
            record.append(gradients(model))
            square_loss(model, step + 5).backward()
            record.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        return record, values(model), states(optimizer)

    check_same(script, tmp_path, device=2 * 4096)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_p99_zero_grad(tmp_path: Path, by: str, *, set_to_none: bool) -> None:
    """P99: a gradient of zeros (momentum goes on) taken for no gradient (nothing happens)."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(
            torch.optim.SGD, model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1
        )
        record: list[Any] = [gradients(model)]
        optimizer.step()
        for step in range(3):
            square_loss(model, step).backward()
            optimizer.step()
            {"optimizer": optimizer, "model": model}[by].zero_grad(set_to_none=set_to_none)
            record += [gradients(model), values(model)]
            optimizer.step()
            record.append(values(model))
        return record, states(optimizer)

    check_same(script, tmp_path)


def test_p99_a_gradient_kept_by_user_code(tmp_path: Path) -> None:
    """P99: what user code holds of a gradient stays valid: after zero_grad, after the next
    backward, after the step."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.05)
        kept = []
        for step in range(3):
            square_loss(model, step).backward()
            kept.append(model[0].weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        square_loss(model, 3).backward()
        growing = model[0].weight.grad
        square_loss(model, 4).backward()
        return [grad.clone() for grad in [*kept, growing]], values(model)

    check_same(script, tmp_path)


def test_p99_wrong_gradients_raise_as_in_torch(tmp_path: Path) -> None:
    """P99: a gradient of another shape, type or kind is taken."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 1))
        kinds = []
        for wrong in (torch.zeros(3), torch.zeros(8, 8, dtype=torch.float64), "no tensor"):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                model[0].weight.grad = wrong
            kinds.append(type(caught.value).__name__)
            assert "assign" in str(caught.value)
        return kinds, model[0].weight.grad

    check_same(script, tmp_path)


def test_p99_gradients_asked_for_by_hand(tmp_path: Path) -> None:
    """P99: `torch.autograd.grad`, frozen parameters, and a parameter frozen and thawed again."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        record: list[Any] = []
        for step in range(4):
            asked = torch.autograd.grad(square_loss(model, step), list(model.parameters()))
            record.append([grad.clone() for grad in asked])
            model[0].weight.requires_grad_(step % 2 == 1)
            model[2].bias.requires_grad = step % 2 == 1
            square_loss(model, step).backward()
            record.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            model.requires_grad_(True)
        return record, values(model)

    check_same(script, tmp_path)


def test_p100_hooks_see_full_gradients(tmp_path: Path) -> None:
    """P100: a tensor hook gets a shard, or what it returns is not used."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        seen: list[Any] = []

        def double(grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.clone())
            return grad * 2

        def after(param: torch.Tensor) -> None:
            seen.append((param.shape, param.grad.clone()))
            param.grad.mul_(0.5)

        handle = model[0].weight.register_hook(double)
        model[2].weight.register_post_accumulate_grad_hook(after)
        record = [update(square_loss(model, 0), optimizer)]
        square_loss(model, 1).backward()
        square_loss(model, 2).backward()
        record += [gradients(model)]
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        record += [update(square_loss(model, 3), optimizer)]
        return record, seen, values(model)

    check_same(script, tmp_path)


@pytest.mark.parametrize("when", ["before attach", "before the optimizer", "late"])
def test_p100_hooks_registered_at_any_time(tmp_path: Path, when: str) -> None:
    """P100: hooks that were there before are lost; the order of hooks changes."""

    def script(world: Any) -> Any:
        model = mlp(8, 2)
        seen: list[Any] = []

        def register() -> None:
            for index, param in enumerate(model.parameters()):
                param.register_hook(lambda g, i=index: seen.append((i, "a", g.sum().item())))
                param.register_hook(lambda g: g + 1)
                param.register_hook(lambda g, i=index: seen.append((i, "b", g.sum().item())))
                param.register_post_accumulate_grad_hook(
                    lambda p, i=index: seen.append((i, "c", p.grad.sum().item()))
                )

        if when == "before attach":
            register()
        world.attach(model)
        if when == "before the optimizer":
            register()
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        if when == "late":
            square_loss(model, 7).backward()
            register()
        record = [update(square_loss(model, step), optimizer) for step in range(2)]
        return record, seen, values(model)

    check_same(script, tmp_path)


def test_p100_stepping_in_a_hook(tmp_path: Path) -> None:
    """P100: the optimizer step in backward (one optimizer per parameter), as torch documents."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3))
        optimizers = {
            param: world.optimizer(torch.optim.Adam, [param], lr=0.05)
            for param in model.parameters()
        }

        def step_now(param: torch.Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step_now)
        losses = []
        for step in range(3):
            loss = square_loss(model, step)
            loss.backward()
            losses.append(loss.detach())
        return losses, values(model), gradients(model)

    check_same(script, tmp_path)


def test_p100_module_hooks_and_intermediate_tensors(tmp_path: Path) -> None:
    """P100: forward, backward and tensor hooks on what is not a parameter."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        seen: list[Any] = []
        model[0].register_forward_pre_hook(lambda m, a: seen.append(m.weight.sum().item()))
        model[2].register_forward_hook(lambda m, a, out: out * 2)
        model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        model[0].register_full_backward_pre_hook(lambda m, go: seen.append(go[0].sum().item()))
        x = batch(0, 2, 8).requires_grad_()
        out = model(x)
        out.register_hook(lambda g: seen.append(g.clone()))
        out.square().mean().backward()
        return seen, x.grad, gradients(model)

    check_same(script, tmp_path)
