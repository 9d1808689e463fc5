"""Faults of weights reached by hand, from elsewhere, or under two names (P53 to P58)."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from faults.support import (
    assert_same,
    batch,
    check_same,
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


def _through_numpy(p: torch.Tensor) -> None:
    array = p.detach().view(torch.int16 if p.dtype is torch.bfloat16 else torch.int32).numpy()
    array[..., 0] = 0


def _through_vectors(p: torch.Tensor) -> None:
    vector = torch.nn.utils.parameters_to_vector([p])
    torch.nn.utils.vector_to_parameters(vector * 0.5, [p])


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "p.mul_": lambda p: p.mul_(0.5),
    "p.data.mul_": lambda p: p.data.mul_(0.5),
    "p.data = ": lambda p: setattr(p, "data", p.data * 0.5),
    "p.copy_": lambda p: p.copy_(torch.full(p.shape, 0.25)),
    "p.data.copy_": lambda p: p.data.copy_(torch.full(p.shape, 0.25, dtype=p.dtype)),
    "p.data.view(-1)[0] =": lambda p: p.data.view(-1).__setitem__(0, 3.0),
    "p.data[0] =": lambda p: p.data.__setitem__(0, 3.0),
    "p[0] =": lambda p: p.__setitem__(0, 3.0),
    "p[0].mul_": lambda p: p[0].mul_(3.0),
    "p.view(-1)[::2].add_": lambda p: p.view(-1)[::2].add_(1.0),
    "p.detach().add_": lambda p: p.detach().add_(0.125),
    "p.data +=": lambda p: p.data.__iadd__(0.125),
    "nn.init": lambda p: nn.init.constant_(p, 0.75),
    "nn.init with random numbers": lambda p: nn.init.normal_(p, std=0.1),
    "torch.add(out=)": lambda p: torch.add(p.data, 0.5, out=p.data),
    "p.clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "p.lerp_": lambda p: p.lerp_(torch.zeros(p.shape, dtype=p.dtype), 0.1),
    "torch._foreach_mul_": lambda p: torch._foreach_mul_([p], 0.5),
    "numpy view": _through_numpy,
    "vector_to_parameters": _through_vectors,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", EDITS)
def test_p53_an_edit_by_hand_survives(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    """P53: an edit is lost at the next step, since another copy of the weight overwrites it."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2).to(dtype))
        optimizer = world.optimizer(
            torch.optim.AdamW,
            model.parameters(),
            lr=1e-3,
            master_weights=dtype is torch.bfloat16,
        )
        record: list[Any] = []
        for step in range(6):
            record.append(update(square_loss(model, step), optimizer))
            if step in (2, 4):
                with torch.no_grad():
                    for param in model.parameters():
                        EDITS[way](param)
            record.append(values(model))
        return record

    check_same(script, tmp_path)


@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_p53_an_edit_around_the_backward_pass(tmp_path: Path, when: str) -> None:
    """P53: an edit through `.data` between the passes counts in backward, as in plain PyTorch,
    and one after it is there when the step comes."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        record = []
        for step in range(3):
            loss = square_loss(model, step)
            if when == "before backward":
                model[2].weight.data.mul_(0.5)
            loss.backward()
            if when == "after backward":
                with torch.no_grad():
                    model[2].weight.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            record.append(loss.detach())
        return record, values(model)

    check_same(script, tmp_path)


def test_p53_an_edit_autograd_must_notice(tmp_path: Path) -> None:
    """P53: backward with other weights than forward goes unnoticed."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        loss = square_loss(model, 0)
        with torch.no_grad():
            model[2].weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return values(model)

    check_same(script, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_p53_a_moving_average_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """P53: an average that reads placeholders, and weights that do not take it back."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2).to(dtype))
        optimizer = world.optimizer(
            torch.optim.AdamW,
            model.parameters(),
            lr=0.01,
            master_weights=dtype is torch.bfloat16,
        )
        average = [param.detach().clone() for param in model.parameters()]
        record = []
        for step in range(10):
            record.append(update(square_loss(model, step), optimizer))
            with torch.no_grad():
                for mean, param in zip(average, model.parameters(), strict=True):
                    mean.lerp_(param, 0.1)
                    if step == 6:
                        param.copy_(mean)
        return record, values(model), [mean.clone() for mean in average]

    check_same(script, tmp_path)


def test_p53_torchs_own_averaged_model(tmp_path: Path) -> None:
    """P53: the same through `torch.optim.swa_utils`, which copies the whole model."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for step in range(4):
            update(square_loss(model, step), optimizer)
            average.update_parameters(model)
        return values(model), values(average)

    check_same(script, tmp_path)


class ForeignUse(nn.Module):
    """The output layer is the embedding's weight, used outside the embedding."""

    def __init__(self, num: int = 11, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(num, dim)
        self.hidden = nn.Linear(dim, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.hidden(self.embed(ids))), self.embed.weight)


def test_p55_a_product_with_a_foreign_weight(tmp_path: Path) -> None:
    """P55: fetching tied to the owner's forward: E = [[0,1],[2,3],[4,5]], sum(E[1] E^T) = 39."""

    def script(world: Any) -> Any:
        model = nn.Embedding(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.arange(6.0).view(3, 2))
        world.attach(model)
        out = (model(torch.tensor([1])) @ model.weight.t()).sum()
        out.backward()
        return out.item(), model.weight.grad.tolist()

    assert check_same(script, tmp_path) == (39.0, [[2.0, 3.0], [8.0, 12.0], [2.0, 3.0]])


def test_p55_foreign_weights_in_forward_and_loss(tmp_path: Path) -> None:
    """P55: weights used by another module and in the loss need no registration."""

    def script(world: Any) -> Any:
        model = world.attach(ForeignUse())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)

        def loss_of(model: nn.Module, step: int) -> torch.Tensor:
            ids = torch.arange(step, step + 5)
            decay = sum(param.square().sum() for param in model.parameters())
            return F.cross_entropy(model(ids), ids) + 0.01 * decay

        return train(model, optimizer, 4, loss_of), values(model)

    check_same(script, tmp_path)


