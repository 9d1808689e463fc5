"""bf16 parameters with fp32 masters, against a loop that keeps the masters by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from parity.models import Transformer, transformer_loss
from parity.support import Recipe, tightest
from zinf_core.units import KiB

STEPS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


def bf16_model() -> nn.Module:
    """Return the transformer in bf16 with its seed."""
    torch.manual_seed(0)
    return Transformer().bfloat16()


class ByHand:
    """Mixed precision written out: fp32 masters, sums of gradients in fp32 from the second on."""

    def __init__(
        self, model: nn.Module, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
    ) -> None:
        self.params = list(model.parameters())
        self.masters = [param.detach().float() for param in self.params]
        self.sums: list[torch.Tensor | None] = [None] * len(self.params)
        self.optimizer = optimizer(self.masters, **options)

    def take_gradients(self) -> None:
        """Add what backward left in the parameters to the sums."""
        for number, param in enumerate(self.params):
            grad, param.grad = param.grad, None
            total = self.sums[number]
            if grad is not None:
                self.sums[number] = grad if total is None else total.float() + grad.float()

    def clip(self, max_norm: float) -> float:
        """Clip the sums as they are, in the dtype they have, as one list."""
        holders = []
        for number, total in enumerate(self.sums):
            if total is not None:
                holders.append(nn.Parameter(torch.zeros_like(total)))
                holders[-1].grad = total
                assert self.sums[number] is holders[-1].grad
        return nn.utils.clip_grad_norm_(holders, max_norm).item()

    def step(self) -> None:
        """Update the masters and round them to nearest even into the parameters."""
        for master, total in zip(self.masters, self.sums, strict=True):
            master.grad = None if total is None else total.float()
        self.optimizer.step()
        self.sums = [None] * len(self.params)
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master.to(torch.bfloat16))

    def merge_edits(self) -> None:
        """Take elements of the parameters that were edited over into the masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            edited = param.detach() != master.to(torch.bfloat16)
            master[edited] = param.detach()[edited].float()


def losses_by_hand(
    model: nn.Module, hand: ByHand, *, accumulation: int, max_norm: float | None
) -> list[float]:
    """Train with the by-hand loop; return losses and norms."""
    generator = torch.Generator().manual_seed(1)
    trace = []
    for _ in range(STEPS):
        for _ in range(accumulation):
            loss = transformer_loss(model, generator) / accumulation
            loss.backward()
            hand.take_gradients()
            trace.append(loss.item())
        if max_norm is not None:
            trace.append(hand.clip(max_norm))
        hand.step()
    return trace


def losses_of_user_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation: int,
    max_norm: float | None,
) -> list[float]:
    """Train as a user does; return losses and norms."""
    generator = torch.Generator().manual_seed(1)
    trace = []
    for _ in range(STEPS):
        for _ in range(accumulation):
            loss = transformer_loss(model, generator) / accumulation
            loss.backward()
            trace.append(loss.item())
        if max_norm is not None:
            trace.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return trace


def open_runtime(folder: Path, **homes: Any) -> zt.Runtime:
    """Return a runtime in which the model does not fit the device."""
    return zt.Runtime(device=32 * KiB, host=256 * KiB, nvme=folder, **homes)


def assert_equal_weights(found: nn.Module, expected: nn.Module) -> None:
    """Fail unless both models have the same bits."""
    values = dict(found.named_parameters())
    for name, value in expected.named_parameters():
        assert values[name].dtype is value.dtype, name
        assert torch.equal(values[name].detach().clone(), value), name


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_equal_a_loop_by_hand(
    tmp_path: Path, name: str, accumulation: int, max_norm: float | None
) -> None:
    """Catches a master that is rounded between steps, gradients summed in bf16 or clipped in
    another dtype than they are stored in, and parameters that are not the rounded masters."""
    optimizer_class, options = OPTIMIZERS[name]
    expected = bf16_model()
    hand = ByHand(expected, optimizer_class, options)
    trace = losses_by_hand(expected, hand, accumulation=accumulation, max_norm=max_norm)
    used = Recipe(
        build=bf16_model, batch_loss=transformer_loss, optimizer=optimizer_class, options=options
    )
    with tightest(used, tmp_path / "z") as (_, model, optimizer):
        found = losses_of_user_loop(model, optimizer, accumulation=accumulation, max_norm=max_norm)
        assert found == trace
        assert_equal_weights(model, expected)
        states = optimizer.state_dict()["state"]
        for number, (param, master) in enumerate(zip(hand.params, hand.masters, strict=True)):
            assert torch.equal(states[number]["master_weight"].clone(), master)
            for key, value in hand.optimizer.state[master].items():
                other = states[number][key]
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    assert other.dtype is torch.float32
                    assert torch.equal(other.clone(), value), key
            assert param.dtype is torch.bfloat16


@pytest.mark.parametrize("tier", ["device", "host"])
def test_masters_in_memory(tmp_path: Path, tier: str) -> None:
    """Catches a master that shares its place with the parameter, or is updated in a copy."""
    optimizer_class, options = OPTIMIZERS["adamw"]
    expected = bf16_model()
    hand = ByHand(expected, optimizer_class, options)
    trace = losses_by_hand(expected, hand, accumulation=2, max_norm=None)
    homes = dict.fromkeys(("parameters", "gradients", "optimizer_states"), tier)
    with zt.Runtime(device="2MiB", host="2MiB", **homes) as runtime:
        model = runtime.attach(bf16_model())
        optimizer = runtime.optimizer(optimizer_class, model.parameters(), **options)
        assert losses_of_user_loop(model, optimizer, accumulation=2, max_norm=None) == trace
        assert_equal_weights(model, expected)


