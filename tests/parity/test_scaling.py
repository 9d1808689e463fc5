"""Clipping without a pass: the same bits as torch's own, and no gradient read for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from zinf_core.keys import StateKind
from zinf_core.runtime.events import Event, EventKind
from zinf_core.units import KiB, MiB

WIDTH, DEPTH = 64, 6


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(dtype)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)
    model(ids).square().sum().backward()


def grads(model: nn.Module) -> list[torch.Tensor]:
    found = [param.grad for param in model.parameters()]
    return [grad.clone() for grad in found if grad is not None]


Script = Callable[[nn.Module], list[Any]]


def clip_twice(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    norms = [nn.utils.clip_grad_norm_(params, limit) for limit in (0.5, 0.25)]
    return [*norms, *grads(model)]


def clip_and_accumulate(model: nn.Module) -> list[Any]:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    backward(model, 7)
    return [norm, nn.utils.clip_grad_norm_(model.parameters(), 100.0), *grads(model)]


def scale_by_hand(model: nn.Module) -> list[Any]:
    factor = torch.tensor(0.37)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(factor).mul_(3)
    factor.zero_()  # the factor is what it was then
    return [torch.linalg.vector_norm(grad) for grad in grads(model)]


def edit_after_the_norm(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    first = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    for param in params:
        assert param.grad is not None
        param.grad[0] += 1
    return [first, nn.utils.clip_grad_norm_(params, 1.0), *grads(model)]


def other_norms(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    kinds = (2.0, 1.0, float("inf"), 3.0, 2.0)
    return [nn.utils.clip_grad_norm_(params, 1e9, norm_type=kind) for kind in kinds]


def not_finite(model: nn.Module) -> list[Any]:
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[1, 1] = float("inf")
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [norm, *(grad.isnan().sum() for grad in grads(model))]


SCRIPTS = (clip_twice, scale_by_hand, edit_after_the_norm, other_norms, not_finite)


@pytest.mark.parametrize(
    ("script", "dtype"),
    [
        (clip_and_accumulate, torch.float32),
        *itertools.product(SCRIPTS, (torch.float32, torch.bfloat16, torch.float16)),
    ],
)
def test_same_bits(tmp_path: Path, script: Script, dtype: torch.dtype) -> None:
    """Catches a norm that is out of date, a factor that is lost, applied twice, applied in another
    dtype or applied to what came after it."""
    plain = build(dtype)
    with zt.Runtime(device=64 * KiB, host=96 * KiB, nvme=tmp_path / "z") as runtime:
        paged = runtime.attach(build(dtype))
        for number in range(3):
            for model in (plain, paged):
                for param in model.parameters():
                    param.grad = None
                # sums of several go on in fp32 (docs/decisions/002), unlike plain PyTorch's
                for seed in range(2 if number == 1 and dtype is torch.float32 else 1):
                    backward(model, seed)
            for mine, other in zip(script(paged), script(plain), strict=True):
                assert torch.equal(mine, other)


def test_clipping_reads_no_gradient(tmp_path: Path) -> None:
    """Catches a pass over gradients that are on the drive: reading them for the norm, or reading
    and writing them for the factor."""
    moved: list[Event] = []
    with zt.Runtime(
        device=64 * KiB, host=128 * KiB, nvme=tmp_path / "z", observers=[moved.append]
    ) as runtime:
        model = runtime.attach(build(torch.float32))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters())
        for _ in range(4):
            backward(model, 0)
            moved.clear()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            clipped = [e for e in moved if e.key.kind_value == StateKind.GRAD.value]
            optimizer.step()
            reads = [e for e in moved if e.key.kind_value == StateKind.GRAD.value
                     and e.kind is EventKind.READ]  # fmt: skip
            optimizer.zero_grad()
    assert clipped == []
    assert 0 < len(reads) <= DEPTH


def test_a_gradient_shows_the_factor_after_the_step(tmp_path: Path) -> None:
    """Catches `p.grad` that is as it was before clipping, although the step used it clipped."""
    with zt.Runtime(device=MiB, host=MiB, nvme=tmp_path / "z") as runtime:
        plain, paged = build(torch.bfloat16), runtime.attach(build(torch.bfloat16))
        optimizer = runtime.optimizer(torch.optim.AdamW, paged.parameters())
        for model in (plain, paged):
            backward(model, 0)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        for mine, other in zip(grads(paged), grads(plain), strict=True):
            assert torch.equal(mine, other)
