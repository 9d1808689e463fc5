"""Section kit: the conformance kit on device memory, registered memory and the drive."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from gpu.lab import Lab, open_lab
from gpu.plain_kit import PlainHooks, plain_failures
from gpu.report import CheckFailed, Finding, Report, Skipped
from gpu.rigs import Rig, rigs
from gpu.settings import Settings

from zinf_core.buffers import Buffer
from zinf_core.errors import ConfigError
from zinf_core.keys import TensorKey
from zinf_core.testing.faults import Operation
from zinf_core.tier import Tier

_NEEDED = ("pytest", "hypothesis")
_MACHINES = ("DeviceTier, device buffers", "NvmeTier over this script's engine, mixed buffers")
_MIN_LEFT_S = 3.0
_MAX_SHOWN = 6
_QUICK_LAWS = ("test_law_01", "test_law_03_side", "test_law_06", "test_law_09")


def run(report: Report, settings: Settings) -> None:
    """Check every rig, then look for a sequence of calls that breaks two of them."""
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(settings.folder)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    lab = open_lab(simulate=settings.simulate)
    try:
        if missing:
            report.note(
                "kit",
                f"{' and '.join(missing)} not installed: a few checks of this script instead of "
                'the kit; pip install "zinf[testing]"',
            )
        _warm_up(lab)
        for rig in rigs(lab):
            with report.item(rig.name) as finding:
                if rig.needs_kvikio and settings.no_kvikio:
                    raise Skipped(settings.no_kvikio)
                with tempfile.TemporaryDirectory(dir=settings.folder) as place:
                    _check(rig, Path(place), report, finding, settings, missing=bool(missing))
            if rig.name in _MACHINES and not missing and not settings.quick:
                with report.item(f"state machine: {rig.name}") as finding:
                    _search(rig, finding)
    finally:
        lab.close()


def _check(
    rig: Rig, place: Path, report: Report, finding: Finding, settings: Settings, *, missing: bool
) -> None:
    path_taken = _path_taken(rig, place / "probe")
    if missing:
        failures, num_checks = plain_failures(PlainHooks(rig), place), 1
    else:
        failures, num_checks = _laws(rig, place, report, settings)
    finding.data = {"failures": failures, "num_checks": num_checks, "path_taken": path_taken}
    if failures:
        laws = {name.partition("[")[0]: text for name, text in reversed(failures.items())}
        shown = [f"{name}: {text}" for name, text in sorted(laws.items())[:_MAX_SHOWN]]
        raise CheckFailed(
            f"{len(laws)} of {num_checks} checks fail, path {path_taken}: {'; '.join(shown)}"
            + ("; ..." if len(laws) > _MAX_SHOWN else "")
        )
    finding.text = f"{num_checks} checks; path {path_taken}"


def _path_taken(rig: Rig, folder: Path) -> str:
    """Open the tier once. Raises Skipped if it cannot be used here."""
    folder.mkdir()
    try:
        tier = rig.open(folder)
    except ConfigError as exc:
        raise Skipped(str(exc)) from exc
    try:
        return str(getattr(tier, "path_taken", "-"))
    finally:
        tier.close()


def _laws(rig: Rig, place: Path, report: Report, settings: Settings) -> tuple[dict[str, str], int]:
    """Return the failed laws and the number of checks, one law at a time."""
    from zinf_core.testing import failures_of  # noqa: PLC0415 - needs pytest

    suite = _suite(rig)
    names = [name for name in dir(suite) if name.startswith("test_")]
    if settings.quick:
        names = [name for name in names if name.startswith(_QUICK_LAWS)]
    failures: dict[str, str] = {}
    for number, name in enumerate(names):
        if report.left_s < _MIN_LEFT_S:
            failures["time"] = f"ran out before {name}"
            break
        report.at(f"{rig.name}: {name}")
        failures |= failures_of(suite, place / str(number), only=name)
    return failures, len(names)


def _suite(rig: Rig) -> Any:
    from zinf_core.testing import TierSuite  # noqa: PLC0415 - needs pytest

    class RigSuite(TierSuite):
        """The kit's checks on one rig."""

        timeout_s = 20.0

        def open_tier(self, folder: Path) -> Tier:
            return rig.open(folder)

        def make_buffer(self, nbytes: int) -> Buffer:
            return rig.make(nbytes)

        def fill(self, buffer: Buffer, data: bytes) -> None:
            rig.lab.fill(buffer, data)

        def contents(self, buffer: Buffer) -> bytes:
            return rig.lab.contents(buffer)

        def peek(self, tier: Tier, key: TensorKey) -> bytes:
            return rig.door.peek(tier, key)

        def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
            return rig.door.poke(tier, key, data)

        def fail_next(self, tier: Tier, operation: Operation) -> bool:
            return rig.fail(operation)

    return RigSuite()


def _search(rig: Rig, finding: Finding) -> None:
    """Let Hypothesis look for calls after which the tier is not a dict."""
    from hypothesis import HealthCheck, settings  # noqa: PLC0415 - optional
    from hypothesis.stateful import run_state_machine_as_test  # noqa: PLC0415 - optional

    from zinf_core.testing import machine_for  # noqa: PLC0415 - needs hypothesis

    machine = machine_for(
        rig.open, make_buffer=rig.make, fill=rig.lab.fill, contents=rig.lab.contents
    )
    num_examples, num_calls = 12, 30
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_calls,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    finding.text = f"{num_examples} sequences of up to {num_calls} calls"


def _warm_up(lab: Lab) -> None:
    """Have the device start what it starts with its first copies: no tier is to blame for it."""
    host, device = lab.pinned(4096), lab.device.allocate(4096)
    lab.fill(device, bytes(4096))
    for dst, src in ((device, host), (host, device)):
        lab.device.copy(dst, src).wait(timeout_s=10)
    lab.contents(device)
