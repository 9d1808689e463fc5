"""Session: all cells of one tier, in rounds, so that a machine that drifts drifts under all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zinf_core.tier import Tier
from zinf_storage.bench.disk import DiskWatch, Judgement, Verdict
from zinf_storage.bench.figures import Spread, percentile
from zinf_storage.bench.grid import Cell, Schedule, rotated
from zinf_storage.bench.report import CellResult
from zinf_storage.bench.sample import Sample, Sampler
from zinf_storage.bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """What runs beside a measurement."""

    describe: Callable[[str], None]
    """Called with what goes on, when it is no measurement."""
    advance: Callable[[str], None]
    """Called before each measurement, with what is measured."""
    should_stop: Callable[[], bool]
    """Whether to end with what there is."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Samples of one cell."""

    reported: list[tuple[Sample, Judgement]] = field(default_factory=list)
    refused: list[Judgement] = field(default_factory=list)


class Session:
    """Measures cells on one filled tier. Not thread-safe."""

    def __init__(
        self, tier: Tier, workload: Workload, *, watch: DiskWatch, steering: Steering
    ) -> None:
        """Use `workload`, which is filled, on `tier`; `watch` tells who moves the bytes."""
        self._workload = workload
        self._watch = watch
        self._steering = steering
        self._sampler = Sampler(tier, should_stop=steering.should_stop)

    def run(self, schedule: Schedule) -> tuple[tuple[CellResult, ...], bool]:
        """Measure every cell `num_rounds` times; return the results in the order of the schedule,
        and whether nothing is missing. Blocks. Raises what the tier raises."""
        found: dict[Cell, _Found] = {cell: _Found() for cell in schedule.cells}
        ends_s = time.perf_counter() + schedule.limit_s
        is_complete = True
        for index in range(schedule.num_rounds):
            for cell in rotated(schedule.cells, index, schedule.num_rounds):
                if self._steering.should_stop() or time.perf_counter() > ends_s:
                    is_complete = False
                    break
                self._steering.advance(str(cell))
                self._add(found[cell], cell, schedule.sample_s)
        results = [_result(cell, cell_found) for cell, cell_found in found.items()]
        return tuple(result for result in results if result is not None), is_complete

    def measure(self, cell: Cell, seconds: float) -> tuple[Sample, Judgement]:
        """Measure one cell once. Blocks. Raises what the tier raises."""
        slots = self._workload.slots(cell)
        with self._workload.requests(cell) as requests:
            before = self._watch.look()
            sample = self._sampler.measure(requests, slots, seconds=seconds)
            after = self._watch.look()
        return sample, self._watch.judge(before, after, sample)

    def _add(self, found: _Found, cell: Cell, seconds: float) -> None:
        sample, judgement = self.measure(cell, seconds)
        if not sample.latencies_s:
            return
        if judgement.verdict is Verdict.CACHED:
            found.refused.append(judgement)
        else:
            found.reported.append((sample, judgement))


def best_cell(results: Sequence[CellResult]) -> CellResult | None:
    """Return the fastest of `results` that has a rate, None if none has."""
    fitting = [result for result in results if result.bytes_per_s]
    return max(fitting, key=_median, default=None)


def _median(result: CellResult) -> float:
    return result.bytes_per_s.median if result.bytes_per_s else -math.inf


def _result(cell: Cell, found: _Found) -> CellResult | None:
    """Return the figures of one cell, None if it was never measured."""
    if not found.reported and not found.refused:
        return None
    judgement = found.reported[-1][1] if found.reported else found.refused[-1]
    samples = [sample for sample, _ in found.reported]
    return CellResult(
        cell=cell,
        verdict=judgement.verdict,
        reason=judgement.reason,
        num_refused=len(found.refused),
        bytes_per_s=_spread([sample.bytes_per_s for sample in samples]),
        p50_s=_spread([percentile(sample.latencies_s, 0.5) for sample in samples]),
        p99_s=_spread([percentile(sample.latencies_s, 0.99) for sample in samples]),
        cpu_share=_spread([sample.cpu_share for sample in samples]),
    )


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values else None
