"""Conformance kit for tiers; needs the extra ``zinf[testing]`` (pytest and hypothesis).

In a test file of yours, subclass `TierSuite` and call `machine_for`; their docstrings show how.
The tiers here are for tests of what uses tiers: `DictTier` keeps the laws in the simplest way,
`DeferredTier` shows races, `FaultyTier` fails where it is told to, and `sweep_faults` makes every
call fail once.
"""

from zinf_core.testing.buffers import host_buffer
from zinf_core.testing.deferred import DeferredTier, latest, seeded_order
from zinf_core.testing.faulty import (
    Fault,
    FaultPlan,
    FaultyTier,
    Operation,
    Phase,
    io_error,
    no_space,
)
from zinf_core.testing.memory import DictTier
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
    "Operation",
    "Phase",
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
