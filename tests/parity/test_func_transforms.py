"""torch.func transforms see through handles; they must be refused, not answered wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_torch as zt
from zinf_core.errors import UnsupportedError


def test_transforms_over_the_input_are_refused(tmp_path: Path) -> None:
    """Catches vmap over an attached model ending deep inside with an error about storages."""
    with zt.Runtime(device="1MiB", host="1MiB", nvme=tmp_path / "z") as runtime:
        model = runtime.attach(nn.Linear(4, 4))
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            torch.func.vmap(model)(torch.ones(3, 4))


def test_transforms_over_plain_copies_work(tmp_path: Path) -> None:
    """Catches the remedy that the refusal names not working."""
    plain = nn.Linear(4, 2)
    x = torch.ones(3, 4)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(plain, params, (x,)).square().mean()

    expected = torch.func.grad(loss)({k: v.detach() for k, v in plain.named_parameters()})
    with zt.Runtime(device="1MiB", host="1MiB", nvme=tmp_path / "z") as runtime:
        model = runtime.attach(nn.Linear(4, 2))
        model.load_state_dict(plain.state_dict())
        copies = {k: v.detach().clone() for k, v in model.named_parameters()}
        found = torch.func.grad(loss)(copies)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
