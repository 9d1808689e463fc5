"""Loans: a page's own memory on the host, which keeps the page afterwards, and its newest bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from core_helpers import InterruptibleTier, World, noise

from zinf_core.errors import BudgetExceededError, InternalError, TransferError
from zinf_core.runtime.loans import Loan
from zinf_core.runtime.page import Page
from zinf_core.runtime.residency import Residency
from zinf_core.testing import DeferredTier, DictTier, FaultyTier, Operation, Phase

P = 4096
A, B, C = (noise(P, seed) for seed in range(3))


@pytest.fixture
def world() -> Iterator[World]:
    """Return a pager over a tier that defers, with room for two pages in each memory."""
    world = World(DeferredTier(DictTier()), device_pages=2, host_pages=2)
    yield world
    for pool in (world.device_pool, world.host_pool):
        assert pool.usage().peak_nbytes <= pool.usage().budget_nbytes


def put(loan: Loan, data: bytes) -> None:
    loan.buffer.array[:] = np.frombuffer(data, np.uint8)


def bytes_of(loan: Loan) -> bytes:
    data: bytes = loan.buffer.array.tobytes()
    return data


# -- brought to the host ---------------------------------------------------------------------


def test_an_absent_page_is_brought_to_the_host(world: World) -> None:
    """Catches use of the bytes before the read is done, a page fetched to the device, and a page
    thrown away after its loan although there is room."""
    a = world.stored("a", A)
    loan = world.desk.borrow(a)
    world.desk.wait(loan)
    assert bytes_of(loan) == A
    assert (world.log(), world.leased_pages()) == (["demand_fetch a", "read a"], (0, 1))
    world.desk.give_back(loan, written=False)
    assert (world.log(), world.leased_pages()) == ([], (0, 1))
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == A
    del buffer
    assert (world.log(), world.leased_pages()) == ([], (0, 1))
    world.pager.evict_all()
    assert (world.log(), world.leased_pages()) == (["evict a"], (0, 0))


def test_written_bytes_become_the_pages(world: World) -> None:
    """Catches new bytes that do not go home, or whose memory is reused before they have."""
    a, c, d = world.stored("a", A), world.stored("c", C), world.stored("d", A)
    loan = world.desk.borrow(a)
    world.desk.wait(loan)
    put(loan, B)
    world.desk.give_back(loan, written=True)
    assert world.log() == ["demand_fetch a", "read a"]
    with world.desk.lent(c) as other:
        assert other.array.tobytes() == C
    assert world.log() == ["demand_fetch c", "read c", "evict a", "write a"]
    with world.desk.lent(d) as other:
        assert other.array.tobytes() == A
    del other
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert world.bytes_of(a) == B
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)


def test_a_page_that_is_replaced_is_not_read(world: World) -> None:
    """Catches reading bytes that the borrower writes anyway."""
    a = world.stored("a", A)
    with world.desk.lent(a, read=False, write=True) as buffer:
        buffer.array[:] = np.frombuffer(B, np.uint8)
    assert world.log() == ["create a"]
    del buffer
    world.pager.evict_all()
    assert world.log() == ["evict a", "write a"]
    assert world.bytes_of(a) == B


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_to_be_replaced_and_was_not_is_forgotten(world: World, fails: bool) -> None:
    """Catches unspecified memory that becomes the page because the borrower gave up, over the
    bytes that were there or where there were none."""

    def scribble(page: Page) -> None:
        with suppress(ZeroDivisionError), world.desk.lent(page, read=False, write=fails) as buffer:
            buffer.array[:] = 0
            if fails:
                raise ZeroDivisionError

    a, new = world.stored("a", A), world.add("new")
    scribble(a)
    scribble(new)
    assert world.log() == ["create a", "create new"]
    assert (new.has_bytes, world.leased_pages()) == (False, (0, 0))
    assert world.bytes_of(a) == A
    assert world.log() == ["demand_fetch a", "read a"]


def test_a_page_lent_during_its_write_has_the_new_bytes(world: World) -> None:
    """Catches reading the home tier while newer bytes are on their way there."""
    a, c = world.stored("a", A), world.stored("c", C)
    with world.desk.lent(a, read=False, write=True) as buffer:
        buffer.array[:] = np.frombuffer(B, np.uint8)
    del buffer
    with world.desk.lent(c):  # which leaves too little room for what comes next
        pass
    assert a.residency is Residency.WRITING_BACK
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == B


def test_loans_wait_for_room_that_writes_will_free(world: World) -> None:
    """Catches a refusal although a write in flight is about to free the memory."""
    pages = [world.stored(f"p{i}", noise(P, i)) for i in range(5)]
    for page in pages:
        with world.desk.lent(page, write=True) as buffer:
            buffer.array[:] += 1
    for seed, page in enumerate(pages):
        expected = np.frombuffer(noise(P, seed), np.uint8) + np.uint8(1)
        assert world.bytes_of(page) == expected.tobytes()


def test_loans_that_cannot_fit_are_refused(world: World) -> None:
    """Catches a hang, or a budget that gives way."""
    loans = [world.desk.borrow(world.stored(name, A)) for name in "ab"]
    with pytest.raises(BudgetExceededError, match=r"host budget of 8\.00 KiB"):
        world.desk.borrow(world.stored("c", C))
    for loan in loans:
        world.desk.give_back(loan, written=False)
    with world.desk.lent(world.pages["c"]) as buffer:
        assert buffer.array.tobytes() == C
    del buffer
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)


# -- in place --------------------------------------------------------------------------------


@pytest.mark.parametrize("dirty", [False, True], ids=["clean", "dirty"])
def test_a_resident_page_is_lent_in_place(world: World, dirty: bool) -> None:
    """Catches the home tier's old bytes lent while newer ones are resident, and edits of a loan
    that the resident page does not see."""
    a = world.stored("a", A)
    if dirty:
        world.edit(a, B)
    else:
        world.bytes_of(a)
    world.log()
    loan = world.desk.borrow(a)
    world.desk.wait(loan)
    assert bytes_of(loan) == (B if dirty else A)
    assert (world.log(), world.leased_pages()) == ([], (0, 1))  # out of the way of operations
    put(loan, C)
    assert world.bytes_of(a) == C
    world.desk.give_back(loan, written=True)
    del loan
    world.pager.evict_all()
    assert world.bytes_of(a) == C
    assert world.log() == ["evict a", "write a", "demand_fetch a", "read a"]


def test_a_page_lent_in_place_stays(world: World) -> None:
    """Catches a page evicted under its borrower."""
    a, b, c = (world.stored(name, data) for name, data in (("a", A), ("b", B), ("c", C)))
    world.bytes_of(a)
    loan = world.desk.borrow(a)
    for page in (b, c):
        world.bytes_of(page)
    world.pager.evict_all()
    assert bytes_of(loan) == A
    assert a.residency is Residency.RESIDENT
    world.desk.give_back(loan, written=False)
    world.pager.evict_all()
    assert a.residency is Residency.ABSENT


def test_a_page_of_the_host_tier_is_lent_in_place(world: World) -> None:
    """Catches a copy where the home is host memory already, and edits that do not count as the
    page's value."""
    a = world.add("a", home="host")
    with world.desk.lent(a, read=False, write=True) as buffer:
        buffer.array[:] = np.frombuffer(A, np.uint8)
    assert (world.log(), world.leased_pages()) == ([], (0, 1))
    assert world.bytes_of(a) == A
    world.edit(a, B)
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == B
    world.pager.evict_all()
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == B


