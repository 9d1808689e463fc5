"""The process that a crash test kills: ``python -m zinf_core.testing.crash_child ORDERS``.

Waits for a line on its standard input, opens the tier and works on it, reporting each thing it is
about to do, or has done, as one byte on a pipe. Ends when the parent is gone: then the line does
not come, or a report cannot be written.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from pathlib import Path

from zinf_core.completion import Completion
from zinf_core.keys import TensorKey
from zinf_core.testing.bench import TierHooks
from zinf_core.testing.crash_model import Step, StepKind, workload
from zinf_core.testing.crash_orders import Orders, Report
from zinf_core.tier import Tier


class _Worker:
    """Carries the workload out. Writes of different keys are in flight together, and so are
    flushes: the work goes on for up to three steps before one is waited for."""

    def __init__(self, hooks: TierHooks, tier: Tier, orders: Orders) -> None:
        self._hooks = hooks
        self._tier = tier
        self._orders = orders
        self._pending: dict[TensorKey, Completion] = {}
        self._flushes: deque[tuple[Completion, int]] = deque()
        self._random = random.Random(orders.seed)

    def run(self) -> None:
        tier, orders = self._tier, self._orders
        sizes = {key: tier.stat(key).nbytes for key in list(tier.keys())}
        unit = max(tier.capabilities.offset_align, tier.capabilities.length_align)
        for step in workload(orders.seed, sizes, unit=unit, num_steps=orders.num_steps):
            self._end_step()
            orders.report(Report.STEP)
            if step.kind is StepKind.FLUSH:
                self._flush()
            else:
                self._change(step)
        while self._flushes:
            self._acknowledge()

    def _flush(self) -> None:
        for key in list(self._pending):
            self._settle(key)
        self._orders.report(Report.FLUSH)
        num_steps = self._random.choice((0, 0, 1, 2, 3))
        self._flushes.append((self._tier.flush(), num_steps))

    def _end_step(self) -> None:
        """Wait for the flushes that have had their number of steps meanwhile, in their order."""
        while self._flushes and self._flushes[0][1] == 0:
            self._acknowledge()
        self._flushes = deque((flush, max(left - 1, 0)) for flush, left in self._flushes)

    def _acknowledge(self) -> None:
        flush, _ = self._flushes.popleft()
        flush.wait(timeout_s=self._hooks.timeout_s)
        self._orders.report(Report.FLUSHED)

    def _change(self, step: Step) -> None:
        self._settle(step.key)
        if step.kind is StepKind.DISCARD:
            self._tier.discard(step.key)
            return
        if step.kind is StepKind.STORE:
            self._tier.reserve(step.key, len(step.data))
        src = self._hooks.make_buffer(len(step.data))
        self._hooks.fill(src, step.data)
        self._pending[step.key] = self._tier.write_from(step.key, src, offset=step.offset)

    def _settle(self, key: TensorKey) -> None:
        completion = self._pending.pop(key, None)
        if completion is not None:
            completion.wait(timeout_s=self._hooks.timeout_s)


def main(arguments: list[str]) -> None:
    """Carry out the orders in `arguments[0]`."""
    orders = Orders.from_json(arguments[0])
    hooks = orders.reference.load()
    if not sys.stdin.readline():
        return
    orders.report(Report.OPEN)
    tier = hooks.open_tier(Path(orders.folder))
    _Worker(hooks, tier, orders).run()
    hooks.close(tier)
    orders.report(Report.CLOSED)


if __name__ == "__main__":
    main(sys.argv[1:])
