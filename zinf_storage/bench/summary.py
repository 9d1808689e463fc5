"""Summary: what is best on a measured tier, in numbers and for the hardware profile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zinf_storage.bench.figures import smallest_near_best
from zinf_storage.bench.grid import Cell, Operation, Order
from zinf_storage.bench.report import CellResult, Report, TierReport
from zinf_storage.profile import BestRequest, HardwareProfile

DEVICE_SCHEME: Final = "device"


def best_request(
    tier: TierReport, operation: Operation, order: Order = Order.SEQUENTIAL
) -> CellResult | None:
    """Return the smallest request and depth near the best rate, None if nothing is reported."""
    rates = {
        result.cell: result.bytes_per_s.median
        for result in tier.cells
        if result.bytes_per_s is not None
        and (result.cell.operation, result.cell.order) == (operation, order)
    }
    if not rates:
        return None
    chosen = smallest_near_best(rates, {cell: _cost(cell) for cell in rates})
    return next(result for result in tier.cells if result.cell == chosen)


def profile_of(report: Report, tier: TierReport) -> HardwareProfile | None:
    """Return what to keep about the drive of `tier`, None unless it was tuned, and measured on
    the drive. Rates between host and device come from a device tier of the same report."""
    read, write = (best_request(tier, way) for way in (Operation.READ, Operation.WRITE))
    if tier.tuning is None or read is None or write is None:
        return None
    best_read, best_write = _as_request(read), _as_request(write)
    mixed = best_request(tier, Operation.MIXED)
    if best_read is None or best_write is None:
        return None
    return HardwareProfile(
        zinf=report.zinf,
        date=report.date,
        filesystem=tier.filesystem,
        path_taken=tier.path_taken,
        io_nbytes=tier.tuning.chosen.io_nbytes,
        num_threads=tier.tuning.chosen.num_threads,
        read=best_read,
        write=best_write,
        mixed=_as_request(mixed) if mixed else None,
        h2d_bytes_per_s=_device_rate(report.tiers, Operation.WRITE),
        d2h_bytes_per_s=_device_rate(report.tiers, Operation.READ),
    )


def _cost(cell: Cell) -> tuple[int, ...]:
    return (cell.nbytes * cell.depth, cell.nbytes)


def _as_request(result: CellResult) -> BestRequest | None:
    if result.bytes_per_s is None or result.p50_s is None or result.p99_s is None:
        return None
    return BestRequest(
        nbytes=result.cell.nbytes,
        depth=result.cell.depth,
        bytes_per_s=result.bytes_per_s.median,
        p50_s=result.p50_s.median,
        p99_s=max(result.p50_s.median, result.p99_s.median),
    )


def _device_rate(tiers: Sequence[TierReport], operation: Operation) -> float | None:
    for tier in tiers:
        if tier.scheme == DEVICE_SCHEME:
            best = best_request(tier, operation)
            if best is not None and best.bytes_per_s is not None:
                return best.bytes_per_s.median
    return None
