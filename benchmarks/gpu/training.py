"""Section train: a small transformer on the device, bit by bit against plain PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu.lab import Lab, open_lab
from gpu.models import batch, build
from gpu.oracle import ACCUMULATION, MAX_NORM, NUM_LAYERS, OPTIONS, Trace, train_plain
from gpu.report import CheckFailed, Finding, Report, Skipped
from gpu.settings import Settings
from gpu.staged import StagedEngine
from torch import nn

import zinf_torch as zt
from zinf_core.units import PAGE_NBYTES, align_up, format_nbytes
from zinf_storage.nvme import Engine, NvmeOptions, NvmeTier
from zinf_torch.budget import device_requirement
from zinf_torch.homes import Homes

_DTYPES = (torch.float32, torch.bfloat16)
_STATES = ("parameters", "gradients", "optimizer_states")
_STATE_NBYTES = 20
"""Bytes of all states of one parameter at most: bf16 with masters, gradients in both types."""
_MAX_STATES = 6


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Where the states live."""

    name: str
    homes: dict[str, str]
    """Home by state; ``"drive"`` is a tier this section opens, ``"nvme"`` the runtime's own."""
    staged: bool = False
    """The drive is reached by this script's engine, which takes device memory."""
    gds: bool = False
    """The runtime's own tier is to be reached through kvikio."""
    in_quick: bool = True
    """Trained in bf16 with --quick, too."""


_VARIANTS = (
    Variant(name="all on device", homes=dict.fromkeys(_STATES, "device")),
    Variant(name="all on host", homes=dict.fromkeys(_STATES, "host"), in_quick=False),
    Variant(name="all on nvme, posix", homes=dict.fromkeys(_STATES, "drive"), in_quick=False),
    Variant(
        name="parameters on nvme (posix), gradients on device, states on host",
        homes=dict(zip(_STATES, ("drive", "device", "host"), strict=True)),
        in_quick=False,
    ),
    Variant(
        name="all on nvme, device memory through this script's engine",
        homes=dict.fromkeys(_STATES, "drive"),
        staged=True,
    ),
    Variant(name="all on nvme, gds", homes=dict.fromkeys(_STATES, "nvme"), gds=True),
)


def run(report: Report, settings: Settings) -> None:
    """Train every variant in both types."""
    torch.use_deterministic_algorithms(mode=True)
    torch.set_float32_matmul_precision("highest")
    num_steps = 2 if settings.quick else 4
    lab = open_lab(simulate=settings.simulate)

    @cache
    def oracle(dtype: torch.dtype) -> Trace:
        return train_plain(dtype, lab.torch_device, num_steps=num_steps)

    try:
        for variant, dtype in _plan(quick=settings.quick):
            if variant.gds and dtype is torch.float32:
                _inform(report, oracle, lab, num_steps=num_steps)
            with report.item(f"{variant.name}, {_short(dtype)}") as finding:
                if variant.gds and settings.no_kvikio:
                    raise Skipped(settings.no_kvikio)
                found = _train(variant, dtype, lab, settings, num_steps=num_steps, finding=finding)
                _compare(found, oracle(dtype), finding)
    finally:
        lab.close()


def _plan(*, quick: bool) -> Iterator[tuple[Variant, torch.dtype]]:
    """Iterate over what is trained, the variant that may hang last."""
    for gds in (False, True):
        for dtype in _DTYPES:
            for variant in _VARIANTS:
                thinned = quick and dtype is torch.bfloat16 and not variant.in_quick
                if variant.gds == gds and not thinned:
                    yield variant, dtype


def _train(
    variant: Variant,
    dtype: torch.dtype,
    lab: Lab,
    settings: Settings,
    *,
    num_steps: int,
    finding: Finding,
) -> Trace:
    """Train under zinf. Raises CheckFailed if a budget was not kept."""
    if not lab.is_simulated:
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=settings.folder)))
        runtime = stack.enter_context(zt.Runtime(**_settings(variant, dtype, lab, place, stack)))
        paths = runtime.paths()
        if variant.gds and not paths["nvme"].startswith("gds"):
            raise Skipped(f"the nvme tier went {paths['nvme']}: kvikio cannot be used")
        model = runtime.attach(build(NUM_LAYERS, dtype))
        optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), **OPTIONS)
        trace = Trace()
        for step in range(num_steps):
            _step(model, optimizer, step, lab.torch_device, trace)
        usage = runtime.usage()
    finding.data["paths"] = paths
    finding.data["budgets"] = {name: pool.budget_nbytes for name, pool in usage.items()}
    finding.data["peaks"] = {name: pool.peak_nbytes for name, pool in usage.items()}
    if not lab.is_simulated:
        finding.data["torch_peak_nbytes"] = torch.cuda.max_memory_allocated()
    for name, pool in usage.items():
        if pool.peak_nbytes > pool.budget_nbytes:
            raise CheckFailed(f"{name}: {pool.peak_nbytes} bytes over {pool.budget_nbytes}")
    return trace


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    device: torch.device,
    trace: Trace,
) -> None:
    """Do one step, as in any loop of plain PyTorch."""
    for micro in range(ACCUMULATION):
        loss = model(batch(step * ACCUMULATION + micro, device)) / ACCUMULATION
        loss.backward()
        trace.losses.append(loss.item())
    trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
    optimizer.step()
    optimizer.zero_grad()
    trace.weights.append({n: p.detach().clone().cpu() for n, p in model.named_parameters()})


