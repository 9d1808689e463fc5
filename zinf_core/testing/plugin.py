"""Pytest plugin of the conformance kit; imports nothing but pytest until a test asks for it.

With it ``pytest --pyargs zinf_core.testing.kit --zinf-tier URL`` proves the tier at a URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

_KIT: Final = Path(__file__).with_name("kit.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say which tier ``zinf_core.testing.kit`` checks."""
    group = parser.getgroup("zinf", "conformance kit for tiers (zinf_core.testing.kit)")
    group.addoption(
        "--zinf-tier",
        metavar="URL",
        help="tier to check; {folder} in it stands for a new folder per test",
    )
    group.addoption(
        "--zinf-capacity",
        metavar="SIZE",
        default="64MiB",
        help="room the tier is opened with, at least 16MiB (default: %(default)s)",
    )
    group.addoption(
        "--zinf-kills",
        metavar="N",
        type=int,
        default=8,
        help="processes that are killed while they use a persistent tier (default: %(default)s)",
    )
    group.addoption(
        "--zinf-examples",
        metavar="N",
        type=int,
        default=25,
        help="sequences of calls the state machine tries (default: %(default)s)",
    )
    group.addoption(
        "--zinf-flush",
        choices=("tier", "key"),
        default="tier",
        help="what a flush commits: the whole tier at once, or each key (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the kit's markers."""
    config.addinivalue_line("markers", "zinf_crash: starts processes and kills them")
    config.addinivalue_line("markers", "zinf_machine: a search by Hypothesis, of seconds")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Collect the kit's module only where a tier is given."""
    if module_path != _KIT or parent.config.getoption("--zinf-tier"):
        return None
    module: pytest.Module = _WithoutTier.from_parent(parent, path=module_path)
    return module


class _WithoutTier(pytest.Module):
    """The kit's module when nobody says which tier to check."""

    def collect(self) -> Sequence[pytest.Item | pytest.Collector]:
        """Skip the module."""
        pytest.skip("say which tier to check: --zinf-tier URL", allow_module_level=True)
