"""Pager: random operations under a tier that defers, with iterations that repeat and are read
ahead, against a dict of bytes."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import numpy as np
import pytest
from core_helpers import ArrayClient, Bytes, World, key, noise
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from zinf_core.errors import BudgetExceededError, TierFullError
from zinf_core.keys import StateKind
from zinf_core.runtime.loans import Loan
from zinf_core.runtime.page import Page
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.runtime.residency import Residency
from zinf_core.testing import DeferredTier, DictTier, seeded_order

P = 4096
DEVICE_PAGES, HOST_PAGES = 5, 5
SIZES = st.sampled_from([1, 100, P - 1, P, P + 1, 2 * P])
SEEDS = st.integers(0, 1 << 20)


def num_pages(nbytes: int) -> int:
    return -(-nbytes // P)


@dataclass(eq=False)
class Known:
    """What the test knows of one page."""

    page: Page
    data: bytes | None = None
    pins: list[Bytes] = field(default_factory=list)
    views: list[Bytes] = field(default_factory=list)
    """Views held without a pin."""
    loans: list[Loan] = field(default_factory=list)
    is_removed: bool = False

    @property
    def home(self) -> str:
        return self.page.home

    @property
    def is_lent_at_home(self) -> bool:
        """Whether a loan has the bytes on the home tier, where a fetch would make a second copy."""
        return self.home == "host" and any(not loan.pinned for loan in self.loans)

    @property
    def is_being_made(self) -> bool:
        """Whether the memory holds nothing before the borrower has written it."""
        return any(loan.is_new for loan in self.loans)

    @property
    def is_idle(self) -> bool:
        return not (self.pins or self.views or self.loans)

    def holds(self, pool: BufferPool) -> int:
        """Return the pages of memory that cannot be taken from it in `pool`.

        Where operations look at it is device memory. Where a borrower has it is either, and not
        known while it is on its way.
        """
        nbytes = num_pages(self.page.nbytes)
        if self.home == pool.name:
            return nbytes
        if self.pins or self.views:
            return nbytes * (pool.name == "device" and self.home != "device")
        if not any(loan.pinned for loan in self.loans) or self.home == "device":
            return 0
        lease = self.page.lease
        return nbytes * (lease is None or lease.pool is pool)

    @property
    def view(self) -> Bytes | None:
        return (self.pins + self.views or [None])[0]

    def write(self, data: bytes, into: Bytes) -> None:
        into[:] = np.frombuffer(data, np.uint8)
        self.data = data


class PagerMachine(RuleBasedStateMachine):
    """Every byte read is the byte written last; budgets hold; what must fit is not refused."""

    pages = Bundle("pages")

    @initialize(target=pages, seed=SEEDS, sizes=st.lists(SIZES, min_size=2, max_size=9))
    def open(self, seed: int, sizes: list[int]) -> object:
        """Begin with pages that have bytes at home, and with nothing in memory."""
        self.slow = DeferredTier(DictTier(), order=seeded_order(seed))
        self.world = World(self.slow, device_pages=DEVICE_PAGES, host_pages=HOST_PAGES)
        self.pager = self.world.pager
        self.known: list[Known] = []
        self.working: list[Lease] = []
        for nbytes in sizes:
            page = self.pager.add(key(f"p{len(self.known)}"), nbytes, "slow", ArrayClient())
            self.known.append(Known(page))
            self.create(self.known[-1], seed + nbytes)
        self.pager.evict_all()
        return multiple(*self.known)

    # -- what must fit -----------------------------------------------------------------------

    def room(self, pool: BufferPool, but: Known | None = None) -> int:
        """Return the pages that can be made free in `pool` for `but`: all that is cached there,
        and nothing that is held or at home there."""
        used = sum(
            known.holds(pool) for known in self.known if known is not but and not known.is_removed
        )
        if pool is self.world.host_pool:
            used += sum(num_pages(lease.buffer.nbytes) for lease in self.working)
        return pool.budget_nbytes // P - used

    def fits_device(self, known: Known) -> bool:
        if known.home == "device" or known.pins or known.views:
            return True
        return num_pages(known.page.nbytes) <= self.room(self.world.device_pool, known)

    def fits_host(self, known: Known) -> bool:
        """Return whether the page can be lent, in place or brought to the host."""
        is_in_memory = known.page.residency is not Residency.ABSENT
        if is_in_memory or known.home != "slow":
            return True
        return num_pages(known.page.nbytes) <= self.room(self.world.host_pool, known)

    # -- rules -------------------------------------------------------------------------------

    @rule(
        target=pages,
        nbytes=SIZES,
        home=st.sampled_from(["slow", "slow", "slow", "host", "device"]),
        kind=st.sampled_from([StateKind.PARAM, StateKind.GRAD]),
    )
    def add(self, nbytes: int, home: str, kind: StateKind) -> object:
        which = key(f"p{len(self.known)}", kind)
        try:
            page = self.pager.add(which, nbytes, home, ArrayClient())
        except TierFullError:
            assert home != "slow"
            pool = getattr(self.world, f"{home}_pool")
            assert num_pages(nbytes) > self.room(pool)
            return multiple()
        self.known.append(Known(page))
        return self.known[-1]

    @rule(known=pages, seed=SEEDS)
    def create(self, known: Known, seed: int) -> None:
        if known.is_removed or known.is_lent_at_home or known.is_being_made:
            return
        fits = self.fits_device(known)
        try:
            view = self.pager.create(known.page)
        except BudgetExceededError:
            assert not fits
            return
        known.write(noise(known.page.nbytes, seed), view)

    @rule(known=pages, keep=st.booleans())
    def pin(self, known: Known, keep: bool) -> None:
        if known.is_removed or known.is_lent_at_home or known.is_being_made:
            return
        if known.data is None:
            return
        fits = self.fits_device(known)
        try:
            view = self.pager.pin(known.page)
        except BudgetExceededError:
            assert not fits
            return
        assert view.tobytes() == known.data
        if keep:
            known.pins.append(view)
        else:
            self.pager.unpin(known.page)
            if len(known.views) < 2 and known.page.nbytes == P:
                known.views.append(view)

    @precondition(lambda self: any(known.pins for known in self.known))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([known for known in self.known if known.pins]))
        known.pins.pop()
        self.pager.unpin(known.page)

    @precondition(lambda self: any(known.views for known in self.known))
    @rule(data=st.data())
    def look_away(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([known for known in self.known if known.views])).views.pop()

    @rule(known=pages, seed=SEEDS, told=st.booleans())
    def edit(self, known: Known, seed: int, told: bool) -> None:
        """Write through a pinned or held view; tell the pager, or let the client notice."""
        view = known.view
        if view is None or known.is_removed:
            return
        known.write(noise(known.page.nbytes, seed), view)
        if told:
            self.pager.mark_dirty(known.page)
        else:
            known.page.client.written = True

    @rule(known=pages, read=st.booleans())
    def borrow(self, known: Known, read: bool) -> None:
        if known.is_removed or known.is_being_made or (known.data is None and read):
            return
        fits = self.fits_host(known)
        try:
            loan = self.world.desk.borrow(known.page, read=read)
        except BudgetExceededError:
            assert not fits
            return
        assert loan.lease is None
        if loan.pinned and loan.page.mapped and not read:
            known.data = loan.buffer.array.tobytes()
        known.loans.append(loan)

    @precondition(lambda self: any(known.loans for known in self.known))
    @rule(data=st.data(), seed=SEEDS, written=st.booleans(), waits=st.booleans())
    def give_back(self, data: st.DataObject, seed: int, written: bool, waits: bool) -> None:
        known = data.draw(st.sampled_from([known for known in self.known if known.loans]))
        loan = known.loans.pop()
        if waits or written:
            self.world.desk.wait(loan)
            if not loan.is_new and known.data is not None:
                assert loan.buffer.array.tobytes() == known.data
        if written:
            known.write(noise(known.page.nbytes, seed), loan.buffer.array)
        self.world.desk.give_back(loan, written=written)
        self.world.desk.give_back(loan, written=not written)

    @rule(known=pages, gone=st.booleans())
    def drop(self, known: Known, gone: bool) -> None:
        if known.is_removed or not known.is_idle:
            return
        if gone:
            self.pager.remove(known.page)
            known.is_removed = True
        else:
            self.pager.drop(known.page)
        known.data = None

    @rule(nbytes=SIZES)
    def work(self, nbytes: int) -> None:
        """Take working memory of the host, as an update does beside its loans."""
        fits = num_pages(nbytes) <= self.room(self.world.host_pool)
        try:
            self.working.append(self.pager.lease_host(nbytes))
        except BudgetExceededError:
            assert not fits

    @precondition(lambda self: self.working)
    @rule()
    def end_work(self) -> None:
        self.working.pop().release()

    @rule(act=st.sampled_from(["evict_all", "settle", "end_iteration", "end_iteration"]))
    def whole(self, act: str) -> None:
        getattr(self.pager, act)()
        if act != "end_iteration":
            assert self.slow.num_pending == 0

    @rule(num=st.integers(2, 6), times=st.integers(1, 3), ends=st.booleans())
    def iterate(self, num: int, times: int, ends: bool) -> None:
        """Use the first pages in order, again and again, so that they are read ahead."""
        for _ in range(times):
            for known in self.known[:num]:
                self.pin(known, keep=False)
                if known.views and not known.pins:
                    known.views.pop()
            if ends:
                self.pager.end_iteration()

    # -- what holds --------------------------------------------------------------------------

    @invariant()
    def budgets_are_kept(self) -> None:
        for pool in (self.world.device_pool, self.world.host_pool):
            usage = pool.usage()
            assert usage.tracked_nbytes <= usage.peak_nbytes <= usage.budget_nbytes
            assert 0 <= self.pager._memory.ahead_nbytes <= self.pager._prefetcher._window_nbytes

    @invariant()
    def pins_are_those_of_users_and_borrowers(self) -> None:
        for known in self.known:
            num_pinned = sum(loan.pinned for loan in known.loans)
            assert known.page.pins == len(known.pins) + num_pinned

    @invariant()
    def views_show_the_pages_bytes(self) -> None:
        for known in self.known:
            for view in known.pins + known.views:
                assert view.tobytes() == known.data

    def teardown(self) -> None:
        if not hasattr(self, "known"):
            return
        for lease in self.working:
            lease.release()
        for known in self.known:
            for loan in known.loans:
                self.world.desk.give_back(loan, written=False)
            for _ in range(len(known.pins)):
                self.pager.unpin(known.page)
            known.loans.clear()
            known.pins.clear()
            known.views.clear()
        gc.collect(0)
        self.pager.evict_all()
        alive = [known for known in self.known if not known.is_removed]
        for at, found in zip(("device", "host"), self.world.leased_pages(), strict=True):
            assert found == sum(num_pages(k.page.nbytes) for k in alive if k.home == at)
        for known in alive:
            if known.data is not None and self.fits_device(known):
                assert self.world.bytes_of(known.page) == known.data
            self.pager.remove(known.page)
        assert self.world.leased_pages() == (0, 0)
        assert self.slow.usage().num_keys == self.slow.num_pending == 0


TestPagerMachine = pytest.mark.slow(PagerMachine.TestCase)
