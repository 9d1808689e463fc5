"""One script, run twice: in plain PyTorch and on pages under the tightest budget accepted.

A script is a function of a *world*, which is a `zinf_torch.Runtime` or `Plain`. It builds a model,
trains it and returns values; both runs must return the same, bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zinf_torch as zt
from zinf_core.errors import BudgetTooSmallError
from zinf_core.units import PAGE_NBYTES, align_up

Script = Callable[[Any], Any]

_NEEDED = re.compile(r"Set (device|host) to at least (\d+) bytes")


class Plain:
    """World without paging: the oracle."""

    is_paged = False

    def attach(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        master_weights: bool = False,
        **options: Any,
    ) -> Any:
        if master_weights:
            return Masters(params, optimizer_class, **options)
        return optimizer_class(params, **options)


class Masters:
    """Mixed precision by hand: `optimizer_class` on fp32 copies of low-precision parameters.

    `step` first takes over elements that were edited since the last one.
    """

    def __init__(self, params: Iterable[Any], optimizer_class: Any, **options: Any) -> None:
        self.params = list(params)
        self.masters = [p.detach().clone().float().requires_grad_() for p in self.params]
        self.inner = optimizer_class(self.masters, **options)

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            is_edited = master.detach().to(param.dtype) != param.detach()
            master.data[is_edited] = param.detach().float()[is_edited]
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data.copy_(master.detach())

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def on_tightest(
    script: Script,
    folder: Path,
    *,
    device: int = PAGE_NBYTES,
    host: int = PAGE_NBYTES,
    **options: Any,
) -> Any:
    """Return what `script` returns on a runtime with the least budgets that set-up accepts.

    Starts with `device` and `host` bytes and raises one only when a refusal names the bytes.
    States are at home on NVMe unless `options` of the runtime say otherwise. Checks that no
    budget was exceeded and that no file is left.
    """
    budgets = {"device": device, "host": host}
    for _ in range(64):
        torch.manual_seed(0)
        try:
            with zt.Runtime(**budgets, nvme=folder / "nvme", **options) as runtime:
                result = script(runtime)
                usage = runtime.usage()
        except BudgetTooSmallError as exc:
            budgets |= _raised(budgets, str(exc))
            continue
        for name, used in usage.items():
            assert used.peak_nbytes <= budgets[name] == used.budget_nbytes
        assert not (folder / "nvme").exists()
        return result
    raise AssertionError(f"no accepted budget found, last {budgets}")


def _raised(budgets: dict[str, int], refusal: str) -> dict[str, int]:
    """Return the budget that `refusal` names with the bytes it asks for."""
    match = _NEEDED.search(refusal)
    assert match is not None, f"the refusal does not say what to set: {refusal}"
    name, nbytes = match[1], int(match[2])
    assert nbytes > budgets[name], f"no progress: {refusal}"
    return {name: nbytes}


def on_plain(script: Script) -> Any:
    """Return what `script` returns in plain PyTorch."""
    torch.manual_seed(0)
    return script(Plain())


def check_same(script: Script, folder: Path, **options: Any) -> Any:
    """Run `script` plain and paged (see `on_tightest`), require equal results, return them."""
    expected = on_plain(script)
    assert_same(on_tightest(script, folder, **options), expected)
    return expected


def assert_same(actual: Any, expected: Any, where: str = "result") -> None:
    """Require the same structure, types, shapes, dtypes and bits."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), where
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        same = torch.equal(torch.nan_to_num(actual), torch.nan_to_num(expected))
        assert same, f"{where}:\n{actual}\nis not\n{expected}"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), (where, list(actual), list(expected))
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    else:
        assert actual == expected, where


def home_nbytes(model: nn.Module, homes: dict[str, str], tier: str, *, num_states: int) -> int:
    """Return the bytes, in whole pages, of the fp32 states of `model` at home on `tier`.

    `homes` are the arguments of the runtime; an optimizer keeps `num_states` per parameter.
    """
    copies = {"parameters": 1, "gradients": 1, "optimizer_states": num_states}
    each = sum(align_up(4 * param.numel()) for param in model.parameters())
    return each * sum(copies[name] for name, home in homes.items() if home == tier)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of every parameter and persistent buffer."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients there are."""
    return {
        name: None if param.grad is None else param.grad.detach().clone()
        for name, param in model.named_parameters()
    }


def states(optimizer: Any) -> dict[Any, Any]:
    """Return a copy of the states in an optimizer's state dict, without masters."""
    return {
        index: {name: copied(value) for name, value in state.items() if name != "master_weight"}
        for index, state in sorted(optimizer.state_dict()["state"].items())
    }


def copied(value: Any) -> Any:
    """Return `value` with copies for the tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


def update(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """Run backward, step and zero_grad; return a copy of the loss."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def train(
    model: nn.Module,
    optimizer: Any,
    num_steps: int,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
) -> list[torch.Tensor]:
    """Train for some steps with `loss_of(model, step)`; return the losses."""
    return [update(loss_of(model, step), optimizer) for step in range(num_steps)]


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the random batch of a step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(*shape, generator=generator).to(dtype)


def mlp(width: int = 8, depth: int = 3) -> nn.Sequential:
    """Return linears with tanh between them."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


def square_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the mean square of the output of an `mlp` on the batch of `step`."""
    first = next(model.parameters())
    return model(batch(step, 4, first.shape[-1], dtype=first.dtype)).square().mean()
