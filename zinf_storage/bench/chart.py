"""Chart: a report as a picture, one row per tier.

The figure is drawn without pyplot, so that nothing of the process's matplotlib state is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from zinf_core.errors import ConfigError
from zinf_storage.bench import panels
from zinf_storage.bench.grid import Operation, short_nbytes
from zinf_storage.bench.report import Report, TierReport
from zinf_storage.bench.summary import best_request
from zinf_storage.bench.words import GOOD_SHARE, busy_words

HINT: Final = 'it needs matplotlib; pip install "zinf[bench]"'
_ROW_INCHES: Final = 4.3
_WIDTH_INCHES: Final = 17.0
_DPI: Final = 110
_INK: Final = "#222222"
_FAINT: Final = "#6b6b6b"


def require_format(path: Path) -> None:
    """Raise ConfigError unless the ending of `path` is one that charts can be drawn in, or without
    matplotlib."""
    known = sorted(_imported_figure()().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        endings = ", ".join(f".{name}" for name in known)
        raise ConfigError(f"the chart cannot be written to {path}: its ending is none of {endings}")


def draw(report: Report, path: Path) -> None:
    """Draw `report` to the image file `path`, whose ending names the format (.png, .svg, .pdf).

    Raises ConfigError without matplotlib, without a tier, for another ending, or if the file cannot
    be written.
    """
    require_format(path)
    if not report.tiers:
        raise ConfigError("no tier was measured, so there is no chart to draw")
    figure = _imported_figure()(
        figsize=(_WIDTH_INCHES, _ROW_INCHES * len(report.tiers) + 0.7), dpi=_DPI, facecolor="white"
    )
    rows = figure.subfigures(len(report.tiers), 1, squeeze=False)
    for subfigure, tier in zip(rows[:, 0], report.tiers, strict=True):
        _draw_tier(subfigure, tier)
    figure.text(0.012, 0.006, _footer(report), color=_FAINT, fontsize=8.5, va="bottom")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the chart cannot be written to {path}: {exc}") from exc


def _imported_figure() -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError as exc:
        raise ConfigError(f"no chart was drawn: {HINT}") from exc
    return Figure


def _draw_tier(figure: Any, tier: TierReport) -> None:
    """Draw the four panels of one tier below its headline."""
    figure.text(0.012, 0.965, tier.url, fontsize=13, fontweight="bold", color=_INK, va="top")
    figure.text(0.012, 0.905, _headline(tier), fontsize=10, color=_FAINT, va="top")
    axes = figure.subplots(
        1,
        4,
        gridspec_kw={
            "left": 0.045, "right": 0.985, "top": 0.79, "bottom": 0.14, "wspace": 0.24,
            "width_ratios": (1.25, 1.25, 1.0, 1.0),
        },
    )  # fmt: skip
    top = panels.highest_rate(tier)
    panels.draw_rates(axes[0], tier, Operation.READ, top=top)
    panels.draw_rates(axes[1], tier, Operation.WRITE, top=top)
    panels.draw_latencies(axes[2], tier)
    if tier.tuning is not None:
        panels.draw_tuning(axes[3], tier.tuning)
    else:
        panels.draw_cpu(axes[3], tier)


def _headline(tier: TierReport) -> str:
    """Return what there is to know, in one line."""
    where = f"{tier.path_taken} on {tier.filesystem}" if tier.filesystem else tier.path_taken
    parts = [] if where == "unknown" else [where]
    for operation in Operation:
        best = best_request(tier, operation)
        if best is not None and best.bytes_per_s is not None:
            size = short_nbytes(best.cell.nbytes)
            parts.append(
                f"{operation.value} {best.bytes_per_s.median / 1e9:.2f} GB/s with {size} at depth "
                f"{best.cell.depth}"
            )
    if tier.references:
        low, high = _extremes([reference.ratio.median for reference in tier.references])
        parts.append(f"{low:.2f} to {high:.2f} of fio")
    if tier.tuning is not None:
        share = tier.tuning.default_share.median
        verdict = "" if share >= GOOD_SHARE else ": worth tuning"
        parts.append(f"defaults reach {share:.0%} of the best options{verdict}")
    parts += tier.notes
    if not tier.is_complete:
        parts.append("INCOMPLETE")
    return "   ·   ".join(parts)


def _extremes(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _footer(report: Report) -> str:
    machine = report.machine
    fio = f", {report.fio}" if report.fio else ""
    busy = "".join(f"   {line}." for line in busy_words(machine))
    return (
        f"{machine.cpu}, {machine.num_cores} cores, {_short_gib(machine.memory_nbytes)} memory, "
        f"Linux {machine.kernel}, {machine.python}, zinf {report.zinf}{fio}, {report.date}.   "
        "Lines: median of the rounds; bands: least to most. GB/s are 10^9 bytes per second."
        f"{busy}"
    )


def _short_gib(nbytes: int) -> str:
    """Return `nbytes` in whole GiB."""
    return f"{nbytes / (1 << 30):.0f} GiB"
