"""The NVMe tier against fio, kvikio's host path and DeepSpeed's aio_handle, interleaved.

Usage: python benchmarks/nvme_engine.py FOLDER [--gib N] [--rounds N] [--json FILE]
[--deepspeed-python PYTHON] [--only NAME[,NAME...]]

Every round runs every contestant once, reading and writing the same number of bytes in keys of
64 MiB, in an order that rotates, so that a drive that drifts drifts under all of them; ratios are
taken within a round. fio and the peers are first tried with several settings, and keep their best.
Host memory is private, page aligned and of huge pages, except that fio and DeepSpeed bring their
own. "from disk" is what the kernel says the process had the drive move: 1.00 is all of it.
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
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from peers.fio import Fio
from peers.libcuda import build
from peers.protocol import measure

from zinf_core.keys import StateKind, TensorKey
from zinf_core.units import GiB, MiB, format_nbytes
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme import Engine, NvmeOptions, NvmeTier

KEY_NBYTES = 64 * MiB
KEYS_IN_FLIGHT = 4
OPERATIONS = ("read", "write")
PEERS = Path(__file__).parent / "peers"
DEFAULTS = "zinf, defaults"
VARIANTS = [(1, 2), (1, 8), (1, 32), (2, 4), (2, 16), (4, 4)]
"""Request size in MiB and threads tried besides the defaults."""
GOALS = {"fio": 0.95, "kvikio host": 1.0, "aio_handle": 1.1}


class Contestant(Protocol):
    """Something that moves all bytes once when asked to."""

    path_taken: str

    def settings(self) -> dict[str, str]:
        """Return per operation what it was set to."""
        ...

    def run(self, operation: str) -> dict[str, float]:
        """Return seconds, cpu_seconds and disk_nbytes of one pass."""
        ...


class Zinf:
    """An NvmeTier with keys of 64 MiB."""

    def __init__(self, folder: Path, nbytes: int, options: NvmeOptions) -> None:
        """Write every key three times, so that every extent was written before."""
        self._tier = NvmeTier.open(folder, options=options)
        self.path_taken = f"{self._tier.path_taken}, new extents, all written before"
        self._options = options
        allocator = PageAlignedAllocator()
        self._buffers = {
            TensorKey.of(f"key.{number}", StateKind.PARAM): allocator.allocate(KEY_NBYTES)
            for number in range(nbytes // KEY_NBYTES)
        }
        for key, buffer in self._buffers.items():
            buffer.array[:] = 7
            self._tier.reserve(key, KEY_NBYTES)
        for _ in range(3):
            self._move("write")

    def close(self) -> None:
        """Close the tier and delete its files."""
        self._tier.remove()

    def settings(self) -> dict[str, str]:
        """Return request size and threads."""
        options = self._options
        size = format_nbytes(options.io_nbytes)
        return dict.fromkeys(OPERATIONS, f"{size} requests, {options.num_threads} threads")

    def run(self, operation: str) -> dict[str, float]:
        """Move every byte once."""
        return measure(self._move, operation)

    def _move(self, operation: str) -> None:
        submit = self._tier.read_into if operation == "read" else self._tier.write_from
        pending = deque()
        for key, buffer in self._buffers.items():
            if len(pending) == KEYS_IN_FLIGHT:
                pending.popleft().wait()
            pending.append(submit(key, buffer))
        for completion in pending:
            completion.wait()


class Peer:
    """A program of `peers` that serves commands; see `peers.protocol`."""

    def __init__(self, python: str, script: str, file: Path, environment: dict[str, str]) -> None:
        """Start it and let it find its best settings. Raises RuntimeError if it cannot work."""
        sizes = [str(file.stat().st_size), str(KEY_NBYTES)]
        self._process = subprocess.Popen(
            [python, str(PEERS / script), str(file), *sizes], env=os.environ | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            answer = self._answer()
        except RuntimeError:
            self.close()
            raise
        self.path_taken = answer["path"]
        self._settings = answer["settings"]

    def close(self) -> None:
        """End the program."""
        with self._process as process:
            if process.stdin:
                process.stdin.close()
            process.wait(timeout=30)

    def settings(self) -> dict[str, str]:
        """Return what the program chose."""
        return self._settings

    def run(self, operation: str) -> dict[str, float]:
        """Move every byte once."""
        print(operation, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended without a word"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


@dataclass(slots=True)
class Series:
    """All passes of one contestant in one direction."""

    nbytes: int
    passes: list[dict[str, float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """GB/s of each pass."""
        return [self.nbytes / one["seconds"] / 1e9 for one in self.passes]

    @property
    def cpu_share(self) -> float:
        """Median CPU seconds per second."""
        return statistics.median(one["cpu_seconds"] / one["seconds"] for one in self.passes)

    @property
    def disk_share(self) -> float:
        """Least part of the bytes that came from or went to the drive."""
        return min(one["disk_nbytes"] / self.nbytes for one in self.passes)


Results = dict[tuple[str, str], Series]


@contextmanager
def prepared_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """Yield a file of `nbytes` with every block written, for the peers to overwrite."""
    path = folder / "peer.bin"
    chunk = bytes(8 * MiB)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for _ in range(nbytes // len(chunk)):
            file.write(chunk)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        yield path
    finally:
        path.unlink()


def zinf_variants() -> dict[str, NvmeOptions]:
    """Return the defaults and what else is tried."""
    default = NvmeOptions(engine=Engine.POSIX)
    found = {DEFAULTS: default}
    for size, threads in VARIANTS:
        options = NvmeOptions(engine=Engine.POSIX, io_nbytes=size * MiB, num_threads=threads)
        if options != default:
            found[f"zinf, {size} MiB x {threads}"] = options
    return found


def contestants(
    stack: ExitStack, args: argparse.Namespace, folder: Path
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return whoever can take part by name, and of the others why they cannot."""
    nbytes = args.gib * GiB
    file = stack.enter_context(prepared_file(folder, nbytes))

    def zinf(options: NvmeOptions) -> Contestant:
        own = Path(tempfile.mkdtemp(dir=folder))
        tier = Zinf(own, nbytes, options)
        stack.callback(tier.close)
        return tier

    def fio() -> Contestant:
        found = Fio(file, nbytes)
        found.tune()
        return found

    def peer(python: str, script: str, environment: dict[str, str]) -> Contestant:
        found = Peer(python, script, file, environment)
        stack.callback(found.close)
        return found

    def kvikio() -> Contestant:
        library = build(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        return peer(sys.executable, "kvikio_host.py", {"LD_LIBRARY_PATH": str(library.parent)})

    def deepspeed() -> Contestant:
        python = args.deepspeed_python
        programs = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
        return peer(python, "deepspeed_aio.py", {"PATH": programs})

    makers: dict[str, Callable[[], Contestant]] = {
        name: lambda options=options: zinf(options) for name, options in zinf_variants().items()
    }
    makers |= {"fio": fio, "kvikio host": kvikio, "aio_handle": deepspeed}
    present, absent = {}, {}
    for name, make in makers.items():
        if args.only and not any(wanted in name for wanted in args.only):
            continue
        try:
            present[name] = make()
        except RuntimeError as exc:
            absent[name] = str(exc)
        print(f"  {name}: {absent.get(name, 'ready')}", file=sys.stderr, flush=True)
    return present, absent


def rounds(present: dict[str, Contestant], num_rounds: int, nbytes: int) -> Results:
    """Run everybody `num_rounds` times, beginning with another one each time."""
    results = {(name, op): Series(nbytes) for op in OPERATIONS for name in present}
    names = list(present)
    for number in range(num_rounds):
        start = number * max(1, len(names) // num_rounds) % len(names)
        for name in names[start:] + names[:start]:
            for operation in OPERATIONS:
                results[name, operation].passes.append(present[name].run(operation))
        print(f"  round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return results


def spread(values: list[float]) -> str:
    """Return median (min-max)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def ratios(results: Results, mine: str, other: str, operation: str) -> list[float]:
    """Return per round how many times as fast `mine` was."""
    pairs = zip(results[mine, operation].rates, results[other, operation].rates, strict=True)
    return [a / b for a, b in pairs]


def checksum_seconds(nbytes: int) -> float:
    """Return CPU seconds that xxh3 takes for `nbytes` in requests of 1 MiB."""
    memory = np.full(256 * MiB, 7, np.uint8)
    start = time.process_time()
    for low in range(0, memory.nbytes, MiB):
        xxhash.xxh3_64_intdigest(memory[low : low + MiB].data)
    return (time.process_time() - start) * nbytes / memory.nbytes


def print_tables(results: Results, present: dict[str, Contestant]) -> None:
    """Print a table for each direction; zinf's ratios are those of its defaults."""
    for operation in OPERATIONS:
        print(f"\n{operation:22} {'GB/s':>18} {'defaults / it':>18} {'CPU':>6} {'from disk':>9}"
              "  settings; path")  # fmt: skip
        for name, contestant in present.items():
            series = results[name, operation]
            ratio = ""
            if DEFAULTS in present and name != DEFAULTS:
                ratio = spread(ratios(results, DEFAULTS, name, operation))
            print(f"{name:22} {spread(series.rates):>18} {ratio:>18} {series.cpu_share:>6.0%} "
                  f"{series.disk_share:>9.2f}  {contestant.settings()[operation]}; "
                  f"{contestant.path_taken}")  # fmt: skip


def print_verdict(results: Results, present: dict[str, Contestant], checksums_s: float) -> None:
    """Print whether the goals are met, and what checksums cost."""
    print()
    if DEFAULTS not in present:
        return
    for name, goal in GOALS.items():
        for operation in OPERATIONS:
            if name in present:
                ratio = statistics.median(ratios(results, DEFAULTS, name, operation))
                verdict = "met" if ratio >= goal else "MISSED"
                print(f"{operation}: {ratio:.2f} x {name}, goal {goal:.2f}: {verdict}")
    seconds = statistics.median(one["seconds"] for one in results[DEFAULTS, "write"].passes)
    print(f"checksums of writes alone take {checksums_s / seconds:.0%} of a core at that rate "
          "(contained in CPU)")  # fmt: skip
    for (name, operation), series in results.items():
        if series.disk_share < 0.99:
            print(f"{name}, {operation}: {series.disk_share:.2f} of the bytes came from the drive; "
                  "the rest is memory's speed, do not compare it")  # fmt: skip


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder on the drive to measure")
    parser.add_argument("--gib", type=int, default=1, help="GiB moved per pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON",
                        help="interpreter that has deepspeed and ninja")  # fmt: skip
    parser.add_argument("--only", type=lambda text: text.split(","),
                        help="contestants whose name contains one of these words")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    """Run the rounds, print the tables and write the JSON if asked."""
    args = parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    nbytes = args.gib * GiB
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; {args.gib} GiB in "
          f"keys of {format_nbytes(KEY_NBYTES)}, {args.rounds} rounds, {args.folder}")  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        present, absent = contestants(stack, args, folder)
        results = rounds(present, args.rounds, nbytes)
        checksums_s = checksum_seconds(nbytes)
        print_tables(results, present)
        print_verdict(results, present, checksums_s)
        for name, reason in absent.items():
            print(f"{name} did not take part: {reason}")
        if args.json:
            args.json.write_text(as_json(args, present, absent, results, checksums_s))
    return 0


def as_json(
    args: argparse.Namespace,
    present: dict[str, Contestant],
    absent: dict[str, str],
    results: Results,
    checksums_s: float,
) -> str:
    """Return everything that was found."""
    return json.dumps(
        {
            "nbytes": args.gib * GiB,
            "key_nbytes": KEY_NBYTES,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "checksum_seconds": checksums_s,
            "absent": absent,
            "contestants": {
                name: {
                    "path_taken": contestant.path_taken,
                    "settings": contestant.settings(),
                    **{
                        operation: {
                            "passes": results[name, operation].passes,
                            "gb_per_s": results[name, operation].rates,
                        }
                        for operation in OPERATIONS
                    },
                }
                for name, contestant in present.items()
            },
        },
        indent=2,
    )


if __name__ == "__main__":
    sys.exit(main())
