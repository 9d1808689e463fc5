"""Closing a tier: once, and again after an interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from zinf_core.errors import TierClosedError, TransferError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import open_tier
from zinf_core.testing import host_buffer
from zinf_storage.transfers.ending import Ending


@pytest.fixture(scope="module", autouse=True)
def _obstore_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have obstore start its runtime, which keeps a few descriptors for good, before they are
    counted."""
    open_tier(f"object://file://{tmp_path_factory.mktemp('first')}").close()


class Steps:
    """An end that goes wrong in the ways given, one after the other, and then succeeds."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self._errors = list(errors)
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self._errors:
            raise self._errors.pop(0)


def test_ends_once() -> None:
    """Catches a second close that ends what is gone, or waits for ever."""
    ending, end = Ending(), Steps()
    ending.run(end)
    ending.run(end)
    assert end.num_calls == 1


def test_interrupted_end_is_taken_up_again() -> None:
    """Catches a tier that Ctrl-C leaves half closed for ever."""
    ending, end = Ending(), Steps(KeyboardInterrupt, KeyboardInterrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ending.run(end)
    ending.run(end)
    ending.run(end)
    assert end.num_calls == 3


def test_failed_end_is_over() -> None:
    """Catches an end that fails once more whenever somebody closes."""
    ending, end = Ending(), Steps(TransferError)
    with pytest.raises(TransferError):
        ending.run(end)
    ending.run(end)
    assert end.num_calls == 1


def test_later_callers_wait() -> None:
    """Catches a close that returns while another thread still closes."""
    ending, begun, go_on, order = Ending(), threading.Event(), threading.Event(), []

    def end() -> None:
        begun.set()
        go_on.wait()
        order.append("ended")

    first = threading.Thread(target=ending.run, args=(end,))
    first.start()
    begun.wait()
    second = threading.Thread(target=lambda: (ending.run(end), order.append("second")))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert order == ["ended", "second"]


@contextmanager
def interrupt_after(delay_s: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block after `delay_s`, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    [
        "nvme://{folder}?io_nbytes=4KiB&num_threads=1",
        "object://file://{folder}?part_nbytes=16KiB&num_threads=1",
        "checksummed://[nvme://{folder}?io_nbytes=4KiB&num_threads=1]?num_threads=1",
        "striped://[host://][nvme://{folder}]?shares=1,1&chunk_nbytes=4KiB&num_threads=1",
    ],
)
def test_interrupted_close_can_be_repeated(tmp_path: Path, url: str) -> None:
    """Catches a folder, lease, thread or inner tier that an interrupted close keeps for ever."""
    threads = threading.active_count()
    for delay_s in (0.0005, 0.002, 0.005):
        tier = open_tier(url.format(folder=tmp_path / "t"), capacity_nbytes=1 << 26)
        key = TensorKey.of("w", StateKind.PARAM)
        tier.reserve(key, 1 << 20)
        writes = [tier.write_from(key, host_buffer(1 << 20)) for _ in range(4)]
        with suppress(KeyboardInterrupt), interrupt_after(delay_s):
            tier.close()
        tier.close()
        assert all(write.done() for write in writes)
        with pytest.raises(TierClosedError):
            tier.usage()
        assert threading.active_count() == threads
