"""Fetcher: brings pages into memory because they are used now."""

from __future__ import annotations

from functools import partial

from zinf_core.errors import InternalError, ZinfError
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.page import Page
from zinf_core.runtime.page_io import PageIo
from zinf_core.runtime.page_memory import PageMemory
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency
from zinf_core.runtime.transfers import Transfer


class Fetcher:
    """Fetches pages on demand and makes new ones. Guarded by the pager's lock; blocks."""

    def __init__(
        self, io: PageIo, memory: PageMemory, *, device_pool: BufferPool, host_pool: BufferPool
    ) -> None:
        """Fetch through `io` into leases of the pools."""
        self._io = io
        self._memory = memory
        self._device_pool = device_pool
        self._host_pool = host_pool

    def lease_device(self, page: Page) -> Lease:
        """Return memory for the page where operations use it. Raises BudgetExceededError."""
        return self._memory.room.lease(self._device_pool, page.nbytes, str(page.key))

    def bring_to_host(self, page: Page, *, read: bool) -> None:
        """Have an absent page in host memory: being read, or dirty with unspecified bytes."""
        lease = self._memory.room.lease(self._host_pool, page.nbytes, str(page.key))
        if read:
            self._submit_fetch(page, lease)
        else:
            self.create_in(page, lease)

    def create_on_device(self, page: Page) -> None:
        """Have an absent page where operations use it, dirty with unspecified bytes."""
        self.create_in(page, None if page.mapped else self.lease_device(page))

    def wait(self, page: Page, transfer: Transfer) -> None:
        """Wait for `transfer`, a read of the page into host memory; one ahead that failed is made
        again first. Raises what the read failed with."""
        try:
            self._io.in_flight.wait(transfer)
        except ZinfError:
            if not transfer.is_ahead:
                raise
            if page.residency is Residency.ABSENT:
                self.bring_to_host(page, read=True)
            if page.transfer is not None:
                self._io.in_flight.wait(page.transfer)

    def create_in(self, page: Page, lease: Lease | None) -> None:
        """Have an absent page in `lease`, or mapped if that is None, dirty."""
        try:
            self._io.emit(EventKind.CREATE, page)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        page.become(Residency.DIRTY)
        self._memory.open(page, lease)

    def fetch(self, page: Page) -> None:
        """Bring the page to where operations use it and wait for it.

        Raises BudgetExceededError, or what the read failed with.
        """
        self._io.settle(page)
        if page.view is not None:
            return
        if page.lease is not None:
            if page.lease.pool is self._device_pool:  # an interrupted eviction left it there
                self._memory.open(page, page.lease)
            else:
                self._memory.promote(page)
            return
        if not page.stored:
            raise InternalError(f"{page.key} was used before it was given a value")
        self._submit_fetch(page, self.lease_device(page))
        if page.transfer is not None:
            self._io.in_flight.wait(page.transfer)

    def _submit_fetch(self, page: Page, lease: Lease) -> None:
        page.become(Residency.FETCHING)
        staging = None
        try:
            staging = self._memory.lease_staging(page, lease)
            self._io.emit(EventKind.DEMAND_FETCH, page)
            finish = partial(self._memory.fetched, page, lease)
            page.transfer = self._io.read(page, lease.buffer, finish, staging=staging)
        except BaseException:
            page.become(Residency.ABSENT)
            lease.release()
            if staging is not None:
                staging.release()
            raise