def test_a_page_of_the_device_tier_is_lent_in_place(world: World) -> None:
    """Catches a page of the device that cannot be lent before it has a value."""
    a = world.add("a", home="device")
    with world.desk.lent(a, read=False, write=True) as buffer:
        buffer.array[:] = np.frombuffer(A, np.uint8)
    assert world.bytes_of(a) == A
    world.edit(a, B)
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == B
    assert world.leased_pages() == (1, 0)


@pytest.mark.parametrize("home", ["slow", "host", "device"])
def test_a_page_without_a_value_cannot_be_read(world: World, home: str) -> None:
    """Catches unspecified bytes of the tier taken for the page's value."""
    with pytest.raises(InternalError, match="before it was given a value"):
        world.desk.borrow(world.add("a", home=home))
    assert world.leased_pages() == (home == "device", home == "host")


# -- giving back -----------------------------------------------------------------------------


def borrowed_ways(world: World) -> dict[str, Page]:
    pages = {home: world.stored(home, A, home=home) for home in ("slow", "host", "device")}
    pages["resident"] = world.stored("resident", A)
    return pages


@pytest.mark.parametrize("way", ["slow", "host", "device", "resident"])
@pytest.mark.parametrize("written", [False, True])
def test_giving_back_twice_does_nothing(way: str, written: bool) -> None:
    """Catches a lease or pin given up twice, which is somebody else's by then."""
    world = World(DeferredTier(DictTier()))
    page = borrowed_ways(world)[way]
    if way == "resident":
        world.bytes_of(page)
    loan = world.desk.borrow(page)
    world.desk.wait(loan)
    put(loan, B)
    world.desk.give_back(loan, written=written)
    world.desk.give_back(loan, written=not written)
    world.desk.give_back(loan, written=written)
    assert page.pins == 0
    with world.pager.pinned(page):
        world.desk.give_back(loan, written=True)
        assert page.pins == 1
    if written:
        assert world.bytes_of(page) == B