def test_p55_initialised_and_normalised_from_outside(tmp_path: Path) -> None:
    """P55: code outside the owner that fills or constrains a weight."""

    def script(world: Any) -> Any:
        model = world.attach(ForeignUse())
        nn.init.orthogonal_(model.hidden.weight)
        model.apply(lambda module: None)
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            ids = torch.arange(step, step + 5)
            with torch.no_grad():
                model.embed.weight.div_(model.embed.weight.norm(dim=1, keepdim=True))
            losses.append(update(F.cross_entropy(model(ids), ids), optimizer))
        return losses, values(model)

    check_same(script, tmp_path, device=2 * PAGE_NBYTES)


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def _tied_loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.arange(step, step + 5)
    return F.cross_entropy(model(ids), ids)


def test_p56_tied_weights_through_an_export(tmp_path: Path) -> None:
    """P56: the tied weight is missing or no longer tied after it was saved and loaded."""

    def script(world: Any) -> Any:
        model = world.attach(Tied(tie=True))
        assert model.head.weight is model.embed.weight
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses = train(model, optimizer, 5, _tied_loss)
        assert len(optimizer.state) == 3
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
        with torch.no_grad():
            outputs = [model(torch.arange(6)).clone()]
            for tie in (True, False):
                fresh = Tied(tie=tie)
                fresh.load_state_dict(saved, strict=True)
                assert (fresh.head.weight is fresh.embed.weight) == tie
                outputs.append(fresh(torch.arange(6)).clone())
        assert_same(outputs[1:], outputs[:1] * 2)
        return losses, dict(saved), states(optimizer)

    losses, saved, _ = check_same(script, tmp_path)
    assert list(saved) == ["embed.weight", "body.weight", "body.bias", "head.weight"]
    assert losses[-1] < losses[0]


def test_p56_tied_after_attaching_and_loaded_again(tmp_path: Path) -> None:
    """P56: weights tied late, a state dict loaded into tied ones, and a tie that is undone."""

    def script(world: Any) -> Any:
        model = world.attach(Tied(tie=False))
        model.head.weight = model.embed.weight
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses = train(model, optimizer, 3, _tied_loss)
        model.load_state_dict(values(model))
        assert model.head.weight is model.embed.weight
        losses += train(model, optimizer, 2, _tied_loss)
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        world.attach(model)
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses += train(model, optimizer, 2, _tied_loss)
        assert not torch.equal(model.head.weight, model.embed.weight)
        return losses, values(model)

    check_same(script, tmp_path, device=2 * PAGE_NBYTES)


def test_p56_three_modules_share_one_weight(tmp_path: Path) -> None:
    """P56: a weight counted, updated or stored once per name."""

    def script(world: Any) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        model.append(nn.Linear(6, 6))
        model[2].weight = model[4].weight = model[0].weight
        world.attach(model)
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses = train(model, optimizer, 3, lambda m, s: m(batch(s, 2, 6)).square().mean())
        return losses, values(model), len(list(model.parameters())), states(optimizer)

    check_same(script, tmp_path)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = mlp(8, 2)
        self.num_calls = 0

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(ids)).mean(1)

    def forward(self, ids: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.num_calls += 1
        return self.encode(ids) * scale


CALLS: dict[str, Callable[[Encoder, torch.Tensor], torch.Tensor]] = {
    "submodule": lambda m, ids: m.body(m.embed(ids)),
    "bound method": lambda m, ids: m.encode(ids),
    "partial": lambda m, ids: functools.partial(m.forward, scale=2.0)(ids),
    "forward": lambda m, ids: m.forward(ids),
    "a method of the class": Encoder.encode,
    "F.embedding": lambda m, ids: m.body(F.embedding(ids, m.embed.weight)),
    "an index": lambda m, ids: m.body(m.embed.weight[ids]),
    "gathered rows": lambda m, ids: m.embed.weight.index_select(0, ids.flatten()),
    "functional_call": lambda m, ids: torch.func.functional_call(
        m, dict(m.named_parameters()), (ids,)
    ),
    "a wrapper module": lambda m, ids: nn.Sequential(m)(ids),
}


@pytest.mark.parametrize("way", CALLS)
def test_p58_every_way_to_call_a_part(tmp_path: Path, way: str) -> None:
    """P58: the placeholder is seen when a call goes around the model's hooks."""

    def script(world: Any) -> Any:
        model = world.attach(Encoder())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses = train(
            model,
            optimizer,
            3,
            lambda m, s: CALLS[way](m, torch.tensor([[s, 1, 2], [4, 5, s]])).square().mean(),
        )
        with torch.no_grad():
            output = CALLS[way](model, torch.tensor([[1, 2, 3]])).clone()
        return losses, output, values(model)

    assert_same(on_tightest(script, tmp_path), on_plain(script))
