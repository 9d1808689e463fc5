"""Faults of swapping: buffers, sizes and the states of pages (P01 to P07)."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zinf_torch as zt
from faults.support import (
    assert_same,
    batch,
    check_same,
    copied,
    gradients,
    mlp,
    on_plain,
    on_tightest,
    square_loss,
    states,
    train,
    update,
    values,
)
from zinf_core.errors import BudgetExceededError, BudgetTooSmallError
from zinf_core.units import PAGE_NBYTES, MiB


class Layers(nn.Module):
    """Twelve linears whose weights are used by their parent."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [layer.weight for layer in self.layers]
        if self.use == "sum":
            return sum(F.linear(x, weight) for weight in weights)
        if self.use == "reverse order":
            return sum(F.linear(x, weight) for weight in reversed(weights))
        return F.linear(x, torch.stack(weights).sum(0))


@pytest.mark.parametrize("use", ["sum", "reverse order"])
def test_p01_more_weights_in_use_than_buffers(tmp_path: Path, use: str) -> None:
    """P01: an assertion that one swap buffer is wanted and none is free."""

    def script(world: Any) -> Any:
        model = world.attach(Layers(use))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.01)
        losses = train(model, optimizer, 5, lambda m, s: m(batch(s, 3, 64)).square().mean())
        return losses, values(model)

    check_same(script, tmp_path)


@pytest.mark.slow
def test_p01_every_budget_is_refused_at_setup_or_enough(tmp_path: Path) -> None:
    """P01: a pool that is accepted and too small in the middle of a step."""

    def script(world: Any) -> Any:
        model = world.attach(Layers("sum"))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.01)
        return train(model, optimizer, 1, lambda m, s: m(batch(s, 3, 64)).square().mean())

    expected = on_plain(script)
    accepted, refusals = [], []
    for device, host in itertools.product((3, 4, 6), (7, 8, 10)):
        torch.manual_seed(0)
        sizes = {"device": device * PAGE_NBYTES, "host": host * PAGE_NBYTES}
        with zt.Runtime(**sizes, nvme=tmp_path / "z") as runtime:
            try:
                actual = script(runtime)
            except BudgetTooSmallError as exc:
                refusals.append((sizes.values(), str(exc)))
                continue
        assert_same(actual, expected)
        accepted.append((device, host))
    for sizes, text in refusals:
        assert re.search(r"at least \d+ bytes", text)
        assert any(str(nbytes) in text for nbytes in sizes)
    assert accepted == list(itertools.product([4, 6], [8, 10]))


@pytest.mark.slow
def test_p01_one_operation_on_more_than_the_budget_is_named_and_survived(tmp_path: Path) -> None:
    """P01: an operation that takes twelve weights at once ends in an assertion or a dead run."""

    def script(world: Any) -> Any:
        model = world.attach(Layers("stack"))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.01)
        return model, optimizer

    def steps(model: nn.Module, optimizer: Any) -> Any:
        losses = train(model, optimizer, 3, lambda m, s: m(batch(s, 3, 64)).square().mean())
        return losses, values(model)

    expected = steps(*on_plain(script))
    with zt.Runtime(device=4 * 16384, host=1 * MiB, nvme=tmp_path / "z") as runtime:
        torch.manual_seed(0)
        model, optimizer = script(runtime)
        with pytest.raises(BudgetExceededError, match=r"device budget of .* at least"):
            model(batch(0, 3, 64))
        model.use = "sum"
        sum_of_losses = train(model, optimizer, 1, lambda m, s: m(batch(s, 3, 64)).square().mean())
        assert torch.isfinite(sum_of_losses[0])
    with zt.Runtime(device=12 * 16384, host=1 * MiB, nvme=tmp_path / "z") as runtime:
        torch.manual_seed(0)
        assert_same(steps(*script(runtime)), expected)


class Embedded(nn.Module):
    def __init__(self, num: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num, dim)
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(ids))))


