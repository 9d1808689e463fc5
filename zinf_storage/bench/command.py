"""``zinf bench``: measure tiers, say what is best, and remember it for this machine."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zinf_core.cli import EXIT_INTERRUPTED
from zinf_core.errors import ConfigError, ZinfError
from zinf_core.registry import TierUrl
from zinf_core.units import GiB, parse_nbytes
from zinf_storage.bench import chart
from zinf_storage.bench.fio import HINT as NO_FIO
from zinf_storage.bench.fio import Fio
from zinf_storage.bench.grid import Effort
from zinf_storage.bench.interrupt import stop_on_interrupt
from zinf_storage.bench.measure import Task, measure_tier, num_measurements
from zinf_storage.bench.report import SCHEMA, Machine, Report, TierReport, from_json, to_json
from zinf_storage.bench.scratch import format_url, require_scheme
from zinf_storage.bench.session import Steering
from zinf_storage.bench.summary import profile_of
from zinf_storage.bench.words import show_tables, to_lines
from zinf_storage.bench.workload import rounded_data
from zinf_storage.cuda import cuda_problem
from zinf_storage.machine import python_version, read_memory
from zinf_storage.profile import save_profile

_LEAST_DATA_NBYTES: Final = 64 * 1024
_FORCING: Final = frozenset({"direct", "engine"})
"""Options under which a drive does not show what it does by itself."""
_DATA_NBYTES: Final = {Effort.QUICK: GiB // 2, Effort.NORMAL: GiB, Effort.FULL: 4 * GiB}


class BenchCommand:
    """The subcommand."""

    name = "bench"
    help = "measure storage tiers, and keep what is best for this machine"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what to measure and what to write."""
        kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
        _add_tiers(kinds.add_parser("tiers", help="measure tiers by their URLs"))
        again = kinds.add_parser("chart", help="draw the chart of a report written with --json")
        again.add_argument("report", type=Path, metavar="REPORT.json")
        again.add_argument("chart", type=Path, metavar="OUT.png")

    def run(self, args: argparse.Namespace) -> int:
        """Measure, or draw. Raises ConfigError, BudgetError, and what a tier raises."""
        if args.what == "chart":
            chart.draw(from_json(_read(args.report)), args.chart)
            return 0
        return _measure(args)


BENCH: Final = BenchCommand()


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        nargs="*",
        metavar="URL",
        help="tiers, e.g. nvme:///mnt/fast (default: nvme in the current folder, host, and device "
        "where there is one); existing folders are not touched, a new one inside them is used",
    )
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="about half a minute per tier")
    effort.add_argument("--full", action="store_true", help="every size and depth, half an hour")
    parser.add_argument("--size", metavar="NBYTES", help="test data, e.g. 4GiB (default: 1GiB)")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="seconds for each part of the measurement"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")
    parser.add_argument("--chart", type=Path, metavar="OUT.png", help="draw a chart")
    parser.add_argument(
        "--no-profile", action="store_true", help="do not keep what is best for later runs"
    )
    parser.add_argument("--no-fio", action="store_true", help="do not compare with fio")


def _measure(args: argparse.Namespace) -> int:
    """Measure every tier, then write what was asked for, also when interrupted or one failed."""
    found = None if args.no_fio else Fio.find()
    tasks = _tasks(args, found)
    for path in (args.json, args.chart):
        _require_writable(path)
    if args.chart is not None:
        if importlib.util.find_spec("matplotlib") is None:
            _say(f"there will be no chart: {chart.HINT}")
        else:
            chart.require_format(args.chart)
    if found is None and not args.no_fio:
        _say(NO_FIO)
    machine = _machine()
    reports: list[TierReport] = []
    failures: list[ZinfError] = []
    with stop_on_interrupt() as should_stop:
        for task in tasks:
            if should_stop():
                break
            try:
                with _progress(task, should_stop) as steering:
                    reports.append(measure_tier(task, steering))
            except ZinfError as exc:
                failures.append(exc)
        is_interrupted = should_stop()
    failures += _written(_report(machine, reports, found), args)
    if failures:
        raise ExceptionGroup("zinf bench tiers", failures)
    return EXIT_INTERRUPTED if is_interrupted else 0


