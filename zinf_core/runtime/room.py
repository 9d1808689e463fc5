"""Room: leases of a pool whose memory is full of what others can do without."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

from zinf_core.errors import BudgetExceededError, PoolExhaustedError
from zinf_core.runtime.idle_pages import IdlePages
from zinf_core.runtime.page import Page
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.transfers import TransfersInFlight
from zinf_core.units import align_up, format_nbytes


class Room:
    """Makes room in pools by waiting for transfers and evicting idle pages. Guarded by the pager's
    lock."""

    def __init__(
        self, in_flight: TransfersInFlight, idle: IdlePages, evict: Callable[[Page], bool]
    ) -> None:
        """Evict pages of `idle` with `evict`, which returns False if it cannot."""
        self._in_flight = in_flight
        self._idle = idle
        self._evict = evict
        self._leaving: dict[BufferPool, int] = {}

    def expect(self, pool: BufferPool, nbytes: int) -> None:
        """Know that `nbytes` more of `pool` will be free when a write is done; fewer, if negative,
        when it is."""
        self._leaving[pool] = self._leaving.get(pool, 0) + nbytes

    def coming_nbytes(self, pool: BufferPool) -> int:
        """Return what is free, or will be when the writes in flight are done."""
        free = pool.budget_nbytes - pool.usage().leased_nbytes
        return free + self._leaving.get(pool, 0)

    def evict_one(self, pool: BufferPool, *, for_step: int | None = None) -> bool:
        """Evict the best victim of `pool`; False if there is none, or none that is needed later
        than the access `for_step`."""
        return self._idle.evict_one(pool, self._evict, for_step)

    def lease(self, pool: BufferPool, nbytes: int, what: str) -> Lease:
        """Return a lease, making room as needed. Blocks. Raises BudgetExceededError."""
        found: list[Lease] = []
        self.take(pool, nbytes, what, lambda: found.append(pool.lease_nowait(nbytes)))
        return found[0]

    def lease_ahead(self, pool: BufferPool, nbytes: int, step: int) -> Lease | None:
        """Return a lease for an access at `step`, giving up only what is needed later. Never
        blocks; None if there is no room yet."""
        found: list[Lease] = []
        self.take_ahead(pool, nbytes, step, lambda: found.append(pool.lease_nowait(nbytes)))
        return found[0] if found else None

    def take_ahead(
        self, pool: BufferPool, nbytes: int, step: int | None, take: Callable[[], None]
    ) -> bool:
        """Call `take` until it does not raise PoolExhaustedError, giving up only what is needed
        later than `step`. Never blocks; False if there is no room yet."""
        while True:
            with suppress(PoolExhaustedError):
                take()
                return True
            if step is None or self.coming_nbytes(pool) >= align_up(nbytes):
                return False
            if not self.evict_one(pool, for_step=step):
                return False

    def take(self, pool: BufferPool, nbytes: int, what: str, take: Callable[[], None]) -> None:
        """Call `take` as `try_to_take` does. Raises BudgetExceededError if it cannot be done."""
        if self.try_to_take(pool, nbytes, take):
            return
        gc.collect()  # views may hang in reference cycles, as after an exception
        if not self.try_to_take(pool, nbytes, take):
            raise BudgetExceededError(self._explain(pool, nbytes, what))

    def try_to_take(self, pool: BufferPool, nbytes: int, take: Callable[[], None]) -> bool:
        """Call `take` until it does not raise PoolExhaustedError, making room in between; return
        False if no more can be made."""
        while True:
            with suppress(PoolExhaustedError):
                take()
                return True
            if not self._make_room(pool, nbytes):
                return False

    def _make_room(self, pool: BufferPool, nbytes: int) -> bool:
        """Take one step towards room for `nbytes`; False if none is left to take."""
        if self._in_flight.reap():
            return True
        if self.coming_nbytes(pool) < align_up(nbytes) and self.evict_one(pool):
            return True
        return self._in_flight.wait_oldest() or self.evict_one(pool)

    def _explain(self, pool: BufferPool, nbytes: int, what: str) -> str:
        pages = self._idle.in_memory.values()
        held = [p for p in pages if p.lease is not None and p.lease.pool is pool]
        names = ", ".join(f"{p.key} ({format_nbytes(p.nbytes)})" for p in held[:8])
        more = f" and {len(held) - 8} more" if len(held) > 8 else ""
        holders = f" In use at once: {names}{more}." if held else ""
        usage = pool.usage()
        return (
            f"{pool.name} budget of {format_nbytes(pool.budget_nbytes)} has no room for {what} "
            f"({format_nbytes(nbytes)}): {format_nbytes(usage.leased_nbytes)} are in use by the "
            f"running operation, by tensors that live on this tier or by views that are still "
            f"held.{holders} Raise the {pool.name} budget by at least {format_nbytes(nbytes)}."
        )
