"""One script for a machine with a CUDA device: does all that zinf does with it work, how fast?

Usage: python benchmarks/gpu_check.py [--quick] [--only SECTION]... [--json FILE] [--folder PATH]
       python benchmarks/gpu_check.py --list

From a checkout that is not installed: PYTHONPATH=. python benchmarks/gpu_check.py. Needs the
packages of zinf[torch,cuda13]; zinf[testing] for the whole conformance kit.

It takes less than five minutes. Every section is a process of its own with a time limit, so that a
hanging or crashing one takes nothing along; items are printed as they come, and Ctrl-C writes what
there is. The result is a table, and a JSON file, by default benchmarks/results/gpu-NAME-DATE.json.

--simulate runs the same checks on a simulated device in host memory. That checks this script; it
proves nothing about a GPU, and writes nothing to benchmarks/results.

Exit code: 0 if nothing failed (what was skipped is explained), 1 if something did, 2 without a CUDA
device that torch and cupy can use, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu.children import Outcome, run_section
from gpu.output import show_item, show_table

RESULTS = Path(__file__).resolve().parent / "results"
TOTAL_S = 285.0
_MIN_S = 5.0
"""A section is not begun with less."""
_PROBE_S = 60.0
_SIMULATED = "SIMULATED: this checks the script; it proves nothing about a GPU."


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One process's worth of checks."""

    module: str
    cap_s: float
    about: str


SECTIONS = {
    "facts": Section(
        module="gpu.facts",
        cap_s=60,
        about="versions, driver, limits; how torch, cupy and kvikio share memory here",
    ),
    "kit": Section(
        module="gpu.kit",
        cap_s=90,
        about="the conformance kit on device memory, registered host memory and nvme (posix, gds)",
    ),
    "train": Section(
        module="gpu.training",
        cap_s=90,
        about="a small transformer, states on every tier, bit by bit against plain PyTorch",
    ),
    "races": Section(
        module="gpu.races",
        cap_s=40,
        about="copies between late kernels on side streams, data checked; waits that time out",
    ),
    "rates-copy": Section(
        module="gpu.rates_copy",
        cap_s=60,
        about="host to device and back against torch's copies; what pinning costs",
    ),
    "rates-drive": Section(
        module="gpu.rates_drive",
        cap_s=60,
        about="the nvme tier from and to both memories, against raw calls and copies",
    ),
}
"""In the order of their value: what comes late is lost first when time runs out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for and return the exit code."""
    # A shell that starts it in the background would have it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"--folder {args.folder}: there is no such folder")
    if args.fd is not None:
        return _child(args)
    if args.list:
        for name, section in SECTIONS.items():
            print(f"{name:12} at most {section.cap_s:3.0f} s  {section.about}")
        return 0
    if args.simulate and args.json and RESULTS in args.json.resolve().parents:
        print(
            f"--simulate writes no results to {RESULTS}: they are no measurements", file=sys.stderr
        )
        return 2
    problem, device = (None, "simulated device") if args.simulate else _find_device()
    if problem is not None:
        print(
            f"Nothing was run: {problem}.\n\nThis script checks zinf on a CUDA device:\n"
            + "\n".join(f"  {name:12} {section.about}" for name, section in SECTIONS.items())
            + "\n\n--simulate runs it on a simulated device, which checks the script only."
        )
        return 2
    return _run(args, device)


