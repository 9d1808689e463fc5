"""Grid: which requests a benchmark makes, and in which order. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from zinf_core.units import GiB, KiB, MiB

T = TypeVar("T")

MAX_IN_FLIGHT_NBYTES: Final = 256 * MiB
"""Cells with more bytes in flight are left out: they would measure nothing but their memory."""


class Operation(enum.Enum):
    """What requests do."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"
    """Reads and writes, taking turns."""


class Order(enum.Enum):
    """Where the next request lies."""

    SEQUENTIAL = "sequential"
    RANDOM = "random"


class Effort(enum.Enum):
    """How much is measured."""

    QUICK = "quick"
    NORMAL = "normal"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to use a tier."""

    operation: Operation
    order: Order
    nbytes: int
    """Bytes of one request."""
    depth: int
    """Requests submitted and not waited for, at most."""

    def __str__(self) -> str:
        """Return the form used in messages."""
        what = f"{self.order.value} {self.operation.value}"
        return f"{what}, {short_nbytes(self.nbytes)}, depth {self.depth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long to measure, and what."""

    cells: tuple[Cell, ...]
    num_rounds: int
    """Times that every cell is measured, once per round."""
    sample_s: float
    """Seconds of one measurement of one cell."""
    limit_s: float
    """Seconds after which no further cell is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    random_depths: tuple[int, ...]
    mixed_depths: tuple[int, ...]
    mixed_orders: tuple[Order, ...]
    num_rounds: int
    seconds: float


_AXES: Final = {
    Effort.QUICK: _Axes(
        sizes=(4 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB),
        depths=(1, 4, 16),
        random_depths=(4,),
        mixed_depths=(4,),
        mixed_orders=(Order.SEQUENTIAL,),
        num_rounds=3,
        seconds=15,
    ),
    Effort.NORMAL: _Axes(
        sizes=(4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB),
        depths=(1, 2, 4, 8, 32),
        random_depths=(1, 4, 32),
        mixed_depths=(4,),
        mixed_orders=(Order.SEQUENTIAL,),
        num_rounds=3,
        seconds=60,
    ),
    Effort.FULL: _Axes(
        sizes=tuple(4 * KiB << shift for shift in range(15)),
        depths=(1, 2, 4, 8, 16, 32),
        random_depths=(1, 2, 4, 8, 16, 32),
        mixed_depths=(1, 2, 4, 8, 16, 32),
        mixed_orders=(Order.SEQUENTIAL, Order.RANDOM),
        num_rounds=5,
        seconds=600,
    ),
}
_LIMIT_FACTOR: Final = 2.0
"""A slow tier overruns its samples, because every cell needs `depth` requests at least."""
_LIMIT_SPARE_S: Final = 10.0
"""For making and discarding the keys that are written."""


def plan_schedule(
    effort: Effort, *, data_nbytes: int, align: int, seconds: float | None = None
) -> Schedule:
    """Return what to measure on a tier that holds `data_nbytes` of test data.

    Request sizes are multiples of `align` bytes, at least one page, and a cell has at most a
    quarter of the data in flight, so that requests in flight are different ones. `seconds` is the
    time for all cells together; None for what `effort` asks.
    """
    axes = _AXES[effort]
    limit = min(MAX_IN_FLIGHT_NBYTES, data_nbytes // 4)
    cells = tuple(
        cell
        for cell in _cells(axes)
        if cell.nbytes * cell.depth <= limit and cell.nbytes % align == 0
    )
    total_s = axes.seconds if seconds is None else seconds
    return Schedule(
        cells=cells,
        num_rounds=axes.num_rounds,
        sample_s=total_s / max(1, len(cells) * axes.num_rounds),
        limit_s=total_s * _LIMIT_FACTOR + _LIMIT_SPARE_S,
    )


def rotated(items: Sequence[T], round_index: int, num_rounds: int) -> list[T]:
    """Return `items` in the order of one round: each round starts elsewhere and every second one
    runs backwards, so that no item always follows the same neighbour."""
    start = round_index * len(items) // max(1, num_rounds)
    order = [*items[start:], *items[:start]]
    return order[::-1] if round_index % 2 else order


def short_nbytes(nbytes: int) -> str:
    """Return a size as short as it can be: ``"64 KiB"``, ``"1.5 MiB"``."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def _cells(axes: _Axes) -> Iterator[Cell]:
    for order, operation, depths in _families(axes):
        for nbytes in axes.sizes:
            for depth in depths:
                yield Cell(operation=operation, order=order, nbytes=nbytes, depth=depth)


def _families(axes: _Axes) -> Iterator[tuple[Order, Operation, tuple[int, ...]]]:
    for operation in (Operation.READ, Operation.WRITE):
        yield Order.SEQUENTIAL, operation, axes.depths
        yield Order.RANDOM, operation, axes.random_depths
    for order in axes.mixed_orders:
        yield order, Operation.MIXED, axes.mixed_depths
