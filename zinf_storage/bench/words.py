"""Words: a report for people, as lines that can be searched or as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zinf_storage.bench.disk import Verdict
from zinf_storage.bench.figures import Spread
from zinf_storage.bench.grid import Operation, Order, short_nbytes
from zinf_storage.bench.report import CellResult, Machine, Reference, Report, TierReport, Tuning
from zinf_storage.bench.summary import best_request

CACHED = "cached: not reported as a disk number"
_QUIET_LOAD = 0.5
"""Load per core from which on others disturb."""
GOOD_SHARE = 0.8
"""Part of the tuned rate that the defaults should reach."""


def to_lines(report: Report) -> Iterator[str]:
    """Iterate over one line per cell, then what follows from them."""
    for tier in report.tiers:
        for result in tier.cells:
            yield f"{tier.url}: {result.cell}: {cell_words(result)}"
        yield from (f"{tier.url}: {line}" for line in _conclusions(tier))
    yield from busy_words(report.machine)


def show_tables(console: Console, report: Report) -> None:
    """Draw a table per tier and kind of request, then what follows from them."""
    for tier in report.tiers:
        console.print(Text(f"\n{tier.url}", style="bold"), Text(_subtitle(tier)))
        for operation in Operation:
            for order in Order:
                results = [
                    result
                    for result in tier.cells
                    if (result.cell.operation, result.cell.order) == (operation, order)
                ]
                if results:
                    console.print(_table(f"{order.value} {operation.value}, GB/s", results))
        for line in _conclusions(tier):
            console.print(Text(line))
    for line in busy_words(report.machine):
        console.print(Text(line))


def busy_words(machine: Machine) -> Iterator[str]:
    """Iterate over the warning that others were at work, if they were."""
    if machine.load > machine.num_cores * _QUIET_LOAD:
        yield (
            f"note: the machine was busy when this began (load {machine.load:.1f} on "
            f"{machine.num_cores} cores): measure again when it is quiet"
        )


def cell_words(result: CellResult) -> str:
    """Return the figures of one cell."""
    rate, p50, p99, cpu = result.bytes_per_s, result.p50_s, result.p99_s, result.cpu_share
    if rate is None or p50 is None or p99 is None or cpu is None:
        return f"{CACHED} ({result.reason})"
    return (
        f"{rate_words(rate)}, p50 {time_words(p50.median)}, p99 {time_words(p99.median)}, "
        f"cpu {cpu.median:.0%}"
    )


def rate_words(rate: Spread) -> str:
    """Return e.g. ``"2.31 GB/s (2.10-2.40)"``."""
    low, middle, high = (_gb(value) for value in (rate.least, rate.median, rate.most))
    return f"{middle} GB/s ({low}-{high})"


def time_words(seconds: float) -> str:
    """Return e.g. ``"1.7 ms"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def tuning_words(tuning: Tuning) -> Iterator[str]:
    """Iterate over what to set, and whether that is worth it."""
    chosen = tuning.chosen
    share = tuning.default_share
    yield (
        f"best options: requests of {short_nbytes(chosen.io_nbytes)}, {chosen.num_threads} "
        f"threads: read {rate_words(chosen.read_bytes_per_s)}, write "
        f"{rate_words(chosen.write_bytes_per_s)}"
    )
    verdict = "fine as they are" if share.median >= GOOD_SHARE else "worth tuning"
    yield (
        f"the defaults reach {share.median:.0%} of that ({share.least:.0%}-{share.most:.0%}): "
        f"{verdict}"
    )
    yield f"ready to paste: {tuning.url}"


def reference_words(reference: Reference) -> str:
    """Return one comparison with fio."""
    ratio = reference.ratio
    return (
        f"{reference.cell}: {rate_words(reference.ours_bytes_per_s)}, fio "
        f"{rate_words(reference.fio_bytes_per_s)}, ratio {ratio.median:.2f} "
        f"({ratio.least:.2f}-{ratio.most:.2f})"
    )


def _subtitle(tier: TierReport) -> str:
    where = f" on {tier.filesystem}" if tier.filesystem else ""
    return f"path {tier.path_taken}{where}, {short_nbytes(tier.data_nbytes)} of data"


def _conclusions(tier: TierReport) -> Iterator[str]:
    yield f"path taken: {tier.path_taken}"
    for note in tier.notes:
        yield f"note: {note}"
    for operation in Operation:
        best = best_request(tier, operation)
        if best is not None:
            yield f"best: {best.cell}: {cell_words(best)}"
    yield from _refusals(tier)
    for reference in tier.references:
        yield reference_words(reference)
    if tier.tuning is not None:
        yield from tuning_words(tier.tuning)
    if not tier.is_complete:
        yield "incomplete: it was interrupted, or ran out of time"


def _refusals(tier: TierReport) -> Iterator[str]:
    refused = [result for result in tier.cells if result.verdict is Verdict.CACHED]
    if refused:
        yield f"{len(refused)} of {len(tier.cells)} cells {CACHED}: {refused[0].reason}"
    unsure = [result for result in tier.cells if result.verdict is Verdict.UNVERIFIED]
    if unsure:
        yield f"{len(unsure)} of {len(tier.cells)} cells not verified: {unsure[0].reason}"


def _table(title: str, results: Sequence[CellResult]) -> Table:
    """Return sizes by depths; the best cell is bold."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    depths = sorted({result.cell.depth for result in results})
    table.add_column("request")
    for depth in depths:
        table.add_column(f"depth {depth}", justify="right")
    most = max((r.bytes_per_s.median for r in results if r.bytes_per_s), default=0.0)
    for nbytes in sorted({result.cell.nbytes for result in results}):
        by_depth = {r.cell.depth: r for r in results if r.cell.nbytes == nbytes}
        cells = [_table_cell(by_depth.get(depth), most) for depth in depths]
        table.add_row(short_nbytes(nbytes), *cells)
    return table


def _table_cell(result: CellResult | None, most: float) -> Text:
    if result is None:
        return Text("")
    rate = result.bytes_per_s
    if rate is None:
        return Text("cached", style="yellow")
    text = f"{_gb(rate.median)} ({_gb(rate.least)}-{_gb(rate.most)})"
    return Text(text, style="bold" if rate.median == most else "")


def _gb(bytes_per_s: float) -> str:
    value = bytes_per_s / 1e9
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"
