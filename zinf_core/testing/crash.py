"""Crash test: processes that use a persistent tier are killed, and what they leave is checked."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import Bench, TierHooks, expect_bytes
from zinf_core.testing.crash_model import (
    FlushScope,
    Progress,
    State,
    Step,
    outcomes_by_key,
    states_at_flushes,
    workload,
)
from zinf_core.testing.crash_orders import Orders, Report
from zinf_core.testing.limits import run_limited

_ENDLESS: Final = 1_000_000
_LAST_STEPS: Final = 60
_MOMENTS: Final = (
    (Report.OPEN, 1, 2e-2),
    (Report.FLUSH, 6, 5e-3),
    (Report.STEP, 50, 5e-3),
    (Report.OPEN, 1, 1e-2),
    (Report.FLUSHED, 6, 2e-3),
    (Report.FLUSH, 12, 5e-3),
)
"""Reports to kill after, the largest count of them and the longest delay in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a child is killed."""

    report: Report
    count: int
    """The kill follows this many of the reports ..."""
    delay_s: float
    """... by this many seconds."""

    def __str__(self) -> str:
        """Return the moment in words."""
        return f"kill {self.delay_s * 1e3:.2f} ms after {self.report.name} number {self.count}"


def draw_kills(seed: int, num_kills: int) -> list[Kill]:
    """Return moments drawn from `seed`: while opening, writing, flushing, and after a flush."""
    rng, kills = random.Random(seed), []
    for report, max_count, max_s in itertools.islice(itertools.cycle(_MOMENTS), num_kills):
        delay = max_s * 10 ** rng.uniform(-2, 0)
        kills.append(Kill(report=report, count=rng.randint(1, max_count), delay_s=delay))
    return kills


def kill_repeatedly(hooks: TierHooks, folder: Path, *, unit: int, seed: int = 0) -> None:
    """Have `hooks.num_kills` processes in turn open the tier in `folder`, use it and be killed.

    After each kill the tier is opened here, and must be what `hooks.flush_scope` allows; at last a
    process that nobody kills must be able to go on. `unit` is what offsets and lengths must be
    multiples of, in bytes. The workload follows from `seed`, the moments only roughly. Leaves no
    process behind. Raises AssertionError that says what was found after which kill.
    """
    kills: list[Kill | None] = [*draw_kills(seed, hooks.num_kills), None]
    state: State = {}
    with contextlib.ExitStack() as stack:
        children = _children(stack, hooks, folder, len(kills))
        for i, (kill, child) in enumerate(zip(kills, children, strict=True)):
            progress = child.finished() if kill is None else child.killed(kill)
            steps = workload(
                child.orders.seed,
                {key: len(data) for key, data in state.items()},
                unit=unit,
                num_steps=child.orders.num_steps,
            )
            what = f"law 14: process {i}, " + ("not killed" if kill is None else str(kill))
            done = list(itertools.islice(steps, progress.num_steps))
            look = functools.partial(_look, hooks, folder, what, state, done, progress)
            state = run_limited(look, limit_s=4 * hooks.timeout_s, what=what)


def _look(
    hooks: TierHooks, folder: Path, what: str, start: State, steps: list[Step], progress: Progress
) -> State:
    return _Found(hooks, folder, what).checked(start, steps, progress)


def _children(
    stack: contextlib.ExitStack, hooks: TierHooks, folder: Path, count: int
) -> Iterator[_Child]:
    """Yield `count` children, each started while the one before is at work: starting is slow."""
    reference = hooks.in_child()
    waiting: list[_Child] = []
    for i in range(count):
        num_steps = _LAST_STEPS if i == count - 1 else _ENDLESS
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        said = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - left by the stack
        orders = Orders(
            reference=reference, folder=str(folder), seed=i, num_steps=num_steps, report_fd=writer
        )
        child = _Child(orders, reader, said, timeout_s=hooks.timeout_s)
        stack.callback(child.end)
        waiting.append(child)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


class _Child:
    """One process, in a session of its own, and what it has reported."""

    def __init__(self, orders: Orders, reader: int, said: BinaryIO, *, timeout_s: float) -> None:
        """Start the process; it waits for `killed` or `finished`. Its output goes to `said`."""
        self.orders = orders
        self._reader = reader
        self._timeout_s = timeout_s
        self._reports = b""
        self._output = said
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "zinf_core.testing.crash_child", orders.to_json()],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(orders.report_fd,),
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        finally:
            os.close(orders.report_fd)

    def killed(self, kill: Kill) -> Progress:
        """Let it work, kill it at the moment `kill` says, and return how far it had come."""
        self._go()
        while self._reports.count(kill.report.value) < kill.count:
            self._read(f"{kill.report.name} number {kill.count}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=kill.delay_s)
        self._kill()
        if self._process.returncode != -signal.SIGKILL:
            raise AssertionError(f"crash test: the child ended by itself:\n{self._said()}")
        return self._progress()

    def finished(self) -> Progress:
        """Let it do all its steps and end; return how far it came."""
        self._go()
        while Report.CLOSED.value not in self._reports:
            self._read("its end")
        if self._process.wait(timeout=self._timeout_s):
            raise AssertionError(f"crash test: the last child failed:\n{self._said()}")
        return self._progress()

    def end(self) -> None:
        """Kill the process if it runs."""
        self._kill()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _go(self) -> None:
        if self._process.stdin is None:
            raise AssertionError("crash test: the child has no standard input")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def _read(self, awaited: str) -> None:
        ready, _, _ = select.select([self._reader], [], [], self._timeout_s)
        found = os.read(self._reader, 1 << 16) if ready else b""
        if not found:
            self._kill()
            why = "ended" if ready else f"was silent for {self._timeout_s} s"
            raise AssertionError(f"crash test: the child {why} before {awaited}:\n{self._said()}")
        self._reports += found

    def _progress(self) -> Progress:
        while found := os.read(self._reader, 1 << 16):
            self._reports += found
        count = self._reports.count
        return Progress(
            num_steps=count(Report.STEP.value),
            num_flushes=count(Report.FLUSH.value),
            num_acknowledged=count(Report.FLUSHED.value),
        )

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-4000:]


class _Found:
    """What a process left, read in this one."""

    def __init__(self, hooks: TierHooks, folder: Path, what: str) -> None:
        """Open the tier and read everything; CorruptDataError is noted, not raised."""
        self._hooks = hooks
        self._what = what
        try:
            self._bench = Bench(hooks, folder)
        except Exception as exc:
            raise AssertionError(f"{what}: the tier cannot be opened: {exc}") from exc
        self._state: dict[TensorKey, bytes] = {}
        self._corrupt: dict[TensorKey, CorruptDataError] = {}

    def checked(self, start: State, steps: list[Step], progress: Progress) -> State:
        """Compare with what may be there after `steps` from `start`; close; return what is."""
        try:
            self._read()
            if self._hooks.flush_scope is FlushScope.TIER:
                self._expect_one_of(states_at_flushes(start, steps, progress))
            else:
                self._expect_outcomes(start, steps, progress)
        finally:
            self._bench.close()
        return self._state

    def _read(self) -> None:
        for key in list(self._bench.tier.keys()):
            try:
                self._state[key] = self._bench.read(key)
            except CorruptDataError as exc:
                self._corrupt[key] = exc
        usage = self._bench.tier.usage()
        assert usage.num_keys == len(self._state) + len(self._corrupt), (
            f"{self._what}: usage().num_keys is {usage.num_keys}, keys() has others"
        )

    def _expect_one_of(self, states: list[State]) -> None:
        if self._state in states and not self._corrupt:
            return
        for key, exc in self._corrupt.items():
            raise AssertionError(f"{self._what}: {key} cannot be read: {exc}") from exc
        acknowledged = states[0]
        missing = sorted(map(str, set(acknowledged) - set(self._state)))
        other = sorted(map(str, set(self._state) - set(acknowledged)))
        differing = [
            k for k in self._state if k in acknowledged and self._state[k] != acknowledged[k]
        ]
        raise AssertionError(
            f"{self._what}: the tier is neither as the last acknowledged flush made it nor as one "
            f"of the {len(states) - 1} submitted later; compared with the first, missing: "
            f"{missing}, not in it: {other}, other bytes: {sorted(map(str, differing))}"
        )

    def _expect_outcomes(self, start: State, steps: list[Step], progress: Progress) -> None:
        outcomes = outcomes_by_key(start, steps, progress)
        unknown = set(self._state) - set(outcomes)
        assert not unknown, f"{self._what}: keys nobody stored: {sorted(map(str, unknown))}"
        for key, outcome in outcomes.items():
            if key in self._corrupt:
                assert len(outcome.versions) > 1, f"{self._what}: {self._corrupt[key]}"
                self._bench.tier.discard(key)
            elif not outcome.allows(self._state.get(key)):
                self._fail(key, outcome.versions[0])
        if self._corrupt:
            self._bench.flush()

    def _fail(self, key: TensorKey, flushed: bytes | None) -> None:
        """Say what is wrong with a key, compared with the flush acknowledged last."""
        found = self._state.get(key)
        assert found is not None, f"{self._what}: {key} is gone"
        assert flushed is not None, (
            f"{self._what}: {key} holds {len(found)} bytes that nobody stored under it"
        )
        expect_bytes(found, flushed, f"{self._what}: {key}")
