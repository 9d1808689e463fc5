"""Faults of what user code sees of parameters, gradients and placements (P98 to P111)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.support import (
    assert_same,
    batch,
    check_same,
    gradients,
    mlp,
    on_plain,
    on_tightest,
    square_loss,
    states,
    update,
    values,
)
from torch import nn

import zinf_torch as zt
from zinf_core.runtime.events import Event, EventKind


class Varied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.register_buffer("steps", torch.zeros(3))

    def loss(self, step: int) -> torch.Tensor:
        out = self.linear(batch(step, 2, 6)).square().mean() * self.scale
        out = out + self.conv(batch(step, 1, 2, 4, 4)).square().mean()
        return out + self.low.float().sum().square() + self.wide.square().sum().float()


def _facts(model: nn.Module) -> list[Any]:
    """Return everything about the parameters that needs no values."""
    facts: list[Any] = [
        repr(model),
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() * p.element_size() for p in model.parameters()),
        sum(p.nbytes for p in model.parameters()),
        len({id(p) for p in model.parameters()}),
    ]
    for name, p in model.named_parameters():
        facts += [
            name, p.shape, p.size(), p.dtype, p.device, p.layout, p.ndim, p.dim(), p.numel(),
            p.nelement(), torch.numel(p), p.element_size(), p.itemsize, p.nbytes, p.stride(),
            p.is_contiguous(), p.requires_grad, p.is_leaf, p.grad is None, p.grad_fn,
            p.is_floating_point(), torch.is_floating_point(p), p.is_cuda, p.is_meta, p.is_sparse,
            p.size(-1) if p.ndim else None, len(p) if p.ndim else None, p.storage_offset(),
            p.is_complex(), p.is_quantized, isinstance(p, nn.Parameter),
            isinstance(p, torch.Tensor), torch.is_tensor(p), p.get_device(), p.output_nr,
        ]  # fmt: skip
    return facts


def test_p98_metadata_is_that_of_plain_at_any_time(tmp_path: Path) -> None:
    """P98: `sum(p.numel())` is 0 and shapes are empty while a parameter is away."""

    def script(world: Any) -> Any:
        model = world.attach(Varied())
        seen = [_facts(model)]
        inside: list[Any] = []
        model.linear.register_forward_hook(lambda *_: inside.append(_facts(model)))
        optimizer = world.optimizer(
            torch.optim.AdamW, model.parameters(), lr=0.1, master_weights=False
        )
        for step in range(2):
            loss = model.loss(step)
            seen.append(_facts(model))
            loss.backward()
            seen.append(_facts(model))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(_facts(model))
        return seen, inside

    expected = check_same(script, tmp_path)
    assert expected[0][0][1] == 35 + 57 + 1 + 0 + 4 + 3 + 4


def test_p98_metadata_reads_nothing(tmp_path: Path) -> None:
    """P98: counting the parameters of a model reads all of it."""
    events: list[Event] = []
    with zt.Runtime(
        device="64KiB", host="64KiB", nvme=tmp_path / "z", observers=[events.append]
    ) as runtime:
        model = runtime.attach(Varied())
        runtime.pager.evict_all()
        events.clear()
        _facts(model)
        str(model)
        assert events == []


def test_p98_values_look_like_plain_ones(tmp_path: Path) -> None:
    """P98: printing, comparing, hashing and converting a parameter shows a placeholder."""

    def script(world: Any) -> Any:
        model = world.attach(Varied())
        weight, low = model.linear.weight, model.low
        shown = [re.sub(r"PagedParameter|Parameter", "P", text) for text in (str(weight[0]),)]
        return [
            shown, weight.tolist(), low.tolist(), model.scale.item(), float(model.scale.detach()),
            bool((weight == weight).all()), torch.equal(weight, weight.clone()),
            weight in set(model.parameters()), weight.detach().numpy().copy().tolist(),
            [row.sum().item() for row in weight], f"{model.scale.item():.2f}",
            torch.allclose(low, low), model.scale > 1, -model.scale.detach(), 3 * model.wide,
            weight.to(torch.bfloat16), weight.half(), weight.T.shape, weight.abs().max(),
        ]  # fmt: skip

    def detached(world: Any) -> Any:
        return [
            v.detach().clone() if isinstance(v, torch.Tensor) else v for v in script(world)
        ]

    check_same(detached, tmp_path)


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


HALF_DISK = {
    "0.*": "nvme", "2.*": "nvme", "4.*": "nvme", "6.*": "nvme",
    "8.*": "host", "10.*": "host", "*": "device",
}  # fmt: skip
PLACEMENTS: dict[str, dict[str, Any]] = {
    "half disk, a quarter host, a quarter device": {
        "parameters": HALF_DISK,
        "gradients": HALF_DISK,
        "optimizer_states": {"0.*": "host", "2.bias": "device", "*": "nvme"},
    },
    "every state elsewhere": {
        "parameters": "device",
        "gradients": "host",
        "optimizer_states": "nvme",
    },
    "the other way round": {
        "parameters": "nvme",
        "gradients": "device",
        "optimizer_states": "host",
    },
    "weights here, biases there": {
        "parameters": {"*.bias": "device", "*": "nvme"},
        "gradients": {"*.weight": "host", "*": "nvme"},
        "optimizer_states": {"*.bias": "nvme", "*": "host"},
    },
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_p111_mixed_placements(tmp_path: Path, placement: str) -> None:
    """P111: states of one parameter on several tiers: clip, state_dict and step agree."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 8))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        record: list[Any] = []
        for step in range(3):
            square_loss(model, step).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            record += [norm.clone(), gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
            record += [values(model), states(optimizer)]
        return record

    assert_same(on_tightest(script, tmp_path, **PLACEMENTS[placement]), on_plain(script))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_p111_every_state_stays_on_its_tier(tmp_path: Path, placement: str) -> None:
    """P111: the tier decided per path and not per tensor, so that a state ends up elsewhere."""
    homes = PLACEMENTS[placement]
    touched: set[tuple[str, str, str]] = set()

    def note(event: Event) -> None:
        if event.kind in (EventKind.READ, EventKind.WRITE):
            touched.add((event.key.name, event.key.kind_value, event.tier))

    with zt.Runtime(
        device="1MiB", host="1MiB", nvme=tmp_path / "z", observers=[note], **homes
    ) as runtime:
        model = runtime.attach(mlp(8, 8))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        for step in range(2):
            runtime.pager.evict_all()
            update(square_loss(model, step), optimizer)
    kinds = {"param": "parameters", "grad": "gradients", "optimizer_state": "optimizer_states"}
    for name, kind, tier in touched:
        rule = homes[kinds[kind]]
        rules = {"*": rule} if isinstance(rule, str) else rule
        home = next(
            where
            for pattern, where in rules.items()
            if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name)
        )
        assert tier == home, (name, kind)
