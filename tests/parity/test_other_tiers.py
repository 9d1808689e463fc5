"""fp32 training with states on every further tier, at the tightest budgets, against plain PyTorch.

The same loop and models as the matrix of the built-in homes; expected values are plain PyTorch's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parity.support import TIERS, assert_same, train_plain, train_tightest
from parity.test_architectures import recipe as architecture
from parity.test_matrix import OPTIMIZERS, plain, recipe
from parity.zoo import ARCHITECTURES
from zinf_core.blocking import BlockingTier
from zinf_core.testing import DeferredTier, DictTier, seeded_order
from zinf_core.testing.simulated import SimulatedDevice

_EXAMPLE = Path(__file__).parents[2] / "examples" / "sqlite-tier" / "zinf_sqlite_tier.py"
_PLACES = ({"parameters"}, {"optimizer_states"}, {"parameters", "optimizer_states", "gradients"})


def _sqlite() -> ModuleType:
    """Return the module of the example package, which need not be installed."""
    if _EXAMPLE.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(_EXAMPLE.stem, _EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[_EXAMPLE.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[_EXAMPLE.stem]


Place = Callable[[Path, ExitStack], tuple[str, Mapping[str, Any]]]
"""Returns (home, settings of the runtime that make it known)."""


def _sqlite_object(folder: Path, stack: ExitStack) -> tuple[str, Mapping[str, Any]]:
    store = _sqlite().SqliteStore(str(folder / "states.db"))
    tier = BlockingTier(store, name="db", persistent=True)
    stack.callback(tier.close)
    return "db", {"tiers": {"db": tier}}


def _deferred_object(folder: Path, stack: ExitStack) -> tuple[str, Mapping[str, Any]]:
    tier = DeferredTier(DictTier(), order=seeded_order(3))
    stack.callback(tier.close)
    return "late", {"tiers": {"late": tier}}


def _url(text: str) -> Place:
    return lambda folder, stack: (text.format(folder=folder), {})


PLACES: Mapping[str, Place] = {
    "sqlite": _sqlite_object,
    "deferred": _deferred_object,
    "object": _url("object://file://{folder}/objects"),
    "striped": _url(
        "striped://[nvme://{folder}/a][nvme://{folder}/b]?chunk_nbytes=4096&shares=1,1"
    ),
    "compressed": _url("compressed://[nvme://{folder}/c]?codec=zstd&chunk_nbytes=8192"),
    "checksummed": _url("checksummed://[nvme://{folder}/d]?chunk_nbytes=8192"),
    "throttled": _url("throttled://[nvme://{folder}/e]?bytes_per_s=1GB"),
    "nested": _url("compressed://[striped://[nvme://{folder}/f][host://]?shares=2,1]?codec=lz4"),
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a place opened after the test."""
    with ExitStack() as stack:
        yield stack


def _homes(place: str, kinds: set[str], folder: Path, stack: ExitStack) -> dict[str, Any]:
    folder.mkdir()
    home, settings = PLACES[place](folder, stack)
    return {**settings, **dict.fromkeys(kinds, home)}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", _PLACES, ids=lambda kinds: "+".join(sorted(kinds)))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_homes(
    tmp_path: Path, stack: ExitStack, optimizer: str, place: str, kinds: set[str]
) -> None:
    """Catches a tier that keeps the laws alone but not under training: old bytes after an
    overwrite, a chunk of another key, a state lost between its write and its next read."""
    options: dict[str, Any] = {"num_steps": 5, "accumulation": 2, "clip": 0.5}
    homes = _homes(place, kinds, tmp_path / "tier", stack)
    found = train_tightest(recipe(optimizer, **options), tmp_path / "z", **homes)
    assert_same(found, plain(optimizer, **options))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", TIERS)
@pytest.mark.parametrize("optimizer_states", TIERS)
@pytest.mark.parametrize("parameters", TIERS)
def test_simulated_device(
    tmp_path: Path, parameters: str, optimizer_states: str, gradients: str
) -> None:
    """Catches a copy between host and device that is not waited for, a source reused under a copy,
    and memory of the device used as if it were the host's."""
    options: dict[str, Any] = {"num_steps": 3, "accumulation": 2, "clip": 0.5}
    with SimulatedDevice(order=seeded_order(5)) as device:
        found = train_tightest(
            recipe("adamw", **options),
            tmp_path / "z",
            parameters=parameters,
            optimizer_states=optimizer_states,
            gradients=gradients,
            compute=device,
        )
        assert device.num_pending == 0
        assert device.registered_nbytes == 0
    assert_same(found, plain("adamw", **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_on_a_simulated_device(tmp_path: Path, name: str) -> None:
    """Catches the same in models whose operations take pages in unusual orders: tied weights,
    experts, states carried over time, encoders."""
    used = architecture(name)
    with SimulatedDevice(order=seeded_order(7)) as device:
        found = train_tightest(used, tmp_path / "z", compute=device)
    assert_same(found, train_plain(used))
