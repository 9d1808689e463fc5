"""Faults of what user code sees of parameters, and of mixed placements (P98, P111)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
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
        shown = [re.findall(r"-?\d+\.\d+", str(item)) for item in (weight, weight[0], low)]
        return [
            shown, weight.tolist(), low.tolist(), model.scale.item(), float(model.scale.detach()),
            bool((weight == weight.clone()).all()), torch.equal(weight, weight.clone()),
            weight in set(model.parameters()), weight.detach().numpy().copy().tolist(),
            [row.sum().item() for row in weight], f"{model.scale.item():.2f}",
            torch.allclose(low, low), model.scale > 1, -model.scale.detach(), 3 * model.wide,
            weight.to(torch.bfloat16), weight.half(), weight.T.shape, weight.abs().max(),
        ]  # fmt: skip

    def detached(world: Any) -> Any:
        return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in script(world)]

    check_same(detached, tmp_path)


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


@pytest.mark.slow
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
