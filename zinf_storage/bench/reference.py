"""Reference: cells of ours and of fio, in turns on one folder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zinf_core.units import MiB
from zinf_storage.bench.disk import Verdict
from zinf_storage.bench.figures import Spread
from zinf_storage.bench.fio import Fio
from zinf_storage.bench.grid import Cell, Effort, Operation, Order
from zinf_storage.bench.report import CellResult, Reference
from zinf_storage.bench.session import Session, Steering, best_cell

SIZES: Final = (MiB, 4 * MiB)
_SAMPLE_S: Final = {Effort.QUICK: 0.5, Effort.NORMAL: 1.0, Effort.FULL: 2.0}
_NUM_ROUNDS: Final = {Effort.QUICK: 3, Effort.NORMAL: 3, Effort.FULL: 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class FioPlan:
    """How to compare with fio."""

    fio: Fio
    folder: Path
    """Existing, on the tier's drive; the file is created in a new folder inside it."""
    file_nbytes: int
    effort: Effort
    seconds: float | None
    """For all of ours together; None for what `effort` asks."""


def reference_cells(results: Sequence[CellResult]) -> tuple[Cell, ...]:
    """Return the cells to compare: sequential reads and writes of `SIZES`, each at the depth at
    which the tier was fastest. Pure."""
    cells = []
    for operation in (Operation.READ, Operation.WRITE):
        for nbytes in SIZES:
            alike = [
                result
                for result in results
                if (result.cell.operation, result.cell.order) == (operation, Order.SEQUENTIAL)
                and result.cell.nbytes == nbytes
            ]
            best = best_cell(alike)
            if best is not None:
                cells.append(best.cell)
    return tuple(cells)


def num_measurements(effort: Effort) -> int:
    """Return how often `compare` measures at most."""
    return _NUM_ROUNDS[effort] * len(SIZES) * 2


def compare(
    session: Session, cells: Sequence[Cell], plan: FioPlan, steering: Steering
) -> tuple[Reference, ...]:
    """Measure `cells` with the tier and with fio in turns. Blocks.

    A cell whose rounds were interrupted or cached is left out. Raises TransferError if fio fails.
    """
    num_rounds = _NUM_ROUNDS[plan.effort]
    seconds = _SAMPLE_S[plan.effort]
    if plan.seconds is not None:
        seconds = min(seconds, plan.seconds / max(1, num_rounds * len(cells)))
    pairs: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory(prefix=".zinf-bench-", dir=plan.folder) as folder:
        file = Path(folder) / "fio"
        if cells:
            plan.fio.prepare(file, plan.file_nbytes)
        for _ in range(num_rounds):
            for cell in cells:
                if steering.should_stop():
                    break
                steering.advance(f"{cell}, and fio")
                sample, judgement = session.measure(cell, seconds)
                theirs = plan.fio.measure(cell, file, plan.file_nbytes, seconds=seconds)
                if judgement.verdict is not Verdict.CACHED and theirs:
                    pairs[cell].append((sample.bytes_per_s, theirs))
    return tuple(_reference(cell, found) for cell, found in pairs.items() if found)


def _reference(cell: Cell, pairs: Sequence[tuple[float, float]]) -> Reference:
    return Reference(
        cell=cell,
        ours_bytes_per_s=Spread.of([ours for ours, _ in pairs]),
        fio_bytes_per_s=Spread.of([theirs for _, theirs in pairs]),
        ratio=Spread.of([ours / theirs for ours, theirs in pairs]),
    )
