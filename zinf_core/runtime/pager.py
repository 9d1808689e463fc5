"""Pager: brings pages in on demand, evicts when the budget needs the room, writes back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from zinf_core.buffers import Buffer
from zinf_core.errors import (
    BudgetExceededError,
    InternalError,
    KeyAbsentError,
    KeyExistsError,
    PoolExhaustedError,
)
from zinf_core.keys import StateKind, TensorKey
from zinf_core.policy.replacement import Candidate, eviction_order
from zinf_core.policy.trace import TraceCursor
from zinf_core.runtime.events import Event, EventKind, Observer
from zinf_core.runtime.page import Page, PageClient
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency
from zinf_core.runtime.transfers import Finish, Transfer, TransfersInFlight
from zinf_core.tier import SupportsMap, Tier
from zinf_core.units import align_up, format_nbytes


class Pager:
    """Moves pages between their home tiers and the device, on demand.

    `tiers` maps home names to tiers; the tier called ``"device"`` is the device memory itself,
    whose pages are used in place. Pages of other tiers are fetched into leases of `device_pool`.
    Thread-safe: one re-entrant lock guards all pages and is held while a fetch is waited for.
    """

    def __init__(
        self,
        *,
        tiers: Mapping[str, Tier],
        device_pool: BufferPool,
        host_pool: BufferPool,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Serve `tiers`; neither they nor the pools are closed by the pager."""
        self.tiers = dict(tiers)
        self._mappable = {name: t for name, t in tiers.items() if isinstance(t, SupportsMap)}
        self.device_pool = device_pool
        self.host_pool = host_pool
        self._observers = tuple(observers)
        self._lock = threading.RLock()
        self._pages: dict[TensorKey, Page] = {}
        self._resident: dict[TensorKey, Page] = {}
        self._transfers = TransfersInFlight()
        self._cursor = TraceCursor()
        self._clock = 0

    @property
    def lock(self) -> threading.RLock:
        """The lock that guards every page; hold it to make several calls one."""
        return self._lock

    def add(self, key: TensorKey, nbytes: int, home: str, client: PageClient) -> Page:
        """Return a new page of `nbytes` (>= 1) at home on tier `home`, with room reserved there.

        Raises TierFullError if the tier has no room, KeyAbsentError if there is no such tier.
        """
        tier = self.tiers.get(home)
        if tier is None:
            raise KeyAbsentError(f"no tier {home!r} for {key}; there are {sorted(self.tiers)}")
        with self._lock:
            if key in self._pages:
                raise KeyExistsError(f"{key} is paged already, at home on {self._pages[key].home}")
            tier.reserve(key, nbytes)
            page = Page(key, nbytes, home, client)
            page.mapped = home == "device"
            self._pages[key] = page
            return page

    def home_buffer(self, page: Page) -> Buffer | None:
        """Return the page's own bytes on its home tier if they can be used in place."""
        tier = self._mappable.get(page.home)
        return None if tier is None else tier.map(page.key)

    def create(self, page: Page) -> Any:
        """Return the view of a page that gets new bytes, all of which the caller writes.

        Nothing is read; the page is dirty. May block to make room. Raises BudgetExceededError.
        """
        with self._lock:
            self._settle(page)
            if page.residency is Residency.ABSENT:
                lease = (
                    None
                    if page.mapped
                    else self._lease(self.device_pool, page.nbytes, str(page.key))
                )
                self._open(page, lease)
                page.become(Residency.DIRTY)
                self._emit(EventKind.CREATE, page)
            else:
                self.mark_dirty(page)
            self._touch(page)
            return page.view

    def pin(self, page: Page) -> Any:
        """Return the view of the page's current bytes; it stays until the matching `unpin`.

        Fetches from the home tier if needed, and blocks for that. Raises BudgetExceededError if
        no room can be made, or what the transfer failed with.
        """
        with self._lock:
            if page.view is None or page.transfer is not None:
                self._fetch(page)
            self._touch(page)
            page.pins += 1
            return page.view

    def unpin(self, page: Page) -> None:
        """Allow the page to be evicted again."""
        with self._lock:
            page.pins -= 1

    @contextmanager
    def pinned(self, page: Page) -> Iterator[Any]:
        """Pin for the duration of a block."""
        view = self.pin(page)
        try:
            yield view
        finally:
            self.unpin(page)

    def mark_dirty(self, page: Page) -> None:
        """Note that the resident bytes were written and must be written back."""
        with self._lock:
            if page.residency is Residency.RESIDENT:
                page.become(Residency.DIRTY)
            elif page.residency is not Residency.DIRTY:
                raise InternalError(f"{page.key} is {page.residency.value}: nothing was written")

    def drop(self, page: Page) -> None:
        """Forget the page's bytes wherever they are; its room at home stays reserved."""
        with self._lock:
            self._settle(page)
            if page.residency is not Residency.ABSENT:
                self._close(page)
            page.stored = False

    def remove(self, page: Page) -> None:
        """Forget the page and free its room at home."""
        with self._lock:
            self.drop(page)
            self.tiers[page.home].discard(page.key)
            self._pages.pop(page.key, None)

    def evict_all(self) -> None:
        """Write back what is dirty and give up every page that nobody holds. Blocks."""
        with self._lock:
            for page in list(self._resident.values()):
                if page.pins == 0 and page.transfer is None:
                    self._evict(page)
            self.settle()

    def settle(self) -> None:
        """Block until nothing is in flight. Raises the first error after finishing them all."""
        first: Exception | None = None
        with self._lock:
            while True:
                try:
                    if not self._transfers.wait_oldest():
                        break
                except Exception as exc:  # noqa: BLE001 - raised below
                    first = first or exc
        if first is not None:
            raise first

    def end_iteration(self) -> None:
        """Tell the pager that the next access begins a new iteration of the same model."""
        with self._lock:
            self._cursor.end_iteration()

    def lease_host(self, nbytes: int) -> Lease:
        """Return a lease of host memory, waiting for transfers in flight if there is no room.

        Raises BudgetExceededError if waiting cannot help.
        """
        with self._lock:
            return self._lease(self.host_pool, nbytes, f"{format_nbytes(nbytes)} of working memory")

    def submit_read(self, page: Page, dst: Buffer, finish: Finish) -> Transfer:
        """Submit a read of the whole page from its home tier into `dst`."""
        with self._lock:
            self._emit(EventKind.READ, page)
            return self._transfers.add(self.tiers[page.home].read_into(page.key, dst), finish)

    def submit_write(self, page: Page, src: Buffer, finish: Finish) -> Transfer:
        """Submit a write of the whole page from `src` to its home tier."""
        with self._lock:
            self._emit(EventKind.WRITE, page)
            return self._transfers.add(self.tiers[page.home].write_from(page.key, src), finish)

    def write_home(self, page: Page, lease: Lease) -> None:
        """Take over `lease`, which holds newer bytes of an absent page, and write them home.

        Does not block. If the write fails the bytes stay resident in the lease, dirty.
        """
        with self._lock:
            page.become(Residency.DIRTY)
            page.lease = lease
            self._resident[page.key] = page
            self._write_back(page, lease)

    def wait(self, transfer: Transfer) -> None:
        """Block until `transfer` is finished; raise what it failed with."""
        with self._lock:
            self._transfers.wait(transfer)

    def settle_page(self, page: Page) -> None:
        """Block until no transfer of `page` itself is in flight."""
        with self._lock:
            self._settle(page)

    # -- below: called with the lock held ------------------------------------------------------

    def _fetch(self, page: Page) -> None:
        self._settle(page)
        if page.view is not None:
            return
        if not page.stored:
            raise InternalError(f"{page.key} was used before it was given a value")
        lease = self._lease(self.device_pool, page.nbytes, str(page.key))
        page.become(Residency.FETCHING)
        self._emit(EventKind.DEMAND_FETCH, page)
        try:
            transfer = self.submit_read(page, lease.buffer, partial(self._fetched, page, lease))
        except BaseException:
            page.become(Residency.ABSENT)
            lease.release()
            raise
        page.transfer = transfer
        self._transfers.wait(transfer)

    def _fetched(self, page: Page, lease: Lease, error: Exception | None) -> None:
        page.transfer = None
        if error is None:
            self._open(page, lease)
            page.become(Residency.RESIDENT)
        else:
            lease.release()
            page.become(Residency.ABSENT)

    def _settle(self, page: Page) -> None:
        if page.transfer is not None:
            page.wanted = True
            try:
                self._transfers.wait(page.transfer)
            finally:
                page.wanted = False

    def _open(self, page: Page, lease: Lease | None) -> None:
        if lease is not None:
            page.lease = lease
            self._resident[page.key] = page
        buffer = self.home_buffer(page) if lease is None else lease.buffer
        if buffer is None:
            raise InternalError(f"tier {page.home} is the device and cannot map {page.key}")
        page.view = page.client.open_view(buffer)

    def _close(self, page: Page) -> None:
        page.view = None
        page.become(Residency.ABSENT)
        lease, page.lease = page.lease, None
        self._resident.pop(page.key, None)
        if lease is not None:
            lease.release()

    def _evict(self, page: Page) -> bool:
        """Give up the fast copy; False if a view of it is held somewhere."""
        lease = page.lease
        if lease is None:
            return False
        page.view = None
        if lease.buffer.is_shared():
            page.view = page.client.open_view(lease.buffer)
            return False
        if page.client.was_written() and page.residency is Residency.RESIDENT:
            page.become(Residency.DIRTY)
        self._emit(EventKind.EVICT, page)
        if page.residency is Residency.RESIDENT:
            self._close(page)
        else:
            self._write_back(page, lease)
        return True

    def _write_back(self, page: Page, lease: Lease) -> None:
        page.become(Residency.WRITING_BACK)
        try:
            transfer = self.submit_write(page, lease.buffer, partial(self._written_back, page))
        except BaseException:
            self._written_back(page, InternalError("the write was not submitted"))
            raise
        page.transfer = transfer
        if transfer.completion.done():
            self._transfers.wait(transfer)

    def _written_back(self, page: Page, error: Exception | None) -> None:
        page.transfer = None
        kept = page.wanted and page.lease is not None and page.lease.pool is self.device_pool
        if error is not None or kept:
            if page.lease is not None:
                page.view = page.client.open_view(page.lease.buffer)
            page.stored = page.stored or error is None
            page.become(Residency.RESIDENT if error is None else Residency.DIRTY)
        else:
            page.stored = True
            self._close(page)

    def _lease(self, pool: BufferPool, nbytes: int, what: str) -> Lease:
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
        if self._transfers.reap():
            return True
        usage = pool.usage()
        room = usage.budget_nbytes - usage.leased_nbytes
        coming = sum(
            align_up(page.nbytes)
            for page in self._resident.values()
            if page.transfer is not None and page.lease is not None and page.lease.pool is pool
        )
        if room + coming < align_up(nbytes) and self._evict_one(pool):
            return True
        return self._transfers.wait_oldest() or self._evict_one(pool)

    def _evict_one(self, pool: BufferPool) -> bool:
        """Evict the best victim whose memory is not held elsewhere; False if there is none."""
        candidates = [
            Candidate(
                key=page.key,
                nbytes=page.nbytes,
                last_use=page.last_use,
                next_use=self._cursor.next_use(page.key),
            )
            for page in self._resident.values()
            if page.pins == 0
            and page.transfer is None
            and page.lease is not None
            and page.lease.pool is pool
        ]
        return any(self._evict(self._resident[key]) for key in eviction_order(candidates))

    def _explain(self, pool: BufferPool, nbytes: int, what: str) -> str:
        held = [page for page in self._resident.values() if pool is self.device_pool]
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

    def _touch(self, page: Page) -> None:
        self._clock += 1
        page.last_use = self._clock
        if page.key.kind_value == StateKind.PARAM.value:
            self._cursor.advance(page.key)

    def _emit(self, kind: EventKind, page: Page) -> None:
        if self._observers:
            event = Event(kind, page.key, page.home, page.nbytes)
            for observer in self._observers:
                observer(event)
