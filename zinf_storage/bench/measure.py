"""Measure: one tier from its URL to its report, in a scratch place that is gone afterwards."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from zinf_core.buffers import BufferAllocator
from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.errors import ConfigError
from zinf_core.registry import TierUrl, open_tier
from zinf_core.tier import Tier
from zinf_core.units import MiB, format_nbytes
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator
from zinf_storage.bench import reference, tuning
from zinf_storage.bench.disk import IN_MEMORY, DiskWatch, Verdict
from zinf_storage.bench.fio import Fio
from zinf_storage.bench.grid import MAX_IN_FLIGHT_NBYTES, Effort, Schedule, plan_schedule
from zinf_storage.bench.report import CellResult, Reference, TierReport
from zinf_storage.bench.scratch import (
    Scratch,
    require_capacity,
    require_disk,
    require_memory,
    scratch_of,
)
from zinf_storage.bench.session import Session, Steering
from zinf_storage.bench.summary import DEVICE_SCHEME
from zinf_storage.bench.workload import Workload, allocate_noise
from zinf_storage.cuda import CudaDevice, cuda_problem
from zinf_storage.probe import IoPath, probe_path

_FIO_FILE_NBYTES: Final = 512 * MiB
_ROOM_FACTOR: Final = 2
"""Data, what is written besides it, and the fresh room that a tier without overwriting needs."""
_TUNABLE: Final = frozenset({Verdict.DISK, Verdict.UNVERIFIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to measure."""

    url: str
    effort: Effort
    data_nbytes: int
    """See `rounded_data`."""
    seconds: float | None = None
    """For each of the parts: grid, fio, tuning. None for what the effort asks."""
    fio: Fio | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the tier's files lie."""

    paths: tuple[Path, ...]
    filesystem: str
    """Empty without files."""
    notes: tuple[str, ...]


def schedule_of(task: Task, *, align: int = 1) -> Schedule:
    """Return the grid of `task` on a tier whose transfers align to `align` bytes."""
    return plan_schedule(
        task.effort, data_nbytes=task.data_nbytes, align=align, seconds=task.seconds
    )


def num_measurements(task: Task) -> int:
    """Return how often a measurement is begun at most, for a progress bar."""
    schedule = schedule_of(task)
    count = len(schedule.cells) * schedule.num_rounds
    if task.fio is not None:
        count += reference.num_measurements(task.effort)
    if TierUrl.parse(task.url).scheme == tuning.SCHEME:
        count += tuning.num_measurements(task.effort)
    return count


def measure_tier(task: Task, steering: Steering) -> TierReport:
    """Measure one tier and remove every trace of it. Blocks.

    Raises ConfigError, BudgetError (no room) and what the tier raises.
    """
    with scratch_of(task.url) as scratch:
        require_disk(scratch, task.data_nbytes * _ROOM_FACTOR, url=task.url)
        steering.describe(f"{task.url}: writing test data")
        tier = open_tier(scratch.url)
        try:
            report = _measure_open(tier, task, scratch, steering)
        finally:
            tier.close()
    return _with_tuning(report, task, steering)


