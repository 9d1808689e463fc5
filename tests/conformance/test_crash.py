"""The crash test: what it draws, what it allows, that it passes sound tiers and ends its processes.

Which bugs it catches is in test_planted_bugs.py. ``--zinf-kills 500`` makes a nightly run of it.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import planted_crash
import psutil
import pytest

from zinf_core.completion import Completion
from zinf_core.errors import ConfigError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import SuiteReference, TierSuite, failures_of
from zinf_core.testing.crash import draw_kills, kill_repeatedly
from zinf_core.testing.crash_model import (
    Progress,
    Step,
    outcomes_by_key,
    states_at_flushes,
    workload,
)
from zinf_core.testing.crash_model import StepKind as Kind
from zinf_core.testing.crash_orders import Orders, Report
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.nvme import NvmeOptions, NvmeTier

A, B = (TensorKey.of(name, StateKind.PARAM) for name in "ab")
CHECK = "test_law_14_kills"


class NvmeSuite(TierSuite):
    options = NvmeOptions(segment_nbytes=4 * MiB, capacity_nbytes=16 * MiB)

    def open_tier(self, folder: Path) -> Tier:
        return NvmeTier.open(folder, options=self.options)


class VerifiedNvmeSuite(NvmeSuite):
    options = NvmeOptions(segment_nbytes=MiB, capacity_nbytes=16 * MiB, verify_reads=True)


class FailingSuite(planted_crash.CrashSuite):
    def in_child(self) -> SuiteReference:
        return SuiteReference(suite="planted_crash:NoSuchSuite")


class SilentTier(planted_crash.FileTier):
    def flush(self) -> Completion:
        planted_crash.linger(60)  # the parent kills the process long before
        return super().flush()


class SilentSuite(planted_crash.CrashSuite):
    kind = SilentTier
    timeout_s = 3.0


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("kind", [NvmeSuite, VerifiedNvmeSuite])
def test_nvme_survives_kills(
    kind: type[TierSuite], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Catches a commit that is not atomic, and an open that destroys what a kill left."""
    suite = kind()
    suite.num_kills = pytestconfig.getoption("--zinf-kills")
    assert failures_of(suite, tmp_path, only=CHECK) == {}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("kind", [planted_crash.CrashSuite, planted_crash.FolderTierSuite])
def test_sound_tiers_survive_kills(kind: type[TierSuite], tmp_path: Path) -> None:
    """Catches a model that allows less than a sound tier does, of either scope of flushes."""
    suite = kind()
    suite.num_kills = 8
    assert failures_of(suite, tmp_path, only=CHECK) == {}
    assert psutil.Process().children(recursive=True) == []


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FailingSuite, "ended before OPEN number 1.*NoSuchSuite"),
        (SilentSuite, "silent for 3.0 s before FLUSH"),
    ],
)
def test_child_that_gets_nowhere_is_reported(
    kind: type[TierSuite], message: str, tmp_path: Path
) -> None:
    """Catches a crash test that hangs, hides why its child failed, or leaves it running."""
    suite = kind()
    folder = tmp_path / "killed"
    folder.mkdir()
    with pytest.raises(AssertionError, match=r"(?s)" + message):
        kill_repeatedly(suite, folder, unit=1)
    assert psutil.Process().children(recursive=True) == []


def test_suites_in_functions_are_refused() -> None:
    """Catches a child that fails to import what only its parent has."""

    class Inner(TierSuite):
        def open_tier(self, folder: Path) -> Tier:
            raise NotADirectoryError

    with pytest.raises(ConfigError, match="level of its module"):
        Inner().in_child()


def test_suite_is_made_anew_with_settings() -> None:
    """Catches a child that works on another tier than its parent looks at."""
    reference = SuiteReference.of(NvmeSuite, settings={"num_kills": 3})
    orders = Orders(reference=reference, folder="/f", seed=7, num_steps=9, report_fd=4)
    again = Orders.from_json(orders.to_json())
    assert again == orders
    suite = again.reference.load()
    assert isinstance(suite, NvmeSuite)
    assert suite.num_kills == 3


def test_kills_meet_every_kind_of_moment() -> None:
    """Catches a draw that is not reproducible, or that never kills while a flush is in flight."""
    kills = draw_kills(1, 8)
    assert kills == draw_kills(1, 8)
    assert {kill.report for kill in kills} == set(Report) - {Report.CLOSED}
    assert len({kill.delay_s for kill in kills}) == 8


def test_workload_is_drawn_from_the_seed_and_what_is_held() -> None:
    """Catches a parent and a child that do not do the same, and steps that a tier must refuse."""
    held = {A: 100}
    steps = list(workload(3, held, unit=4096, num_steps=400))
    assert steps == list(workload(3, held, unit=4096, num_steps=400))
    assert steps != list(workload(4, held, unit=4096, num_steps=400))
    assert {step.kind for step in steps} == set(Kind)
    state = {A: bytes(100)}
    for step in steps:
        assert (step.kind is Kind.STORE) == (step.key not in state) or step.kind is Kind.FLUSH
        if step.kind is Kind.WRITE:
            assert step.offset % 4096 == 0
            assert step.offset + len(step.data) == len(state[step.key])
        step.apply(state)


STEPS = (
    Step(kind=Kind.STORE, key=A, data=b"1111"),
    Step(kind=Kind.FLUSH),
    Step(kind=Kind.WRITE, key=A, offset=2, data=b"22"),
    Step(kind=Kind.STORE, key=B, data=b"3"),
    Step(kind=Kind.FLUSH),
    Step(kind=Kind.DISCARD, key=A),
    Step(kind=Kind.FLUSH),
)


@pytest.mark.parametrize(
    ("acknowledged", "submitted", "states"),
    [
        (0, 0, [{}]),
        (0, 1, [{}, {A: b"1111"}]),
        (1, 1, [{A: b"1111"}]),
        (1, 3, [{A: b"1111"}, {A: b"1122", B: b"3"}, {B: b"3"}]),
    ],
)
def test_states_are_those_of_flushes(
    acknowledged: int, submitted: int, states: list[dict[TensorKey, bytes]]
) -> None:
    """Catches a tier that may be at a flush too early, or at none."""
    progress = Progress(num_steps=len(STEPS), num_flushes=submitted, num_acknowledged=acknowledged)
    assert states_at_flushes({}, STEPS, progress) == states


def test_keys_are_at_the_flush_or_later() -> None:
    """Catches an outcome that is allowed although the flush ruled it out, or the other way."""
    for num_steps, num_acknowledged in itertools.product((2, 4, 6), (0, 1)):
        progress = Progress(num_steps=num_steps, num_flushes=2, num_acknowledged=num_acknowledged)
        found = outcomes_by_key({}, STEPS, progress)
        before = [None, b"1111"] if num_acknowledged == 0 else [b"1111"]
        later = {2: [], 4: [b"1122"], 6: [b"1122", None]}[num_steps]
        assert found[A].versions == [*before, *later]
        assert found[A].allows(b"zzzz") == (num_acknowledged == 0)
        assert not found[A].allows(b"zz")
        assert (B in found) == (num_steps > 2)
