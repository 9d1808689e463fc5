"""Faults of gradient clipping (P47)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from faults.support import (
    assert_same,
    check_same,
    gradients,
    mlp,
    square_loss,
    values,
)


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(1.0, [2.4, 3.2]), (10.0, [0.0, 0.0])], ids=["clips", "does not"]
)
def test_p47_clipping(tmp_path: Path, max_norm: float, expected: list[float]) -> None:
    """P47: the clip value is ignored, or the norm is not returned: w = [3, 4], norm 5."""

    def script(world: Any) -> Any:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([3.0, 4.0]))})
        world.attach(model)
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=1.0)
        (0.5 * model["w"].square().sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return norm.detach().clone(), values(model)

    norm, weights = check_same(script, tmp_path)
    assert norm.item() == 5.0
    assert weights["w"].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_p47_gradients_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    """P47: another policy than torch's for inf and NaN, and the error it can be asked for."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(4, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        square_loss(model, 0).backward()
        with torch.no_grad():
            model[0].weight.grad[1, 1] = bad
        before = gradients(model)
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert_same(gradients(model), before)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm.clone(), values(model)

    check_same(script, tmp_path)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_p47_every_norm_over_a_model(
    tmp_path: Path, norm_type: float, *, foreach: bool | None
) -> None:
    """P47: as above, over several parameters, for the norms and the paths torch has."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        record = []
        for step in range(2):
            square_loss(model, step).backward()
            norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), 0.01, norm_type=norm_type, foreach=foreach
            )
            record += [norm.clone(), gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return record, values(model)

    check_same(script, tmp_path)


def test_p47_by_value(tmp_path: Path) -> None:
    """P47: the other ways of clipping: by value, and in two steps."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        square_loss(model, 0).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.02, norm)
        optimizer.step()
        return norm.clone(), values(model)

    check_same(script, tmp_path)