def _measure_open(tier: Tier, task: Task, scratch: Scratch, steering: Steering) -> TierReport:
    schedule = _require_measurable(tier, task)
    capabilities = tier.capabilities
    arena_nbytes = min(MAX_IN_FLIGHT_NBYTES, task.data_nbytes // 4)
    workload = Workload(
        tier,
        data_nbytes=task.data_nbytes,
        arena=allocate_noise(arena_nbytes, _allocator_for(capabilities)),
        token=secrets.token_hex(4),
    )
    try:
        workload.fill(steering.should_stop)
        place = _place_of(scratch)
        watch = DiskWatch(place.paths, filesystem=place.filesystem)
        session = Session(tier, workload, watch=watch, steering=steering)
        cells, is_complete = session.run(schedule)
        references = _compared(session, cells, task, place, steering)
    finally:
        workload.remove()
    return TierReport(
        url=task.url,
        name=tier.name,
        scheme=TierUrl.parse(task.url).scheme,
        path_taken=str(getattr(tier, "path_taken", "unknown")),
        filesystem=place.filesystem,
        notes=place.notes,
        data_nbytes=task.data_nbytes,
        preferred_io_nbytes=capabilities.preferred_io_nbytes,
        max_in_flight=capabilities.max_in_flight,
        sample_s=schedule.sample_s,
        cells=cells,
        references=references,
        tuning=None,
        is_complete=is_complete,
    )


def _require_measurable(tier: Tier, task: Task) -> Schedule:
    """Return the grid for `tier`. Raises ConfigError or BudgetError if it cannot be measured."""
    capabilities = tier.capabilities
    if not capabilities.takes(MemorySpace.HOST):
        raise ConfigError(f"{task.url}: the tier takes no host memory, so it cannot be measured")
    align = math.lcm(capabilities.offset_align, capabilities.length_align)
    schedule = schedule_of(task, align=align)
    if not schedule.cells:
        raise ConfigError(
            f"{task.url}: no request that the tier takes fits {task.data_nbytes} bytes "
            f"({format_nbytes(task.data_nbytes)}) of data; raise --size"
        )
    require_capacity(tier, task.data_nbytes * _ROOM_FACTOR, url=task.url)
    _require_host_memory(tier, task)
    return schedule


def _require_host_memory(tier: Tier, task: Task) -> None:
    """Raise BudgetError unless the machine has the memory for the buffers, and for the data if
    that is where the tier keeps it."""
    nbytes = task.data_nbytes // 4
    capabilities = tier.capabilities
    is_memory = capabilities.mappable and not capabilities.persistent
    if is_memory and TierUrl.parse(task.url).scheme != DEVICE_SCHEME:
        nbytes += task.data_nbytes * _ROOM_FACTOR
    require_memory(nbytes, url=task.url)


def _allocator_for(capabilities: TierCapabilities) -> BufferAllocator:
    """Return pinned memory for tiers that a device copies for, so that it copies at full rate."""
    if capabilities.takes(MemorySpace.DEVICE) and cuda_problem() is None:
        return PinnedAllocator(CudaDevice(0))
    return PageAlignedAllocator()


def _place_of(scratch: Scratch) -> _Place:
    """Return where the opened tier keeps its files, and what its file systems are like."""
    paths = scratch.local_paths()
    if not paths:
        return _Place(paths=(), filesystem="", notes=())
    probes = [probe_path(folder) for folder in scratch.drives()]
    notes = [
        f"{probe.filesystem} refuses O_DIRECT ({probe.refusal}): bytes pass through the page cache"
        for probe in probes
        if probe.io_path is IoPath.POSIX_BUFFERED
    ]
    types = sorted({probe.filesystem for probe in probes})
    memory = [kind for kind in types if kind in IN_MEMORY]
    notes += [f"{kind} is memory, not a drive: its rates are not reported" for kind in memory]
    return _Place(paths=paths, filesystem=(memory or types)[0], notes=tuple(notes))


def _compared(
    session: Session,
    cells: tuple[CellResult, ...],
    task: Task,
    place: _Place,
    steering: Steering,
) -> tuple[Reference, ...]:
    """Return the comparison with fio, where there is a drive and fio."""
    wanted = reference.reference_cells([cell for cell in cells if cell.verdict is Verdict.DISK])
    if task.fio is None or not wanted or steering.should_stop():
        return ()
    folder = place.paths[0] if place.paths[0].is_dir() else place.paths[0].parent
    plan = reference.FioPlan(
        fio=task.fio,
        folder=folder,
        file_nbytes=min(_FIO_FILE_NBYTES, task.data_nbytes // 2),
        effort=task.effort,
        seconds=task.seconds,
    )
    return reference.compare(session, wanted, plan, steering)


def _with_tuning(report: TierReport, task: Task, steering: Steering) -> TierReport:
    """Return `report` with the best options of the tier, if it has options that are tuned."""
    has_drive = any(cell.verdict in _TUNABLE for cell in report.cells)
    if report.scheme != tuning.SCHEME or not has_drive or steering.should_stop():
        return report
    tuner = tuning.Tuner(
        task.url,
        data_nbytes=task.data_nbytes,
        filesystem=report.filesystem,
        effort=task.effort,
        steering=steering,
    )
    found = tuner.tune(seconds=task.seconds)
    return replace(report, tuning=found, is_complete=report.is_complete and found is not None)