@pytest.mark.slow
def test_p02_a_tensor_larger_than_a_request(tmp_path: Path) -> None:
    """P02: more elements than the buffer holds, for one big embedding (5 MB in 1 MiB requests)."""

    def script(world: Any) -> Any:
        model = world.attach(Embedded(20000, 64))
        optimizer = world.optimizer(torch.optim.Adam, model.parameters(), lr=1e-2)

        def loss_of(model: nn.Module, step: int) -> torch.Tensor:
            ids = torch.arange(step, 20000, 1777)
            return model(ids).square().mean()

        return train(model, optimizer, 5, loss_of), values(model)

    check_same(script, tmp_path)


@pytest.mark.slow
def test_p02_one_weight_is_nearly_the_whole_model(tmp_path: Path) -> None:
    """P02: a wide linear of 3 MiB and a few bytes between small layers."""

    def script(world: Any) -> Any:
        model = nn.Sequential(nn.Linear(5, 1025), nn.Linear(1025, 769), nn.Linear(769, 2))
        model = world.attach(model)
        optimizer = world.optimizer(torch.optim.Adam, model.parameters(), lr=1e-3)
        return train(model, optimizer, 2, lambda m, s: m(batch(s, 2, 5)).square().mean()), values(
            model
        )

    check_same(script, tmp_path)


SIZES = (1, 7, 511, 512, 513, 1023, 1024, 1025, 262143, 262144, 262145)


class Odd(nn.Module):
    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size).to(dtype)) for size in sizes)

    def loss(self, step: int) -> torch.Tensor:
        scale = 1.0 + step
        return sum((part * scale).square().mean() for part in self.parts)


def _resumed_training(sizes: tuple[int, ...], dtype: torch.dtype, world: Any) -> Any:
    """Train three steps, save, load into a fresh model and optimizer, train three more."""

    def start() -> tuple[Odd, Any]:
        model = world.attach(Odd(sizes, dtype))
        options = {"lr": 0.1, "weight_decay": 0.1, "master_weights": False}
        return model, world.optimizer(torch.optim.AdamW, model.parameters(), **options)

    model, optimizer = start()
    record: list[Any] = []
    for step in range(3):
        record += [update(model.loss(step), optimizer), values(model)]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    record += [copied(saved["model"]), copied(saved["optimizer"]["state"])]
    model, optimizer = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        record += [update(model.loss(step), optimizer), values(model)]
    return record


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_p03_odd_sizes(tmp_path: Path, dtype: torch.dtype) -> None:
    """P03: file shorter than the aligned request, for sizes around powers of two."""
    check_same(lambda world: _resumed_training(SIZES, dtype, world), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=["fp16", "fp64"])
def test_p03_odd_sizes_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """P03: padding in elements instead of bytes, which only other element sizes show."""
    sizes = (1, 3, 511, 513, 2047, 2049)
    check_same(lambda world: _resumed_training(sizes, dtype, world), tmp_path)


def test_p03_odd_sizes_with_masters(tmp_path: Path) -> None:
    """P03: the fp32 copy of an odd bf16 parameter has another padding than the parameter."""

    def script(world: Any) -> Any:
        model = world.attach(Odd((1, 7, 513, 1025, 4097), torch.bfloat16))
        optimizer = world.optimizer(
            torch.optim.AdamW, model.parameters(), lr=0.01, master_weights=True
        )
        return [(update(model.loss(step), optimizer), values(model)) for step in range(4)]

    check_same(script, tmp_path)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_p04_parameters_smaller_than_a_shard(tmp_path: Path, optimizer_class: Any) -> None:
    """P04: gradient files of length 0 for parameters of 1, 2 and 3 elements."""

    def script(world: Any) -> Any:
        model = world.attach(Odd((1, 2, 3), torch.float32))
        optimizer = world.optimizer(optimizer_class, model.parameters(), lr=0.1)
        record = []
        for step in range(3):
            loss = model.loss(step)
            loss.backward()
            record += [gradients(model), loss.detach()]
            optimizer.step()
            optimizer.zero_grad()
        return record, values(model), states(optimizer)

    check_same(script, tmp_path)