def _run(args: argparse.Namespace, device: str) -> int:
    started = datetime.datetime.now(datetime.UTC)
    print(f"zinf on {device}, {started:%Y-%m-%d %H:%M} UTC")
    if args.simulate:
        print(_SIMULATED)
    outcomes = _run_sections(args)
    interrupted = any(outcome.status == "interrupted" for outcome in outcomes)
    verdict, code = _verdict(outcomes, simulate=args.simulate, interrupted=interrupted)
    show_table(outcomes, verdict)
    path = args.json or (None if args.simulate else _default_path(device, started))
    if path is not None:
        result = {
            "device": device,
            "simulated": args.simulate,
            "quick": args.quick,
            "started": started.isoformat(timespec="seconds"),
            "commit": _commit(),
            "verdict": verdict,
            "sections": [asdict(outcome) for outcome in outcomes],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
    return code


def _run_sections(args: argparse.Namespace) -> list[Outcome]:
    """Run the sections until one is interrupted or the time is over."""
    outcomes: list[Outcome] = []
    end = time.monotonic() + TOTAL_S
    no_kvikio = "there is no kvikio in a simulation" if args.simulate else ""
    for name in args.only or SECTIONS:
        section = SECTIONS[name]
        cap_s = min(section.cap_s, end - time.monotonic())
        if cap_s < _MIN_S:
            outcomes.append(Outcome(name, status="timeout", text="no time was left to begin it"))
            continue
        print(f"{name}{' (simulated)' if args.simulate else ''}: {section.about}", flush=True)
        command = [__file__, "--only", name, "--seconds", str(cap_s - 2)]
        command += [f"--{flag}" for flag in ("quick", "simulate") if getattr(args, flag)]
        # Removed here, too, when the section was killed.
        with tempfile.TemporaryDirectory(
            prefix="zinf-gpu-", dir=args.folder, ignore_cleanup_errors=True
        ) as folder:
            command += ["--folder", folder, "--no-kvikio", no_kvikio]
            outcome = run_section(name, command, cap_s=cap_s, show=show_item)
        outcomes.append(outcome)
        if outcome.status != "ran":
            print(f"  {outcome.status}: {outcome.text}")
        if outcome.status == "interrupted":
            break
        no_kvikio = _kvikio_problem(outcome, no_kvikio)
    return outcomes


def _kvikio_problem(outcome: Outcome, known: str) -> str:
    """Return why later sections must leave kvikio alone, from what the facts say."""
    if outcome.name != "facts":
        return known
    found = [item["data"]["no_kvikio"] for item in outcome.items if item["name"] == "kvikio"]
    return found[0] if found else known or "the section facts did not come to kvikio"


def _verdict(outcomes: Sequence[Outcome], *, simulate: bool, interrupted: bool) -> tuple[str, int]:
    num_failed = sum(outcome.num_failed for outcome in outcomes)
    statuses = [item["status"] for outcome in outcomes for item in outcome.items]
    text = f"{statuses.count('pass')} passed, {num_failed} failed, {statuses.count('skip')} skipped"
    mark = f"{_SIMULATED} " if simulate else ""
    if interrupted:
        return f"{mark}INTERRUPTED: {text} so far", 130
    return f"{mark}{'FAILED' if num_failed else 'PASSED'}: {text}", 1 if num_failed else 0


def _find_device() -> tuple[str | None, str]:
    """Return why there is no device to check, or None, and its name."""
    code = (
        "import json\n"
        "from zinf_storage.cuda import cuda_problem\n"
        "problem = cuda_problem()\n"
        "name = ''\n"
        "if problem is None:\n"
        "    import torch\n"
        "    if torch.cuda.is_available():\n"
        "        name = torch.cuda.get_device_name(0)\n"
        "    else:\n"
        "        problem = f'needs a CUDA build of torch, not {torch.__version__}'\n"
        "print('\\n' + json.dumps([problem, name]))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=_PROBE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"looking for a CUDA device took more than {_PROBE_S:.0f} s", ""
    if done.returncode:
        return done.stderr.strip().splitlines()[-1], ""
    problem, name = json.loads(done.stdout.strip().splitlines()[-1])
    return problem and f"it {problem}", name


def _child(args: argparse.Namespace) -> int:
    """Be the process of one section."""
    report_module = importlib.import_module("gpu.report")
    settings_module = importlib.import_module("gpu.settings")
    report = report_module.Report(args.fd, seconds=args.seconds)
    settings = settings_module.Settings(
        simulate=args.simulate,
        quick=args.quick,
        folder=args.folder,
        no_kvikio=args.no_kvikio,
    )
    importlib.import_module(SECTIONS[args.only[0]].module).run(report, settings)
    report.end()
    return 0


def _default_path(device: str, started: datetime.datetime) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"gpu-{slug}-{started:%Y-%m-%d}.json"


def _commit() -> str:
    """Return the commit that is checked out, or nothing."""
    command = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, rounds and laws")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION",
        help="run this section; may be repeated",
    )  # fmt: skip
    parser.add_argument("--simulate", action="store_true", help="check the script without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()),
        help="folder on the drive to use (default: %(default)s)",
    )  # fmt: skip
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS}
    parser.add_argument("--fd", type=int, **hidden)
    parser.add_argument("--seconds", type=float, **hidden)
    parser.add_argument("--no-kvikio", default="", **hidden)
    return parser


if __name__ == "__main__":
    sys.exit(main())
