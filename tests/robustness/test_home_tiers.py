"""Homes on tiers of the user's own, by object and by URL: what is closed and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_torch as zt
from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.errors import ConfigError, TierClosedError, TierFullError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import open_tier
from zinf_core.testing import DictTier, FaultyTier, Operation, host_buffer
from zinf_core.units import MiB
from zinf_storage.nvme import NvmeTier


def open_runtime(**settings: Any) -> zt.Runtime:
    return zt.Runtime(device=MiB, host=MiB, **settings)


def train(runtime: zt.Runtime) -> dict[str, torch.Tensor]:
    """Train a few steps and return the weights."""
    torch.manual_seed(0)
    model = runtime.attach(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime.pager.evict_all()
    return {name: value.clone() for name, value in model.state_dict().items()}


def iter_keys(runtime: zt.Runtime, home: str) -> list[TensorKey]:
    return list(runtime.pager.tiers[home].keys())


def in_memory() -> Mapping[str, torch.Tensor]:
    with open_runtime() as runtime:
        return train(runtime)


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_tier_object_stays_open(tmp_path: Path) -> None:
    """Catches a tier of the caller's that is closed, or keeps the run's keys."""
    tier = DictTier("mine")
    other = TensorKey.of("other", StateKind.PARAM)
    tier.reserve(other, 8)
    homes = {"parameters": "mine", "optimizer_states": "mine", "gradients": "mine"}
    with open_runtime(tiers={"mine": tier}, **homes) as runtime:
        found = train(runtime)
        assert tier.usage().num_keys > 4
        assert runtime.traffic()["mine"].written_nbytes > 0
    assert list(tier.keys()) == [other]
    assert same(found, in_memory())
    tier.close()


@pytest.mark.parametrize("by_name", [True, False])
def test_tier_by_url(tmp_path: Path, *, by_name: bool) -> None:
    """Catches a URL that is not opened, opened twice, not closed, or whose files stay behind."""
    url = f"nvme://{tmp_path}/states?segment_nbytes=1MiB"
    home = "fast" if by_name else url
    tiers = {"fast": url} if by_name else {}
    with open_runtime(tiers=tiers, parameters=home, optimizer_states=home) as runtime:
        found = train(runtime)
        assert isinstance(runtime.pager.tiers[home], NvmeTier)
        assert runtime.paths()[home].startswith("posix")
        tier = runtime.pager.tiers[home]
    assert same(found, in_memory())
    with pytest.raises(TierClosedError):
        tier.usage()
    assert not list((tmp_path / "states").glob("segment*"))
    open_tier(url).close()


def test_url_among_patterns(tmp_path: Path) -> None:
    """Catches URLs that are only understood as a whole rule."""
    url = f"nvme://{tmp_path}/w"
    with open_runtime(parameters={"0.*": url, "*": "host"}) as runtime:
        found = train(runtime)
        assert {key.name for key in iter_keys(runtime, url)} == {"0.weight", "0.bias"}
    assert same(found, in_memory())


def test_full_place_is_refused(tmp_path: Path) -> None:
    """Catches a run that mixes its states with what somebody stored, or destroys it."""
    url = f"nvme://{tmp_path}/used"
    stored = TensorKey.of("precious", StateKind.PARAM)
    tier = open_tier(url)
    tier.reserve(stored, 8)
    tier.write_from(stored, host_buffer(8)).wait()
    tier.flush().wait()
    tier.close()
    with pytest.raises(ConfigError, match=r"holds 1 tensors .*precious/param among them; empty it"):
        open_runtime(parameters=url)
    tier = open_tier(url)
    assert list(tier.keys()) == [stored]
    tier.close()


def test_refusals(tmp_path: Path) -> None:
    """Catches names that hide a built-in tier, unknown homes, and tiers left open by a refusal."""
    with pytest.raises(ConfigError, match="'nvme' is taken"):
        open_runtime(tiers={"nvme": DictTier()})
    with pytest.raises(ConfigError, match="'host' is taken"):
        open_runtime(tiers={"host": DictTier()})
    with pytest.raises(ConfigError, match=r"there are the tiers .*mine.*; or write a URL"):
        open_runtime(tiers={"mine": DictTier()}, parameters="yours")
    with pytest.raises(ConfigError, match="no installed package offers tape:// tiers"):
        open_runtime(parameters=f"nvme://{tmp_path}/a", gradients="tape:///x")
    open_tier(f"nvme://{tmp_path}/a").close()  # locked if it had been left open
    far = TierCapabilities(memory_spaces=frozenset({MemorySpace.DEVICE}))
    with pytest.raises(ConfigError, match="takes no host memory"):
        open_runtime(tiers={"far": DictTier(capabilities=far)}, parameters="far")


def test_full_tier_says_so(tmp_path: Path) -> None:
    """Catches a refusal of a foreign tier that is swallowed or arrives as a bug of ours."""
    with (
        open_runtime(tiers={"small": DictTier(capacity_nbytes=100)}, parameters="small") as runtime,
        pytest.raises(TierFullError, match="no room for 2048 bytes"),
    ):
        train(runtime)


def test_error_of_the_tier_reaches_the_loop() -> None:
    """Catches a failed transfer of a foreign tier that ends in other numbers."""
    tier = FaultyTier(DictTier("flaky"))
    with open_runtime(tiers={"flaky": tier}, parameters="flaky") as runtime:
        model = runtime.attach(nn.Linear(16, 32))
        runtime.pager.evict_all()
        tier.fail_next(Operation.READ)
        with pytest.raises(OSError, match="planned failure of read_into"):
            model(torch.ones(1, 16))
        assert model(torch.ones(1, 16)).shape == (1, 32)


def test_refused_direct_io_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slow path that is taken silently (FAULTS P92), or a warning nobody can avoid."""
    monkeypatch.setattr(NvmeTier, "path_taken", "posix-buffered")
    url = f"nvme://{tmp_path}/a"
    with (
        pytest.warns(UserWarning, match="refuses direct I/O") as told,
        open_runtime(parameters=url) as runtime,
    ):
        found = train(runtime)
    assert len(told) == 1
    assert same(found, in_memory())
    with open_runtime(parameters=f"{url}?direct=never") as runtime:
        assert same(train(runtime), in_memory())