def test_giving_back_before_the_read_is_done_waits_for_it(world: World) -> None:
    """Catches memory reused while the tier still reads into it."""
    a, b = world.stored("a", A), world.stored("b", B)
    world.desk.give_back(world.desk.borrow(a), written=False)
    with world.desk.lent(b, read=False, write=True) as buffer:
        buffer.array[:] = np.frombuffer(C, np.uint8)
        world.pager.settle()
    assert world.bytes_of(b) == C


def test_a_loan_that_was_given_back_holds_nothing(world: World) -> None:
    """Catches memory that stays counted because the object of an old loan is still around, when
    it serves a page of another size meanwhile."""
    b = world.stored("b", B[:-7])
    old = world.desk.borrow(world.stored("a", A))
    world.desk.give_back(old, written=False)
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    with world.desk.lent(b) as buffer:
        assert buffer.array.tobytes() == B[:-7]
    del buffer
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert old.returned
    with pytest.raises(InternalError, match="a/param was used after it was given back"):
        old.buffer  # noqa: B018 - the property raises


def test_an_interrupted_give_back_can_be_repeated() -> None:
    """Catches a read that Ctrl-C makes forgotten: its memory goes to someone else under it."""
    tier = InterruptibleTier(DeferredTier(DictTier()))
    world = World(tier)
    a = world.stored("a", A)
    loan = world.desk.borrow(a)
    tier.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        world.desk.give_back(loan, written=False)
    assert world.leased_pages() == (0, 1)
    world.desk.give_back(loan, written=False)
    assert (tier.num_pending, world.leased_pages()) == (0, (0, 1))
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)


def test_a_page_used_while_it_is_lent_is_one_memory(world: World) -> None:
    """Catches a second copy for the operation, which does not see what the borrower writes; and
    memory that goes under the one when the other is done with it."""
    a, b = world.stored("a", A), world.stored("b", B)
    loan = world.desk.borrow(a)
    world.desk.wait(loan)
    assert world.bytes_of(a) == A
    assert (world.log(), world.leased_pages()) == (["demand_fetch a", "read a"], (1, 0))
    put(loan, B)
    with world.pager.pinned(a) as view:
        assert view.tobytes() == B
        world.desk.give_back(loan, written=True)
        assert world.bytes_of(b) == B
        world.pager.evict_all()
        assert view.tobytes() == B
    del view, loan
    world.log()
    world.pager.evict_all()
    assert (world.log(), world.leased_pages()) == (["evict a", "write a"], (0, 0))
    assert world.bytes_of(a) == B


