"""Faults of sizes and of construction, with states on every kind of tier (P03, P06, P09)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.simulated_gds import GdsFaults, simulated_gds
from torch import nn

import zinf_torch as zt
from faults.places import IN_MEMORY, ON_DISK, PLACES, bytes_of, homes_at, opened, store, stored
from faults.support import (
    assert_same,
    batch,
    copied,
    on_plain,
    on_tightest,
    train,
    update,
    values,
)
from zinf_core.errors import UnsupportedError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import seeded_order
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.tier import Tier
from zinf_core.units import PAGE_NBYTES, KiB
from zinf_storage.nvme import NvmeTier

SMALL = (1, 7, 511, 512, 513, 1023, 1025)
LARGE = (262143, 262144, 262145)
"""Elements; of 4 bytes 1 MiB and one element less or more."""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_p03_stored_bytes_of_every_size(tmp_path: Path, place: str) -> None:
    """P03: files shorter than the aligned request, and padding that is taken for bytes, in the
    tier that was written or in the same one opened again."""
    sizes = sorted({size * width for size in (*SMALL, *LARGE) for width in (1, 2, 4)})
    data = {
        TensorKey.of(f"odd.{nbytes}", StateKind.PARAM): random.Random(nbytes).randbytes(nbytes)
        for nbytes in sizes
    }
    url = PLACES[place].format(folder=tmp_path)
    with opened(url) as tier:
        for key, written in data.items():
            store(tier, key, written)
        tier.flush().wait()
        assert {key: stored(tier, key) for key in tier.keys()} == data  # noqa: SIM118
        assert tier.usage().nbytes == sum(sizes)
    if place in IN_MEMORY:
        return
    with opened(url) as tier:
        assert {key: stored(tier, key) for key in tier.keys()} == data  # noqa: SIM118
        assert tier.usage().nbytes == sum(sizes)


TIGHT_FOR_ODD = {"device": 1052672, "host": 4210688}
"""The least that is accepted; found anew where a test's homes need more."""


