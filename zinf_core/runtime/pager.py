"""Pager: brings pages in ahead of use or on demand, keeps what the budgets hold, writes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zinf_core.buffers import Buffer
from zinf_core.device import Device
from zinf_core.errors import (
    InternalError,
    KeyAbsentError,
    KeyExistsError,
    TierFullError,
)
from zinf_core.keys import TensorKey
from zinf_core.runtime.events import Observer
from zinf_core.runtime.fetcher import Fetcher
from zinf_core.runtime.page import Page, PageClient
from zinf_core.runtime.page_io import PageIo
from zinf_core.runtime.page_memory import PageMemory
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.prefetcher import Prefetcher
from zinf_core.runtime.residency import Residency
from zinf_core.runtime.transfers import Finish, Transfer
from zinf_core.tier import Tier
from zinf_core.units import format_nbytes


class Pager:
    """Moves pages between their home tiers, host memory and the device.

    `tiers` maps home names to tiers; the tier called ``"device"`` is the device memory itself,
    whose pages are used in place. Pages of other tiers are fetched into leases of `device_pool`;
    where that is memory a tier does not reach, `device` copies from and to leases of `host_pool`.
    Thread-safe: one re-entrant lock guards all pages and is held while a fetch is waited for.
    """

    def __init__(
        self,
        *,
        tiers: Mapping[str, Tier],
        device_pool: BufferPool,
        host_pool: BufferPool,
        observers: Sequence[Observer] = (),
        device: Device | None = None,
    ) -> None:
        """Serve `tiers`; nothing given is closed by the pager. `device` is needed if `device_pool`
        is not host memory."""
        self.device = device
        self.device_pool = device_pool
        self.host_pool = host_pool
        self._lock = threading.RLock()
        self._pages: dict[TensorKey, Page] = {}
        self._io = PageIo(tiers, observers, device)
        self._memory = PageMemory(self._io, device_pool, host_pool)
        self._fetcher = Fetcher(
            self._io, self._memory, device_pool=device_pool, host_pool=host_pool
        )
        self._prefetcher = Prefetcher(
            self._pages, self._io, self._memory, device_pool=device_pool, host_pool=host_pool
        )

    @property
    def lock(self) -> threading.RLock:
        """The lock that guards every page; hold it to make several calls one."""
        return self._lock

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """The tiers by home name."""
        return self._io.tiers

    def add(self, key: TensorKey, nbytes: int, home: str, client: PageClient) -> Page:
        """Return a new page of `nbytes` (>= 1) at home on tier `home`, with room reserved there.

        Raises TierFullError if the tier has no room, KeyAbsentError if there is no such tier,
        KeyExistsError if the key is paged already.
        """
        tier = self.tiers.get(home)
        if tier is None:
            raise KeyAbsentError(f"no tier {home!r} for {key}; there are {sorted(self.tiers)}")
        with self._lock:
            if key in self._pages:
                raise KeyExistsError(f"{key} is paged already, at home on {self._pages[key].home}")
            self._reserve(tier, key, nbytes)
            page = Page(key, nbytes, home, client)
            page.mapped = home == "device"
            self._pages[key] = page
            return page

    def keys_at(self, home: str) -> list[TensorKey]:
        """Return the keys of the pages at home on tier `home`."""
        with self._lock:
            return [page.key for page in self._pages.values() if page.home == home]

    def lends_in_place(self, home: str) -> bool:
        """Return whether the host works on the bytes of pages at `home` where they are."""
        return self.device is None and self.tiers[home].capabilities.mappable

    def has(self, key: TensorKey) -> bool:
        """Return whether `key` is paged."""
        with self._lock:
            return key in self._pages

    def create(self, page: Page) -> Any:
        """Return the view of a page that gets new bytes, all of which the caller writes.

        Nothing is read; the page is dirty. May block to make room. Raises BudgetExceededError.
        """
        with self._lock:
            self._io.settle(page)
            if page.residency is Residency.ABSENT:
                self._fetcher.create_on_device(page)
            else:
                if page.view is None:
                    self._memory.promote(page)
                self.mark_dirty(page)
            self._memory.touch(page, overwrites=True)
            self._memory.idle.offer(page)
            return page.view

    def pin(self, page: Page) -> Any:
        """Return the view of the page's current bytes; it stays until the matching `unpin`.

        Fetches from the home tier if needed, and blocks for that. Raises BudgetExceededError if
        no room can be made, or what the transfer failed with.
        """
        with self._lock:
            if page.view is None or page.transfer is not None:
                self._fetcher.fetch(page)
            self._memory.touch(page)
            self._prefetcher.pin(page)
            return page.view

    def unpin(self, page: Page) -> None:
        """Allow the page to be evicted again."""
        with self._lock:
            page.pins -= 1
            self._memory.idle.offer(page)

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
            self._io.settle(page)
            if page.residency is not Residency.ABSENT:
                self._memory.close(page)
            page.stored = False

    def remove(self, page: Page) -> None:
        """Forget the page and free its room at home. Raises KeyAbsentError the second time."""
        with self._lock:
            self.drop(page)
            self.tiers[page.home].discard(page.key)
            self._pages.pop(page.key, None)

    def evict_all(self) -> None:
        """Write back what is dirty and give up every page that nobody holds. Blocks."""
        with self._lock:
            self._io.settle_all()  # what is on its way to memory now would stay there
            for pool in (self.device_pool, self.host_pool):
                while self._memory.room.evict_one(pool):
                    pass
            self._io.settle_all()

    def end_iteration(self) -> None:
        """Tell the pager that the next access begins a new iteration of the same model."""
        with self._lock:
            self._prefetcher.end_iteration()

    # -- working memory and pages in host memory, for `LoanDesk` -------------------------------

    def lease_host(self, nbytes: int) -> Lease:
        """Return a lease of host memory, waiting for transfers in flight if there is no room.

        Raises BudgetExceededError if waiting cannot help.
        """
        with self._lock:
            what = f"{format_nbytes(nbytes)} of working memory"
            return self._memory.room.lease(self.host_pool, nbytes, what)

    def idle_host_nbytes(self) -> int:
        """Return the leased bytes of the host pool that are given up when others need them."""
        with self._lock:
            return self._memory.idle.nbytes(self.host_pool)

    def home_buffer(self, page: Page) -> Buffer | None:
        """Return the page's own bytes on its home tier if they can be used in place."""
        return self._io.home_buffer(page)

    def hold(self, page: Page, *, read: bool) -> Transfer | None:
        """Pin the page where it is in memory, or in host memory if it is in none, until `let_go`.

        Returns the read in flight, which must be waited for before the bytes are used. With
        `read=False` the bytes are unspecified, and the page is dirty. May block to make room.
        """
        with self._lock:
            if not read or page.residency is Residency.WRITING_BACK:
                self._io.settle(page)
            is_new = not read and page.residency is Residency.ABSENT
            if page.residency is Residency.ABSENT:
                self._fetcher.bring_to_host(page, read=read)
            elif page.transfer is None:
                self._memory.move_to_host(page)
            self._memory.touch(page, overwrites=not read)
            try:
                self._prefetcher.pin(page)
            except BaseException:
                if is_new:
                    self._memory.close(page)
                raise
            return page.transfer

    def wait_held(self, page: Page, transfer: Transfer) -> None:
        """Block until the bytes of a page that is held are there; `transfer` is what `hold` told.
        Raises what the read failed with; one ahead that failed is made again first."""
        with self._lock:
            self._fetcher.wait(page, transfer)

    def let_go(self, page: Page, *, is_void: bool = False) -> None:
        """Undo one `hold`; `is_void`: what memory has of the page is nothing. Writes pages home
        until there is room for what comes next; does not block on that."""
        with self._lock:
            if is_void:
                self._memory.close(page)
            page.pins -= 1
            self._memory.idle.offer(page)
            self._memory.trim()

    def submit_copy(self, dst: Buffer, src: Buffer, finish: Finish) -> Transfer:
        """Submit a copy between host and device memory."""
        with self._lock:
            return self._io.copy(dst, src, finish)

    def wait(self, transfer: Transfer) -> None:
        """Block until `transfer` is finished; raise what it failed with."""
        with self._lock:
            self._io.in_flight.wait(transfer)

    def forget_cached(self) -> None:
        """Give up what waits in host memory, written home or not, because it ends."""
        with self._lock:
            self._memory.forget_cached()

    def settle_page(self, page: Page) -> None:
        """Block until no transfer of `page` itself is in flight."""
        with self._lock:
            self._io.settle(page)

    def settle(self) -> None:
        """Block until nothing is in flight. Raises the first error after finishing them all."""
        with self._lock:
            self._io.settle_all()

    def _reserve(self, tier: Tier, key: TensorKey, nbytes: int) -> None:
        try:
            tier.reserve(key, nbytes)
        except TierFullError:  # pages that are only cached may hold the room
            self.evict_all()
            tier.reserve(key, nbytes)