def test_a_copy_made_while_the_page_is_lent_is_noticed(world: World) -> None:
    """Catches a resident copy of a page of the host tier that stays as it was while the borrower
    writes to the page; and a lease lost when that is noticed."""
    a = world.stored("a", A, home="host")
    before = world.leased_pages()
    loan = world.desk.borrow(a)
    world.desk.wait(loan)
    world.bytes_of(a)
    put(loan, B)
    with pytest.raises(InternalError, match="a/param was fetched while it was lent out"):
        world.desk.give_back(loan, written=True)
    world.pager.drop(a)
    world.pager.settle()
    assert world.leased_pages() == before


def test_reading_one_page_twice_at_a_time_is_fine(world: World) -> None:
    """Catches memory that goes with the first loan while the second one uses it, and an update
    lost because another borrower wrote nothing."""
    a = world.stored("a", A)
    first, second = world.desk.borrow(a), world.desk.borrow(a)
    for loan in (first, second):
        world.desk.wait(loan)
        assert bytes_of(loan) == A
    assert world.log() == ["demand_fetch a", "read a"]
    world.desk.give_back(first, written=False)
    world.pager.evict_all()
    assert (bytes_of(second), world.leased_pages()) == (A, (0, 1))
    third = world.desk.borrow(a)
    put(second, B)
    world.desk.give_back(second, written=True)
    world.desk.give_back(third, written=False)
    world.pager.evict_all()
    assert (world.log(), world.leased_pages()) == (["evict a", "write a"], (0, 0))
    assert world.bytes_of(a) == B


@pytest.mark.parametrize("resident", [False, True])
def test_a_block_that_raises_leaves_one_truth(world: World, resident: bool) -> None:
    """Catches bytes that are there until the page is evicted, and then are not."""
    a = world.stored("a", A)
    if resident:
        world.bytes_of(a)

    def write_and_fail() -> None:
        with world.desk.lent(a, write=True) as buffer:
            buffer.array[:] = np.frombuffer(B, np.uint8)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    seen = world.bytes_of(a)
    world.pager.evict_all()
    assert world.bytes_of(a) == seen
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert a.pins == 0


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", Phase)
def test_a_read_that_fails_is_raised_and_leaves_nothing(phase: Phase) -> None:
    """Catches half-read bytes lent as a page, and a lease lost with them."""
    tier = FaultyTier(DictTier())
    world = World(DeferredTier(tier))
    a = world.stored("a", A)
    tier.fail_next(Operation.READ, phase=phase)
    with pytest.raises(TransferError, match="planned failure"), world.desk.lent(a):
        pass
    assert world.leased_pages() == (0, 0)
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == A


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("phase", Phase)
def test_a_write_that_fails_keeps_the_bytes(phase: Phase, deferred: bool) -> None:
    """Catches an update lost with the write that failed: it stays in memory and goes home later."""
    tier = FaultyTier(DictTier())
    world = World(DeferredTier(tier) if deferred else tier)
    a = world.stored("a", A)
    tier.fail_next(Operation.WRITE, phase=phase)
    with pytest.raises(TransferError, match="planned failure"):  # noqa: PT012 - at either place
        with world.desk.lent(a, read=False, write=True) as buffer:
            buffer.array[:] = np.frombuffer(B, np.uint8)
        del buffer
        world.pager.evict_all()
    assert a.residency is Residency.DIRTY
    assert world.leased_pages() == (0, 1)
    with world.desk.lent(a) as buffer:
        assert buffer.array.tobytes() == B
    del buffer
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    assert world.bytes_of(a) == B
