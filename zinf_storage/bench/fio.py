"""fio: the yardstick of disk benchmarks, when it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zinf_core.errors import TransferError
from zinf_storage.bench.grid import Cell, Operation, Order

HINT: Final = "fio is not installed, so there is no reference; apt-get install fio, or dnf"
_START_S: Final = 60
"""Seconds that fio may take besides its run."""
_RW: Final = {
    (Operation.READ, Order.SEQUENTIAL): "read",
    (Operation.READ, Order.RANDOM): "randread",
    (Operation.WRITE, Order.SEQUENTIAL): "write",
    (Operation.WRITE, Order.RANDOM): "randwrite",
    (Operation.MIXED, Order.SEQUENTIAL): "rw",
    (Operation.MIXED, Order.RANDOM): "randrw",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fio:
    """An installed fio."""

    program: Path
    version: str

    @classmethod
    def find(cls) -> Fio | None:
        """Return the fio on the PATH, None if there is none that starts. Blocks."""
        name = shutil.which("fio")
        if name is None:
            return None
        try:
            found = subprocess.run(
                [name, "--version"], capture_output=True, text=True, check=True, timeout=_START_S
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return cls(program=Path(name), version=found.stdout.strip())

    def prepare(self, file: Path, nbytes: int) -> None:
        """Write `nbytes` of a new `file`, so that reads find blocks. Blocks."""
        self._run(file, nbytes, ["--rw=write", "--bs=4m", "--iodepth=4", "--end_fsync=1"], 0)

    def measure(self, cell: Cell, file: Path, nbytes: int, *, seconds: float) -> float:
        """Return the bytes per second of `cell` on the first `nbytes` of `file`. Blocks for about
        `seconds`. Raises TransferError if fio fails."""
        mode = _RW[cell.operation, cell.order]
        job = self._run(
            file,
            nbytes,
            [
                f"--rw={mode}",
                f"--bs={cell.nbytes}",
                f"--iodepth={cell.depth}",
                "--time_based",
                f"--runtime={max(1, round(seconds * 1000))}ms",
            ],
            seconds,
        )
        return float(sum(job[way]["bw_bytes"] for way in ("read", "write")))

    def _run(
        self, file: Path, nbytes: int, options: list[str], seconds: float
    ) -> dict[str, dict[str, float]]:
        """Run one job and return its part of fio's report."""
        command = [
            str(self.program), "--name=zinf", f"--filename={file}", f"--size={nbytes}",
            "--ioengine=libaio", "--direct=1", "--thread", "--output-format=json", *options,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=seconds + _START_S,
                cwd=file.parent,
            )  # fmt: skip
            # Some versions write notes before the report.
            job: dict[str, dict[str, float]] = json.loads(done.stdout[done.stdout.index("{") :])[
                "jobs"
            ][0]
        except subprocess.SubprocessError as exc:
            said = getattr(exc, "stderr", None) or exc
            raise TransferError(f"fio failed at {file}: {said}".strip()) from exc
        except (OSError, ValueError, LookupError) as exc:
            raise TransferError(f"fio at {file} gave no report: {exc}") from exc
        return job
