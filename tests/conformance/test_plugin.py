"""The plugin and the kit for a tier without a test file, each run in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = """
import sys
import zinf_core.testing.plugin
heavy = {"numpy", "hypothesis", "msgpack", "zinf_core.testing.suite", "zinf_core.tier"}
print(sorted(heavy & set(sys.modules)))
"""
OWN_FILE = """
import pytest
from zinf_core.testing import DictTier, TierSuite

class TestOwn(TierSuite):
    def open_tier(self, folder):
        return DictTier()
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in an empty project, with warnings as errors and strict markers."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "error", "--strict-markers"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run_kit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_pytest(folder, "--pyargs", "zinf_core.testing.kit", *arguments)


@pytest.mark.slow
def test_plugin_is_light() -> None:
    """Catches every pytest run of every project paying for numpy, or failing without hypothesis."""
    found = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_own_suite_needs_no_settings(tmp_path: Path) -> None:
    """Catches markers of the kit that a project with strict markers would have to declare."""
    (tmp_path / "test_own.py").write_text(OWN_FILE)
    result = run_pytest(tmp_path, "-k", "law_01 or kills")
    assert result.returncode == 0, result.stdout
    assert "12 passed, 3 skipped" in result.stdout


@pytest.mark.slow
def test_without_a_tier_nothing_is_collected(tmp_path: Path) -> None:
    """Catches failures, or silence, where nobody said which tier to check."""
    result = run_kit(tmp_path)
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "--zinf-tier URL" in result.stdout


@pytest.mark.slow
def test_kit_checks_the_tier_at_a_url(tmp_path: Path) -> None:
    """Catches options that do not reach the tier, and a machine that is not run."""
    result = run_kit(
        tmp_path, "--zinf-tier", "host://", "--zinf-capacity", "16MiB", "--zinf-examples", "5",
        "-k", "law_01 or full_tier or machine",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "14 passed, 2 skipped" in result.stdout
    assert "has no peek" in result.stdout


@pytest.mark.slow
@pytest.mark.multiproc
def test_kit_gives_each_test_a_folder(tmp_path: Path) -> None:
    """Catches persistent tiers shared by two tests, or by a child and another parent."""
    url = "nvme://{folder}?segment_nbytes=1MiB"
    result = run_kit(
        tmp_path, "--zinf-tier", url, "--zinf-kills", "2", "-k", "kills or look_alikes or keys"
    )
    assert result.returncode == 0, result.stdout
    assert "6 passed" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zinf-tier", "nvme://{place}/always"], "write {folder} where its folder"),
        (["--zinf-tier", "nowhere://{folder}"], "no installed package offers nowhere://"),
        (["--zinf-tier", "host://", "--zinf-capacity", "some"], "--zinf-capacity = 'some'"),
    ],
)
def test_kit_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    """Catches a tier that seems broken because the command line is."""
    arguments = [argument.replace("{place}", str(tmp_path)) for argument in arguments]
    result = run_kit(tmp_path, *arguments, "-k", "look_alikes")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert message in result.stdout
