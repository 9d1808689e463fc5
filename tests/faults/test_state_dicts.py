"""Faults of state dicts read and loaded by hand (P85, P86)."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from faults.support import (
    Plain,
    assert_same,
    batch,
    check_same,
    mlp,
    on_plain,
    on_tightest,
    square_loss,
    states,
    train,
    values,
)
from zinf_torch import Runtime


class Varied(nn.Module):
    """Buffers (persistent or not), a frozen, a tied, an empty, a scalar and a bf16 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.body[0].weight
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.low = nn.Parameter(torch.randn(7).bfloat16())
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("not_kept", torch.ones(2), persistent=False)

    def loss(self, step: int) -> torch.Tensor:
        h = self.head(torch.tanh(self.body(batch(step, 4, 6)))) * self.scale
        return h.square().mean() + self.low.float().square().sum() + self.frozen.sum() * 0


def _saved(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def _pickled(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(pickle.loads(pickle.dumps(model.state_dict())))


def _as_safetensors(model: nn.Module) -> dict[str, torch.Tensor]:
    saved = save_safetensors({n: v.clone() for n, v in model.state_dict().items()})
    return dict(sorted(load_safetensors(saved).items()))


SAVES: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "torch.save": _saved,
    "clones": lambda model: {n: v.clone() for n, v in model.state_dict().items()},
    "to cpu": lambda model: {n: v.detach().cpu() + 0 for n, v in model.state_dict().items()},
    "pickle": _pickled,
    "safetensors": _as_safetensors,
    "numpy": lambda model: {
        n: torch.from_numpy(v.detach().float().numpy().copy())
        for n, v in model.state_dict().items()
    },
    "named_parameters": lambda model: {
        n: p.data.clone() for n, p in model.named_parameters(remove_duplicate=False)
    },
    "prefix and keep_vars": lambda model: {
        n: v.detach().clone() for n, v in model.state_dict(prefix="m.", keep_vars=True).items()
    },
    "deepcopy": lambda model: dict(copy.deepcopy(model).state_dict()),
    "saved whole": lambda model: dict(pickle.loads(pickle.dumps(model)).state_dict()),
}


@pytest.mark.parametrize("way", SAVES)
def test_p85_every_way_to_save_gives_full_tensors(tmp_path: Path, way: str) -> None:
    """P85: a saved file has empty tensors, since placeholders were saved."""

    def script(world: Any) -> Any:
        model = world.attach(Varied())
        optimizer = world.optimizer(
            torch.optim.AdamW,
            [p for n, p in model.named_parameters() if n != "low"],
            lr=0.01,
        )
        before = SAVES[way](model)
        losses = train(model, optimizer, 2, lambda m, s: m.loss(s))
        after = SAVES[way](model)
        for saved in (before, after):
            assert all(type(value) is torch.Tensor for value in saved.values())
        return before, losses, after

    check_same(script, tmp_path)


def test_p85_saved_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """P85: what is saved between forward and backward, and between backward and step."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        record = []
        for step in range(3):
            loss = square_loss(model, step)
            record.append(_saved(model))
            loss.backward()
            record.append(_saved(model))
            optimizer.step()
            record.append(_saved(model))
            optimizer.zero_grad()
        return record

    check_same(script, tmp_path)


def test_p85_what_was_saved_stays_as_it_was(tmp_path: Path) -> None:
    """P85: a saved copy that follows later training; a loaded one that is still shared."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        saved = values(model)
        kept = {name: value.clone() for name, value in saved.items()}
        train(model, optimizer, 2, square_loss)
        assert_same(saved, kept)
        model.load_state_dict(saved)
        train(model, optimizer, 1, square_loss)
        assert_same(saved, kept)
        return values(model)

    check_same(script, tmp_path)


def _other_values(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("when", ["before the optimizer", "before training", "between steps"])
def test_p86_loading_by_hand_is_taken_over(tmp_path: Path, when: str, dtype: torch.dtype) -> None:
    """P86: size mismatch against placeholders; loaded weights that the masters overwrite."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2).to(dtype))
        other = _other_values(model)
        if when == "before the optimizer":
            model.load_state_dict(other, strict=True)
        optimizer = world.optimizer(
            torch.optim.AdamW,
            model.parameters(),
            lr=1e-3,
            master_weights=dtype is torch.bfloat16,
        )
        losses = []
        if when == "between steps":
            losses += train(model, optimizer, 2, square_loss)
        if when != "before the optimizer":
            model.load_state_dict(other, strict=True)
        assert_same(values(model), other)
        losses += train(model, optimizer, 2, square_loss)
        return losses, values(model), states(optimizer)

    check_same(script, tmp_path)


def _message(model: nn.Module, state: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state, **options)
    return str(caught.value)


def _wrong_dicts(model: nn.Module) -> dict[str, dict[str, Any]]:
    full = _other_values(model)
    return {
        "wrong shape": {**full, "0.weight": torch.zeros(8, 9)},
        "another rank": {**full, "0.bias": torch.zeros(8, 1)},
        "empty": {**full, "0.weight": torch.zeros(0)},
        "missing": {name: value for name, value in full.items() if name != "2.bias"},
        "unexpected": {**full, "3.weight": torch.zeros(1)},
        "no tensor": {**full, "0.weight": [1.0]},
    }


@pytest.mark.parametrize("kind", list(_wrong_dicts(mlp(8, 2))))
def test_p86_wrong_dicts_give_torchs_own_messages(tmp_path: Path, kind: str) -> None:
    """P86: the usual errors of `strict` name placeholders, or do not come at all."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        before = values(model)
        state = _wrong_dicts(model)[kind]
        message = _message(model, state)
        assert re.search(r"size mismatch|Missing key|Unexpected key|expected", message)
        changed = [n for n, v in values(model).items() if not torch.equal(v, before[n])]
        return message.replace("PagedParameter", "Parameter"), changed, values(model)

    assert_same(on_tightest(script, tmp_path), on_plain(script))


def test_p86_not_strict(tmp_path: Path) -> None:
    """P86: `strict=False` reports the same keys and loads the rest."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        state = _other_values(model)
        state.pop("0.bias")
        result = model.load_state_dict({**state, "more": torch.zeros(2)}, strict=False)
        return result.missing_keys, result.unexpected_keys, values(model)

    assert check_same(script, tmp_path)[:2] == (["0.bias"], ["more"])


def test_p86_dtypes_are_converted_on_loading(tmp_path: Path) -> None:
    """P86: a bf16 or fp64 checkpoint loaded into fp32, and the other way."""

    def script(world: Any) -> Any:
        record = []
        for of_model, of_state in [
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float64),
        ]:
            model = world.attach(mlp(8, 1).to(of_model))
            state = {name: value.to(of_state) for name, value in _other_values(model).items()}
            model.load_state_dict(state)
            record.append(values(model))
        return record

    check_same(script, tmp_path)


def test_p86_assign(tmp_path: Path) -> None:
    """P86: `assign=True` puts new parameters in place of paged ones; they can be attached."""

    def script(world: Any) -> Any:
        model = world.attach(mlp(8, 2))
        state = _other_values(model)
        model.load_state_dict(state, assign=True)
        world.attach(model)
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        return train(model, optimizer, 2, square_loss), values(model)

    check_same(script, tmp_path)


def test_p86_between_two_runs(tmp_path: Path) -> None:
    """P86: the state dict of one attached model is loaded into another, both on tiers, and into a
    plain one; hooks of loading and saving run."""

    def script(world: Any) -> Any:
        first, second = world.attach(mlp(8, 2)), world.attach(mlp(8, 2))
        seen: list[str] = []
        first.register_state_dict_post_hook(lambda *_: seen.append("saved"))
        second.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
        second.load_state_dict(first.state_dict())
        third = mlp(8, 2)
        third.load_state_dict(second.state_dict())
        assert all(type(param) is nn.Parameter for param in third.parameters())
        return seen, values(second), values(third)

    check_same(script, tmp_path)


def test_p86_detached_models_are_plain_again(tmp_path: Path) -> None:
    """P86: what is left after training must not need the runtime."""

    def script(world: Plain | Runtime) -> Any:
        model = world.attach(mlp(8, 2))
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
        train(model, optimizer, 2, square_loss)
        square_loss(model, 2).backward()
        if isinstance(world, Runtime):
            world.detach(model)
        assert all(type(param) is nn.Parameter for param in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        return train(model, optimizer, 2, square_loss), values(model)

    check_same(script, tmp_path)
