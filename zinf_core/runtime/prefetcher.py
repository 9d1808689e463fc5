"""Prefetcher: reads pages before they are used, as the known iteration says they will be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from zinf_core.errors import ZinfError
from zinf_core.keys import TensorKey
from zinf_core.policy.prefetch import Confidence, Lookahead, window_nbytes
from zinf_core.runtime.events import EventKind
from zinf_core.runtime.page import Page
from zinf_core.runtime.page_io import PageIo
from zinf_core.runtime.page_memory import PageMemory
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency


class Prefetcher:
    """Submits reads ahead of use, within a window of bytes and for what is kept no longer than
    what it displaces. Guarded by the pager's lock; never blocks."""

    def __init__(
        self,
        pages: Mapping[TensorKey, Page],
        io: PageIo,
        memory: PageMemory,
        *,
        device_pool: BufferPool,
        host_pool: BufferPool,
    ) -> None:
        """Fetch `pages` into the pools: host memory first, from where the way is short."""
        self._pages = pages
        self._io = io
        self._memory = memory
        self._pools = (host_pool, device_pool) if io.device is None else (host_pool,)
        self._window_nbytes = window_nbytes(pool.budget_nbytes for pool in self._pools)
        self._confidence = Confidence()
        self._lookahead = Lookahead()
        self._expected: OrderedDict[TensorKey, int] = OrderedDict()
        """Steps for which keys were fetched ahead, in the order of the fetches."""

    def pin(self, page: Page) -> None:
        """Pin `page`, which is used now, and go on with what comes next."""
        page.pins += 1
        try:
            self.go_on()
        except BaseException:  # a page that had to give way could not be written
            page.pins -= 1
            self._memory.idle.offer(page)
            raise

    def go_on(self) -> None:
        """Submit what can be submitted now."""
        self._end_passed_over()
        trace = self._memory.idle.cursor.known
        if trace is None or self._memory.ahead_nbytes >= self._window_nbytes:
            return
        for step, access in self._lookahead.coming(trace, self._memory.idle.cursor.step):
            page = self._pages.get(access.key)
            if page is None or access.overwrites or not self._is_wanted(page):
                continue
            if self._memory.ahead_nbytes + page.nbytes > self._window_nbytes:
                return
            if not self._fetch(page, step):
                return

    def end_iteration(self) -> None:
        """Begin a new iteration, which is expected to be like the one that ends."""
        forecast = self._memory.idle.cursor.known
        happened = self._memory.idle.cursor.end_iteration()
        if happened is None:
            return
        if forecast is not None:
            self._confidence.learn(forecast, happened)
            for key in self._expected:
                self._expected[key] -= len(forecast)
        self._lookahead.end_iteration()
        self.go_on()

    def _end_passed_over(self) -> None:
        """Let what was fetched for accesses that did not come, or came, take no more of the
        window."""
        while self._expected:
            key, step = next(iter(self._expected.items()))
            page = self._pages.get(key)
            if page is not None:
                if page.is_ahead and step > self._memory.idle.cursor.step:
                    return
                self._memory.end_ahead(page)
            del self._expected[key]

    def _is_wanted(self, page: Page) -> bool:
        return (
            page.residency is Residency.ABSENT
            and page.stored
            and self._confidence.trusts(page.key)
            and self._io.home_buffer(page) is None  # else its home is as near as the cache
        )

    def _fetch(self, page: Page, step: int) -> bool:
        for pool in self._pools:
            lease = self._memory.room.lease_ahead(pool, page.nbytes, step)
            if lease is not None:
                self._submit(page, lease)
                self._expected[page.key] = step
                self._expected.move_to_end(page.key)
                return True
        return False

    def _submit(self, page: Page, lease: Lease) -> None:
        page.become(Residency.FETCHING)
        try:
            self._io.emit(EventKind.PREFETCH, page)
            finish = partial(self._memory.fetched, page, lease)
            page.transfer = self._io.read_ahead(page, lease.buffer, finish)
        except BaseException as exc:
            page.become(Residency.ABSENT)
            lease.release()
            if isinstance(exc, ZinfError):
                return  # whoever needs the page reads it, and sees it
            raise
        page.is_ahead = True
        self._memory.ahead_nbytes += page.nbytes
