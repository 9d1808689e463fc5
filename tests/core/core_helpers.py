"""What the tests of the core share: pages seen as numpy arrays, and pagers on small budgets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.keys import StateKind, TensorKey
from zinf_core.runtime.events import Event, EventKind, Observer
from zinf_core.runtime.loans import LoanDesk
from zinf_core.runtime.page import Page
from zinf_core.runtime.pager import Pager
from zinf_core.runtime.pool import BufferPool
from zinf_core.tier import Tier
from zinf_core.units import PAGE_NBYTES
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.host import HostTier

Bytes = npt.NDArray[np.uint8]


def key(name: str, kind: StateKind = StateKind.PARAM) -> TensorKey:
    return TensorKey.of(name, kind)


def noise(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng((nbytes, seed)).bytes(nbytes)


def pool_of(num_pages: int, name: str = "device") -> BufferPool:
    return BufferPool(name, budget_nbytes=num_pages * PAGE_NBYTES, allocator=PageAlignedAllocator())


class ArrayClient:
    """Sees a page as a byte array; whoever writes through a view sets `written`."""

    def __init__(self) -> None:
        self.written = False

    def open_view(self, buffer: Buffer) -> Bytes:
        return buffer.array[:]

    def was_written(self) -> bool:
        written, self.written = self.written, False
        return written

    def close_view(self) -> None:
        """Remember nothing."""


class World:
    """A pager over one slow tier, with device memory and host memory under budgets."""

    def __init__(
        self,
        slow: Tier,
        *,
        device_pages: int = 4,
        host_pages: int = 4,
        device_pool: BufferPool | None = None,
        host_pool: BufferPool | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.slow = slow
        self.device_pool = device_pool or pool_of(device_pages)
        self.host_pool = host_pool or pool_of(host_pages, "host")
        self.tiers: Mapping[str, Tier] = {
            "device": HostTier("device", pool=self.device_pool),
            "host": HostTier("host", pool=self.host_pool),
            "slow": slow,
        }
        self.events: list[Event] = []
        self.pager = Pager(
            tiers=self.tiers,
            device_pool=self.device_pool,
            host_pool=self.host_pool,
            observers=(self.events.append, *([observer] if observer else [])),
        )
        self._share_out()
        self.desk = LoanDesk(self.pager)
        self.pages: dict[str, Page] = {}

    def add(
        self,
        name: str,
        nbytes: int = PAGE_NBYTES,
        home: str = "slow",
        *,
        kind: StateKind = StateKind.PARAM,
    ) -> Page:
        page = self.pager.add(key(name, kind), nbytes, home, ArrayClient())
        self.pages.setdefault(name, page)
        return page

    def fill(self, page: Page, data: bytes) -> None:
        self.pager.create(page)[:] = np.frombuffer(data, np.uint8)

    def stored(self, name: str, data: bytes, home: str = "slow") -> Page:
        """Return a page whose bytes are at home only."""
        page = self.add(name, len(data), home)
        self.fill(page, data)
        self.pager.evict_all()
        self.events.clear()
        return page

    def edit(self, page: Page, data: bytes) -> None:
        with self.pager.pinned(page) as view:
            view[:] = np.frombuffer(data, np.uint8)
            self.pager.mark_dirty(page)

    def bytes_of(self, page: Page) -> bytes:
        with self.pager.pinned(page) as view:
            return view.tobytes()

    def log(self, *kinds: EventKind) -> list[str]:
        """Return the events so far, of `kinds` only if any, as ``kind name``; forget them."""
        events = [e for e in self.events if not kinds or e.kind in kinds]
        self.events.clear()
        return [f"{event.kind.value} {event.key.name}" for event in events]

    def _share_out(self) -> None:
        """Read ahead into a quarter of the memory, keep an eighth of the host's free: literal
        events on a few pages do not depend on the shares chosen for real budgets."""
        budgets = self.device_pool.budget_nbytes, self.host_pool.budget_nbytes
        self.pager._prefetcher._window_nbytes = sum(budgets) // 4
        self.pager._memory._reserve_nbytes = budgets[1] // 8

    def read_nothing_ahead(self) -> None:
        """Fetch on demand only from now on."""
        self.pager._prefetcher._window_nbytes = 0

    def leased_pages(self) -> tuple[int, int]:
        """Return pages of memory leased on (device, host)."""
        pools = (self.device_pool, self.host_pool)
        device, host = (pool.usage().leased_nbytes // PAGE_NBYTES for pool in pools)
        return device, host


class InterruptibleTier:
    """Wrapper whose completions raise KeyboardInterrupt from `wait` while `interrupts` lasts.

    The transfer itself is left as it was, as with Ctrl-C pressed during a blocking wait.
    """

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self._waits_before = 0
        self.interrupts = 0

    def interrupt_after(self, num_waits: int) -> None:
        """Interrupt once, after `num_waits` waits that go well."""
        self._waits_before, self.interrupts = num_waits, 1

    def interrupt_never(self) -> None:
        """Let every wait go well from now on."""
        self.interrupts = 0

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt if it is time."""
        if self._waits_before:
            self._waits_before -= 1
        elif self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_into(self, which: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return _Interruptible(self, self._inner.read_into(which, dst, offset=offset))

    def prefetch_into(self, which: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return self.read_into(which, dst, offset=offset)

    def write_from(self, which: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        return _Interruptible(self, self._inner.write_from(which, src, offset=offset))


class _Interruptible:
    def __init__(self, tier: InterruptibleTier, inner: Completion) -> None:
        self._tier = tier
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._tier.interrupt()
        self._inner.wait(timeout_s)
