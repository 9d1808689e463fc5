"""fio on one file, at the block size and depth that serve it best."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("libaio", "io_uring")
BLOCKS = ("1m", "4m")
DEPTHS = (1, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class FioSetting:
    """How fio is asked to work."""

    engine: str
    block: str
    depth: int

    def __str__(self) -> str:
        return f"{self.engine} {self.block} depth {self.depth}"


class Fio:
    """Runs fio over one file of `nbytes`, in place and past the page cache."""

    path_taken = "O_DIRECT, overwrite in place, own buffers of depth x block"

    def __init__(self, file: Path, nbytes: int) -> None:
        """Find the engines that work. Raises RuntimeError if there are none."""
        self._file = file
        self._nbytes = nbytes
        self._executable = shutil.which("fio") or ""
        if not self._executable:
            raise RuntimeError("fio is not installed")
        self._engines = [name for name in ENGINES if self._works(FioSetting(name, "1m", 1))]
        if not self._engines:
            raise RuntimeError(f"fio has none of {', '.join(ENGINES)}, or may not use them")
        self._best: dict[str, FioSetting] = {}

    def settings(self) -> dict[str, str]:
        """Return the setting chosen for reads and for writes."""
        return {operation: str(setting) for operation, setting in self._best.items()}

    def tune(self, num_tries: int = 3) -> None:
        """Choose the settings with the best median; tries are interleaved."""
        every = [FioSetting(e, b, d) for e in self._engines for b in BLOCKS for d in DEPTHS]
        for operation in ("write", "read"):
            times: dict[FioSetting, list[float]] = {setting: [] for setting in every}
            for _ in range(num_tries):
                for setting in every:
                    times[setting].append(self._run(setting, operation)["seconds"])
            self._best[operation] = min(every, key=lambda one: statistics.median(times[one]))

    def run(self, operation: str) -> dict[str, float]:
        """Move every byte once; return seconds, CPU seconds and bytes of the disk."""
        return self._run(self._best[operation], operation)

    def _works(self, setting: FioSetting) -> bool:
        try:
            self._run(setting, "read")
        except RuntimeError:
            return False
        return True

    def _run(self, setting: FioSetting, operation: str) -> dict[str, float]:
        command = [
            self._executable, "--name=peer", f"--filename={self._file}", f"--size={self._nbytes}",
            f"--rw={operation}", f"--bs={setting.block}", f"--iodepth={setting.depth}",
            f"--ioengine={setting.engine}", "--direct=1", "--overwrite=1", "--iomem_align=4096",
            "--thread", "--output-format=json",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        with process:
            text = process.stdout.read() if process.stdout else ""
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or "{" not in text:
            raise RuntimeError(f"fio ended with {process.returncode}: {text.strip()[:200]}")
        job = json.loads(text[text.index("{") :])["jobs"][0]
        seconds = self._nbytes / job[operation]["bw_bytes"]
        blocks = usage.ru_inblock if operation == "read" else usage.ru_oublock
        return {
            "seconds": seconds,
            "cpu_seconds": seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100,
            "disk_nbytes": 512 * blocks,
        }
