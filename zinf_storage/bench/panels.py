"""Panels: the parts of the chart. Each draws on axes it is given; none imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from zinf_storage.bench.disk import Verdict
from zinf_storage.bench.figures import Spread
from zinf_storage.bench.grid import Operation, Order, short_nbytes
from zinf_storage.bench.report import CellResult, TierReport, Tuning
from zinf_storage.bench.summary import best_request

_INK: Final = "#222222"
_FAINT: Final = "#6b6b6b"
_GRID: Final = "#e4e4e4"
_ACCENT: Final = "#b5400f"
_DEPTH_COLORS: Final = ("#e69f00", "#e8663f", "#cc4778", "#9c179e", "#5c01a6", "#0d0887")
"""Light to dark with the depth (as plasma), so that they also differ in grey and to any eye."""
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_GLYPHS: Final = ("●", "■", "▲", "◆", "▼", "✚")
"""The markers as text, for the key."""
_HEADROOM: Final = 1.22


def highest_rate(tier: TierReport) -> float:
    """Return the largest GB/s that the panels of `tier` must show."""
    rates = [result.bytes_per_s.most for result in tier.cells if result.bytes_per_s]
    rates += [reference.fio_bytes_per_s.most for reference in tier.references]
    return max(rates, default=0.0) / 1e9


def draw_rates(axes: Any, tier: TierReport, operation: Operation, *, top: float) -> None:
    """Draw GB/s against the request size, one line per depth, up to `top`."""
    results = _selected(tier, operation, Order.SEQUENTIAL)
    _dress(axes, f"sequential {operation.value}, GB/s", _sizes(tier))
    axes.set_ylim(0, top * _HEADROOM if top else 1)
    colors = _colors(tier)
    for depth in sorted({result.cell.depth for result in results}):
        line = [result for result in results if result.cell.depth == depth]
        _band(axes, line, _gb_per_s, colors[depth])
        _line(axes, line, _gb_per_s, colors[depth], zorder=3 + depth / 64)
    _draw_random(axes, tier, operation)
    _draw_fio(axes, tier, operation)
    _mark_cached(axes, results)
    _mark_best(axes, best_request(tier, operation))
    _depth_key(axes, colors, {result.cell.depth for result in results if result.bytes_per_s})


def draw_latencies(axes: Any, tier: TierReport) -> None:
    """Draw the latency of reads against the request size: median, and up to the 99th percent."""
    results = [r for r in _selected(tier, Operation.READ, Order.SEQUENTIAL) if r.p50_s]
    _dress(axes, "time of one read, p50 with band to p99", _sizes(tier))
    colors = _colors(tier)
    depths = sorted({result.cell.depth for result in results})
    for depth in depths:
        line = [result for result in results if result.cell.depth == depth]
        places = [math.log2(result.cell.nbytes) for result in line]
        middle = [_median(result.p50_s) for result in line]
        high = [_median(result.p99_s) for result in line]
        color, marker = colors[depth]
        axes.fill_between(places, middle, high, color=color, alpha=0.16, linewidth=0)
        axes.plot(places, middle, color=color, marker=marker, markersize=4, linewidth=1.7)
    if not results:
        _say_cached(axes)
        return
    axes.set_yscale("log")
    low, high_edge = axes.get_ylim()
    axes.set_ylim(low, high_edge * 2.5)
    axes.yaxis.set_major_formatter(_time_label)
    axes.minorticks_off()
    _depth_key(axes, colors, set(depths))


def draw_cpu(axes: Any, tier: TierReport) -> None:
    """Draw the processor time of sequential reads and writes at their best depth."""
    _dress(axes, "processor time, % of one core", _sizes(tier))
    axes.set_ylim(0, 124)
    shown = 0
    for operation, color, marker in (
        (Operation.READ, _DEPTH_COLORS[5], "o"), (Operation.WRITE, _DEPTH_COLORS[1], "s"),
    ):  # fmt: skip
        best = best_request(tier, operation)
        if best is None:
            continue
        line = [
            result
            for result in _selected(tier, operation, Order.SEQUENTIAL)
            if result.cell.depth == best.cell.depth and result.cpu_share
        ]
        _band(axes, line, _cpu_percent, (color, marker))
        _line(axes, line, _cpu_percent, (color, marker), zorder=3)
        text = f"{operation.value}, depth {best.cell.depth}"
        axes.text(
            0.03 + 0.42 * shown, 0.95, text, transform=axes.transAxes, color=color, fontsize=9,
            fontweight="bold", va="top",
        )  # fmt: skip
        shown += 1
    if not shown:
        _say_cached(axes)


def draw_tuning(axes: Any, tuning: Tuning) -> None:
    """Draw the combined rate for every pair of options as tiles; best and default say so."""
    sizes = sorted({point.io_nbytes for point in tuning.points})
    threads = sorted({point.num_threads for point in tuning.points})
    rates = {
        (point.io_nbytes, point.num_threads): point.combined_bytes_per_s.median / 1e9
        for point in tuning.points
    }
    grid = [[rates.get((size, count), math.nan) for size in sizes] for count in threads]
    known = list(rates.values())
    axes.imshow(
        grid, cmap="cividis", aspect="auto", origin="lower", vmin=min(known) * 0.8, vmax=max(known)
    )
    middle = (min(known) * 0.8 + max(known)) / 2
    for (size, count), rate in rates.items():
        place = sizes.index(size), threads.index(count)
        axes.text(
            *place, f"{rate:.2f}", ha="center", va="center", fontsize=9,
            color="white" if rate < middle else _INK,
        )  # fmt: skip
    for point, text, drop in ((tuning.default, "default", -0.3), (tuning.chosen, "best", 0.3)):
        _frame_tile(
            axes, sizes.index(point.io_nbytes), threads.index(point.num_threads), text, drop
        )
    axes.set_title("nvme options, GB/s read + written", **_TITLE)
    axes.set_xticks(range(len(sizes)), [short_nbytes(size) for size in sizes])
    axes.set_yticks(range(len(threads)), [str(count) for count in threads])
    axes.set_xlabel("io_nbytes", color=_FAINT, fontsize=9)
    axes.set_ylabel("num_threads", color=_FAINT, fontsize=9, labelpad=4)
    axes.tick_params(length=0, labelsize=9, colors=_FAINT)
    for spine in axes.spines.values():
        spine.set_visible(False)


_TITLE: Final[Mapping[str, Any]] = {
    "loc": "left", "fontsize": 10.5, "color": _INK, "fontweight": "bold", "pad": 7,
}  # fmt: skip


def _frame_tile(axes: Any, column: int, row: int, text: str, drop: float) -> None:
    """Frame one tile and write what it is near its upper or lower edge."""
    edges = [-0.47, 0.47, 0.47, -0.47, -0.47], [-0.47, -0.47, 0.47, 0.47, -0.47]
    axes.plot(
        [column + x for x in edges[0]], [row + y for y in edges[1]], color=_ACCENT, linewidth=2.2
    )
    axes.text(
        column, row + drop, text, ha="center", va="center", fontsize=8.5, fontweight="bold",
        color=_ACCENT, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
    )  # fmt: skip


def _dress(axes: Any, title: str, sizes: Sequence[int]) -> None:
    """Give axes over request sizes their title, ticks and grid."""
    axes.set_title(title, **_TITLE)
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")
    places = [math.log2(size) for size in sizes]
    step = 1 if len(sizes) <= 8 else 2
    labels = [short_nbytes(size).replace(" ", "\n") for size in sizes]
    axes.set_xticks(places[::step], labels[::step])
    axes.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    axes.tick_params(length=0, labelsize=9, colors=_FAINT)


def _line(
    axes: Any,
    results: Sequence[CellResult],
    value: Callable[[CellResult], Spread | None],
    style: tuple[str, str],
    *,
    zorder: float,
) -> None:
    points = [(r.cell.nbytes, found.median) for r in results if (found := value(r))]
    axes.plot(
        [math.log2(nbytes) for nbytes, _ in points],
        [middle for _, middle in points],
        color=style[0],
        marker=style[1],
        markersize=4.5,
        linewidth=1.9,
        zorder=zorder,
    )


def _band(
    axes: Any,
    results: Sequence[CellResult],
    value: Callable[[CellResult], Spread | None],
    style: tuple[str, str],
) -> None:
    points = [(r.cell.nbytes, found) for r in results if (found := value(r))]
    axes.fill_between(
        [math.log2(nbytes) for nbytes, _ in points],
        [found.least for _, found in points],
        [found.most for _, found in points],
        color=style[0],
        alpha=0.13,
        linewidth=0,
    )


def _draw_random(axes: Any, tier: TierReport, operation: Operation) -> None:
    """Draw random requests at their deepest as one dashed line, named where it is steep."""
    results = [r for r in _selected(tier, operation, Order.RANDOM) if r.bytes_per_s]
    if not results:
        return
    depth = max(result.cell.depth for result in results)
    line = [result for result in results if result.cell.depth == depth]
    places = [math.log2(result.cell.nbytes) for result in line]
    rates = [_median(result.bytes_per_s) / 1e9 for result in line]
    axes.plot(places, rates, color=_INK, linestyle=(0, (4, 2)), linewidth=1.2, zorder=6)
    steep = range(min(1, len(rates) - 1), len(rates))
    middle = min(steep, key=lambda index: abs(rates[index] - max(rates) / 3))
    axes.annotate(
        f"random, depth {depth}", (places[middle], rates[middle]), xytext=(9, -9),
        textcoords="offset points", va="center", fontsize=8.5, color=_INK, zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
    )  # fmt: skip


def _draw_fio(axes: Any, tier: TierReport, operation: Operation) -> None:
    """Draw what fio reached, with its spread."""
    found = [r for r in tier.references if r.cell.operation is operation]
    for reference in found:
        place, fio = math.log2(reference.cell.nbytes), reference.fio_bytes_per_s
        axes.plot(
            [place, place], [fio.least / 1e9, fio.most / 1e9], color=_INK, linewidth=1, zorder=7
        )
        axes.plot(
            [place], [fio.median / 1e9], marker="D", markersize=8, markerfacecolor="white",
            markeredgecolor=_INK, zorder=8,
        )  # fmt: skip
        axes.annotate(
            f"{reference.ratio.median:.2f} of fio", (place, fio.least / 1e9), xytext=(0, -7),
            textcoords="offset points", ha="center", va="top", fontsize=8, color=_INK, zorder=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )  # fmt: skip


def _mark_best(axes: Any, best: CellResult | None) -> None:
    """Point at the smallest request and depth near the best rate."""
    if best is None or best.bytes_per_s is None:
        return
    place, rate = math.log2(best.cell.nbytes), best.bytes_per_s.median / 1e9
    axes.plot(
        [place], [rate], marker="o", markersize=13, markerfacecolor="none",
        markeredgecolor=_ACCENT, markeredgewidth=2, zorder=10,
    )  # fmt: skip
    cpu = f", {best.cpu_share.median:.0%} of a core" if best.cpu_share else ""
    axes.annotate(
        f"{rate:.2f} GB/s with {short_nbytes(best.cell.nbytes)}, depth {best.cell.depth}{cpu}",
        (0, 1), xycoords="axes fraction", xytext=(5, -18), textcoords="offset points",
        va="top", color=_ACCENT, fontsize=9.5, fontweight="bold", zorder=11,
    )  # fmt: skip


def _mark_cached(axes: Any, results: Sequence[CellResult]) -> None:
    """Say where there is no number because it would be the page cache's."""
    cached = [result for result in results if result.verdict is Verdict.CACHED]
    if not cached:
        return
    if len(cached) == len(results):
        _say_cached(axes)
        return
    places = sorted({math.log2(result.cell.nbytes) for result in cached})
    axes.plot(places, [0] * len(places), marker="x", color=_FAINT, linestyle="none", clip_on=False)
    axes.text(
        places[0], axes.get_ylim()[1] * 0.03, "x: cached, not a disk number", color=_FAINT,
        fontsize=8.5, va="bottom",
    )  # fmt: skip


