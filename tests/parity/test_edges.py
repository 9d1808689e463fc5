"""Corners of PyTorch that see a parameter in other ways than through an operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zinf_torch as zt

ROOMY = 1 << 20


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def runtime_at(folder: Path, device: int = ROOMY) -> zt.Runtime:
    return zt.Runtime(device=device, host="1MiB", nvme=folder / "z")


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def test_an_edit_through_a_view_is_no_error(tmp_path: Path) -> None:
    """Catches "modified by an inplace operation" for a weight that was edited before forward."""
    plain = build()
    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(build())
        for each in (plain, model):
            each(batch(0))
            with torch.no_grad():
                each[2].weight[0].fill_(3)
                each[0].weight.T[2].fill_(1)
            each(batch(1)).mean().backward()
        assert_equal(
            [p.grad.clone() for p in model.parameters()], [p.grad for p in plain.parameters()]
        )


def test_a_state_dict_may_be_loaded_where_it_came_from(tmp_path: Path) -> None:
    """Catches handles that are filled from their own placeholder (NaN)."""
    plain = build()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(build())
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        for each, opt in ((plain, plain_optimizer), (model, optimizer)):
            steps(each, opt, range(2))
            opt.load_state_dict(opt.state_dict())
            steps(each, opt, range(2, 4))
        assert_equal(values(model), values(plain))


def test_a_state_put_by_hand_counts(tmp_path: Path) -> None:
    """Catches state tensors that are assigned, not edited, and then ignored."""
    plain = build()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(build())
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        for each, opt in ((plain, plain_optimizer), (model, optimizer)):
            steps(each, opt, range(2))
            first, second, *_ = each.parameters()
            opt.state[first]["exp_avg"] = torch.ones(8, 6)
            opt.state[second] = {k: v * 2 for k, v in opt.state[second].items()}
            steps(each, opt, range(2, 4))
        assert_equal(values(model), values(plain))


def test_a_gradient_scaler_unscales(tmp_path: Path) -> None:
    """Catches writes that count no version and are lost with the page."""
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with runtime_at(tmp_path, device=2 * 4096) as runtime:
        model = runtime.attach(build())
        optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        for each, opt in ((plain, plain_optimizer), (model, optimizer)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
            for step in range(3):
                opt.zero_grad()
                scaler.scale(each(batch(step)).square().mean()).backward()
                scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
        assert_equal(values(model), values(plain))


def test_conjugated_and_negated_views_are_saved_as_such(tmp_path: Path) -> None:
    """Catches a saved view that comes back without its lazy conjugation or negation."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    plain = Complex()
    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(Complex())
        for each in (plain, model):
            conjugated = torch.conj(each.w) * each.w
            negated = each.w.conj().imag * each.w.imag
            (conjugated.abs().sum() + negated.sum()).backward()
        assert plain.w.grad is not None
        assert model.w.grad is not None
        assert torch.equal(model.w.grad.clone(), plain.w.grad)


@pytest.mark.parametrize("through", ["tensor", "autograd"])
def test_backward_to_chosen_inputs_needs_no_bytes_of_them(tmp_path: Path, through: str) -> None:
    """Catches all inputs being brought in at once, which the tightest budget cannot hold."""
    plain = build()
    with runtime_at(tmp_path, device=2 * 4096) as runtime:
        model = runtime.attach(build())
        for each in (plain, model):
            loss = each(batch(0)).square().mean()
            chosen = [each[0].weight, each[2].weight, each[2].bias]
            if through == "tensor":
                loss.backward(inputs=chosen)
            else:
                torch.autograd.backward([loss], inputs=chosen)
        grads: list[Any] = [p.grad for p in model.parameters()]
        for found, param in zip(grads, plain.parameters(), strict=True):
            assert (found is None) == (param.grad is None)
            assert found is None or torch.equal(found.clone(), param.grad)


def test_a_dlpack_capsule_keeps_its_page(tmp_path: Path) -> None:
    """Catches a capsule that points at a placeholder, or at memory that was given away."""
    with runtime_at(tmp_path, device=4 * 4096) as runtime:
        model = runtime.attach(build())
        expected = build()[0].weight.detach()
        alias = torch.from_dlpack(model[0].weight.detach())
        as_numpy = np.from_dlpack(model[0].weight.detach())
        model(batch(0))
        assert torch.equal(alias, expected)
        assert np.array_equal(as_numpy, expected.numpy())
        alias.zero_()
        assert not torch.any(model[0].weight.detach().clone())


def test_a_model_may_be_detached_and_attached_again(tmp_path: Path) -> None:
    """Catches owners that are compared as tensors, and room that a detached model keeps."""
    with runtime_at(tmp_path) as runtime:
        model = build()
        kept = []
        for _ in range(3):
            runtime.attach(model)
            runtime.detach(model)
            kept.append(runtime.pager.tiers["nvme"].usage().num_keys)
        assert kept == [0, 0, 0]
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert_equal(values(model), values(build()))


def test_plain_tensors_may_take_over_what_a_handle_shows(tmp_path: Path) -> None:
    """Catches a plain model that gets the placeholder's NaN as its weights."""
    target = build()
    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(build())
        with torch.no_grad():
            model[0].weight.add_(1)
        for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
            mine.data = theirs.data
        assert_equal(values(target), values(model))


def test_scalars_are_formatted_by_value(tmp_path: Path) -> None:
    """Catches a log line that fails because a view is not exactly a torch.Tensor."""
    plain = build()
    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(build())
        weight, expected = model[0].weight, plain[0].weight
        assert f"{weight[0, 0]:.4f}" == f"{expected[0, 0]:.4f}"
        assert f"{weight.data[0, 0]:.4f}" == f"{expected.data[0, 0]:.4f}"


def test_paging_is_no_operation_of_the_users(tmp_path: Path) -> None:
    """Catches internal tensor work in dispatch modes (selective checkpointing, flop counters)."""
    seen: list[list[str]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    with runtime_at(tmp_path, device=2 * 4096) as runtime:
        for each in (build(), runtime.attach(build())):
            seen.append([])
            with Recorder():
                each(batch(0)).square().mean().backward()
    forward = [[name for name in names if "mm" in name or "tanh" in name] for names in seen]
    assert forward[0] == forward[1]
    assert not any("lift_fresh" in name or "as_strided" in name for name in seen[1])


def test_states_that_change_shape_leave_nothing_behind(tmp_path: Path) -> None:
    """Catches pages of earlier shapes that are remembered for ever."""

    class Growing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    state["count"] = state.get("count", 1) + 1
                    state["window"] = torch.ones(state["count"])
                    param.sub_(group["lr"] * param.grad)

    with runtime_at(tmp_path) as runtime:
        model = runtime.attach(nn.Linear(6, 6))
        optimizer = runtime.optimizer(Growing, model.parameters(), lr=0.1)
        counts = []
        for _ in range(6):
            steps(model, optimizer, range(1))
            owned = len(optimizer._owned)
            counts.append((owned, [len(param.zinf_states) for param in model.parameters()]))
        assert counts[1:] == counts[1:2] * 5