def _tasks(args: argparse.Namespace, found: Fio | None) -> list[Task]:
    """Return what to measure. Raises ConfigError for what cannot be, before anything is."""
    effort = Effort.QUICK if args.quick else Effort.FULL if args.full else Effort.NORMAL
    nbytes = _DATA_NBYTES[effort] if args.size is None else parse_nbytes(args.size, what="--size")
    if nbytes < _LEAST_DATA_NBYTES:
        raise ConfigError(f"--size = {nbytes} is less than {_LEAST_DATA_NBYTES} bytes")
    if args.seconds is not None and not (0 < args.seconds < math.inf):
        raise ConfigError(f"--seconds = {args.seconds} is not a time to measure for")
    urls = list(dict.fromkeys(args.urls or _default_urls()))
    for url in urls:
        require_scheme(url)
    return [
        Task(
            url=url,
            effort=effort,
            data_nbytes=rounded_data(nbytes),
            seconds=args.seconds,
            fio=found,
        )
        for url in urls
    ]


def _default_urls() -> list[str]:
    here = Path.cwd()
    folder = here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())
    urls = [format_url(TierUrl(scheme="nvme", path=str(folder))), "host://"]
    if cuda_problem() is None:
        urls.append("device://cuda:0")
    return urls


def _written(report: Report, args: argparse.Namespace) -> list[ZinfError]:
    """Write all that was asked for and can be; return why the rest could not."""
    failures: list[ZinfError] = []
    steps: list[Callable[[], None]] = []
    if report.tiers and args.json is not None:
        steps.append(lambda: _write_text(args.json, to_json(report)))
    if report.tiers and args.chart is not None:
        steps.append(lambda: chart.draw(report, args.chart))
    # After the files: the terminal may be gone.
    steps.append(lambda: _show(report))
    if not args.no_profile:
        steps += [partial(_keep_profile, report, tier) for tier in report.tiers]
    for step in steps:
        try:
            step()
        except ZinfError as exc:
            failures.append(exc)
    return failures


def _show(report: Report) -> None:
    if sys.stdout.isatty():
        show_tables(Console(), report)
    else:
        sys.stdout.writelines(f"{line}\n" for line in to_lines(report))


def _keep_profile(report: Report, tier: TierReport) -> None:
    url = TierUrl.parse(tier.url)
    profile = profile_of(report, tier)
    if profile is None:
        return
    forced = sorted(_FORCING & url.options.keys())
    if forced:
        _say(f"{tier.url}: not kept for later runs, because the URL forces {forced[0]}")
        return
    path = save_profile(profile, Path(url.path))
    sys.stdout.write(f"{tier.url}: kept for later runs: {path}\n")


@contextmanager
def _progress(task: Task, should_stop: Callable[[], bool]) -> Iterator[Steering]:
    """Show a bar on the terminal, on standard error; nothing where that is none."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    is_silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_silent) as bar:
        bar_task = bar.add_task(task.url, total=num_measurements(task))

        def advance(what: str) -> None:
            bar.update(bar_task, description=what, advance=1)

        def describe(what: str) -> None:
            bar.update(bar_task, description=what)

        yield Steering(describe=describe, advance=advance, should_stop=should_stop)


def _report(machine: Machine, tiers: list[TierReport], found: Fio | None) -> Report:
    return Report(
        schema=SCHEMA,
        zinf=metadata.version("zinf"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        fio=found.version if found else "",
        tiers=tuple(tiers),
    )


def _machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        num_cores=os.cpu_count() or 1,
        memory_nbytes=read_memory().total_nbytes,
        kernel=platform.release(),
        python=python_version(),
        load=os.getloadavg()[0],
    )


def _cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


def _require_writable(path: Path | None) -> None:
    """Raise ConfigError now rather than after minutes of measuring."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {path}: name a file in a folder you may write to")


def _say(message: str) -> None:
    sys.stderr.write(f"zinf: {message}\n")
