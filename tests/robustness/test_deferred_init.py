"""Models built under `deferred_init`: the values of plain ones, and never held whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.models import Transformer, transformer_loss
from torch import nn

import zinf_torch as zt
from robustness.constructors import CONSTRUCTORS
from robustness.support import assert_equal_values, idle_nbytes, run_python, values
from zinf_core.errors import BudgetTooSmallError
from zinf_core.units import KiB, MiB

DEVICE = 64 * KiB


def open_runtime(folder: Path) -> zt.Runtime:
    """Return a runtime with little memory."""
    return zt.Runtime(device=DEVICE, host=96 * KiB, nvme=folder)


def seeded(construct: Callable[[], nn.Module]) -> nn.Module:
    """Return what `construct` makes with a fixed seed."""
    torch.manual_seed(7)
    return construct()


def described(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return what is true of each parameter whatever holds it."""
    return [
        (name, param.shape, param.dtype, param.stride(), param.requires_grad)
        for name, param in model.named_parameters(remove_duplicate=False)
    ]


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_values_of_a_plain_construction(tmp_path: Path, name: str) -> None:
    """Catches a way to construct that misses a value, draws other random numbers, changes a dtype,
    a stride or a flag, or unties what was tied (FAULTS P09, P106)."""
    expected = seeded(CONSTRUCTORS[name])
    state = torch.get_rng_state()
    with open_runtime(tmp_path / "z") as runtime:
        with runtime.deferred_init():
            model = seeded(CONSTRUCTORS[name])
        assert torch.equal(torch.get_rng_state(), state)
        model = runtime.attach(model)
        assert described(model) == described(expected)
        assert_equal_values(values(model), values(expected))
        for usage in runtime.usage().values():
            assert usage.peak_nbytes <= usage.budget_nbytes
        assert str(model) == str(expected)
        assert len(list(model.parameters())) == len(list(expected.parameters()))


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_nothing_is_left_of_the_context(tmp_path: Path, name: str) -> None:
    """Catches a hook that outlives its block, and room that a deleted model keeps."""
    with open_runtime(tmp_path / "z") as runtime:
        with runtime.deferred_init():
            model = seeded(CONSTRUCTORS[name])
        del model
        plain = seeded(CONSTRUCTORS[name])
        for param in plain.parameters():
            assert type(param) is nn.Parameter
        gc.collect()
        with runtime.deferred_init():
            probe = nn.Linear(2, 2)
        del plain
        keys = {str(key) for key in runtime.pager.tiers["nvme"].keys()}  # noqa: SIM118
        assert len(keys) == len(list(probe.parameters()))
        assert idle_nbytes(runtime) == {"device": 0, "host": 0}


def test_nested_contexts(tmp_path: Path) -> None:
    """Catches a second context that undoes the first, pages twice, or ends it (FAULTS P09)."""

    def part(context: Callable[[], Any]) -> nn.Module:
        with context():
            return nn.Linear(4, 4)

    class Whole(nn.Module):
        def __init__(self, context: Callable[[], Any]) -> None:
            super().__init__()
            self.first = part(context)
            self.second = nn.Linear(4, 3)
            with context():
                with context():
                    self.third = nn.Linear(3, 2)
                self.fourth = nn.Parameter(torch.randn(3))

    expected = seeded(lambda: Whole(torch.enable_grad))
    with open_runtime(tmp_path / "z") as runtime:
        with runtime.deferred_init():
            model = seeded(lambda: Whole(runtime.deferred_init))
            assert type(model.second.weight) is not nn.Parameter
        model = runtime.attach(model)
        assert_equal_values(values(model), values(expected))
        assert runtime.pager.tiers["nvme"].usage().num_keys == len(list(model.parameters()))
        assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_plain_tensors_in_the_context(tmp_path: Path) -> None:
    """Catches constructors of tensors that the context changes (FAULTS P25)."""

    def made() -> list[torch.Tensor]:
        return [
            torch.Tensor(), torch.Tensor([1.0, 2.0]), torch.tensor(5), torch.arange(4),
            torch.empty(0), torch.zeros(3, dtype=torch.int8), torch.Tensor(3).fill_(1),
            torch.randn(2), torch.from_numpy(torch.ones(2).numpy()), nn.Parameter(torch.ones(2)),
        ]  # fmt: skip

    expected = seeded(made)  # type: ignore[arg-type]
    with open_runtime(tmp_path / "z") as runtime, runtime.deferred_init():
        found = seeded(made)  # type: ignore[arg-type]
        for tensor, plain in zip(found, expected, strict=True):
            assert type(tensor) is type(plain)
            assert tensor.dtype is plain.dtype
            assert torch.equal(tensor, plain)


