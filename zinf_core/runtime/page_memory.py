"""PageMemory: the memory of pages, which is a cache of their home tiers, and how room is made.

A page in memory is in a lease of the device pool, where operations use it, or of the host pool,
where the optimizer uses it and where it waits for its next use. If both pools are host memory, a
page goes from one to the other without a copy.
"""

from __future__ import annotations

from functools import partial

from zinf_core.errors import InternalError
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.idle_pages import IdlePages
from zinf_core.runtime.page import Page
from zinf_core.runtime.page_io import PageIo
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency
from zinf_core.runtime.room import Room
from zinf_core.units import MiB

_MOST_RESERVE_NBYTES = 64 * MiB


class PageMemory:
    """Opens and closes pages, evicts and writes back. Guarded by the pager's lock."""

    def __init__(self, io: PageIo, device_pool: BufferPool, host_pool: BufferPool) -> None:
        """Evict through `io` what lies in either pool."""
        self._io = io
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._reserve_nbytes = min(host_pool.budget_nbytes // 16, _MOST_RESERVE_NBYTES)
        self.idle = IdlePages(device_pool, host_pool)
        self.room = Room(io.in_flight, self.idle, self.evict)
        self.ahead_nbytes = 0
        """Bytes that were fetched ahead of their use and not used yet."""

    def touch(self, page: Page, *, overwrites: bool = False) -> None:
        """Note that `page` is used now."""
        self.end_ahead(page)
        self.idle.touch(page, overwrites=overwrites)

    def end_ahead(self, page: Page) -> None:
        """Know that `page` is no longer fetched ahead of a use that is still to come."""
        if page.is_ahead:
            page.is_ahead = False
            self.ahead_nbytes -= page.nbytes

    def open(self, page: Page, lease: Lease | None) -> None:
        """Put the page in the memory of `lease`, or in its home tier's own if there is none, and
        show it to its client if that is where operations use it."""
        if lease is not None:
            page.lease = lease
            self.idle.in_memory[page.key] = page
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
        self.idle.in_memory.pop(page.key, None)
        if lease is not None:
            self.idle.withdraw(page, lease.pool)
            lease.release()

    def forget_cached(self) -> None:
        """Give up every idle page in host memory, written home or not."""
        for page in list(self.idle.in_memory.values()):
            if page.lease is not None and page.lease.pool is self._host_pool and not page.pins:
                self.close(page)
                page.stored = True

    def fetched(self, page: Page, lease: Lease, error: Exception | None) -> None:
        """Finish a read of the page into `lease`."""
        page.transfer = None
        if error is None:
            page.become(Residency.RESIDENT)
            self.open(page, lease)
            self.idle.offer(page)
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
        self.idle.withdraw(page, lease.pool)
        if self._demote(page, lease):
            self.idle.offer(page)
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
            if not self.room.try_to_take(host, page.nbytes, lambda: host.adopt(lease)):
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

    def _demote(self, page: Page, lease: Lease) -> bool:
        """Move a page without a view to host memory if no copy is needed and there is room, or
        something that is needed later than the page."""
        host, step = self._host_pool, self.idle.next_step(page)
        return self._can_move(page, lease) and self.room.take_ahead(
            host, page.nbytes, step, lambda: host.adopt(lease)
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
        while self.room.coming_nbytes(pool) < self._reserve_nbytes:
            if not self.room.evict_one(pool):
                return

    def write_back(self, page: Page, lease: Lease) -> None:
        """Submit the write of a dirty page; its lease goes back when that is done."""
        page.become(Residency.WRITING_BACK)
        self.room.expect(lease.pool, lease.nbytes)
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
        self.room.expect(pool, -nbytes)
        page.stored = page.stored or error is None
        if error is None and not page.wanted:
            self.close(page)
            return
        page.become(Residency.RESIDENT if error is None else Residency.DIRTY)
        self.open(page, page.lease)
        self.idle.offer(page)

    def lease_staging(self, page: Page, lease: Lease) -> Lease | None:
        """Return host memory for the hop between the page's home tier and the memory of `lease`;
        None if the tier needs none. Blocks. Raises BudgetExceededError."""
        if self._io.reaches(page, lease.buffer.space):
            return None
        return self.room.lease(
            self._host_pool, page.nbytes, f"the way of {page.key} through the host"
        )

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
                self.room.take(
                    self._device_pool,
                    page.nbytes,
                    str(page.key),
                    lambda: self._device_pool.adopt(lease),
                )
            else:
                copy = self.room.lease(self._device_pool, page.nbytes, str(page.key))
                try:
                    self._io.in_flight.wait(
                        self._io.copy(copy.buffer, lease.buffer, lambda _error: None)
                    )
                except BaseException:
                    copy.release()
                    raise
                lease.release()
                page.lease = copy
            self.idle.withdraw(page, self._host_pool)
            self.open(page, page.lease)
        finally:
            page.pins -= 1

    def _hide(self, page: Page) -> None:
        if page.lease is None or page.lease.pool is self._device_pool:
            page.view = None
            page.client.close_view()