class Odd(nn.Module):
    """Parameters of odd sizes in four types that train and three that cannot."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            torch.float32: (*SMALL, LARGE[2]),
            torch.bfloat16: (1, 7, 513, 1025, LARGE[0]),
            torch.float16: (1, 513, 1025),
            torch.float64: (1, 513),
        }
        self.trained = nn.ParameterDict(
            {
                f"{str(dtype).removeprefix('torch.')}_{size}": torch.randn(size).to(dtype)
                for dtype, all_of_it in sizes.items()
                for size in all_of_it
            }
        )
        self.frozen = nn.ParameterList(
            nn.Parameter((torch.arange(size) % 3).to(dtype), requires_grad=False)
            for dtype in (torch.int8, torch.uint8, torch.bool)
            for size in (1, 7, 513)
        )
        self.register_buffer("mask", torch.arange(513) % 2 == 0)
        self.register_buffer("codes", torch.arange(7, dtype=torch.int8))

    def loss(self, step: int) -> torch.Tensor:
        weight = 1.0 + step + sum(code.float().mean() for code in self.frozen)
        weight = weight + self.mask.float().mean() + self.codes.float().mean()
        parts = self.trained.values()
        return sum((part.float() * weight).square().mean() for part in parts)


def _bytes_at(tier: Tier) -> dict[str, bytes]:
    """Return the bytes of every parameter and optimizer state on `tier`."""
    kept = (StateKind.PARAM, StateKind.OPTIMIZER_STATE)
    return {str(key): stored(tier, key) for key in tier.keys() if key.kind in kept}  # noqa: SIM118


def _expected_bytes(model: nn.Module, optimizer: Any) -> dict[str, bytes]:
    """Return the same of a plain model; states of one element need not be on a tier."""
    named = list(model.named_parameters())
    found = {f"{name}/param": bytes_of(param) for name, param in named}
    for index, state in optimizer.state_dict()["state"].items():
        name, param = named[index]
        if param.numel() > 1:
            for part in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/optimizer_state/{part}"] = bytes_of(state[part])
    return found


def _train_and_resume(world: Any, home: str = "") -> Any:
    """Train three steps, take the bytes at `home`, save, load into new ones, train three more."""

    def start() -> tuple[Odd, Any]:
        model = world.attach(Odd())
        options = {"lr": 0.1, "weight_decay": 0.1, "master_weights": False}
        return model, world.optimizer(torch.optim.AdamW, model.parameters(), **options)

    model, optimizer = start()
    record = train(model, optimizer, 3, Odd.loss)
    if isinstance(world, zt.Runtime):
        world.pager.evict_all()
        world.pager.settle()
        world.pager.tiers[home].flush().wait()
        at_rest = _bytes_at(world.pager.tiers[home])
    else:
        at_rest = _expected_bytes(model, optimizer)
    saved = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    del model, optimizer
    model, optimizer = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    record += [update(model.loss(step), optimizer) for step in range(3, 6)]
    return dict(sorted(at_rest.items())), record, saved["model"], values(model)


@pytest.fixture(scope="module")
def odd_in_plain() -> Any:
    """Return what plain PyTorch gives."""
    return on_plain(_train_and_resume)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_p03_training_odd_sizes(tmp_path: Path, place: str, odd_in_plain: Any) -> None:
    """P03: padding mixed up with length, on the way to a tier or back, in every dtype; bytes at
    rest that are not the values, before or after the tier is opened again."""
    url = PLACES[place].format(folder=tmp_path)
    with opened(url) as tier:
        home = homes_at("mine")
        found = on_tightest(
            lambda world: _train_and_resume(world, "mine"),
            tmp_path, tiers={"mine": tier}, **TIGHT_FOR_ODD, **home,
        )  # fmt: skip
    assert_same(found, odd_in_plain)
    if place in ON_DISK:
        with opened(url) as tier:
            assert dict(sorted(_bytes_at(tier).items())) == odd_in_plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("home", ["device", "host", "nvme", "gds", "zstd"])
def test_p03_odd_sizes_on_a_device(tmp_path: Path, home: str, odd_in_plain: Any) -> None:
    """P03: the same between a device, pinned memory and a tier, also where the drive reaches the
    device by itself, in whole pages only."""
    faults = GdsFaults()
    with ExitStack() as stack:
        device = stack.enter_context(SimulatedDevice(order=seeded_order(11)))
        tiers: dict[str, Any] = {"zstd": PLACES["zstd"].format(folder=tmp_path)}
        if home == "gds":
            engine = simulated_gds(device, faults)
            tiers["gds"] = NvmeTier.open(tmp_path / "gds", device=device, engine=engine)
            stack.callback(tiers["gds"].remove)
        found = on_tightest(
            lambda world: _train_and_resume(world, home),
            tmp_path, compute=device, tiers=tiers, **TIGHT_FOR_ODD, **homes_at(home),
        )  # fmt: skip
        assert device.num_pending == 0
    assert_same(found, odd_in_plain)
    assert faults.mistakes == []
    assert (faults.num_device_transfers > 0) == (home == "gds")


TIGHT_FOR_PARTS = {"device": 2 * PAGE_NBYTES, "host": 4 * PAGE_NBYTES}
Context = Callable[[], Any]


class Tail(nn.Module):
    """A module whose constructor opens the context by itself, twice."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        with context():
            with context():
                self.linear = nn.Linear(5, 3)
            self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def _parts(context: Context) -> nn.Module:
    dynamic = type("Dynamic", (nn.Linear,), {"forward": lambda self, x: self.weight @ x.mean(0)})
    return nn.Sequential(nn.Linear(4, 7), dynamic(7, 5), Tail(context))


def _in_context(context: Context) -> nn.Module:
    with context():
        return _parts(context)


