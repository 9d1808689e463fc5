"""Faults of a store that is full or fails while training (P13)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zinf_torch as zt
from faults.children import run_child
from faults.support import mlp, square_loss, train, values
from zinf_core.errors import TierError, TierFullError
from zinf_core.testing import Fault, FaultPlan, FaultyTier, Operation, Phase, io_error, no_space
from zinf_core.units import PAGE_NBYTES, KiB

BUDGETS = {"device": 2 * PAGE_NBYTES, "host": 8 * PAGE_NBYTES}


@pytest.mark.parametrize("pages", [1, 4, 9, 12])
def test_p13_a_capacity_that_is_too_small_is_refused_at_setup(tmp_path: Path, pages: int) -> None:
    """P13: no early check; a late crash. The refusal names path, needed and allowed bytes."""
    model = mlp(8, 2)
    before = values(model)
    with zt.Runtime(**BUDGETS, nvme=tmp_path / "z", nvme_capacity=pages * PAGE_NBYTES) as runtime:
        with pytest.raises(TierFullError) as caught:
            runtime.optimizer(torch.optim.AdamW, runtime.attach(model).parameters(), lr=0.1)
        for part in (str(tmp_path / "z"), str(pages * PAGE_NBYTES), "bytes"):
            assert part in str(caught.value)
        after = values(model)
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_p13_every_capacity_is_refused_at_setup_or_enough(tmp_path: Path) -> None:
    """P13: a capacity that set-up accepts and that is full in the middle of training."""
    accepted = []
    for pages in range(14, 26):
        with zt.Runtime(
            **BUDGETS, nvme=tmp_path / "z", nvme_capacity=pages * PAGE_NBYTES
        ) as runtime:
            try:
                model = runtime.attach(mlp(8, 2))
                optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
            except TierFullError:
                continue
            accepted.append(pages)
            if len(accepted) < 4:
                train(model, optimizer, 2, square_loss)
    assert accepted == list(range(accepted[0], 26))


def test_p13_a_full_disk_is_refused_at_setup(small_disk: Path) -> None:
    """P13: the disk fills after hours. Here the model's states do not fit 256 KiB."""
    with zt.Runtime(device=64 * KiB, host=256 * KiB, nvme=small_disk / "z") as runtime:
        with pytest.raises(TierFullError) as caught:
            runtime.attach(mlp(64, 16))
        assert str(small_disk / "z") in str(caught.value)
        assert re.search(r"needs \d+ bytes", str(caught.value))
        assert re.search(r"\d+ bytes are free there", str(caught.value))
    with zt.Runtime(device=64 * KiB, host=256 * KiB, nvme=small_disk / "z") as runtime:
        model = runtime.attach(mlp(8, 1))
        optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        train(model, optimizer, 1, square_loss)


class Hoarder(torch.optim.SGD):
    """Keeps every gradient it ever saw, which no set-up check can foresee."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                seen = self.state[param].setdefault("seen", [])
                seen.append(param.grad.clone())
        return super().step(closure)


def test_p13_a_disk_that_fills_in_training(small_disk: Path) -> None:
    """P13: one clear error, no hang; the weights are still there."""
    with zt.Runtime(device=64 * KiB, host=256 * KiB, nvme=small_disk / "z") as runtime:
        model = runtime.attach(mlp(32, 1))
        optimizer = runtime.optimizer(Hoarder, model.parameters(), lr=0.1)
        with pytest.raises(TierFullError) as caught:
            train(model, optimizer, 100, square_loss)
        assert str(small_disk / "z") in str(caught.value)
        assert re.search(r"\d+ bytes", str(caught.value))
        assert all(torch.isfinite(value).all() for value in values(model).values())


LIMITED = """
from zinf_core.errors import TierFullError
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
with zt.Runtime(device="256KiB", host="256KiB", nvme=folder / "z") as runtime:
    try:
        runtime.attach(nn.Linear(160, 160))
        message = None
    except TierFullError as exc:
        message = str(exc)
with zt.Runtime(device="64KiB", host="256KiB", nvme=folder / "z") as runtime:
    model = runtime.attach(nn.Linear(8, 8))
    optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
report(message=message, left=sorted(p.name for p in folder.iterdir()))
"""


@pytest.mark.slow
def test_p13_a_file_size_limit(tmp_path: Path) -> None:
    """P13: EFBIG and SIGXFSZ end in an obscure writer error, or in a killed process."""
    facts = run_child(LIMITED, tmp_path)
    assert str(tmp_path / "z") in facts["message"]
    assert re.search(r"\d+ bytes", facts["message"])
    assert facts["left"] == []


LITTLE = {"device": 2 * PAGE_NBYTES, "host": 5 * PAGE_NBYTES}
"""Room for one update and little else, so that nearly everything goes through the tier."""


def _trained_on_a_faulty_tier(
    folder: Path, plan: FaultPlan
) -> tuple[FaultyTier, list[str], dict[str, torch.Tensor]]:
    """Train; return the tier, the error, and the weights read back after it."""
    torch.manual_seed(0)
    with zt.Runtime(**LITTLE, nvme=folder / "z") as runtime:
        tier = FaultyTier(runtime.pager.tiers["nvme"], plan=plan)
        runtime.pager.tiers["nvme"] = tier
        errors = []
        model = mlp(8, 2)
        try:
            runtime.attach(model)
            optimizer = runtime.optimizer(torch.optim.Adam, model.parameters(), lr=0.1)
            train(model, optimizer, 2, square_loss)
        except TierError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
        try:  # reading makes room, which may be where the planned call is
            weights = values(model)
        except TierError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
            weights = values(model)
        assert all(torch.isfinite(value).all() for value in weights.values())
        usage = runtime.usage()
        assert usage["host"].peak_nbytes <= LITTLE["host"]
    return tier, errors, weights


@pytest.mark.slow
@pytest.mark.parametrize("phase", Phase)
def test_p13_every_write_fails_once(tmp_path: Path, phase: Phase) -> None:
    """P13: a write that fails while swapping hangs, is lost, or takes the weights with it."""
    tier, errors, _ = _trained_on_a_faulty_tier(tmp_path, FaultPlan())
    num_writes = tier.calls.count(Operation.WRITE)
    assert errors == []
    assert num_writes >= 12
    for call in range(num_writes):
        fault = Fault(call=call, operation=Operation.WRITE, phase=phase, error=no_space)
        tier, errors, _ = _trained_on_a_faulty_tier(tmp_path, FaultPlan(faults=(fault,)))
        if tier.fired and call < num_writes - 6:
            assert len(errors) == 1, call
        for error in errors:
            assert "TierFullError" in error
            assert "planned failure of write_from of " in error


@pytest.mark.slow
@pytest.mark.parametrize("phase", Phase)
def test_p13_every_read_fails_once(tmp_path: Path, phase: Phase) -> None:
    """P13: the same for reads, with an I/O error; one that was ahead of its use is done again."""
    tier, _, expected = _trained_on_a_faulty_tier(tmp_path, FaultPlan())
    num_reads = tier.calls.count(Operation.READ)
    assert num_reads >= 8
    num_repeated = 0
    for call in range(num_reads):
        fault = Fault(call=call, operation=Operation.READ, phase=phase, error=io_error)
        tier, errors, weights = _trained_on_a_faulty_tier(tmp_path, FaultPlan(faults=(fault,)))
        assert len(tier.fired) == 1, call
        for error in errors:
            assert "TransferError" in error
            assert "planned failure of read_into of " in error
        if not errors:
            num_repeated += 1
            assert all(torch.equal(weights[name], expected[name]) for name in expected), call
    assert num_repeated < num_reads / 2
