"""Faults of parameters that are no matrices (P34)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from faults.support import (
    batch,
    check_same,
    states,
    train,
    values,
)
from zinf_core.units import PAGE_NBYTES


class Packed(nn.Module):
    """Experts in one three-dimensional weight, taken by index."""

    def __init__(self, num: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, dim, dim) / 4)
        self.bias = nn.Parameter(torch.zeros(num, 1, dim))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, way: str) -> torch.Tensor:
        if way == "einsum":
            return torch.einsum("bi,bio->bo", x, self.weight[ids]) + self.bias[ids, 0]
        if way == "index_select":
            return torch.bmm(x[:, None], self.weight.index_select(0, ids))[:, 0]
        if way == "unbind":
            experts = self.weight.unbind(0)
            return torch.stack([x[i] @ experts[k] for i, k in enumerate(ids.tolist())])
        return torch.stack([x[i] @ self.weight[k].t() for i, k in enumerate(ids.tolist())])


@pytest.mark.parametrize("way", ["einsum", "index_select", "unbind", "views"])
def test_p34_a_packed_weight(tmp_path: Path, way: str) -> None:
    """P34: weights taken to be two-dimensional, or used whole."""

    def script(world: Any) -> Any:
        model = world.attach(Packed())
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.05)

        def loss_of(model: nn.Module, step: int) -> torch.Tensor:
            ids = torch.tensor([step % 4, 1, 3])
            return model(batch(step, 3, 16), ids, way).square().mean()

        return train(model, optimizer, 4, loss_of), values(model), states(optimizer)

    check_same(script, tmp_path)


def test_p34_convolutions_and_memory_formats(tmp_path: Path) -> None:
    """P34: four and five dimensions, channels-last strides and complex weights keep their shape."""

    class Volumes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.deep = nn.Conv3d(1, 2, 2)
            self.wave = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

        def loss(self, step: int) -> torch.Tensor:
            flat = self.conv(batch(step, 1, 3, 6, 6)).square().mean()
            deep = self.deep(batch(step, 1, 1, 3, 3, 3)).square().mean()
            return flat + deep + (self.wave @ batch(step, 3, 3).to(torch.complex64)).abs().mean()

    def script(world: Any) -> Any:
        model = world.attach(Volumes())
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.05, momentum=0.9)
        losses = train(model, optimizer, 4, lambda m, s: m.loss(s))
        strides = [param.stride() for param in model.parameters()]
        return losses, values(model), strides

    check_same(script, tmp_path)


def test_p34_one_dimension_is_one(tmp_path: Path) -> None:
    """P34: (1, n), (n, 1) and (1, 1, 1) mistaken for vectors or scalars."""

    def script(world: Any) -> Any:
        shapes = [(1, 5), (5, 1), (1, 1, 1), (1,)]
        model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        world.attach(model)
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        losses = train(
            model, optimizer, 3, lambda m, s: (m[0] @ m[1] * m[2] * m[3] * (s + 1)).square().sum()
        )
        return losses, values(model), states(optimizer)

    check_same(script, tmp_path, device=2 * PAGE_NBYTES)
