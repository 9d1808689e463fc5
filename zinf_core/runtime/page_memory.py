"""PageMemory: the memory of pages, which is a cache of their home tiers, and how room is made.

A page in memory is in a lease of the device pool, where operations use it, or of the host pool,
where the optimizer uses it and where it waits for its next use. If both pools are host memory, a
page goes from one to the other without a copy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from zinf_core.errors import BudgetExceededError, InternalError, PoolExhaustedError
from zinf_core.keys import TensorKey
from zinf_core.policy.replacement import Candidate, EvictionQueue
from zinf_core.policy.trace import TraceCursor
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.page import Page
from zinf_core.runtime.page_io import PageIo
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency
from zinf_core.units import MiB, align_up, format_nbytes

_MOST_RESERVE_NBYTES = 64 * MiB


class PageMemory:
    """Opens and closes pages, evicts and writes back. Guarded by the pager's lock."""

    def __init__(self, io: PageIo, device_pool: BufferPool, host_pool: BufferPool) -> None:
        """Evict through `io` what lies in either pool."""
        self._io = io
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._reserve_nbytes = min(host_pool.budget_nbytes // 16, _MOST_RESERVE_NBYTES)
        self._idle = {device_pool: EvictionQueue(), host_pool: EvictionQueue()}
        self._leaving = {device_pool: 0, host_pool: 0}
        """Bytes whose pages are being written back and will be freed."""
        self.in_memory: dict[TensorKey, Page] = {}
        self.ahead_nbytes = 0
        """Bytes that were fetched ahead of their use and not used yet."""
        self.cursor = TraceCursor()
        self._num_returns = 0
        self._clock = 0

    def touch(self, page: Page, *, overwrites: bool = False) -> None:
        """Note that `page` is used now."""
        self._clock += 1
        page.last_use = self._clock
        self.end_ahead(page)
        self.cursor.advance(page.key, overwrites=overwrites)

    def end_ahead(self, page: Page) -> None:
        """Know that `page` is no longer fetched ahead of a use that is still to come."""
        if page.is_ahead:
            page.is_ahead = False
            self.ahead_nbytes -= page.nbytes

    def offer(self, page: Page) -> None:
        """Let the page be evicted, unless something holds it."""
        if page.lease is None or page.pins or page.transfer is not None:
            return
        self._idle[page.lease.pool].put(
            Candidate(
                key=page.key,
                last_use=page.last_use,
                next_use=self.cursor.next_use(page.key),
                is_dirty=page.residency is Residency.DIRTY,
            )
        )

    def idle_nbytes(self, pool: BufferPool) -> int:
        """Return the leased bytes of `pool` that are given up when others need them."""
        return sum(
            page.lease.nbytes
            for page in self.in_memory.values()
            if page.lease is not None and page.lease.pool is pool and not page.pins
        )

    def open(self, page: Page, lease: Lease | None) -> None:
        """Put the page in the memory of `lease`, or in its home tier's own if there is none, and
        show it to its client if that is where operations use it."""
        if lease is not None:
            page.lease = lease
            self.in_memory[page.key] = page
            if lease.pool is not self._device_pool:
                return
        buffer = self._io.home_buffer(page) if lease is None else lease.buffer
        if buffer is None:
            raise InternalError(f"tier {page.home} is the device and cannot map {page.key}")
        page.view = page.client.open_view(buffer)

    def close(self, page: Page) -> None:
        """Forget the bytes in memory and give the lease back."""
        self._hide(page)
        page.become(Residency.ABSENT)
        self.end_ahead(page)
        lease, page.lease = page.lease, None
        self.in_memory.pop(page.key, None)
        if lease is not None:
            self._idle[lease.pool].discard(page.key)
            lease.release()

    def fetched(self, page: Page, lease: Lease, error: Exception | None) -> None:
        """Finish a read of the page into `lease`."""
        page.transfer = None
        if error is None:
            page.become(Residency.RESIDENT)
            self.open(page, lease)
            self.offer(page)
        else:
            lease.release()
            page.become(Residency.ABSENT)
            self.end_ahead(page)

    # -- eviction ------------------------------------------------------------------------------

    def evict(self, page: Page) -> bool:
        """Give up the copy where it is; False if a view of it is held somewhere.

        A page that operations used stays in host memory if that has room, and if its home is
        slower than that; else it goes home.
        """
        lease = page.lease
        if lease is None:
            return False
        if not self._take_view(page, lease):
            return False
        self._idle[lease.pool].discard(page.key)
        following = self.cursor.next_use(page.key)
        if self._demote(page, lease, None if following is None else following.step):
            self.offer(page)
            self.trim()
            return True
        self._io.emit(EventKind.EVICT, page)
        if page.residency is Residency.RESIDENT:
            self.close(page)
        else:
            self.write_back(page, lease)
        return True

    def move_to_host(self, page: Page) -> None:
        """Move a page that operations used to host memory, if that takes no copy and room can be
        made; else leave it where it is. Blocks."""
        lease = page.lease
        if lease is None or page.pins or page.view is None or not self._can_move(page, lease):
            return
        if not self._take_view(page, lease):
            return
        page.pins += 1  # making room must not evict the page itself
        try:
            host = self._host_pool
            if not self._find_room(host, page.nbytes, lambda: host.adopt(lease)):
                self.open(page, lease)
        finally:
            page.pins -= 1

    def _take_view(self, page: Page, lease: Lease) -> bool:
        """Take the view from the client, which may have written to it; False if it is held."""
        had_view, page.view = page.view is not None, None
        if lease.buffer.is_shared():
            if had_view:
                page.view = page.client.open_view(lease.buffer)
            return False
        if had_view and page.client.was_written() and page.residency is Residency.RESIDENT:
            page.become(Residency.DIRTY)
        self._hide(page)
        return True

    def _demote(self, page: Page, lease: Lease, step: int | None) -> bool:
        """Move a page without a view to host memory if no copy is needed and there is room, or
        something that is needed later than `step`."""
        return self._can_move(page, lease) and self._take_ahead(
            self._host_pool, page.nbytes, step, lambda: self._host_pool.adopt(lease)
        )

    def _can_move(self, page: Page, lease: Lease) -> bool:
        """Return whether the page can go to the host pool as it is, and is not at home there."""
        return (
            lease.pool is self._device_pool
            and self._io.device is None
            and self._io.home_buffer(page) is None
        )

    def trim(self) -> None:
        """Give up cached pages until the host pool has room for what comes next."""
        pool = self._host_pool
        while True:
            room = pool.budget_nbytes - pool.usage().leased_nbytes + self._leaving[pool]
            if room >= self._reserve_nbytes or not self.evict_one(pool):
                return

    def write_back(self, page: Page, lease: Lease) -> None:
        """Submit the write of a dirty page; its lease goes back when that is done."""
        page.become(Residency.WRITING_BACK)
        self._leaving[lease.pool] += lease.nbytes
        staging = None
        try:
            staging = self.lease_staging(page, lease)
            finish = partial(self._written_back, page, lease.pool, lease.nbytes)
            transfer = self._io.write(page, lease.buffer, finish, staging=staging)
        except BaseException:
            if staging is not None:
                staging.release()
            error = InternalError("the write was not submitted")
            self._written_back(page, lease.pool, lease.nbytes, error)
            raise
        page.transfer = transfer
        if transfer.completion.done():
            self._io.in_flight.wait(transfer)

    def _written_back(
        self, page: Page, pool: BufferPool, nbytes: int, error: Exception | None
    ) -> None:
        page.transfer = None
        self._leaving[pool] -= nbytes
        page.stored = page.stored or error is None
        if error is None and not page.wanted:
            self.close(page)
            return
        page.become(Residency.RESIDENT if error is None else Residency.DIRTY)
        self.open(page, page.lease)
        self.offer(page)

    def evict_one(self, pool: BufferPool, *, for_step: int | None = None) -> bool:
        """Evict the best victim of `pool`; False if there is none, or none that is needed later
        than the access `for_step`."""
        self._refresh()
        queue = self._idle[pool]
        held: list[Page] = []
        try:
            while (best := queue.best()) is not None:
                if for_step is not None and not best.is_needed_later_than(for_step):
                    return False
                queue.discard(best.key)
                page = self.in_memory.get(best.key)
                if page is None or page.pins or page.transfer is not None:
                    continue  # it is offered again when it is let go
                if page.lease is None or page.lease.pool is not pool:
                    continue
                if best.next_use is not None and best.next_use.step <= self.cursor.step:
                    self.offer(page)  # it was passed over: look when it is expected now
                else:
                    held.append(page)
                    if self.evict(page):
                        return True
            return False
        finally:
            for page in held:
                self.offer(page)

    def _refresh(self) -> None:
        """Rank every page anew if the cursor went back."""
        if self._num_returns != self.cursor.num_returns:
            self._num_returns = self.cursor.num_returns
            for page in self.in_memory.values():
                self.offer(page)

    # -- leases --------------------------------------------------------------------------------

    def promote(self, page: Page) -> None:
        """Bring a page from host memory to where operations use it. Blocks.

        Raises BudgetExceededError.
        """
        lease = page.lease
        if lease is None:
            raise InternalError(f"{page.key} is in no memory")
        if page.pins and self._io.device is not None:
            raise InternalError(f"{page.key} was used on the device while it was lent out")
        page.pins += 1  # making room must not evict the page itself
        try:
            if self._io.device is None:
                self._with_room(
                    self._device_pool,
                    page.nbytes,
                    str(page.key),
                    lambda: self._device_pool.adopt(lease),
                )
            else:
                copy = self.lease(self._device_pool, page.nbytes, str(page.key))
                try:
                    self._io.in_flight.wait(
                        self._io.copy(copy.buffer, lease.buffer, lambda _error: None)
                    )
                except BaseException:
                    copy.release()
                    raise
                lease.release()
                page.lease = copy
            self._idle[self._host_pool].discard(page.key)
            self.open(page, page.lease)
        finally:
            page.pins -= 1

    def lease_staging(self, page: Page, lease: Lease) -> Lease | None:
        """Return host memory for the hop between the page's home tier and the memory of `lease`;
        None if the tier needs none. Blocks. Raises BudgetExceededError."""
        if self._io.reaches(page, lease.buffer.space):
            return None
        return self.lease(self._host_pool, page.nbytes, f"the way of {page.key} through the host")

    def lease(self, pool: BufferPool, nbytes: int, what: str) -> Lease:
        """Return a lease, making room as needed. Blocks. Raises BudgetExceededError."""
        found: list[Lease] = []
        self._with_room(pool, nbytes, what, lambda: found.append(pool.lease_nowait(nbytes)))
        return found[0]

    def lease_ahead(self, pool: BufferPool, nbytes: int, step: int) -> Lease | None:
        """Return a lease for an access at `step`, giving up only what is needed later. Never
        blocks; None if there is no room yet."""
        found: list[Lease] = []
        self._take_ahead(pool, nbytes, step, lambda: found.append(pool.lease_nowait(nbytes)))
        return found[0] if found else None

    def _take_ahead(
        self, pool: BufferPool, nbytes: int, step: int | None, take: Callable[[], None]
    ) -> bool:
        while True:
            with suppress(PoolExhaustedError):
                take()
                return True
            room = pool.budget_nbytes - pool.usage().leased_nbytes
            if room + self._leaving[pool] >= align_up(nbytes) or step is None:
                return False
            if not self.evict_one(pool, for_step=step):
                return False

    def _with_room(
        self, pool: BufferPool, nbytes: int, what: str, take: Callable[[], None]
    ) -> None:
        if self._find_room(pool, nbytes, take):
            return
        gc.collect()  # views may hang in reference cycles, as after an exception
        if not self._find_room(pool, nbytes, take):
            raise BudgetExceededError(self._explain(pool, nbytes, what))

    def _find_room(self, pool: BufferPool, nbytes: int, take: Callable[[], None]) -> bool:
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
        if self._io.in_flight.reap():
            return True
        room = pool.budget_nbytes - pool.usage().leased_nbytes
        if room + self._leaving[pool] < align_up(nbytes) and self.evict_one(pool):
            return True
        return self._io.in_flight.wait_oldest() or self.evict_one(pool)

    def _hide(self, page: Page) -> None:
        if page.lease is None or page.lease.pool is self._device_pool:
            page.view = None
            page.client.close_view()

    def _explain(self, pool: BufferPool, nbytes: int, what: str) -> str:
        pages = self.in_memory.values()
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
