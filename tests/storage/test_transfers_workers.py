"""The threads of a tier: how they start, and every way in which they end."""

from __future__ import annotations

import gc
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from nvme_helpers import SMALL, key, noise, opened, read, store
from test_nvme_folder import child

from zinf_core.errors import TransferError
from zinf_storage.nvme import NvmeTier
from zinf_storage.transfers.workers import Workers

NUM_HELPERS = 2
"""Threads besides those asked for: one for commits, one that waits for the end."""


def new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


def test_all_threads_are_there_at_once_and_gone_after_close() -> None:
    """Catches threads started late, where a submit would have to fail, and threads left over."""
    before = set(threading.enumerate())
    workers = Workers(3, tier_name="w")
    assert len(new_threads(before)) == 3 + NUM_HELPERS
    assert not any(thread.daemon for thread in new_threads(before))
    workers.close()
    assert new_threads(before) == set()
    workers.close()


def test_close_waits_for_what_was_handed_over() -> None:
    """Catches functions dropped by close, and functions taken that nobody will call."""
    workers = Workers(2, tier_name="w")
    gate, called = threading.Event(), []
    assert workers.call(lambda: called.append(gate.wait(timeout=30)))
    assert workers.call_alone(lambda: called.append(gate.wait(timeout=30)))
    for _ in range(20):
        assert workers.call(lambda: called.append(True))
    gate.set()
    workers.close()
    assert called == [True] * 22
    assert not workers.call(lambda: called.append(False))
    assert not workers.call_alone(lambda: called.append(False))


def test_long_work_holds_up_nobody() -> None:
    """Catches a commit on a thread that blocks need."""
    workers = Workers(1, tier_name="w")
    gate, moved = threading.Event(), threading.Event()
    workers.call_alone(lambda: gate.wait(timeout=30) and None)
    workers.call(moved.set)
    assert moved.wait(timeout=30)
    gate.set()
    workers.close()


def test_an_idle_thread_refers_to_nothing() -> None:
    """Catches a thread that keeps the tier it last worked for alive."""

    class Owner:
        def work(self) -> None:
            pass

    owner, gone = Owner(), threading.Event()
    weakref.finalize(owner, gone.set)
    workers = Workers(1, tier_name="w")
    workers.call(owner.work)
    del owner
    assert gone.wait(timeout=30)
    workers.close()


def test_dropped_workers_end() -> None:
    """Catches threads that keep their tier alive, or live on, when nobody closed it."""
    before = set(threading.enumerate())
    workers = Workers(2, tier_name="w")
    threads = new_threads(before)
    done = threading.Event()
    workers.call(done.set)
    assert done.wait(timeout=30)
    del workers
    gc.collect()
    for thread in threads:
        thread.join(timeout=30)
    assert new_threads(before) == set()


@pytest.mark.parametrize("nth", range(2 + NUM_HELPERS))
def test_a_refused_thread_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Catches a tier with fewer threads than asked for, a bare RuntimeError, threads that stay,
    and a folder that stays locked."""
    real: Callable[[threading.Thread], None] = threading.Thread.start
    num_started = 0

    def start(thread: threading.Thread) -> None:
        nonlocal num_started
        num_started += 1
        if num_started == nth + 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(TransferError, match=r"one of 4 threads: can't.*num_threads"):
            NvmeTier.open(tmp_path, options=SMALL)
    assert new_threads(before) == set()
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(5000))
        assert read(tier, key(0)) == noise(5000)


EXITING = """
import atexit, sys
from nvme_helpers import *
from zinf_core.errors import TransferError
tier = NvmeTier.open(sys.argv[1], options=SMALL)
for i in range(4):
    tier.reserve(key(i), 200_000)
writes = [tier.write_from(key(i), buffer_of(noise(200_000, i))) for i in range(4)]
dst = buffer_of(bytes(200_000))
read_back = tier.prefetch_into(key(3), dst)
flushed = tier.flush()

def too_late():
    for write in (*writes, read_back):
        write.wait(timeout_s=0)
    late = [flushed.done()]
    for submit in (lambda: tier.read_into(key(0), buffer_of(bytes(9))), tier.flush,
                   lambda: tier.prefetch_into(key(0), buffer_of(bytes(9))),
                   lambda: tier.write_from(key(0), buffer_of(bytes(9)))):
        try:
            submit().wait(timeout_s=30)
        except TransferError as exc:
            late.append("exiting" in str(exc))
    print(late)

atexit.register(too_late)
"""


@pytest.mark.slow
def test_a_program_ends_without_close(tmp_path: Path) -> None:
    """Catches an exit that hangs, drops reads and writes submitted before, or lets something be
    submitted that nobody will do. (A flush that nobody waits for promises nothing.)"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child(EXITING, tmp_path, **pipes) as program:
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (0, "[True, True, True, True, True]\n", "")
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(5000))
