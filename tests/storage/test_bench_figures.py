"""Percentiles, choices, grids and verdicts of the benchmark: pure parts, by their properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.errors import ConfigError
from zinf_storage.bench.disk import CacheState, DiskWatch, IoCounters, Snapshot, Verdict
from zinf_storage.bench.figures import Spread, combined_rate, percentile, smallest_near_best
from zinf_storage.bench.grid import (
    Effort,
    Operation,
    Order,
    plan_schedule,
    rotated,
    short_nbytes,
)
from zinf_storage.bench.sample import Sample
from zinf_storage.bench.tuning import choose, default_setting, settings_of, with_setting
from zinf_storage.bench.workload import rounded_data

MiB = 1 << 20
numbers = st.floats(0, 1e12, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(values: list[float], fraction: float) -> None:
    """Catches an index off by one, and values taken for sorted that are not."""
    expected = float(np.percentile(values, fraction * 100))
    assert percentile(values, fraction) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    spread = Spread.of(values)
    assert (spread.least, spread.most) == (min(values), max(values))
    assert spread.median == pytest.approx(float(np.median(values)), rel=1e-9, abs=1e-9)


def test_no_percentile_of_nothing() -> None:
    """Catches a rate of 0 reported for what was never measured."""
    for values, fraction in (([], 0.5), ([1.0], 1.5), ([1.0], -0.1)):
        with pytest.raises(ConfigError, match="no percentile"):
            percentile(values, fraction)


@given(
    st.dictionaries(st.integers(0, 50), st.floats(1, 1e10), min_size=1, max_size=20),
    st.floats(0, 0.5),
)
def test_the_choice_is_the_cheapest_near_the_best(
    rates: dict[int, float], tolerance: float
) -> None:
    """Catches a choice below the tolerance, and a larger request than is needed."""
    costs = {key: (key // 5, key % 5) for key in rates}
    chosen = smallest_near_best(rates, costs, tolerance=tolerance)
    floor = max(rates.values()) * (1 - tolerance)
    assert rates[chosen] >= floor
    assert all(costs[key] >= costs[chosen] for key, rate in rates.items() if rate >= floor)
    doubled = {key: rate * 2 for key, rate in reversed(rates.items())}
    assert smallest_near_best(doubled, costs, tolerance=tolerance) == chosen


def test_nothing_to_choose_from() -> None:
    """Catches a default that passes for a measurement."""
    with pytest.raises(ConfigError, match="nothing was measured"):
        smallest_near_best({}, {})


@given(st.floats(1, 1e11), st.floats(1, 1e11))
def test_the_combined_rate_is_bytes_over_time(read: float, write: float) -> None:
    """Catches an arithmetic mean, which lets a fast read hide a slow write."""
    assert combined_rate(read, write) == pytest.approx(2e9 / (1e9 / read + 1e9 / write))
    assert combined_rate(read, 0.0) == 0.0


@given(st.sampled_from(Effort), st.integers(64 << 10, 1 << 33), st.sampled_from([1, 4096, 65536]))
def test_grids_stay_within_what_they_promise(effort: Effort, nbytes: int, align: int) -> None:
    """Catches cells that need more memory than the arena, that a tier would refuse, or twice."""
    nbytes = rounded_data(nbytes)
    schedule = plan_schedule(effort, data_nbytes=nbytes, align=align)
    assert len(set(schedule.cells)) == len(schedule.cells)
    for cell in schedule.cells:
        assert cell.nbytes * cell.depth <= min(256 * MiB, nbytes // 4)
        assert cell.nbytes % align == 0
        assert cell.nbytes % 4096 == 0
        assert 1 <= cell.depth <= 32
    total_s = schedule.sample_s * len(schedule.cells) * schedule.num_rounds
    wanted_s = {"quick": 15, "normal": 60, "full": 600}[effort.value]
    assert total_s == pytest.approx(wanted_s if schedule.cells else 0)


def test_the_full_grid_has_everything() -> None:
    """Catches a size, depth or kind of request that is promised and not measured."""
    cells = plan_schedule(Effort.FULL, data_nbytes=4 << 30, align=1).cells
    kinds = {(cell.operation, cell.order) for cell in cells}
    assert kinds == {(operation, order) for operation in Operation for order in Order}
    for kind in kinds:
        mine = [cell for cell in cells if (cell.operation, cell.order) == kind]
        assert {cell.nbytes for cell in mine} == {4096 << shift for shift in range(15)}
        assert {cell.depth for cell in mine} == {1, 2, 4, 8, 16, 32}


@given(st.lists(st.integers(), unique=True, max_size=12), st.integers(1, 6), st.data())
def test_rounds_are_rotations(items: list[int], num_rounds: int, data: st.DataObject) -> None:
    """Catches a round that forgets a cell or measures one twice."""
    index = data.draw(st.integers(0, num_rounds - 1))
    assert sorted(rotated(items, index, num_rounds)) == sorted(items)
    assert rotated(items, 0, num_rounds) == items


def test_rounds_begin_elsewhere() -> None:
    """Catches rounds of one order, in which a drift of the machine always hits the same cells."""
    first = [rotated(range(9), index, 3)[0] for index in range(3)]
    assert len(set(first)) == 3


@given(st.integers(1 << 16, 1 << 34))
def test_test_data_is_whole_keys(nbytes: int) -> None:
    """Catches test data that leaves a remainder no key covers, or that grows by a lot."""
    rounded = rounded_data(nbytes)
    key = min(64 * MiB, rounded // 4)
    assert rounded % key == 0
    assert key % 4096 == 0
    assert nbytes <= rounded < nbytes + 64 * MiB


def test_sizes_in_words() -> None:
    """Catches sizes that cannot be pasted into a URL."""
    assert [short_nbytes(n) for n in (512, 4096, 3 << 19, MiB, 1 << 30)] == [
        "512 B", "4 KiB", "1.5 MiB", "1 MiB", "1 GiB",
    ]  # fmt: skip


@given(st.sampled_from(Effort), st.data())
def test_the_tuned_setting(effort: Effort, data: st.DataObject) -> None:
    """Catches a sweep without the defaults, which could then not be compared with, and a choice
    that has more in flight than another one that is as fast."""
    settings = settings_of(effort, key_nbytes=64 * MiB)
    assert default_setting() in settings
    rates = {setting: data.draw(st.floats(1e8, 1e10)) for setting in settings}
    chosen = choose(rates)
    assert rates[chosen] >= 0.96 * max(rates.values())
    for setting, rate in rates.items():
        if rate >= 0.96 * max(rates.values()):
            in_flight = setting.io_nbytes * setting.num_threads
            assert in_flight >= chosen.io_nbytes * chosen.num_threads


def test_tuned_urls_keep_the_other_options() -> None:
    """Catches options lost, or a size that the tier cannot parse."""
    url = with_setting("nvme:///a%20b?verify_reads=1&io_nbytes=4KiB", default_setting())
    assert url == "nvme:///a%20b?verify_reads=1&io_nbytes=1MiB&num_threads=16"


def sample(*, read: int = 0, written: int = 0) -> Sample:
    return Sample(
        read_nbytes=read, written_nbytes=written, wall_s=1, cpu_s=0.1, latencies_s=(0.5, 0.5)
    )


def snapshot(*, read: int, written: int, unsettled: int = 0) -> Snapshot:
    return Snapshot(
        counters=IoCounters(read_nbytes=read, write_nbytes=written),
        cache=CacheState(cached_nbytes=unsettled, unsettled_nbytes=unsettled),
    )


@pytest.mark.parametrize(
    ("taken", "before", "after", "verdict"),
    [
        (sample(read=100), (0, 0, 0), (100, 0, 0), Verdict.DISK),
        (sample(read=100), (0, 0, 0), (130, 0, 0), Verdict.DISK),  # read ahead
        (sample(read=100), (50, 0, 0), (100, 0, 0), Verdict.CACHED),
        (sample(read=100), (0, 0, 0), (0, 100, 0), Verdict.CACHED),  # writes are no reads
        (sample(written=100), (0, 0, 0), (0, 100, 0), Verdict.DISK),
        (sample(written=100), (0, 0, 0), (0, 100, 100), Verdict.CACHED),  # dirty still
        (sample(written=100), (0, 0, 80), (0, 100, 80), Verdict.DISK),  # as much left as came
        (sample(written=100), (0, 0, 0), (0, 0, 0), Verdict.CACHED),
        (sample(read=50, written=50), (0, 0, 0), (50, 50, 0), Verdict.DISK),
        (sample(read=50, written=50), (0, 0, 0), (100, 0, 0), Verdict.CACHED),
    ],
)
def test_who_moved_the_bytes(
    taken: Sample,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    verdict: Verdict,
    tmp_path: pytest.TempPathFactory,
) -> None:
    """Catches dirty pages taken for bytes on the drive, and one direction covering for another."""
    watch = DiskWatch((tmp_path,), filesystem="ext4")
    looks = [snapshot(read=r, written=w, unsettled=u) for r, w, u in (before, after)]
    judgement = watch.judge(looks[0], looks[1], taken)
    assert judgement.verdict is verdict
    assert bool(judgement.reason) == (verdict is Verdict.CACHED)


def test_verdicts_without_files_or_counters(tmp_path: pytest.TempPathFactory) -> None:
    """Catches a number called a disk's because nothing could be found against it."""
    nothing = Snapshot(counters=None, cache=None)
    full = snapshot(read=100, written=0)
    no_files = DiskWatch((), filesystem="")
    assert no_files.judge(nothing, nothing, sample(read=100)).verdict is Verdict.NO_FILES
    assert no_files.look() == nothing
    on_drive = DiskWatch((tmp_path,), filesystem="ext4")
    unsure = on_drive.judge(nothing, full, sample(read=100))
    assert unsure.verdict is Verdict.UNVERIFIED
    assert unsure.moved_nbytes is None
    in_memory = DiskWatch((tmp_path,), filesystem="tmpfs")
    refused = in_memory.judge(snapshot(read=0, written=0), full, sample(read=100))
    assert refused.verdict is Verdict.CACHED
    assert "tmpfs is memory" in refused.reason


def test_shares() -> None:
    """Catches a rate or a share of the processor over the wrong time."""
    taken = Sample(read_nbytes=300, written_nbytes=100, wall_s=2.0, cpu_s=0.5, latencies_s=(1.0,))
    assert (taken.bytes_per_s, taken.cpu_share) == (200.0, 0.25)
    assert math.isclose(taken.latencies_s[0], 1.0)
