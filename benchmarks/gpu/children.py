"""Sections run in processes of their own: what hangs is killed, what crashes crashes alone."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

_GRACE_S = 5.0
"""Seconds a process has to end once it was killed, or said that it is through."""

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # read when cuBLAS starts: before torch is imported
    "NVIDIA_TF32_OVERRIDE": "0",
    "PYTHONUNBUFFERED": "1",
}


@dataclass
class Outcome:
    """What came of one section."""

    name: str
    status: str = "ran"
    """``ran``, ``timeout``, ``crash`` or ``interrupted``."""
    text: str = ""
    """What it was doing, and the end of what it wrote to stderr, if it did not run to its end."""
    seconds: float = 0.0
    items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        """Failed items; a section that did not end counts as one."""
        cut_short = self.status in {"timeout", "crash"}
        return sum(item["status"] == "fail" for item in self.items) + cut_short


def run_section(
    name: str,
    command: Sequence[str],
    *,
    cap_s: float,
    show: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Run ``command --fd N``, show each item as it arrives, and return them all.

    It is killed, with every process it started, after `cap_s` seconds or by KeyboardInterrupt,
    which is swallowed: the outcome's status is ``interrupted``.
    """
    outcome, start = Outcome(name), time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        child = _start([*command, "--fd", str(writing)], writing, errors)
        os.close(writing)
        listener = _Listener(reading, outcome, show)
        ended = False
        try:
            ended = listener.run(start + cap_s)
            if not ended:
                outcome.status = "timeout"
        except KeyboardInterrupt:
            outcome.status = "interrupted"
        finally:
            os.close(reading)
            _end(child, wait=ended)
        outcome.seconds = round(time.monotonic() - start, 1)
        if ended and not listener.through:
            outcome.status = "crash"
        causes = {
            "crash": _cause(child),
            "timeout": f"stopped after {cap_s:.0f} s",
            "interrupted": "Ctrl-C",
        }
        if outcome.status in causes:
            outcome.text = f"{causes[outcome.status]}, at {listener.at}; {_tail(errors)}"
    return outcome


def _start(command: Sequence[str], writing: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command],
        pass_fds=[writing],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,  # Ctrl-C is for us, and all of it can be killed
    )


class _Listener:
    """Reads a section's lines until it closes its end."""

    def __init__(self, fd: int, outcome: Outcome, show: Callable[[dict[str, Any]], None]) -> None:
        self._fd = fd
        self._outcome = outcome
        self._show = show
        self._rest = b""
        self.at = "its start"
        self.through = False

    def run(self, end: float) -> bool:
        """Return whether the other end was closed before `end`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            while selector.select(max(end - time.monotonic(), 0)):
                data = os.read(self._fd, 1 << 16)
                if not data:
                    return True
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        return False

    def _take(self, record: dict[str, Any]) -> None:
        event = record.pop("event")
        if event == "at":
            self.at = record["name"]
        elif event == "end":
            self.through = True
        else:
            self._outcome.items.append(record)
            self._show(record)


def _end(child: subprocess.Popen[bytes], *, wait: bool) -> None:
    """Have the process and all it started gone; first wait for it if it closed its report."""
    if wait:
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            wait = False
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if not wait:
        # In a system call of the driver it may live on, and there is nothing to be done about it.
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)


def _cause(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return "it wrote: " + " | ".join(lines[-6:]) if lines else "it wrote nothing"
