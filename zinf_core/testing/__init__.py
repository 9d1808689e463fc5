"""Conformance kit for tiers; needs the extra ``zinf[testing]`` (pytest and hypothesis).

In a test file of yours, subclass `TierSuite` and call `machine_for`; their docstrings show how.
Without a file, ``pytest --pyargs zinf_core.testing.kit --zinf-tier URL`` does the same.
The tiers here are for tests of what uses tiers: `DictTier` keeps the laws in the simplest way,
`DeferredTier` shows races, `FaultyTier` fails where it is told to, and `sweep_faults` makes every
call fail once.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zinf_core.testing.buffers import host_buffer
    from zinf_core.testing.crash_model import FlushScope
    from zinf_core.testing.crash_orders import SuiteReference
    from zinf_core.testing.deferred import DeferredTier, latest, seeded_order
    from zinf_core.testing.faults import (
        Fault,
        FaultPlan,
        Operation,
        Phase,
        io_error,
        no_space,
    )
    from zinf_core.testing.faulty import FaultyTier
    from zinf_core.testing.memory import DictTier
    from zinf_core.testing.simulated import SimulatedDevice
    from zinf_core.testing.stateful import TierMachine, machine_for
    from zinf_core.testing.suite import TierSuite
    from zinf_core.testing.sweep import SweepReport, sweep_faults
    from zinf_core.testing.verdict import failures_of

__all__ = [
    "DeferredTier",
    "DictTier",
    "Fault",
    "FaultPlan",
    "FaultyTier",
    "FlushScope",
    "Operation",
    "Phase",
    "SimulatedDevice",
    "SuiteReference",
    "SweepReport",
    "TierMachine",
    "TierSuite",
    "failures_of",
    "host_buffer",
    "io_error",
    "latest",
    "machine_for",
    "no_space",
    "seeded_order",
    "sweep_faults",
]

_HOMES: Final = MappingProxyType(
    {
        "DeferredTier": "deferred",
        "DictTier": "memory",
        "Fault": "faults",
        "FaultPlan": "faults",
        "FaultyTier": "faulty",
        "FlushScope": "crash_model",
        "Operation": "faults",
        "Phase": "faults",
        "SimulatedDevice": "simulated",
        "SuiteReference": "crash_orders",
        "SweepReport": "sweep",
        "TierMachine": "stateful",
        "TierSuite": "suite",
        "failures_of": "verdict",
        "host_buffer": "buffers",
        "io_error": "faults",
        "latest": "deferred",
        "machine_for": "stateful",
        "no_space": "faults",
        "seeded_order": "deferred",
        "sweep_faults": "sweep",
    }
)
"""Module of each name. Imported when asked for: pytest loads the plugin of this package in every
run of every project that has zinf installed, which must cost nothing and need no extra."""


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
