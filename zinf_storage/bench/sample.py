"""Sample: one cell measured once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import ZinfError
from zinf_core.tier import Tier
from zinf_storage.bench.workload import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one measurement saw."""

    read_nbytes: int
    written_nbytes: int
    wall_s: float
    """From the first submit until the last request was done."""
    cpu_s: float
    """Processor time of this process, all threads."""
    latencies_s: tuple[float, ...]
    """Of each request, from before its submit until it was seen to be done."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes moved, read or written, per second."""
        return (self.read_nbytes + self.written_nbytes) / self.wall_s

    @property
    def cpu_share(self) -> float:
        """Share of one core."""
        return self.cpu_s / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Where times come from."""

    wall_s: Callable[[], float] = time.perf_counter
    cpu_s: Callable[[], float] = time.process_time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    completion: Completion
    slot: Buffer
    began_s: float


class Sampler:
    """Keeps requests in flight from one thread, as the pager does. Not thread-safe."""

    def __init__(
        self, tier: Tier, *, should_stop: Callable[[], bool], clocks: Clocks | None = None
    ) -> None:
        """Measure `tier`; no request is begun any more once `should_stop` says so."""
        self._tier = tier
        self._should_stop = should_stop
        self._clocks = clocks or Clocks()
        self._flights: list[_Flight] = []
        self._latencies_s: list[float] = []

    def measure(
        self, requests: Sequence[Request], slots: Sequence[Buffer], *, seconds: float
    ) -> Sample:
        """Repeat `requests`, one in flight per slot, for `seconds` and at least once per slot.

        Blocks until everything submitted is done. Raises what the tier raises.
        """
        clocks, free = self._clocks, list(slots)
        self._latencies_s = []
        moved = {False: 0, True: 0}
        cpu_s, began_s = clocks.cpu_s(), clocks.wall_s()
        try:
            for count, request in enumerate(itertools.cycle(requests)):
                if self._should_stop() or (
                    count >= len(slots) and clocks.wall_s() - began_s >= seconds
                ):
                    break
                if not free:
                    free += self._retire()
                slot = free.pop()
                free += self._submit(request, slot)
                moved[request.is_write] += slot.nbytes
            while self._flights:
                self._retire()
        finally:
            self._drain()
        return Sample(
            read_nbytes=moved[False],
            written_nbytes=moved[True],
            wall_s=max(clocks.wall_s() - began_s, 1e-9),
            cpu_s=clocks.cpu_s() - cpu_s,
            latencies_s=tuple(self._latencies_s),
        )

    def _submit(self, request: Request, slot: Buffer) -> list[Buffer]:
        """Submit one request; return its slot if it is done already."""
        began_s = self._clocks.wall_s()
        move = self._tier.write_from if request.is_write else self._tier.read_into
        completion = move(request.key, slot, offset=request.offset)
        flight = _Flight(completion=completion, slot=slot, began_s=began_s)
        if completion.done():
            return [self._ended(flight)]
        self._flights.append(flight)
        return []

    def _retire(self) -> list[Buffer]:
        """Wait for the oldest request; return the slots of all that are done by then."""
        self._flights[0].completion.wait()
        flights, self._flights = self._flights, []
        free = []
        for flight in flights:
            if flight.completion.done():
                free.append(self._ended(flight))
            else:
                self._flights.append(flight)
        return free

    def _ended(self, flight: _Flight) -> Buffer:
        flight.completion.wait()
        self._latencies_s.append(self._clocks.wall_s() - flight.began_s)
        return flight.slot

    def _drain(self) -> None:
        """Wait for what an error left in flight: its buffers are about to be used again."""
        flights, self._flights = self._flights, []
        for flight in flights:
            try:
                flight.completion.wait()
            except ZinfError:
                # The first failure is on its way to the caller already.
                continue
