"""Large parameters updated piece by piece: the same bits, the same states, less memory at once."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from parity.models import Transformer, transformer_loss
from parity.support import Recipe, assert_same, outcome, train, train_plain, train_tightest
from parity.test_matrix import OPTIMIZERS
from zinf_core.errors import UnsupportedError
from zinf_core.units import KiB, MiB
from zinf_torch import parts
from zinf_torch.joined import JoinedTensor

PIECE_NUMEL = 96
OTHERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "maximize": (torch.optim.Adam, {"lr": 1e-3, "maximize": True, "weight_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIECE_NUMEL", PIECE_NUMEL)


def recipe(name: str, **options: Any) -> Recipe:
    optimizer, arguments = {**OPTIMIZERS, **OTHERS}[name]
    return Recipe(
        build=Transformer,
        batch_loss=transformer_loss,
        optimizer=optimizer,
        options=arguments,
        num_states=0,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("states", ["nvme", "host"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_every_elementwise_optimizer(tmp_path: Path, name: str, states: str) -> None:
    """Catches a piece that starts from another piece's scalars, is updated twice or not at all, or
    an optimizer for which a piece is not the same as its part of the whole."""
    parts.PIECE_NUMEL = 400  # the fixture puts it back
    used = recipe(name, num_steps=3, accumulation=2, clip=0.5)
    assert used.optimizer in parts.ELEMENTWISE
    found = train_tightest(used, tmp_path / "z", optimizer_states=states)
    assert_same(found, train_plain(used))


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[zt.Runtime, nn.Module, torch.optim.Optimizer]]:
    """Return a runtime with a linear whose weight takes several pieces, after a step."""
    with zt.Runtime(device=MiB, host=MiB, nvme=tmp_path / "z") as runtime:
        model = runtime.attach(linear())
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        step(model, optimizer)
        yield runtime, model, optimizer


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(40, 11, bias=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 80).view(2, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def test_states_are_seen_whole(trained: Any) -> None:
    """Catches a state that shows one piece, the wrong order, or another shape, stride or dtype."""
    _, model, optimizer = trained
    other, expected = plain()
    found = optimizer.state[model.weight]["exp_avg"]
    wanted = expected.state[other.weight]["exp_avg"]
    assert isinstance(found, JoinedTensor)
    assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, (40, 1))
    assert torch.equal(found, wanted)
    assert torch.equal(found[3] * 2, wanted[3] * 2)
    assert torch.equal(found.real, wanted.real)
    assert torch.equal(found.T, wanted.T)
    assert repr(found) == repr(wanted)
    for again in (copy.deepcopy(found), _saved_and_loaded(found)):
        assert type(again) is torch.Tensor
        assert torch.equal(again, wanted)


def _saved_and_loaded(value: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    result: torch.Tensor = torch.load(file, weights_only=True)
    return result


def test_states_can_be_edited(trained: Any) -> None:
    """Catches an edit that reaches a copy only."""
    _, model, optimizer = trained
    other, expected = plain()
    for each, weight in ((optimizer, model.weight), (expected, other.weight)):
        state = each.state[weight]
        assert state["exp_avg"].mul_(3) is state["exp_avg"]
        state["exp_avg_sq"][2:4] = 0.25
        state["exp_avg_sq"].data = state["exp_avg_sq"].data.t().contiguous().t() * 2
        state["exp_avg_sq"] = state["exp_avg_sq"] + 1  # a tensor of the user's own
    step(model, optimizer)
    step(other, expected)
    assert torch.equal(model.weight, other.weight)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        value = optimizer.state[model.weight][name]
        assert torch.equal(value, expected.state[other.weight][name]), name


def test_state_of_another_size_is_refused(trained: Any) -> None:
    """Catches a state that is cut where it has no meaning."""
    _, model, optimizer = trained
    optimizer.state[model.weight]["extra"] = torch.ones(7)
    model(torch.ones(1, 40)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"extra of weight has 7 elements"):
        optimizer.step()


def test_state_dicts_go_both_ways(trained: Any, tmp_path: Path) -> None:
    """Catches a piece that is missing or misplaced in a state dict, in either direction."""
    _, model, optimizer = trained
    other, expected = plain()
    # torch's own loading shares the step counters of what it loads
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    with zt.Runtime(device=MiB, host=MiB, nvme=tmp_path / "y") as second:
        third = second.attach(linear())
        loaded = second.optimizer(torch.optim.AdamW, third.parameters(), lr=0.1)
        third.load_state_dict(model.state_dict())
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, steps in ((model, optimizer), (other, expected), (third, loaded)):
            step(each, steps)
        assert torch.equal(model.weight, other.weight)
        assert torch.equal(third.weight, other.weight)


@pytest.mark.parametrize("edit", [False, True])
def test_masters_in_pieces(tmp_path: Path, edit: bool) -> None:
    """Catches a master that is made anew by every piece after an edit of one, or not at all."""
    weights = []
    for numel in (PIECE_NUMEL, 1 << 22):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "PIECE_NUMEL", numel)
            with zt.Runtime(device=MiB, host=MiB, nvme=tmp_path / "z") as runtime:
                model = runtime.attach(linear().to(torch.bfloat16))
                optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
                for number in range(4):
                    model(
                        torch.linspace(-1, 1, 80).view(2, 40).bfloat16()
                    ).square().sum().backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    if edit and number == 1:
                        with torch.no_grad():
                            model.weight[2:5].mul_(1.5)
                master = optimizer.state_dict()["state"][0]["master_weight"]
                assert master.dtype is torch.float32
                assert torch.equal(master.bfloat16(), model.weight)
                weights.append((model.weight.detach().clone(), master.clone()))
                optimizer.load_state_dict(optimizer.state_dict())
                assert torch.equal(
                    optimizer.state_dict()["state"][0]["master_weight"], weights[-1][1]
                )
    assert torch.equal(weights[0][0], weights[1][0])
    assert torch.equal(weights[0][1], weights[1][1])


def test_other_strides(tmp_path: Path) -> None:
    """Catches elements that are cut in the order of the shape instead of that of the memory."""
    used = recipe("adamw", num_steps=2)

    def build() -> nn.Module:
        model = Transformer()
        for param in model.parameters():
            if param.ndim == 2:
                param.data = param.data.t().contiguous().t()
        return model

    model = build_seeded(build)
    optimizer = used.optimizer(model.parameters(), **used.options)
    expected = outcome(train(used, model, optimizer), model, optimizer)
    with zt.Runtime(device=MiB, host=MiB, nvme=tmp_path / "z") as runtime:
        paged = runtime.attach(build_seeded(build))
        streamed = runtime.optimizer(used.optimizer, paged.parameters(), **used.options)
        assert_same(outcome(train(used, paged, streamed), paged, streamed), expected)


def build_seeded(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build()
    return model


def test_less_memory_is_needed(tmp_path: Path) -> None:
    """Catches a large parameter whose states must still be in memory all at once."""
    with zt.Runtime(device=256 * KiB, host=160 * KiB, nvme=tmp_path / "z") as runtime:
        parts.PIECE_NUMEL = 2048
        model = runtime.attach(nn.Linear(128, 128, bias=False))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters())
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        assert runtime.usage()["host"].peak_nbytes <= 160 * KiB < 4 * 4 * 128 * 128
