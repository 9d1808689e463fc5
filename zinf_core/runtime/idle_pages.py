"""IdlePages: which pages are in memory, and the order in which they can be given up."""

from __future__ import annotations

from collections.abc import Callable

from zinf_core.keys import TensorKey
from zinf_core.policy.replacement import Candidate, EvictionQueue
from zinf_core.policy.trace import TraceCursor
from zinf_core.runtime.page import Page
from zinf_core.runtime.pool import BufferPool
from zinf_core.runtime.residency import Residency


class IdlePages:
    """Ranks pages by their next use in the recorded cycle. Guarded by the pager's lock."""

    def __init__(self, *pools: BufferPool) -> None:
        """Rank the pages of each of `pools` by themselves."""
        self.in_memory: dict[TensorKey, Page] = {}
        self.cursor = TraceCursor()
        self._queues = {pool: EvictionQueue() for pool in pools}
        self._num_returns = 0
        self._clock = 0

    def touch(self, page: Page, *, overwrites: bool) -> None:
        """Note that `page` is used now."""
        self._clock += 1
        page.last_use = self._clock
        self.cursor.advance(page.key, overwrites=overwrites)

    def next_step(self, page: Page) -> int | None:
        """Return when the page is expected again; None when unknown."""
        following = self.cursor.next_use(page.key)
        return None if following is None else following.step

    def offer(self, page: Page) -> None:
        """Let the page be evicted, unless something holds it."""
        if page.lease is None or page.pins or page.transfer is not None:
            return
        self._queues[page.lease.pool].put(
            Candidate(
                key=page.key,
                last_use=page.last_use,
                next_use=self.cursor.next_use(page.key),
                is_dirty=page.residency is Residency.DIRTY,
            )
        )

    def withdraw(self, page: Page, pool: BufferPool) -> None:
        """Do not let the page be evicted from `pool`."""
        self._queues[pool].discard(page.key)

    def nbytes(self, pool: BufferPool) -> int:
        """Return the leased bytes of `pool` that are given up when others need them."""
        return sum(
            page.lease.nbytes
            for page in self.in_memory.values()
            if page.lease is not None and page.lease.pool is pool and not page.pins
        )

    def evict_one(
        self, pool: BufferPool, evict: Callable[[Page], bool], for_step: int | None = None
    ) -> bool:
        """Call `evict` for the best victim of `pool`, and for others if it returns False; False if
        there is none, or none that is needed later than the access `for_step`."""
        self._refresh()
        queue = self._queues[pool]
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
                    if evict(page):
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