def _say_cached(axes: Any) -> None:
    axes.set_yticks([])
    axes.text(
        0.5, 0.5, "cached: not reported\nas a disk number", transform=axes.transAxes, ha="center",
        va="center", color=_FAINT, fontsize=12,
    )  # fmt: skip


def _depth_key(axes: Any, colors: Mapping[int, tuple[str, str]], depths: set[int]) -> None:
    """Write the depths in their colours, where the eye is anyway."""
    if not depths:
        return
    write = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
    axes.annotate("depth", (0, 1), xytext=(5, -3), color=_FAINT, fontsize=9, **write)
    for index, depth in enumerate(sorted(depths)):
        color, marker = colors[depth]
        text = f"{_GLYPHS[_MARKERS.index(marker)]} {depth}"
        axes.annotate(
            text, (0, 1), xytext=(40 + 29 * index, -3), color=color, fontsize=9,
            fontweight="bold", **write,
        )  # fmt: skip


def _colors(tier: TierReport) -> dict[int, tuple[str, str]]:
    """Return (colour, marker) by depth, dark for deep."""
    depths = sorted({result.cell.depth for result in tier.cells})
    last = len(_DEPTH_COLORS) - 1
    steps = [
        round(index * last / max(1, len(depths) - 1)) if len(depths) > 1 else last
        for index in range(len(depths))
    ]
    return {
        depth: (_DEPTH_COLORS[step], _MARKERS[step])
        for depth, step in zip(depths, steps, strict=True)
    }


def _selected(tier: TierReport, operation: Operation, order: Order) -> list[CellResult]:
    found = [
        result
        for result in tier.cells
        if (result.cell.operation, result.cell.order) == (operation, order)
    ]
    return sorted(found, key=lambda result: (result.cell.depth, result.cell.nbytes))


def _sizes(tier: TierReport) -> list[int]:
    return sorted({result.cell.nbytes for result in tier.cells}) or [4096]


def _gb_per_s(result: CellResult) -> Spread | None:
    return _scaled(result.bytes_per_s, 1e-9)


def _cpu_percent(result: CellResult) -> Spread | None:
    return _scaled(result.cpu_share, 100.0)


def _scaled(spread: Spread | None, factor: float) -> Spread | None:
    if spread is None:
        return None
    return Spread(
        least=spread.least * factor,
        median=spread.median * factor,
        most=spread.most * factor,
        num_samples=spread.num_samples,
    )


def _median(spread: Spread | None) -> float:
    return spread.median if spread else math.nan


def _time_label(seconds: float, place: int) -> str:
    """Return a tick of the time axis."""
    del place
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit * 0.999:
            return f"{seconds / unit:g} {name}"
    return f"{seconds * 1e6:g} µs"