def _after_a_failure(context: Context) -> nn.Module:
    with context():
        first = nn.Linear(4, 7)
        with pytest.raises(RuntimeError), context():
            nn.Linear(-1, 2)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(7, 5), Tail(context))


def _in_part(context: Context) -> nn.Module:
    model = _parts(nullcontext)
    with context():
        model.append(nn.Linear(3, 3))
    return model.append(nn.Linear(3, 2))


def _meanwhile(context: Context) -> nn.Module:
    """Open the context while a generator holds it open as well, and leave in the other order."""

    def parts() -> Iterator[nn.Module]:
        with context():
            yield nn.Linear(4, 7)
            yield nn.Tanh()

    waiting = parts()
    model = nn.Sequential(next(waiting))
    with context():
        model.append(nn.Linear(7, 5))
        waiting.close()
        return model.append(Tail(context))


CONSTRUCTIONS: Mapping[str, Callable[[Context], nn.Module]] = {
    "built before": lambda _context: _parts(nullcontext),
    "in the context": _in_context,
    "around it": _parts,
    "in part": _in_part,
    "after a failure": _after_a_failure,
    "meanwhile": _meanwhile,
}


def _train_constructions(world: Any) -> Any:
    """Build and train a model in each way, one after the other; return what came of each."""
    context = getattr(world, "deferred_init", nullcontext)
    record = {}
    for way, construct in CONSTRUCTIONS.items():
        torch.manual_seed(1)
        model = construct(context)
        if construct is _in_context and isinstance(world, zt.Runtime):
            assert nn.Parameter not in set(map(type, model.parameters())), "a context ended early"
        assert type(nn.Linear(2, 2).weight) is nn.Parameter, "the context stayed on"
        model = world.attach(world.attach(model))
        initial = values(model)
        optimizer = world.optimizer(torch.optim.AdamW, model.parameters(), lr=0.05)
        losses = train(model, optimizer, 2, lambda m, s: m(batch(s, 2, 4)).square().mean())
        record[way] = (initial, losses, values(model))
    return record


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_p06_p09_every_way_to_construct(tmp_path: Path, place: str) -> None:
    """P06, P09: only a model built in the context has what the tier needs, or only one built
    outside; a nested context, or a class made in it, that fails, changes values or stays on."""
    url = PLACES[place].format(folder=tmp_path)
    expected = on_plain(_train_constructions)
    found = on_tightest(_train_constructions, tmp_path, **TIGHT_FOR_PARTS, **homes_at(url))
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_p06_p09_every_way_to_construct_on_a_device(tmp_path: Path, home: str) -> None:
    """P06, P09: initial values that are drawn or copied before the device has them."""
    expected = on_plain(_train_constructions)
    with SimulatedDevice(order=seeded_order(13)) as device:
        settings = {"compute": device, **TIGHT_FOR_PARTS, **homes_at(home)}
        found = on_tightest(_train_constructions, tmp_path, **settings)
        assert device.num_pending == 0
    assert_same(found, expected)


def test_p09_contexts_of_two_runtimes(tmp_path: Path) -> None:
    """P09: one context inside that of another runtime: pages of both, or a crash far away. It is
    refused, and both go on."""
    sizes = {"device": 64 * KiB, "host": 64 * KiB}
    url = PLACES["striped"].format(folder=tmp_path)
    with (
        zt.Runtime(**sizes, nvme=tmp_path / "z") as outer,
        zt.Runtime(**sizes, parameters=url) as inner,
    ):
        with (
            outer.deferred_init(),
            inner.deferred_init(),
            pytest.raises(UnsupportedError, match="belongs to another runtime"),
        ):
            nn.Linear(2, 2)
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
        for runtime in (outer, inner):
            torch.manual_seed(2)
            with runtime.deferred_init():
                model = nn.Linear(3, 3)
            torch.manual_seed(2)
            assert_same(values(runtime.attach(model)), values(nn.Linear(3, 3)))
