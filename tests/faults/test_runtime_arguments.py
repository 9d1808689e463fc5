"""Runtime: arguments that are of another kind, tiers that are shared, and what detaching leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from zinf_core.errors import ConfigError, KeyExistsError, TierError, UnsupportedError
from zinf_core.testing import DictTier
from zinf_core.units import MiB

WRONG: list[tuple[str, Any]] = [
    *((rule, value) for rule in ("parameters", "gradients", "optimizer_states") for value in (
        DictTier("t"), ["host"], ("host",), 5, True, {5: "host"}, {"*": DictTier("t")}, {"*": 5},
        {}, "", {"*": ""}, b"host",
    )),
    *(("tiers", value) for value in (
        [DictTier("t")], DictTier("t"), "host://", 5, {"x": 5}, {"x": None}, {"x": DictTier},
        {5: DictTier("t")}, {"x": ["host://"]}, {"host": DictTier("t")}, {"x": "nowhere"},
    )),
    *(("nvme", value) for value in (5, True, DictTier("t"), b"/x", "", "nvme:///x", "/x\0y")),
    *(("nvme_capacity", value) for value in (1.5, -1, "much", True, DictTier("t"))),
    *(("device", value) for value in (None, [], 1.5, -1, "much", DictTier("t"))),
    *(("host", value) for value in (None, [], 1.5, -1, "much", DictTier("t"))),
    *(("compute", value) for value in (5, None, "tpu", "meta", DictTier("t"), "")),
    *(("observers", value) for value in (5, print, [5], None, {"x": print})),
]  # fmt: skip


def runtime(**settings: Any) -> zt.Runtime:
    return zt.Runtime(**{"device": MiB, "host": 4 * MiB, **settings})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_the_argument_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    """Catches an AttributeError or TypeError from inside for something of another kind, a setting
    that is ignored, and a folder left of the attempt."""
    monkeypatch.chdir(tmp_path)
    settings = {name: value}
    if name == "nvme_capacity":
        settings["nvme"] = tmp_path / "new"
    with pytest.raises(ConfigError) as caught:
        runtime(**settings)
    assert re_mentions(name, value, str(caught.value))
    assert list(tmp_path.iterdir()) == []


def re_mentions(name: str, value: Any, message: str) -> bool:
    """Return whether a message names the setting, or the very text that was given for it."""
    texts = list(value.values()) if isinstance(value, dict) else [value]
    return name in message or any(isinstance(t, str) and t and repr(t) in message for t in texts)


def test_a_capacity_of_no_folder_is_refused() -> None:
    """Catches a limit that nobody keeps."""
    with pytest.raises(ConfigError, match="nvme_capacity = '1GiB' is of no folder"):
        runtime(nvme_capacity="1GiB")


def test_the_remedy_works() -> None:
    """Catches advice that is wrong, and wrappers refused for how they are made."""

    class Delegating:
        def __init__(self, tier: DictTier) -> None:
            self.tier = tier

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tier, name)

    for tier in (DictTier("t"), Delegating(DictTier("t"))):
        with runtime(tiers={"mine": tier}, parameters="mine") as opened:
            opened.attach(nn.Linear(4, 4))
            assert tier.usage().num_keys == 2


@pytest.mark.parametrize("home", ["parameters", "gradients", "optimizer_states"])
def test_a_tier_that_somebody_else_uses_is_told(home: str) -> None:
    """Catches the advice to discard a key first, which would destroy the other model."""
    tier = DictTier("t")

    def attached(opened: zt.Runtime) -> nn.Module:
        torch.manual_seed(0)
        model = opened.attach(nn.Linear(4, 4))
        optimizer = opened.optimizer(torch.optim.Adam, model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return model

    settings = {"tiers": {"mine": tier}, home: "mine"}
    with runtime(**settings) as first:
        model = attached(first)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        keys = set(tier.keys())
        with runtime(**settings) as second:
            with pytest.raises(KeyExistsError, match="give each run a tier of its own") as caught:
                attached(second)
            assert "discard" not in str(caught.value)
        assert set(tier.keys()) == keys
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
    assert tier.usage().num_keys == 0


def test_two_homes_in_one_folder_leave_nothing(tmp_path: Path) -> None:
    """Catches a folder with a lock file left by a runtime that never came to be."""
    urls = [f"nvme://{tmp_path}/new/x?num_threads={number}" for number in (1, 2)]
    with pytest.raises(TierError, match="is in use"):
        runtime(parameters=urls[0], gradients=urls[1])
    with pytest.raises(TierError, match="is in use"):
        runtime(nvme=tmp_path / "new" / "x", parameters=urls[0])
    with pytest.raises(ConfigError):
        runtime(tiers={"a": urls[0], "b": 5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_is_found_before_while_and_after(dtype: torch.dtype) -> None:
    """Catches a parameter whose hash changes when it is attached or detached, so that dicts of
    the user's and of optimizers lose it: a KeyError with a whole tensor in it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    names = {param: name for name, param in model.named_parameters()}
    with runtime() as opened:
        opened.attach(model)
        assert {param: name for name, param in model.named_parameters()} == names
        assert all(param in names for param in model.parameters())
        optimizer = opened.optimizer(torch.optim.Adam, model.parameters())
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        before = values(optimizer)
        opened.detach(model)
        assert all(param in names for param in model.parameters())
        with pytest.raises(UnsupportedError, match="detached; make a plain optimizer"):
            optimizer.step()
    after = values(optimizer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)


def values(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's states; without masters, which end with the paged parameter."""
    return {
        f"{index}/{name}": value.clone()
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if name != "master_weight"
    }


def test_a_failed_detach_leaves_an_error_of_ours() -> None:
    """Catches a KeyError with a whole parameter in it, of an optimizer whose runtime is closed."""
    opened = runtime()
    model = opened.attach(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = opened.optimizer(torch.optim.Adam, model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    opened.close()
    with pytest.raises(TierError):
        opened.detach(model)
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2, 3}
    with pytest.raises(TierError):
        values(optimizer)
