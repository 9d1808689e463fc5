"""Report: everything one run of the benchmark found, and its JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, Final

from zinf_core.errors import ConfigError
from zinf_storage.bench.disk import Verdict
from zinf_storage.bench.figures import Spread
from zinf_storage.bench.grid import Cell

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured. Nothing here names a person, a host or a folder."""

    cpu: str
    num_cores: int
    memory_nbytes: int
    kernel: str
    python: str
    load: float
    """Processes that wanted to run when it began, on average over the minute before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell, over all rounds. The numbers are None if no sample may be reported."""

    cell: Cell
    verdict: Verdict
    reason: str
    """Why there are no numbers, or how far they are to be trusted."""
    num_refused: int
    """Samples that the page cache took part in; the numbers are those of the others."""
    bytes_per_s: Spread | None
    p50_s: Spread | None
    """Median latency of a request."""
    p99_s: Spread | None
    cpu_share: Spread | None
    """Processor time over wall time: 1.0 is one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One cell of ours beside fio's, measured in turns."""

    cell: Cell
    ours_bytes_per_s: Spread
    fio_bytes_per_s: Spread
    ratio: Spread
    """Ours over fio's, within each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPoint:
    """One pair of options of the nvme tier, under the traffic of paging."""

    io_nbytes: int
    num_threads: int
    read_bytes_per_s: Spread
    write_bytes_per_s: Spread
    combined_bytes_per_s: Spread
    """Equal numbers of bytes read and written, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Which options of the nvme tier are best on a folder."""

    points: tuple[TuningPoint, ...]
    default: TuningPoint
    chosen: TuningPoint
    default_share: Spread
    """Combined rate of the defaults over that of the chosen options, within each round."""
    url: str
    """Ready to paste, with the folder that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """One tier."""

    url: str
    """As it was given."""
    name: str
    scheme: str
    path_taken: str
    """How bytes travel, as the tier says it; ``unknown`` for a tier that does not."""
    filesystem: str
    """Type, empty for a tier without local files."""
    notes: tuple[str, ...]
    """What a reader should know, e.g. that the file system refuses O_DIRECT."""
    data_nbytes: int
    preferred_io_nbytes: int
    max_in_flight: int
    sample_s: float
    cells: tuple[CellResult, ...]
    references: tuple[Reference, ...]
    tuning: Tuning | None
    is_complete: bool
    """False if it was interrupted, or ran out of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run."""

    schema: int
    zinf: str
    date: str
    """UTC, ISO 8601."""
    machine: Machine
    fio: str
    """Version of fio, empty if it was not used."""
    tiers: tuple[TierReport, ...]


def to_json(report: Report) -> str:
    """Return `report` as JSON; sizes are bytes, times seconds."""
    return json.dumps(dataclasses.asdict(report), default=_enum_value, indent=1) + "\n"


def from_json(text: str) -> Report:
    """Return the report that `to_json` wrote.

    Raises ConfigError if it is none, or one of another schema.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"not a benchmark report: {exc}") from exc
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"benchmark report of schema {schema!r}, {SCHEMA} is needed; run again")
    try:
        report: Report = _decoded(Report, data)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"not a benchmark report: {exc!r}") from exc
    return report


def _enum_value(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} is not JSON")


def _decoded(kind: Any, value: Any) -> Any:
    """Return `value` as a `kind`: a dataclass, an enum, a tuple of one kind, or one or None."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        chosen = next(choice for choice in inner if choice is not type(None))
        return None if value is None else _decoded(chosen, value)
    if origin is tuple:
        return tuple(_decoded(inner[0], item) for item in value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: _decoded(hints[name], value[name]) for name in names})
    if issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value
