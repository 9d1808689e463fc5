"""Loans: working memory for whole states outside compute, as the optimizer step needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.errors import InternalError, ZinfError
from zinf_core.runtime.page import Page
from zinf_core.runtime.pager import Pager
from zinf_core.runtime.pool import Lease
from zinf_core.runtime.residency import Residency
from zinf_core.runtime.transfers import Transfer

_HOST_SPACES = frozenset({MemorySpace.HOST, MemorySpace.HOST_PINNED})


class Loan:
    """Host memory with the bytes of a page, to be given back with `LoanDesk.give_back`."""

    __slots__ = ("_buffer", "is_new", "lease", "page", "pinned", "returned", "transfer")

    def __init__(
        self,
        page: Page,
        buffer: Buffer | None,
        *,
        lease: Lease | None = None,
        pinned: bool = False,
        is_new: bool = False,
    ) -> None:
        """Lend `buffer`, or the page's own memory if it is None. With a `lease` the buffer is a
        copy. `pinned`: the page stays in memory until the loan is given back; `is_new`: its bytes
        there are nothing before they were written."""
        self.page = page
        self._buffer = buffer
        self.lease = lease
        self.pinned = pinned
        self.is_new = is_new
        self.returned = False
        """Whether the loan was given back."""
        self.transfer: Transfer | None = None
        """Read in flight into the memory."""

    @property
    def buffer(self) -> Buffer:
        """The memory. Raises InternalError once the loan was given back, or if its bytes did not
        arrive."""
        if self.returned:
            raise InternalError(f"the loan of {self.page.key} was used after it was given back")
        if self._buffer is not None:
            return self._buffer
        if self.page.lease is None:
            raise InternalError(f"the loan of {self.page.key} was used before it was waited for")
        return self.page.lease.buffer

    def end(self) -> None:
        """Forget the buffer, so that the loan does not keep its memory referenced."""
        self._buffer = None
        self.returned = True


class LoanDesk:
    """Lends pages to code that works on the host, in place where their memory is the host's."""

    def __init__(self, pager: Pager) -> None:
        """Lend pages of `pager`."""
        self._pager = pager

    def borrow(self, page: Page, *, read: bool = True) -> Loan:
        """Return a loan of the page's current bytes; wait for it with `wait` before use.

        With `read=False` the contents are unspecified: the borrower writes all of them. In place
        if the page is in host memory or its home is; else it is brought to host memory, and stays
        there afterwards while there is room. A page in device memory is lent as a copy. May block
        to make room. Raises BudgetExceededError, or what submitting the read raises.
        """
        pager = self._pager
        with pager.lock:
            if read and not page.has_bytes:
                raise InternalError(f"{page.key} was used before it was given a value")
            if page.mapped or page.lease is not None:  # else what is in flight may be waited for
                pager.settle_page(page)
            if page.mapped or (pager.device is not None and page.view is not None):
                return self._lend_resident(page, read=read)
            if page.lease is None and page.transfer is None:
                own = pager.home_buffer(page)
                if own is not None and own.space in _HOST_SPACES:
                    return Loan(page, own)
            is_new = not read and page.residency is Residency.ABSENT
            transfer = pager.hold(page, read=read)
            loan = Loan(page, None, pinned=True, is_new=is_new)
            loan.transfer = transfer
            return loan

    def wait(self, loan: Loan) -> None:
        """Block until the loan's bytes are there. Raises what the read failed with."""
        if loan.transfer is not None:
            self._pager.wait_held(loan.page, loan.transfer)
            loan.transfer = None

    def give_back(self, loan: Loan, *, written: bool) -> None:
        """Return a loan; written bytes become the page's. Does not block on the write.

        A borrower that changed bytes must say so. Any array or tensor over the loan's buffer must
        be gone, or its bytes stay counted. A second call for the same loan does nothing.
        """
        pager = self._pager
        with pager.lock:
            if loan.returned:
                return
            self._drain(loan)
            loan.end()
            if loan.lease is not None:
                self._give_back_copy(loan, loan.lease, written=written)
            elif loan.pinned:
                self._give_back_held(loan, written=written)
            elif written:
                loan.page.stored = True
                if loan.page.residency is not Residency.ABSENT:
                    raise InternalError(f"{loan.page.key} was fetched while it was lent out")

    @contextmanager
    def lent(self, page: Page, *, read: bool = True, write: bool = False) -> Iterator[Buffer]:
        """Borrow for the duration of a block; blocks until the bytes are there.

        With `write`, the buffer becomes the page's bytes. If the block raises, what was written
        stays, except in a copy.
        """
        loan = self.borrow(page, read=read)
        written = False
        try:
            self.wait(loan)
            written = write and loan.lease is None and not loan.is_new
            yield loan.buffer
            written = write
        finally:
            self.give_back(loan, written=written)

    def _drain(self, loan: Loan) -> None:
        """Have no read in flight into the loan's memory, whatever became of it."""
        if loan.transfer is not None and not loan.transfer.finished:
            with suppress(ZinfError):  # whoever needed the bytes waits for them and sees it
                self._pager.wait(loan.transfer)
        loan.transfer = None

    def _lend_resident(self, page: Page, *, read: bool) -> Loan:
        if page.view is None and not read:
            self._pager.create(page)
        self._pager.pin(page)
        try:
            own = self._own_buffer(page)
            if own.space in _HOST_SPACES:
                return Loan(page, own, pinned=True)
            return self._lend_copy(page, own, read=read)
        except BaseException:
            self._pager.unpin(page)
            raise

    def _lend_copy(self, page: Page, own: Buffer, *, read: bool) -> Loan:
        lease = self._pager.lease_host(page.nbytes)
        loan = Loan(page, lease.buffer, lease=lease, pinned=True)
        if read:
            try:
                loan.transfer = self._pager.submit_copy(lease.buffer, own, lambda _error: None)
            except BaseException:
                lease.release()
                raise
        return loan

    def _give_back_held(self, loan: Loan, *, written: bool) -> None:
        page = loan.page
        is_void = loan.is_new and not written and page.residency is not Residency.ABSENT
        if written:
            self._pager.mark_dirty(page)
        self._pager.let_go(page, is_void=is_void)

    def _give_back_copy(self, loan: Loan, lease: Lease, *, written: bool) -> None:
        page = loan.page
        if written:
            self._pager.mark_dirty(page)
            finish = partial(self._copied_back, page, lease)
            page.transfer = self._pager.submit_copy(self._own_buffer(page), lease.buffer, finish)
            return
        lease.release()
        self._pager.unpin(page)

    def _copied_back(self, page: Page, lease: Lease, error: Exception | None) -> None:
        del error  # raised to whoever waits for the page next
        page.transfer = None
        lease.release()
        self._pager.unpin(page)

    def _own_buffer(self, page: Page) -> Buffer:
        own = self._pager.home_buffer(page) if page.lease is None else page.lease.buffer
        if own is None:
            raise InternalError(f"{page.key} is resident nowhere")
        return own
