"""striped:// over two tiers of equal, given speed against one of them, interleaved.

Usage: python benchmarks/striped.py [--mib N] [--rounds N] [--rate SIZE] [--folder PATH]
[--require X] [--json FILE]

Both are throttled to the same rate, well below what the machine can do, so that the result says
what the tier does and not what the machine is doing besides: host memory by default, two folders
of --folder if given. Each round reads and writes the same key on both, alternating which is first.
Exits with 1 if the median ratio of either is below --require (default 1.8).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import open_tier
from zinf_core.tier import Tier
from zinf_core.units import MiB, parse_nbytes
from zinf_storage.allocators import PageAlignedAllocator

KEY = TensorKey.of("benchmark", StateKind.PARAM)


def rate(tier: Tier, buffer: Buffer, direction: str) -> float:
    """Return the bytes per second of one transfer of the whole key."""
    start = time.perf_counter()
    submit = tier.read_into if direction == "read" else tier.write_from
    submit(KEY, buffer).wait()
    return buffer.nbytes / (time.perf_counter() - start)


def spread(values: list[float], unit: float = 1.0) -> str:
    """Return min / median / max."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{low / unit:8.3f} {middle / unit:8.3f} {high / unit:8.3f}"


def measure(one: Tier, two: Tier, *, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the rates of each tier and direction, by round; one warm-up round is dropped."""
    buffer = PageAlignedAllocator().allocate(nbytes)
    buffer.array[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    found: dict[str, list[float]] = {}
    tiers = [("one", one), ("striped", two)]
    for tier in (one, two):
        tier.reserve(KEY, nbytes)
    for round_ in range(rounds + 1):
        tiers.reverse()
        for direction in ("write", "read"):
            for name, tier in tiers:
                value = rate(tier, buffer, direction)
                if round_:
                    found.setdefault(f"{name} {direction}", []).append(value)
    return found


def main() -> int:
    """Run the rounds, print a table, write the JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=64, help="size of the key")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="200MB", help="bytes per second of one tier")
    parser.add_argument("--folder", type=Path, help="use two folders in it instead of memory")
    parser.add_argument("--require", type=float, default=1.8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    nbytes, speed = args.mib * MiB, parse_nbytes(args.rate, what="rate")
    with ExitStack() as stack:
        inner = ["host://"] * 3
        if args.folder is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder))
            inner = [f"nvme://{folder}/{name}" for name in ("one", "a", "b")]
        slow = [f"[throttled://[{url}]?bytes_per_s={speed}]" for url in inner]
        capacity = 4 * nbytes + 64 * MiB
        one_url = slow[0].removeprefix("[").removesuffix("]")
        two_url = f"striped://{slow[1]}{slow[2]}?shares=1,1"
        one = stack.enter_context(closing(open_tier(one_url, capacity_nbytes=capacity)))
        two = stack.enter_context(closing(open_tier(two_url, capacity_nbytes=2 * capacity)))
        print(
            f"{args.mib} MiB, {args.rounds} rounds after one warm-up, one tier at {args.rate}/s, "
            f"{platform.machine()}, {os.cpu_count()} cores\n{two_url}: {two.path_taken}"
        )
        found = measure(one, two, nbytes=nbytes, rounds=args.rounds)
    print(f"{'':16}     min   median      max")
    for name, rates in found.items():
        print(f"{name:16} {spread(rates, 1e6)} MB/s")
    ratios = {
        direction: [
            b / a
            for a, b in zip(found[f"one {direction}"], found[f"striped {direction}"], strict=True)
        ]
        for direction in ("write", "read")
    }
    for direction, values in ratios.items():
        print(f"{'ratio ' + direction:16} {spread(values)}")
    medians = {direction: statistics.median(values) for direction, values in ratios.items()}
    if args.json:
        result = {"nbytes": nbytes, "bytes_per_s": speed, "rates": found, "ratios": ratios}
        args.json.write_text(json.dumps(result | {"median_ratio": medians}, indent=2))
    if min(medians.values()) < args.require:
        print(f"below {args.require}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
