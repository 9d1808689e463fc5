"""Transfers in flight: each is finished once, whatever happens, and none is forgotten."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest

from zinf_core.errors import TransferError, TransferTimeoutError
from zinf_core.runtime.transfers import Transfer, TransfersInFlight


class Manual:
    """A completion that is done when the test says so, or when it is waited for."""

    def __init__(self, error: Exception | None = None, *, done: bool = False) -> None:
        self.error = error
        self.is_done = done
        self.interrupts = 0
        self.timeouts = 0
        self.num_promoted = 0

    def cancel(self) -> bool:
        return False

    def promote(self) -> None:
        self.num_promoted += 1

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        del timeout_s
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        if self.timeouts:
            self.timeouts -= 1
            raise TransferTimeoutError("not yet")
        self.is_done = True
        if self.error is not None:
            raise self.error


class Log:
    """Transfers that note how they finished."""

    def __init__(self) -> None:
        self.in_flight = TransfersInFlight()
        self.finished: list[str] = []

    def add(self, name: str, completion: Manual, *, is_ahead: bool = False) -> Transfer:
        def finish(error: Exception | None) -> None:
            self.finished.append(f"{name}: {error}" if error else name)

        return self.in_flight.add(completion, finish, is_ahead=is_ahead)


def test_waiting_finishes_once() -> None:
    """Catches a lease released twice because two waits saw the same completion."""
    log = Log()
    transfer = log.add("a", Manual())
    assert (len(log.in_flight), transfer.finished) == (1, False)
    log.in_flight.wait(transfer)
    log.in_flight.wait(transfer)
    assert (log.finished, len(log.in_flight), transfer.finished) == (["a"], 0, True)


def test_a_failure_is_finished_and_raised_every_time() -> None:
    """Catches a failure that the second of two waiters does not see."""
    log = Log()
    transfer = log.add("a", Manual(TransferError("gone")))
    for _ in range(2):
        with pytest.raises(TransferError, match="gone"):
            log.in_flight.wait(transfer)
    assert log.finished == ["a: gone"]


@pytest.mark.parametrize("attribute", ["interrupts", "timeouts"])
def test_a_wait_that_breaks_off_leaves_it_in_flight(attribute: str) -> None:
    """Catches memory given back while the device still writes to it, after Ctrl-C."""
    log = Log()
    completion = Manual()
    setattr(completion, attribute, 1)
    transfer = log.add("a", completion)
    with pytest.raises((KeyboardInterrupt, TransferTimeoutError)):
        log.in_flight.wait(transfer)
    assert (log.finished, transfer.finished, len(log.in_flight)) == ([], False, 1)
    log.in_flight.wait(transfer)
    assert log.finished == ["a"]


def test_reap_takes_what_is_done_and_only_that() -> None:
    """Catches blocking, or a done transfer behind one that is not."""
    log = Log()
    log.add("a", Manual())
    log.add("b", Manual(done=True))
    log.add("c", Manual(done=True))
    assert log.in_flight.reap()
    assert (log.finished, len(log.in_flight)) == (["b", "c"], 1)
    assert not log.in_flight.reap()


def test_reap_raises_a_failure_and_loses_nothing() -> None:
    """Catches transfers dropped because the one before them failed."""
    log = Log()
    log.add("a", Manual(done=True))
    log.add("b", Manual(TransferError("gone"), done=True))
    log.add("c", Manual(done=True))
    with pytest.raises(TransferError, match="gone"):
        log.in_flight.reap()
    log.in_flight.reap()
    assert log.finished == ["a", "b: gone", "c"]
    assert len(log.in_flight) == 0


def test_the_oldest_comes_first() -> None:
    """Catches waiting for the newest, which is the last to be done."""
    log = Log()
    for name in "abc":
        log.add(name, Manual())
    assert [log.in_flight.wait_oldest() for _ in range(4)] == [True, True, True, False]
    assert log.finished == ["a", "b", "c"]


def test_the_oldest_is_skipped_once_it_is_finished() -> None:
    """Catches waiting for nothing, which the pager takes for memory that was freed."""
    log = Log()
    first = log.add("a", Manual())
    log.add("b", Manual())
    log.in_flight.wait(first)
    assert log.in_flight.wait_oldest()
    assert log.finished == ["a", "b"]
    assert not log.in_flight.wait_oldest()


def test_an_oldest_that_fails_makes_way() -> None:
    """Catches a failed transfer that blocks the queue for ever."""
    log = Log()
    log.add("a", Manual(TransferError("gone")))
    log.add("b", Manual())
    with pytest.raises(TransferError, match="gone"):
        log.in_flight.wait_oldest()
    assert log.in_flight.wait_oldest()
    assert log.finished == ["a: gone", "b"]


def test_an_oldest_that_is_interrupted_stays() -> None:
    """Catches a transfer lost from the queue by Ctrl-C."""
    log = Log()
    completion = Manual()
    completion.interrupts = 1
    log.add("a", completion)
    with pytest.raises(KeyboardInterrupt):
        log.in_flight.wait_oldest()
    assert len(log.in_flight) == 1
    assert log.in_flight.wait_oldest()
    assert log.finished == ["a"]


def test_finished_transfers_are_forgotten() -> None:
    """Catches a queue that keeps every transfer, its error and the frames of that error."""
    log = Log()
    completions = []
    for error in (None, TransferError("gone")):
        transfer = log.add("a", Manual(error))
        completions.append(weakref.ref(transfer.completion))
        with pytest.raises(TransferError) if error else nullcontext():
            log.in_flight.wait(transfer)
        del transfer, error
    gc.collect(0)  # an error, its frames and what they hold form a cycle
    assert [ref() for ref in completions] == [None, None]


# -- reads ahead -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_read_ahead_that_is_needed_goes_first(is_ahead: bool) -> None:
    """Catches a wait behind other reads ahead that nobody needs yet."""
    log = Log()
    completion = Manual()
    log.in_flight.wait(log.add("a", completion, is_ahead=is_ahead))
    assert (completion.num_promoted, log.finished) == (is_ahead, ["a"])


@pytest.mark.parametrize("how", ["reap", "wait_oldest"])
def test_a_failed_read_ahead_is_no_business_of_who_needs_room(how: str) -> None:
    """Catches the failure of a read that nobody needed yet, raised to someone who waits for
    memory; and one that is not finished because of it."""
    log = Log()
    failing = Manual(TransferError("gone"), done=True)
    transfer = log.add("a", failing, is_ahead=True)
    assert getattr(log.in_flight, how)()
    assert (log.finished, transfer.finished) == (["a: gone"], True)
    with pytest.raises(TransferError, match="gone"):  # who needs the bytes themselves is told
        log.in_flight.wait(transfer)


@pytest.mark.parametrize("how", ["reap", "wait_oldest"])
def test_an_interrupt_is_the_business_of_everyone(how: str) -> None:
    """Catches Ctrl-C swallowed with the failures of reads ahead."""
    log = Log()
    completion = Manual(done=True)
    completion.interrupts = 1
    log.add("a", completion, is_ahead=True)
    with pytest.raises(KeyboardInterrupt):
        getattr(log.in_flight, how)()
    assert (log.finished, len(log.in_flight)) == ([], 1)
