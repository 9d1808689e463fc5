"""Pager and pool on a real drive tier, used by several threads at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from core_helpers import World, noise

from zinf_core.runtime.page import Page
from zinf_storage.nvme import NvmeOptions, NvmeTier

P = 4096
NUM_THREADS = 3


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Return a pager over a drive tier, with memory for one large page per thread."""
    options = NvmeOptions(io_nbytes=2 * P, segment_nbytes=64 * P, num_threads=2)
    tier = NvmeTier.open(tmp_path / "zinf", options=options)
    try:
        yield World(tier, device_pages=2 * NUM_THREADS, host_pages=2 * NUM_THREADS)
    finally:
        tier.close()


def run_in_threads(work: Callable[[int], None]) -> None:
    """Run `work` in all threads at once; raise what any of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(NUM_THREADS)

    def run(index: int) -> None:
        try:
            start.wait()
            work(index)
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def edit_at_random(world: World, index: int, expected: dict[Page, bytes]) -> None:
    """Make, edit, lend and drop pages of this thread; check every byte."""
    rng = random.Random(index)
    for turn in range(4):
        nbytes = rng.choice([100, P, P + 1, 2 * P])
        page = world.add(f"p{index}.{turn}", nbytes)
        expected[page] = noise(nbytes, turn)
        world.fill(page, expected[page])
    for turn in range(40):
        page = rng.choice(list(expected))
        data = noise(page.nbytes, 100 * index + turn)
        act = rng.randrange(3)
        if act == 0:
            assert world.bytes_of(page) == expected[page]
        elif act == 1:
            world.edit(page, data)
            expected[page] = data
        else:
            with world.desk.lent(page, write=True) as buffer:
                assert buffer.array.tobytes() == expected[page]
                buffer.array[:] = np.frombuffer(data, np.uint8)
            del buffer
            expected[page] = data


def test_threads_do_not_see_each_others_bytes(world: World) -> None:
    """Catches state of the pager changed outside its lock: bytes of another page, a lease lost,
    a budget exceeded, two threads that wait for each other."""
    expected: list[dict[Page, bytes]] = [{} for _ in range(NUM_THREADS)]
    run_in_threads(lambda index: edit_at_random(world, index, expected[index]))
    for pages in expected:
        for page, data in pages.items():
            assert world.bytes_of(page) == data
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
    for pool in (world.device_pool, world.host_pool):
        assert pool.usage().peak_nbytes <= pool.usage().budget_nbytes


def test_one_page_pinned_by_all_threads_is_read_once(world: World) -> None:
    """Catches two fetches of one page, of which one is lost with its lease."""
    page = world.stored("shared", noise(2 * P, 1))

    def work(index: int) -> None:
        del index
        for _ in range(20):
            assert world.bytes_of(page) == noise(2 * P, 1)

    run_in_threads(work)
    assert world.log() == ["demand_fetch shared", "read shared"]
    assert page.pins == 0
    world.pager.evict_all()
    assert world.leased_pages() == (0, 0)
