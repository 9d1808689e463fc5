"""zinf against DeepSpeed and plain PyTorch: the same model, data and drive, run in turns.

Usage: python benchmarks/versus/versus.py SIZE FOLDER [--micro-batch N] [--device B] [--host B]
[--rounds N] [--steps N] [--deepspeed-python FILE] [--only NAME,...] [--json FILE]

Every round runs every contestant in a process of its own, one after the other, so that a machine
that drifts drifts under all of them; ratios are taken within a round. The first two steps of a
process are not timed (nothing is cached or forecast yet), but count for the peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WARM_UP = 2
PARAMETERS = {"125m": 124_668_672, "1b1": 1_100_048_384}
ZINF = "zinf"
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
}
"""What DeepSpeed wants to be told instead of being launched."""


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the command of each contestant."""
    common = [args.size, "--micro-batch", str(args.micro_batch), "--steps", str(args.steps)]
    nvme = ["--folder", str(folder / "contestant")]
    budgets = ["--device", args.device, "--host", args.host]
    found = {
        ZINF: [sys.executable, str(HERE / "zinf_loop.py"), *common, *nvme, *budgets],
        "plain": [sys.executable, str(HERE / "plain_loop.py"), *common],
    }
    if args.deepspeed_python:
        deepspeed = [args.deepspeed_python, str(HERE / "deepspeed_loop.py")]
        found["deepspeed"] = [*deepspeed, *common, *nvme]
    wanted = args.only.split(",") if args.only else list(found)
    return {name: command for name, command in found.items() if name in wanted}


def run(command: list[str]) -> list[dict[str, float]]:
    """Return what a contestant measured, step by step. Raises RuntimeError if it failed."""
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
        if done.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"loss"')]
    return [json.loads(line) for line in lines]


def seconds(step: dict[str, float]) -> float:
    """Return the time of one step."""
    return step["forward_s"] + step["backward_s"] + step["optimizer_s"]


def spread(values: list[float], digits: int = 2) -> str:
    """Return the median with the range."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(size: str, rounds: list[dict[str, list[dict[str, float]]]]) -> str:
    """Return what was measured, a line per contestant."""
    numel = PARAMETERS[size]
    lines = [
        f"{'':10} {'step s':>20} {'fwd+bwd+opt':>18} {'zinf / it':>18} "
        f"{'read':>6} {'written':>8} B/parameter  peak RSS GiB"
    ]
    for name in rounds[0]:
        steps = [step for each in rounds for step in each[name][WARM_UP:]]
        parts = [
            statistics.median(step[part] for step in steps)
            for part in ("forward_s", "backward_s", "optimizer_s")
        ]
        ratios = [
            statistics.median(map(seconds, each[ZINF][WARM_UP:]))
            / statistics.median(map(seconds, each[name][WARM_UP:]))
            for each in rounds
            if ZINF in each
        ]
        read, written = (
            statistics.median(step[key] for step in steps) / numel
            for key in ("read_nbytes", "written_nbytes")
        )
        first = max(step["peak_rss_nbytes"] for each in rounds for step in each[name][:WARM_UP])
        later = max(step["peak_rss_nbytes"] for step in steps)
        lines.append(
            f"{name:10} {spread([seconds(step) for step in steps]):>20} "
            f"{'+'.join(f'{part:.2f}' for part in parts):>18} "
            f"{spread(ratios) if ratios else '':>18} {read:6.1f} {written:8.1f}"
            f"              {later / 2**30:.2f} (first steps {first / 2**30:.2f})"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("size", choices=PARAMETERS)
    parser.add_argument("folder", type=Path, help="folder on the drive to use")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--device", default="96MiB")
    parser.add_argument("--host", default="416MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--deepspeed-python", help="interpreter that has deepspeed and ninja")
    parser.add_argument("--only", default="", help="contestants, by commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps} must be more than the {WARM_UP} that are not timed")
    rounds: list[dict[str, list[dict[str, float]]]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number in range(args.rounds):
            found = {}
            for name, command in commands(args, Path(folder)).items():
                print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
                found[name] = run(command)
            rounds.append(found)
    print(
        f"{args.size}, micro-batch {args.micro_batch}, 256 tokens, bf16 + fp32 masters, AdamW, "
        f"clip 1.0; zinf device {args.device} + host {args.host}; {platform.machine()}\n"
        + table(args.size, rounds)
    )
    if args.json:
        record = {"size": args.size, "micro_batch": args.micro_batch, "device": args.device,
                  "host": args.host, "rounds": rounds}  # fmt: skip
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
