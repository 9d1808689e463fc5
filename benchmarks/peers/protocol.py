"""How a peer talks to the benchmark: commands on stdin, one JSON object a line on stdout.

Standard library only: a peer may run under an interpreter that has nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Transfer = Callable[[str], None]
"""Moves all bytes of the file; its argument is ``read`` or ``write``."""


def disk_nbytes() -> dict[str, int]:
    """Return what this process had storage devices read and write so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    found = dict(line.split(": ") for line in lines)
    return {"read": int(found["read_bytes"]), "write": int(found["write_bytes"])}


def measure(transfer: Transfer, operation: str) -> dict[str, float]:
    """Run `transfer`; return its seconds, the CPU seconds of this process, and disk bytes."""
    before, cpu, start = disk_nbytes()[operation], time.process_time(), time.perf_counter()
    transfer(operation)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "disk_nbytes": disk_nbytes()[operation] - before,
    }


def say(**fields: object) -> None:
    """Send one object to the benchmark."""
    print(json.dumps(fields), flush=True)


def serve(path_taken: str, transfers: list[tuple[str, Transfer]]) -> None:
    """Answer ``read`` and ``write`` until stdin ends, with the fastest of `transfers` for each.

    Every transfer is tried twice each way first, in turn, and judged by its faster try.
    """
    best = {}
    for operation in ("write", "read"):
        times = {name: [] for name, _ in transfers}
        for _ in range(2):
            for name, transfer in transfers:
                times[name].append(measure(transfer, operation)["seconds"])
        name = min(times, key=lambda name: min(times[name]))
        best[operation] = name, dict(transfers)[name]
    say(path=path_taken, settings={operation: name for operation, (name, _) in best.items()})
    for line in sys.stdin:
        operation = line.strip()
        say(**measure(best[operation][1], operation))
    os._exit(0)  # libraries of peers may hang in their destructors; nothing is left to be saved
