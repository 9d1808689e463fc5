"""The conformance kit for a tier named by its URL, without a test file::

    pytest --pyargs zinf_core.testing.kit --zinf-tier "nvme://{folder}"

``{folder}`` becomes a new folder for each test; a persistent tier needs it, so that no test finds
what another one stored. Runs `TierSuite`, the state machine and, if the tier is persistent, the
crash test. Collects nothing without ``--zinf-tier``.
"""

from __future__ import annotations

import urllib.parse
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import ConfigError
from zinf_core.registry import open_tier
from zinf_core.testing.crash_model import FlushScope
from zinf_core.testing.crash_orders import SuiteReference
from zinf_core.testing.stateful import machine_for
from zinf_core.testing.suite import TierSuite
from zinf_core.tier import Tier
from zinf_core.units import parse_nbytes

_PLACE = "{folder}"


class TestTier(TierSuite):
    """The laws, on the tier that the options name."""

    url = ""
    """Address of the tier, with ``{folder}`` in it."""
    capacity_nbytes = 0
    """Bytes it is opened with."""

    @pytest.fixture(autouse=True)
    def _options(self, pytestconfig: pytest.Config) -> None:
        self.adopt(pytestconfig)

    def adopt(self, config: pytest.Config) -> None:
        """Take over what the command line says. Raises ConfigError for a size that is none."""
        self.url = config.getoption("--zinf-tier")
        self.capacity_nbytes = parse_nbytes(
            config.getoption("--zinf-capacity"), what="--zinf-capacity"
        )
        self.num_kills = config.getoption("--zinf-kills")
        self.flush_scope = FlushScope(config.getoption("--zinf-flush"))

    def open_tier(self, folder: Path) -> Tier:
        """Open the tier at the URL. Raises ConfigError if the kit cannot check it this way."""
        url = self.url.replace(_PLACE, urllib.parse.quote(str(folder)))
        tier = open_tier(url, capacity_nbytes=self.capacity_nbytes)
        capabilities = tier.capabilities
        problem = ""
        if capabilities.persistent and url == self.url:
            problem = (
                f"is persistent: write {_PLACE} where its folder or prefix stands, so that each "
                "test begins with an empty one"
            )
        elif not capabilities.takes(MemorySpace.HOST):
            problem = (
                "takes no host memory: write a test file with a subclass of TierSuite whose "
                "make_buffer, fill and contents use the memory it takes"
            )
        if problem:
            tier.close()
            raise ConfigError(f"the tier at {self.url} {problem}")
        return tier

    def in_child(self) -> SuiteReference:
        """Refer to this class, with the URL and the capacity."""
        return SuiteReference.of(
            type(self), settings={"url": self.url, "capacity_nbytes": self.capacity_nbytes}
        )


@pytest.mark.zinf_machine
def test_state_machine(pytestconfig: pytest.Config) -> None:
    """Hypothesis finds no sequence of calls after which the tier is not a dict."""
    suite = TestTier()
    suite.adopt(pytestconfig)
    machine = machine_for(suite.open_tier)
    run_state_machine_as_test(
        machine,
        settings=settings(
            machine.TestCase.settings,
            max_examples=pytestconfig.getoption("--zinf-examples"),
            stateful_step_count=40,
            derandomize=True,
        ),
    )