class Degenerate(nn.Module):
    def __init__(self, empty: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.empty(empty))
        self.s = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(8, 1)


@pytest.mark.parametrize("empty", [(0,), (3, 0), (0, 4, 2)])
def test_p05_empty_and_scalar_parameters(tmp_path: Path, empty: tuple[int, ...]) -> None:
    """P05: parameters of no element, or of no dimension, crash or hang."""

    def script(world: Any) -> Any:
        model = world.attach(Degenerate(empty))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        losses = train(model, optimizer, 3, lambda m, s: m.s * m.linear(batch(s, 2, 8)).mean())
        assert (model.e.shape, model.s.shape) == (torch.Size(empty), torch.Size([]))
        return losses, values(model)

    check_same(script, tmp_path)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
def test_p05_an_empty_parameter_that_takes_part(tmp_path: Path, optimizer_class: Any) -> None:
    """P05: a gradient of no element reaches the optimizer."""

    def script(world: Any) -> Any:
        model = world.attach(Degenerate())
        optimizer = world.optimizer(optimizer_class, model.parameters(), lr=0.1)
        losses = train(
            model,
            optimizer,
            3,
            lambda m, s: m.e.sum() + m.s.square() + m.linear(batch(s, 2, 8)).square().mean(),
        )
        return losses, values(model), states(optimizer)

    check_same(script, tmp_path)


def test_p05_a_model_of_nothing_but_empty_parameters(tmp_path: Path) -> None:
    """P05: a budget computed from no bytes at all."""

    def script(world: Any) -> Any:
        model = world.attach(nn.ParameterList([nn.Parameter(torch.empty(0))]))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        return update(model[0].sum(), optimizer), values(model)

    check_same(script, tmp_path)


@pytest.mark.slow
def test_p07_fifty_steps_with_evaluation_between(tmp_path: Path) -> None:
    """P07: the first iteration is fine and the second fails on swap."""

    def script(world: Any) -> Any:
        model = world.attach(nn.Sequential(mlp(8, 2), nn.Dropout(0.2), nn.BatchNorm1d(8)))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses = []
        for step in range(50):
            losses += train(model.train(), optimizer, 1, lambda m, _, s=step: square_loss(m, s))
            with torch.no_grad():
                losses.append(square_loss(model.eval(), step).clone())
        return losses, values(model)

    check_same(script, tmp_path)


@pytest.mark.parametrize("grad_in_eval", [True, False])
def test_p07_steps_skipped_and_repeated(tmp_path: Path, grad_in_eval: bool) -> None:
    """P07: the state of a page is left wrong by a forward without backward, by two backwards, or
    by a step without gradients."""

    def script(world: Any) -> Any:
        model = world.attach(mlp())
        optimizer = world.optimizer(torch.optim.Adam, model.parameters(), lr=0.01)
        record = []
        for step in range(6):
            with torch.set_grad_enabled(grad_in_eval):
                record.append(square_loss(model, step).detach().clone())
            optimizer.step()
            for _ in range(step % 3):
                square_loss(model, step).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        return record, values(model), states(optimizer)

    check_same(script, tmp_path)


def test_p07_a_second_model_and_optimizer_on_the_same_runtime(tmp_path: Path) -> None:
    """P07: what one model's step leaves behind breaks the next model."""

    def script(world: Any) -> Any:
        models = [world.attach(mlp(width)) for width in (4, 8)]
        optimizers = [
            world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.05) for model in models
        ]
        record = []
        for step in range(4):
            pair = zip(models, optimizers, strict=True)
            record += [update(square_loss(model, step), optimizer) for model, optimizer in pair]
        return record, list(map(values, models))

    assert_same(on_tightest(script, tmp_path), on_plain(script))
