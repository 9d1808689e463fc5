"""Operations that take parameters in unusual ways, at the tightest budgets, against plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from parity.operations import OPERATIONS, loss
from parity.support import Recipe, assert_same, build, tightest, train_plain, train_tightest


def recipe(name: str) -> Recipe:
    """Return the recipe that trains one operation."""
    return Recipe(build=OPERATIONS[name], batch_loss=loss, num_steps=3, accumulation=2, clip=1.0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_training(tmp_path: Path, name: str) -> None:
    """Catches an operation whose parameters are not found among its arguments (in lists, through
    parametrizations, in C++), a stride or a dtype lost on the way home, an in-place edit made by
    the operation itself that is not written back, and graphs of a higher order."""
    used = recipe(name)
    assert_same(train_tightest(used, tmp_path / "z"), train_plain(used))


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_before_the_step(tmp_path: Path, name: str) -> None:
    """Catches a gradient that is right only in what clipping and the optimizer make of it: a
    missing one shown as zeros, a transposed one, one in another dtype."""
    used = recipe(name)

    def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(4)
        for _ in range(2):
            used.batch_loss(model, generator).backward()
        return {
            path: None if param.grad is None else param.grad.clone()
            for path, param in model.named_parameters()
        }

    expected = gradients(build(used))
    with tightest(used, tmp_path / "z") as (_, model, _):
        found = gradients(model)
    assert found.keys() == expected.keys()
    for path, grad in expected.items():
        other = found[path]
        assert (other is None) == (grad is None), path
        if grad is not None and other is not None:
            assert other.dtype is grad.dtype
            assert torch.equal(other, grad), path