def test_constructor_that_raises(tmp_path: Path) -> None:
    """Catches a context that stays on, or pages that stay counted, when a constructor fails."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            raise ZeroDivisionError

    with open_runtime(tmp_path / "z") as runtime:
        for _ in range(20):
            with pytest.raises(ZeroDivisionError), runtime.deferred_init():
                Broken()
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
        gc.collect()
        with runtime.deferred_init():
            model = nn.Linear(8, 8)
        assert runtime.pager.tiers["nvme"].usage().num_keys == 2
        assert model.weight.shape == (8, 8)
        assert idle_nbytes(runtime) == {"device": 0, "host": 0}


def test_parameter_larger_than_the_budget(tmp_path: Path) -> None:
    """Catches a refusal that does not say what is too large for what, and by how much."""
    with open_runtime(tmp_path / "z") as runtime:
        with pytest.raises(BudgetTooSmallError) as refusal, runtime.deferred_init():
            nn.Sequential(nn.Linear(4, 4), nn.Linear(64, 512))
        message = str(refusal.value)
        assert "Linear.weight" in message
        assert f"at least {128 * KiB} bytes" in message
        assert str(DEVICE) in message


def test_parameter_made_of_a_parameter_is_refused(tmp_path: Path) -> None:
    """Catches two parameters over one page, of which training would update one (weight_norm makes
    them): torch refuses, and nothing has changed by then."""
    with open_runtime(tmp_path / "z") as runtime:
        with runtime.deferred_init():
            layer = seeded(lambda: nn.Linear(3, 4))
        before = values(layer)
        with pytest.raises(RuntimeError, match="Creating a Parameter from an instance of type"):
            nn.Parameter(layer.weight)
        assert_equal_values(values(layer), before)
        copied = nn.Parameter(layer.weight.detach().clone())
        assert torch.equal(copied, before["weight"])


def test_training_goes_as_plain(tmp_path: Path) -> None:
    """Catches parameters that were paged before they had their values, or hooks, and then train
    otherwise (FAULTS P106)."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(3):
            loss = transformer_loss(model, generator)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = seeded(Transformer)
    trace = train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2))
    with open_runtime(tmp_path / "z") as runtime:
        with runtime.deferred_init():
            model = seeded(Transformer)
        model = runtime.attach(model)
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
        assert train(model, optimizer) == trace
        assert_equal_values(values(model), values(expected))


LARGE = """
import sys
from pathlib import Path
import torch
from torch import nn
import zinf_torch as zt


def peak_nbytes():
    # not ru_maxrss: exec keeps the peak of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def build(num_layers, construct):
    return nn.Sequential(*(construct() for _ in range(num_layers)))


def step(model, optimizer):
    model(torch.ones(1, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(runtime, num_layers, construct):
    with runtime.deferred_init():
        model = build(num_layers, construct)
    model = runtime.attach(model)
    optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=1e-3, momentum=0.9)
    step(model, optimizer)
    return model


class Filled(nn.Linear):
    # a constructor that fills its weights more than once
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.normal_(self.weight, std=0.02)


construct = lambda: Filled(1024, 1024, bias=False)
with zt.Runtime(device="32MiB", host="32MiB", nvme=sys.argv[1]) as runtime:
    train(runtime, 2, construct)
    before = peak_nbytes()
    train(runtime, 64, construct)
    print(peak_nbytes() - before)
    for usage in runtime.usage().values():
        print(usage.peak_nbytes <= usage.budget_nbytes)
"""


@pytest.mark.slow
def test_large_model_is_never_held_whole(tmp_path: Path) -> None:
    """Catches memory that grows with the model: a copy that outlives its parameter, a gradient or a
    state kept beside its page, files read through the cache of the process. 256 MiB of weights,
    as much of gradients and of momentum, under 32 + 32 MiB (FAULTS P65)."""
    done = run_python(LARGE, tmp_path / "z")
    assert (done.returncode, done.stderr) == (0, "")
    grown, *kept = done.stdout.split()
    assert kept == ["True", "True"]
    largest = 4 * MiB  # the parameter being constructed, and the gradient being made
    assert int(grown) < 64 * MiB + 2 * largest + 16 * MiB