class OneWeight(nn.Module):
    """w, a bf16 number: its gradient is 1."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))

    def forward(self) -> torch.Tensor:
        """Return the sum of w."""
        return self.w.sum()


@pytest.mark.parametrize("shape", [(1,), (3, 2)])
@pytest.mark.parametrize("master_weights", [True, False])
def test_small_updates_do_not_vanish(
    tmp_path: Path, shape: tuple[int, ...], *, master_weights: bool
) -> None:
    """Catches a master that is skipped or thrown away: 1.0 - 0.001 rounds to 1.0 (FAULTS P60)."""
    with open_runtime(tmp_path / "z") as runtime:
        model = runtime.attach(OneWeight(*shape))
        optimizer = runtime.optimizer(
            torch.optim.SGD, model.parameters(), lr=1e-3, master_weights=master_weights
        )
        for _ in range(10):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        visible = model.w.detach().clone()
        expected = 0.98828125 if master_weights else 1.0
        assert torch.equal(visible, torch.full(shape, expected, dtype=torch.bfloat16))
        state = optimizer.state_dict()["state"].get(0, {})
        assert ("master_weight" in state) is master_weights
        if master_weights:
            master = torch.ones(shape)
            for _ in range(10):
                master.sub_(torch.ones(shape), alpha=1e-3)
            assert torch.equal(state["master_weight"].clone(), master)
            assert master.flatten()[0].item() == pytest.approx(0.990, abs=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_masters_equals_plain_bf16(tmp_path: Path, name: str) -> None:
    """Catches a hidden fp32 step where the user asked for torch's own bf16 arithmetic."""
    optimizer_class, options = OPTIMIZERS[name]
    expected = bf16_model()
    plain = optimizer_class(expected.parameters(), **options)
    trace = losses_of_user_loop(expected, plain, accumulation=1, max_norm=0.5)
    with open_runtime(tmp_path / "z") as runtime:
        model = runtime.attach(bf16_model())
        optimizer = runtime.optimizer(
            optimizer_class, model.parameters(), master_weights=False, **options
        )
        assert losses_of_user_loop(model, optimizer, accumulation=1, max_norm=0.5) == trace
        assert_equal_weights(model, expected)


def test_edits_reach_the_master(tmp_path: Path) -> None:
    """Catches a master that overwrites an edit at the next step, and one that loses the fp32
    digits of the elements that were not edited (FAULTS P53)."""
    optimizer_class, options = OPTIMIZERS["adamw"]

    def edit(model: Any) -> None:
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
            model.embed.weight[3:5].fill_(0.25)
        model.norm.load_state_dict({"weight": torch.full((32,), 1.5), "bias": torch.ones(32)})

    expected = bf16_model()
    hand = ByHand(expected, optimizer_class, options)
    trace = losses_by_hand(expected, hand, accumulation=1, max_norm=None)
    edit(expected)
    hand.merge_edits()
    trace += losses_by_hand(expected, hand, accumulation=1, max_norm=None)
    with open_runtime(tmp_path / "z") as runtime:
        model = runtime.attach(bf16_model())
        optimizer = runtime.optimizer(optimizer_class, model.parameters(), **options)
        found = losses_of_user_loop(model, optimizer, accumulation=1, max_norm=None)
        edit(model)
        found += losses_of_user_loop(model, optimizer, accumulation=1, max_norm=None)
        assert found == trace
        assert_equal_weights(model, expected)


class MixedDtypes(nn.Module):
    """A frozen bf16 weight, trainable fp32 and fp64 ones (FAULTS P43)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(6, 6).bfloat16(), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(6, 6) * 0.1)
        self.gain = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss on x."""
        y = x @ self.base.float() + x @ self.adapter
        return (y.double() * self.gain).square().mean()


def test_mixed_dtypes_in_one_model(tmp_path: Path) -> None:
    """Catches a cast between neighbours of different dtypes, and a master made for a parameter
    that needs none."""

    def run(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        generator = torch.Generator().manual_seed(5)
        trace = []
        for _ in range(4):
            for _ in range(2):
                loss = model(torch.randn(4, 6, generator=generator))
                loss.backward()
                trace.append(loss.item())
            trace.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            assert model.base.grad is None
            assert model.adapter.grad.dtype is torch.float32
            assert model.gain.grad.dtype is torch.float64
            optimizer.step()
            optimizer.zero_grad()
        return trace

    torch.manual_seed(0)
    expected = MixedDtypes()
    trace = run(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))
    with open_runtime(tmp_path / "z") as runtime:
        torch.manual_seed(0)
        model = runtime.attach(MixedDtypes())
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        assert run(model, optimizer) == trace
        assert_equal_weights(model, expected)
        states = optimizer.state_dict()["state"]
        assert all("master_weight" not in state for state in states.values())
        assert states[2]["exp_avg"].dtype is torch.float64
