"""Faults of numerics: losses, accumulation, loading, groups (P36 to P51)."""

from __future__ import annotations

import io
import math
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
    gradients,
    home_nbytes,
    mlp,
    on_plain,
    on_tightest,
    square_loss,
    states,
    train,
    update,
    values,
)
from zinf_core.units import PAGE_NBYTES


class TinyTransformer(nn.Module):
    """Two layers, width 32, four heads."""

    def __init__(self, num_tokens: int = 29) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, num_tokens)

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 29, (2, 7), generator=generator)
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def _thirty_steps(world: Any) -> Any:
    model = world.attach(TinyTransformer())
    optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    return train(model, optimizer, 30, lambda m, s: m.loss(s)), values(model)


@pytest.fixture(scope="module")
def thirty_plain_steps() -> Any:
    return on_plain(_thirty_steps)


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
@pytest.mark.parametrize("optimizer_states", ["device", "host", "nvme"])
def test_p36_the_loss_is_that_of_plain(
    tmp_path: Path, thirty_plain_steps: Any, parameters: str, optimizer_states: str
) -> None:
    """P36: another loss on the same data, between stages or against the plain run."""
    homes = {
        "parameters": parameters,
        "optimizer_states": optimizer_states,
        "gradients": optimizer_states,
    }
    model = TinyTransformer()
    budgets = {
        tier: home_nbytes(model, homes, tier, num_states=2) or PAGE_NBYTES
        for tier in ("device", "host")
    }
    actual = on_tightest(_thirty_steps, tmp_path, **budgets, **homes)
    assert_same(actual, thirty_plain_steps)


def test_p36_bf16_with_masters_is_the_mixed_precision_written_by_hand(tmp_path: Path) -> None:
    """P36: the low-precision path updates something else than fp32 masters."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3).bfloat16())
        optimizer = world.optimizer(
            torch.optim.AdamW, model.parameters(), lr=1e-3, weight_decay=0.1, master_weights=True
        )
        return train(model, optimizer, 10, square_loss), values(model)

    check_same(script, tmp_path)


class Weights(nn.Module):
    """One vector parameter; `loss(x)` is w * x summed."""

    def __init__(self, *start: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))

    def loss(self, x: float) -> torch.Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p38_micro_batches_are_added(tmp_path: Path, dtype: torch.dtype) -> None:
    """P38: only the first micro-batch counts; the last one leaks into the next cycle."""

    def script(world: Any) -> Any:
        model = world.attach(Weights(1.0, dtype=dtype))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        record = []
        for xs in ((1, 2, 3, 4), (0, 0, 0, 0)):
            for x in xs:
                model.loss(x / 4).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            record.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
            record.append(model.w.detach().float().item())
        return record

    assert on_tightest(script, tmp_path) == pytest.approx([2.5, 0.75, 0.0, 0.75])


def test_p38_eight_low_precision_micro_batches_lose_nothing(tmp_path: Path) -> None:
    """P38: adding in bf16 drops small gradients: 1 + 8 * 2**-9 is 1 in bf16."""

    def script(world: Any) -> Any:
        model = world.attach(Weights(0.0, dtype=torch.bfloat16))
        world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        for x in (1.0, *[2.0**-9] * 8):
            model.loss(x).backward()
        return model.w.grad.detach().float().item()

    assert on_tightest(script, tmp_path) == 1.0 + 8 * 2.0**-9


def test_p38_accumulation_over_a_model(tmp_path: Path) -> None:
    """P38: a copy instead of a sum for parameters that some micro-batches do not use."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        record = []
        for step in range(3):
            for micro in range(4):
                part = model[: 2 + 2 * (micro % 3)]
                (part(batch(10 * step + micro, 2, 8)).square().mean() / 4).backward()
            record.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        return record, values(model), states(optimizer)

    check_same(script, tmp_path)


