"""Exceptions of user code in every phase: training goes on with the right bits, nothing leaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.support import Recipe, tightest
from torch import nn

from robustness.support import assert_equal_values, idle_nbytes, mlp, train, values
from zinf_core.units import PAGE_NBYTES

NUM_TIMES = 50
LAYER = 2


class UserError(Exception):
    """What user code raises."""


class Bomb(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        raise UserError("in backward")


class FragileSGD(torch.optim.Optimizer):
    """Heavy-ball SGD that raises at the parameter of shape `fuse`, half done with it."""

    def __init__(self, params: Any, lr: float, fuse: list[torch.Size]) -> None:
        super().__init__(params, {"lr": lr})
        self.fuse = fuse

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["velocity"] = torch.zeros_like(param)
                state["velocity"].mul_(0.9).add_(param.grad)
                if param.shape in self.fuse:
                    raise UserError(f"at {list(param.shape)}")
                param.sub_(state["velocity"], alpha=group["lr"])
        return loss


@dataclass
class Trial:
    """A model and its optimizer, plain or paged, to which the same things happen."""

    model: Any
    optimizer: torch.optim.Optimizer

    def loss(self, seed: int = 3) -> torch.Tensor:
        """Return the loss on random data."""
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        result: torch.Tensor = (self.model(x) - x).square().mean()
        return result


Accident = Callable[[Trial], None]
"""Has user code raise once, and expects it to."""


def in_forward(trial: Trial) -> None:
    """Raise in a forward hook, with the pages of the layers before in the graph."""

    def fail(*_: object) -> None:
        raise UserError("in forward")

    handle = trial.model[LAYER].register_forward_hook(fail)
    with pytest.raises(UserError, match="in forward"):
        trial.loss()
    handle.remove()


def in_forward_under_no_grad(trial: Trial) -> None:
    """Raise while evaluating."""
    with torch.no_grad():
        in_forward(trial)


def in_an_operation(trial: Trial) -> None:
    """Have the operation itself refuse its arguments, with its pages pinned."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trial.model[LAYER](torch.ones(2, 3))


def in_parameter_hook(trial: Trial) -> None:
    """Raise in a hook on a parameter's gradient."""

    def fail(_: torch.Tensor) -> None:
        raise UserError("in a hook")

    handle = trial.model[LAYER].weight.register_hook(fail)
    with pytest.raises(UserError, match="in a hook"):
        trial.loss().backward()
    handle.remove()


def in_post_accumulate_hook(trial: Trial) -> None:
    """Raise when a gradient was just accumulated."""

    def fail(_: torch.Tensor) -> None:
        raise UserError("after accumulation")

    handle = trial.model[LAYER].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(UserError, match="after accumulation"):
        trial.loss().backward()
    handle.remove()


def in_module_backward_hook(trial: Trial) -> None:
    """Raise in a full backward hook of a module."""

    def fail(*_: object) -> None:
        raise UserError("in a module hook")

    handle = trial.model[LAYER].register_full_backward_hook(fail)
    with pytest.raises(UserError, match="in a module hook"):
        trial.loss().backward()
    handle.remove()


def in_autograd_function(trial: Trial) -> None:
    """Raise in the backward of a custom function between two layers."""
    handle = trial.model[LAYER].register_forward_hook(lambda _m, _x, y: Bomb.apply(y))
    with pytest.raises(UserError, match="in backward"):
        trial.loss().backward()
    handle.remove()


