"""PageMemory: the memory of resident pages, and how room is made in it."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial

from zinf_core.errors import BudgetExceededError, InternalError, PoolExhaustedError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.policy.replacement import Candidate, eviction_order
from zinf_core.policy.trace import TraceCursor
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.page import Page
from zinf_core.runtime.page_io import PageIo
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency
from zinf_core.units import align_up, format_nbytes


class PageMemory:
    """Opens and closes resident pages, evicts and writes back. Guarded by the pager's lock."""

    def __init__(self, io: PageIo, device_pool: BufferPool, host_pool: BufferPool) -> None:
        """Evict through `io`; pages that are wanted stay only if `device_pool` holds them, and
        `host_pool` has the memory of the hop that some home tiers need."""
        self._io = io
        self._device_pool = device_pool
        self._host_pool = host_pool
        self.resident: dict[TensorKey, Page] = {}
        self.cursor = TraceCursor()
        self._clock = 0

    def touch(self, page: Page) -> None:
        """Note that `page` is used now."""
        self._clock += 1
        page.last_use = self._clock
        if page.key.kind_value == StateKind.PARAM.value:
            self.cursor.advance(page.key)

    def open(self, page: Page, lease: Lease | None) -> None:
        """Show the page in the memory of `lease`, or in its home tier's own if there is none."""
        if lease is not None:
            page.lease = lease
            self.resident[page.key] = page
        buffer = self._io.home_buffer(page) if lease is None else lease.buffer
        if buffer is None:
            raise InternalError(f"tier {page.home} is the device and cannot map {page.key}")
        page.view = page.client.open_view(buffer)

    def close(self, page: Page) -> None:
        """Forget the bytes in memory and give the lease back."""
        page.view = None
        page.become(Residency.ABSENT)
        lease, page.lease = page.lease, None
        self.resident.pop(page.key, None)
        if lease is not None:
            lease.release()

    def evict(self, page: Page) -> bool:
        """Give up the copy in memory; False if a view of it is held somewhere."""
        lease = page.lease
        if lease is None:
            return False
        page.view = None
        if lease.buffer.is_shared():
            page.view = page.client.open_view(lease.buffer)
            return False
        if page.client.was_written() and page.residency is Residency.RESIDENT:
            page.become(Residency.DIRTY)
        self._io.emit(EventKind.EVICT, page)
        if page.residency is Residency.RESIDENT:
            self.close(page)
        else:
            self.write_back(page, lease)
        return True

    def write_back(self, page: Page, lease: Lease) -> None:
        """Submit the write of a dirty page; its lease goes back when that is done."""
        page.become(Residency.WRITING_BACK)
        staging = None
        try:
            staging = self.lease_staging(page, lease)
            finish = partial(self._written_back, page)
            transfer = self._io.write(page, lease.buffer, finish, staging=staging)
        except BaseException:
            if staging is not None:
                staging.release()
            self._written_back(page, InternalError("the write was not submitted"))
            raise
        page.transfer = transfer
        if transfer.completion.done():
            self._io.in_flight.wait(transfer)

    def _written_back(self, page: Page, error: Exception | None) -> None:
        page.transfer = None
        kept = page.wanted and page.lease is not None and page.lease.pool is self._device_pool
        if error is not None or kept:
            if page.lease is not None:
                page.view = page.client.open_view(page.lease.buffer)
            page.stored = page.stored or error is None
            page.become(Residency.RESIDENT if error is None else Residency.DIRTY)
        else:
            page.stored = True
            self.close(page)

    def lease_staging(self, page: Page, lease: Lease) -> Lease | None:
        """Return host memory for the hop between the page's home tier and the memory of `lease`;
        None if the tier needs none. Blocks. Raises BudgetExceededError."""
        if self._io.reaches(page, lease.buffer.space):
            return None
        return self.lease(self._host_pool, page.nbytes, f"the way of {page.key} through the host")

    def lease(self, pool: BufferPool, nbytes: int, what: str) -> Lease:
        """Return a lease, making room as needed. Blocks. Raises BudgetExceededError."""
        collected = False
        while True:
            with suppress(PoolExhaustedError):
                return pool.lease_nowait(nbytes)
            if self._make_room(pool, nbytes):
                continue
            if collected:
                raise BudgetExceededError(self._explain(pool, nbytes, what))
            collected = True
            gc.collect()  # views may hang in reference cycles, as after an exception

    def _make_room(self, pool: BufferPool, nbytes: int) -> bool:
        """Take one step towards room for `nbytes`; False if none is left to take."""
        if self._io.in_flight.reap():
            return True
        usage = pool.usage()
        room = usage.budget_nbytes - usage.leased_nbytes
        coming = sum(
            align_up(page.nbytes)
            for page in self.resident.values()
            if page.transfer is not None and page.lease is not None and page.lease.pool is pool
        )
        if room + coming < align_up(nbytes) and self._evict_one(pool):
            return True
        return self._io.in_flight.wait_oldest() or self._evict_one(pool)

    def _evict_one(self, pool: BufferPool) -> bool:
        """Evict the best victim whose memory is not held elsewhere; False if there is none."""
        candidates = [
            Candidate(
                key=page.key,
                nbytes=page.nbytes,
                last_use=page.last_use,
                next_use=self.cursor.next_use(page.key),
            )
            for page in self.resident.values()
            if page.pins == 0
            and page.transfer is None
            and page.lease is not None
            and page.lease.pool is pool
        ]
        return any(self.evict(self.resident[key]) for key in eviction_order(candidates))

    def _explain(self, pool: BufferPool, nbytes: int, what: str) -> str:
        held = [p for p in self.resident.values() if p.lease is not None and p.lease.pool is pool]
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