def _settings(
    variant: Variant, dtype: torch.dtype, lab: Lab, place: Path, stack: ExitStack
) -> dict[str, Any]:
    """Return the settings of the runtime: budgets that hold what lives there and little more."""
    homes = variant.homes
    names = ("device", "host", "drive", "nvme")
    model = build(NUM_LAYERS, dtype)
    largest = max(param.numel() for param in model.parameters())
    at_home = sum(
        _STATE_NBYTES * param.numel() + _MAX_STATES * PAGE_NBYTES for param in model.parameters()
    )
    working = {
        "device": device_requirement(model, Homes.of(**homes, tiers=names)).nbytes,
        "host": 18 * largest,
    }
    found: dict[str, Any] = {**homes, "compute": lab.compute}
    for name, nbytes in working.items():
        found[name] = align_up(2 * nbytes + (at_home if name in homes.values() else 0))
    if "drive" in homes.values():
        engine = StagedEngine(device=lab.device) if variant.staged else None
        tier = NvmeTier.open(
            place / "drive", options=NvmeOptions(engine=Engine.POSIX), engine=engine
        )
        stack.callback(tier.close)
        found["tiers"] = {"drive": tier}
    if "nvme" in homes.values():
        found["nvme"] = place / "nvme"
    return found


def _compare(found: Trace, expected: Trace, finding: Finding) -> None:
    """Raise CheckFailed, naming the first difference, unless all bits are equal."""
    for what in ("losses", "norms"):
        pairs = zip(getattr(found, what), getattr(expected, what), strict=True)
        for index, (ours, plain) in enumerate(pairs):
            if ours != plain:
                raise CheckFailed(f"{what}[{index}]: {ours!r}, plain PyTorch {plain!r}")
    count = 0
    for step, (ours, plain) in enumerate(zip(found.weights, expected.weights, strict=True)):
        for name, value in plain.items():
            count += 1
            if not _same_bits(ours[name], value):
                far = (ours[name].double() - value.double()).abs().max().item()
                raise CheckFailed(f"{name} differs after step {step + 1}, by {far:.3g} at most")
    peaks, budgets = finding.data["peaks"], finding.data["budgets"]
    room = ", ".join(f"{n} {format_nbytes(peaks[n])} of {format_nbytes(budgets[n])}" for n in peaks)
    finding.text = (
        f"{len(found.losses)} losses, {len(found.norms)} norms, {count} weights equal; peak {room}"
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _inform(
    report: Report, oracle: Callable[[torch.dtype], Trace], lab: Lab, *, num_steps: int
) -> None:
    """Say what plain PyTorch's other ways give; nobody promises that it is the same."""
    for dtype in _DTYPES:
        name = f"plain PyTorch otherwise, {_short(dtype)}"
        with report.item(name, is_check=False) as finding:
            twin = oracle(dtype)
            other = train_plain(dtype, lab.torch_device, num_steps=num_steps, on_device=True)
            last = list(zip(twin.weights[-1].values(), other.weights[-1].values(), strict=True))
            same = all(_same_bits(a, b) for a, b in last)
            far = max((a.double() - b.double()).abs().max().item() for a, b in last)
            norms = twin.foreach_norms == twin.norms
            finding.data = {"adamw": same, "norms": norms, "largest_difference": far}
            finding.text = (
                f"AdamW on the device gives {_compared(same)} the CPU, weights at most {far:.3g} "
                f"apart; norms of a list of gradients have {_compared(norms)} those of each tensor"
            )


def _compared(same: bool) -> str:
    return "the same bits as" if same else "other bits than"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