def interrupted_in_hook(trial: Trial) -> None:
    """Press Ctrl-C during backward."""

    def interrupt(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = trial.model[LAYER].weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trial.loss().backward()
    handle.remove()


def interrupted_in_forward(trial: Trial) -> None:
    """Press Ctrl-C during forward."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = trial.model[LAYER].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trial.loss()
    handle.remove()


def in_closure(trial: Trial) -> None:
    """Raise in a closure, after its backward."""

    def closure() -> torch.Tensor:
        trial.loss().backward()
        raise UserError("in a closure")

    with pytest.raises(UserError, match="in a closure"):
        trial.optimizer.step(closure)  # type: ignore[arg-type]


def in_saved_tensor_hooks(trial: Trial) -> None:
    """Raise in hooks of the user around a forward pass."""

    def fail(_: object) -> None:
        raise UserError("packing")

    with (
        torch.autograd.graph.saved_tensors_hooks(fail, lambda x: x),
        pytest.raises(UserError, match="packing"),
    ):
        trial.loss()


ACCIDENTS: dict[str, Accident] = {
    accident.__name__: accident
    for accident in (
        in_forward,
        in_forward_under_no_grad,
        in_an_operation,
        in_parameter_hook,
        in_post_accumulate_hook,
        in_module_backward_hook,
        in_autograd_function,
        interrupted_in_hook,
        interrupted_in_forward,
        in_closure,
        in_saved_tensor_hooks,
    )
}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients that are there."""
    return {
        name: None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def assert_equal_gradients(found: nn.Module, expected: nn.Module) -> None:
    """Fail unless both have gradients for the same parameters, with the same bits."""
    others = gradients(found)
    for name, grad in gradients(expected).items():
        other = others[name]
        assert (other is None) == (grad is None), name
        assert grad is None or other is None or torch.equal(grad, other), name


def recipe(optimizer: type[torch.optim.Optimizer], **options: Any) -> Recipe:
    """Return what `tightest` sets up."""
    return Recipe(
        build=mlp,
        batch_loss=lambda *_: torch.zeros(()),
        optimizer=optimizer,
        options=options,
        num_states=1 if optimizer is FragileSGD else 2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCIDENTS)
def test_training_goes_on(tmp_path: Path, name: str) -> None:
    """Catches a page that stays pinned, a lease or a handle's bytes that are not given back, a
    gradient lost or added twice, hooks of ours that stay installed, and a later step that goes
    wrong, fifty times over in the smallest pool."""
    plain = Trial(model := mlp(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    used = recipe(torch.optim.AdamW, lr=1e-2)
    with tightest(used, tmp_path / "z") as (runtime, paged_model, optimizer):
        paged = Trial(paged_model, optimizer)
        assert train(paged.model, paged.optimizer) == train(plain.model, plain.optimizer)
        before = idle_nbytes(runtime)
        for _ in range(NUM_TIMES):
            ACCIDENTS[name](plain)
            ACCIDENTS[name](paged)
        assert idle_nbytes(runtime) == before
        assert_equal_gradients(paged.model, plain.model)
        seed = {"num_steps": 3, "seed": 9}
        assert train(paged.model, optimizer, **seed) == train(plain.model, plain.optimizer, **seed)
        assert_equal_values(values(paged.model), values(plain.model))
        assert idle_nbytes(runtime) == before
        for usage in runtime.usage().values():
            assert usage.peak_nbytes <= usage.budget_nbytes


SHAPES = [param.shape for param in mlp().parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "host"),
    [("nvme", PAGE_NBYTES), ("nvme", 24 * PAGE_NBYTES), ("host", PAGE_NBYTES)],
    ids=["nvme", "nvme-read-ahead", "host"],
)
@pytest.mark.parametrize("at", [0, 4, len(SHAPES) - 1])
def test_optimizer_that_raises(tmp_path: Path, home: str, host: int, at: int) -> None:
    """Catches updates made before the exception that are thrown away or done twice, a loan that is
    not given back, also of what was read ahead, and a parameter left between its old and its new
    value: plain PyTorch leaves exactly what was done in place until then."""
    plain_fuse: list[torch.Size] = []
    paged_fuse: list[torch.Size] = []
    plain = Trial(model := mlp(), FragileSGD(model.parameters(), lr=0.1, fuse=plain_fuse))
    tiers = dict.fromkeys(("parameters", "gradients", "optimizer_states"), home)
    used = recipe(FragileSGD, lr=0.1, fuse=paged_fuse)
    with tightest(used, tmp_path / "z", host=host, **tiers) as (runtime, paged_model, optimizer):
        paged = Trial(paged_model, optimizer)
        assert train(paged.model, paged.optimizer) == train(plain.model, plain.optimizer)
        before = idle_nbytes(runtime)
        for trial, fuse in ((plain, plain_fuse), (paged, paged_fuse)):
            fuse.append(SHAPES[at])
            for time in range(NUM_TIMES):
                trial.loss(time).backward()
                with pytest.raises(UserError, match="at "):
                    trial.optimizer.step()
                if time % 2:
                    trial.optimizer.zero_grad()
            fuse.clear()
        assert_equal_values(values(paged.model), values(plain.model))
        assert_equal_gradients(paged.model, plain.model)
        assert idle_nbytes(runtime) == before
        assert train(paged.model, optimizer) == train(plain.model, plain.optimizer)
        assert_equal_values(values(paged.model), values(plain.model))
        states = plain.optimizer.state_dict()["state"]
        others = optimizer.state_dict()["state"]
        for number, state in states.items():
            assert torch.equal(others[number]["velocity"].clone(), state["velocity"])


def test_first_step_that_raises(tmp_path: Path) -> None:
    """Catches states that are taken for complete although the first update never ended."""
    plain_fuse, paged_fuse = [SHAPES[3]], [SHAPES[3]]
    plain = Trial(model := mlp(), FragileSGD(model.parameters(), lr=0.1, fuse=plain_fuse))
    used = recipe(FragileSGD, lr=0.1, fuse=paged_fuse)
    with tightest(used, tmp_path / "z") as (_, paged_model, optimizer):
        paged = Trial(paged_model, optimizer)
        for trial, fuse in ((plain, plain_fuse), (paged, paged_fuse)):
            trial.loss().backward()
            with pytest.raises(UserError, match="at "):
                trial.optimizer.step()
            fuse.clear()
        assert train(paged.model, optimizer) == train(plain.model, plain.optimizer)
        assert_equal_values(values(paged.model), values(plain.model))


def test_exception_held_by_the_user(tmp_path: Path) -> None:
    """Catches bytes that stay counted, and in the way, because a traceback that the user keeps
    (a debugger, a report) holds the frames in which pages were in use."""
    plain = Trial(model := mlp(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    with tightest(recipe(torch.optim.AdamW, lr=1e-2), tmp_path / "z") as (
        _,
        paged_model,
        optimizer,
    ):
        paged = Trial(paged_model, optimizer)
        kept: list[BaseException] = []

        def fail(*_: object) -> None:
            raise UserError("kept")

        for layer in (0, LAYER, 4):
            handle = paged.model[layer].register_forward_hook(fail)
            try:
                paged.loss()
            except UserError as error:
                kept.append(error)
            handle.remove()
        assert train(paged.model, optimizer) == train(plain.model, plain.optimizer)
        kept.clear()
        gc.collect()