@pytest.mark.parametrize("lengths", [(1, 3, 2, 5), (2, 2, 1), (3,)])
def test_p40_any_number_of_backwards_per_step(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """P40: the end of an accumulation tied to a count; a short last one scaled by the nominal."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
        losses, count = [], 0
        for length in lengths:
            for _ in range(length):
                loss = square_loss(model, count) / length
                loss.backward()
                losses.append(loss.detach())
                count += 1
            optimizer.step()
            optimizer.zero_grad()
        return losses, values(model)

    check_same(script, tmp_path)


def test_p40_ten_samples_in_batches_of_four_accumulated_by_two(tmp_path: Path) -> None:
    """P40: batches of 4, 4 and 2, accumulation of 2: the last cycle has one short micro-batch."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        batches = batch(0, 10, 8).split(4)
        record = []
        for index, x in enumerate(batches):
            loss = model(x).square().mean() / 2
            loss.backward()
            record.append(loss.detach())
            if index % 2 == 1 or index == len(batches) - 1:
                optimizer.step()
                optimizer.zero_grad()
        return record, values(model)

    check_same(script, tmp_path)


def _pretrained() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = TinyTransformer()
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) / 8)
    return model


def _load_by(way: str, world: Any) -> nn.Module:
    """Return a model with the pretrained values, loaded in one of the usual ways."""
    saved = values(_pretrained())
    if way == "before attach":
        model = TinyTransformer()
        model.load_state_dict(saved)
        return world.attach(model)
    model = world.attach(TinyTransformer())
    if way == "load_state_dict":
        model.load_state_dict(saved)
    elif way == "torch.load":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
    elif way == "copy_":
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(saved[name])
    else:
        for name, param in model.named_parameters():
            param.data = saved[name]
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["before attach", "load_state_dict", "torch.load", "copy_", "assigned data"]
)
def test_p41_pretrained_weights_are_what_is_trained(tmp_path: Path, way: str) -> None:
    """P41: a very high loss because a loading path skipped weights."""

    def script(world: Any) -> Any:
        model = _load_by(way, world)
        with torch.no_grad():
            first = model.loss(0).clone()
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        return first, train(model, optimizer, 2, lambda m, s: m.loss(s)), values(model)

    result = check_same(script, tmp_path)
    assert_same(result[0], _pretrained().loss(0).detach())


def test_p41_loading_reaches_the_masters(tmp_path: Path) -> None:
    """P41: bf16 weights loaded after the optimizer was made are overwritten by old masters."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2).bfloat16())
        optimizer = world.optimizer(
            torch.optim.SGD, model.parameters(), lr=1e-3, master_weights=True
        )
        losses = train(model, optimizer, 2, square_loss)
        generator = torch.Generator().manual_seed(3)
        other = {
            name: torch.randn(value.shape, generator=generator).bfloat16()
            for name, value in model.state_dict().items()
        }
        model.load_state_dict(other)
        return losses, train(model, optimizer, 2, square_loss), values(model)

    check_same(script, tmp_path)


class TwoScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(1))
        self.w2 = nn.Parameter(torch.ones(1))

    def loss(self) -> torch.Tensor:
        return (self.w1 + self.w2).sum()


def test_p51_a_learning_rate_per_group(tmp_path: Path) -> None:
    """P51: groups merged, so that all share one learning rate; changes of it are ignored."""

    def script(world: Any) -> Any:
        model = world.attach(TwoScalars())
        groups = [{"params": [model.w1], "lr": 0.1}, {"params": [model.w2], "lr": 0.01}]
        optimizer = world.optimizer(torch.optim.SGD, groups)
        assert len(optimizer.param_groups) == 2
        record = []
        for _ in range(2):
            update(model.loss(), optimizer)
            record.append([model.w1.item(), model.w2.item()])
            optimizer.param_groups[1]["lr"] = 1.0
        return record

    expected = [[0.9, 0.99], [0.8, -0.01]]
    actual = check_same(script, tmp_path, device=2 * PAGE_NBYTES)
    assert actual == [pytest.approx(pair) for pair in expected]


def test_p51_decay_and_betas_per_group(tmp_path: Path) -> None:
    """P51: other options than the learning rate are shared; a frozen group; one of no use."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 3))
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": decayed[:2], "weight_decay": 0.5, "betas": (0.5, 0.9)},
            {"params": others, "weight_decay": 0.0, "lr": 0.0},
            {"params": decayed[2:], "maximize": True},
        ]
        optimizer = world.optimizer(torch.optim.AdamW, groups, lr=0.01)
        record = []
        for step in range(4):
            record.append(update(square_loss(model, step), optimizer))
            optimizer.param_groups[step % 3]["weight_decay"] += 0.1
        settings = copied([{**g, "params": len(g["params"])} for g in optimizer.param_groups])
        return record, values(model), settings

    check_same(script, tmp_path)
