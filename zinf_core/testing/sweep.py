"""Fault sweep: every call of a workload fails once, and afterwards everything works again."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zinf_core.errors import TierError
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing.faults import (
    WITHOUT_COMPLETION,
    Fault,
    FaultPlan,
    Operation,
    Phase,
    stems_from_fault,
)
from zinf_core.testing.faulty import FaultyTier
from zinf_core.tier import Tier

Workload = Callable[[Tier], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep went through."""

    calls: tuple[Operation, ...]
    """Calls the workload makes when nothing fails, in order."""
    num_runs: int
    """Runs with one failing call."""
    num_raised: int
    """Runs whose workload raised the failure; the others dealt with it themselves."""


def sweep_faults(
    workload: Workload, *, open_tier: Callable[[], Tier], pools: Sequence[BufferPool] = ()
) -> SweepReport:
    """Run `workload` once per call it makes and way to fail, each time with that call failing.

    `open_tier` opens a tier that holds nothing, for one run; the sweep closes it. Ways to fail:
    at submit, at wait, and for writes at wait with the key damaged. Raises AssertionError if

    - a failure is swallowed in a workload that then raises something unrelated;
    - the workload makes other calls than before its failing one (it must be deterministic);
    - after the failure a key cannot be discarded, or usage does not return to nothing;
    - the workload, run again on the same tier, does not succeed;
    - a pool of `pools` has more bytes leased than before.
    """
    leased = [pool.usage().leased_nbytes for pool in pools]
    calls = _count_calls(workload, open_tier)
    num_raised = num_runs = 0
    for fault, what in _faults(calls):
        num_runs += 1
        tier = FaultyTier(open_tier(), plan=FaultPlan(faults=(fault,)))
        try:
            num_raised += _run_failing(workload, tier, what)
            _expect_no_leak(pools, leased, f"after {what}")
            _empty(tier, what)
            _run_again(workload, tier, what)
            _expect_no_leak(pools, leased, f"after {what} and a second run")
        finally:
            tier.close()
    return SweepReport(calls=calls, num_runs=num_runs, num_raised=num_raised)


def _count_calls(workload: Workload, open_tier: Callable[[], Tier]) -> tuple[Operation, ...]:
    tier = FaultyTier(open_tier())
    try:
        workload(tier)
        return tier.calls
    finally:
        tier.close()


def _faults(calls: Sequence[Operation]) -> Iterator[tuple[Fault, str]]:
    seen: Counter[Operation] = Counter()
    for call, operation in enumerate(calls):
        what = f"{operation.value} number {seen[operation]} (call {call})"
        seen[operation] += 1
        yield Fault(call=call, phase=Phase.SUBMIT), f"{what} failed at submit"
        if operation not in WITHOUT_COMPLETION:
            yield Fault(call=call), f"{what} failed at wait"
        if operation is Operation.WRITE:
            yield Fault(call=call, damage=True), f"{what} failed at wait with damage"


def _run_failing(workload: Workload, tier: FaultyTier, what: str) -> bool:
    """Run the workload into its fault; return whether it raised it."""
    raised = False
    try:
        workload(tier)
    except (TierError, ExceptionGroup) as exc:
        raised = True
        if not stems_from_fault(exc):
            raise AssertionError(f"{what}: the workload raised something else: {exc!r}") from exc
    if not tier.fired:
        raise AssertionError(f"{what}: the call never came; is the workload deterministic?")
    return raised


def _empty(tier: Tier, what: str) -> None:
    for key in list(tier.keys()):
        tier.discard(key)
    usage = tier.usage()
    if usage.num_keys or usage.nbytes:
        raise AssertionError(f"{what}: everything was discarded, but usage() is {usage}")


def _run_again(workload: Workload, tier: Tier, what: str) -> None:
    try:
        workload(tier)
    except Exception as exc:
        raise AssertionError(f"{what}: the second run failed as well: {exc!r}") from exc


def _expect_no_leak(pools: Sequence[BufferPool], leased: Sequence[int], when: str) -> None:
    for pool, before in zip(pools, leased, strict=True):
        if pool.usage().leased_nbytes != before:
            gc.collect()  # errors keep the frames they went through alive, in cycles
        now = pool.usage().leased_nbytes
        if now != before:
            raise AssertionError(f"{when}: pool {pool.name} leases {now} bytes, before {before}")
