"""The kit against tiers with one bug each: the check made for that bug must fail, by name.

A check that passes here catches nothing. That the same checks pass on sound tiers is in
test_reference_tiers.py.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import planted_bytes
import planted_crash
import planted_flush
import planted_large
import planted_prefetch
import planted_room
import planted_state
import planted_threads
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from zinf_core.keys import TensorKey
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    FaultyTier,
    Operation,
    TierSuite,
    failures_of,
    latest,
    machine_for,
)
from zinf_core.tier import Tier
from zinf_core.units import MiB


class Persistent:
    """Opens tiers that keep their bytes in a dict, one per folder."""

    def __init__(self, kind: Callable[[dict[TensorKey, bytes]], Tier]) -> None:
        self._kind = kind
        self._media: dict[Path, dict[TensorKey, bytes]] = {}

    def open(self, folder: Path) -> Tier:
        return self._kind(self._media.setdefault(folder, {}))


Open = Callable[[], Tier] | Persistent


def open_in(folder: Path, open_one: Open) -> Tier:
    return open_one.open(folder) if isinstance(open_one, Persistent) else open_one()


class PlantedSuite(TierSuite):
    """Suite of whatever `open_one` opens, with DictTier's back door."""

    timeout_s = 0.2

    def __init__(self, open_one: Open) -> None:
        self._open_one = open_one

    def open_tier(self, folder: Path) -> Tier:
        return open_in(folder, self._open_one)

    def peek(self, tier: Tier, key: TensorKey) -> bytes | None:
        return bytes(tier._stored[key]) if isinstance(tier, DictTier) else None

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        if isinstance(tier, DictTier):
            tier._stored[key] = data
        return isinstance(tier, DictTier)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        if isinstance(tier, FaultyTier):
            tier.fail_next(operation, damage=operation is Operation.WRITE)
        return isinstance(tier, FaultyTier)


def _deferred(kind: type[DeferredTier]) -> Open:
    return lambda: kind(DictTier(), order=latest)


def _faulty(kind: type[FaultyTier]) -> Open:
    return lambda: kind(DictTier())


CAUGHT: list[tuple[Open, str]] = [
    (planted_bytes.AgreeingErrors, "test_law_01_written_is_stored"),
    (planted_bytes.AgreeingErrors, "test_law_01_stored_is_read"),
    (planted_bytes.ShortRead, "test_law_01_written_is_read"),
    (planted_state.Overlapping, "test_law_02_keys_are_apart"),
    (planted_bytes.AliasedKeys, "test_law_02_look_alikes_are_apart"),
    (planted_bytes.ReadOffByOne, "test_law_03_reads_are_exact"),
    (planted_bytes.WriteClearsRest, "test_law_03_writes_are_exact"),
    (planted_bytes.ShadowWriteLosesNeighbour, "test_law_03_side_by_side"),
    (planted_bytes.StaleCache, "test_law_04_a_write_is_seen"),
    (planted_bytes.ShortRead, "test_law_05_reads_are_whole"),
    (planted_bytes.ShortRead, "test_law_05_many_in_flight"),
    (planted_bytes.CompletesEarly, "test_law_06_done_means_done"),
    (planted_bytes.AdoptsSource, "test_law_06_source_is_free"),
    (planted_bytes.LateStore, "test_law_06_destination_is_free"),
    (planted_bytes.KeepsReference, "test_law_06_no_reference_is_kept"),
    (planted_bytes.Overruns, "test_law_06_transfers_stay_inside"),
    (planted_state.UsageDrifts, "test_law_07_usage_is_the_sum"),
    (lambda: planted_state.DiscardLeaksRoom(capacity_nbytes=MiB), "test_law_07_room_is_used_again"),
    (lambda: planted_state.FailedReserveLeaks(capacity_nbytes=MiB), "test_law_08_failed_reserve"),
    (_faulty(planted_state.PartlyWritten), "test_law_09_failed_write"),
    (_faulty(planted_state.FailureSwallowed), "test_law_09_failed_write"),
    (_faulty(planted_state.FailsAtSubmit), "test_law_10_failures_come_from_wait"),
    (_faulty(planted_state.FailsOnce), "test_law_10_failures_come_from_wait"),
    (planted_state.RangeErrorAtWait, "test_law_10_bad_ranges"),
    (planted_state.NoAlignmentCheck, "test_law_10_misalignment"),
    (planted_state.TakesAnyMemory, "test_law_10_bad_buffers"),
    (planted_state.DiscardIgnoresAbsent, "test_law_11_absent_keys"),
    (planted_state.WriteCreates, "test_law_11_absent_keys"),
    (_deferred(planted_state.CloseForgets), "test_law_12_close_settles"),
    (planted_state.ClosesOnce, "test_law_12_closed_tiers_refuse"),
    (planted_state.OpenAfterClose, "test_law_12_closed_tiers_refuse"),
    (planted_state.SharedScratch, "test_law_13_threads"),
    (planted_state.OneThreadOnly, "test_law_13_another_thread_may_wait"),
    (Persistent(planted_state.OpenTruncates), "test_law_14_reopening"),
    (Persistent(planted_state.OpenTruncates), "test_law_14_without_flush"),
    (Persistent(planted_state.FlushForgetsOne), "test_law_14_reopening"),
    (_deferred(planted_state.DiscardFreesTooEarly), "test_discard_spares_transfers"),
    (_deferred(planted_state.DiscardFreesTooEarly), "test_discard_ends_late_writes"),
    (planted_state.LiveKeys, "test_keys_is_a_snapshot"),
    (planted_state.PromisesMap, "test_capabilities_are_sane"),
    (planted_state.MapIsACopy, "test_map_is_the_key"),
    (planted_large.LastRequestLost, "test_law_01_large_keys"),
    (planted_large.LaterRequestsAtTheirOwnOffset, "test_law_03_large_ranges"),
    (planted_large.LargeWritesCarryTheRest, "test_law_03_large_side_by_side"),
    (planted_large.KeepsLargeDestination, "test_law_06_large_buffers"),
    (planted_large.AdoptsLargeSource, "test_law_06_large_buffers"),
    (planted_threads.GivesUpSilently, "test_law_06_short_waits"),
    (planted_threads.DoneAndImpatient, "test_law_06_short_waits"),
    (planted_threads.TwoOwners, "test_law_08_one_name"),
    (planted_threads.Overbooks, "test_law_08_last_room"),
    (_deferred(planted_threads.SecondCloseEarly), "test_law_12_every_close_settles"),
    (Persistent(planted_flush.JoinsRunningFlush), "test_law_14_flushes_overlap"),
    (Persistent(planted_flush.OlderFlushWins), "test_law_14_flushes_overlap"),
    (Persistent(planted_flush.FlushForgetsDiscards), "test_law_14_flushes_overlap"),
    (Persistent(planted_flush.TornFlush), "test_law_14_one_moment"),
    (planted_threads.UnlockedTable, "test_law_13_lifetimes"),
    (planted_threads.ClearsBeforeWriting, "test_law_13_one_key"),
    (planted_threads.ReadsFreedMemory, "test_law_12_close_meets_submitters"),
    (_faulty(planted_threads.FailureSpreads), "test_law_09_one_among_many"),
    (planted_threads.UnwrittenIsStuck, "test_fault_sweep"),
    (planted_room.TakesTheRest, "test_law_08_full_tier"),
    (planted_room.EvictsTheOldest, "test_law_08_full_tier"),
    (planted_room.SaysTooLittle, "test_law_08_full_tier"),
    (planted_room.RefusalCostsRoom, "test_law_07_room_comes_back"),
    (_deferred(planted_prefetch.PrefetchIgnoresOffset), "test_prefetch_is_a_read"),
    (_deferred(planted_prefetch.PromoteCancels), "test_prefetch_is_a_read"),
    (_deferred(planted_prefetch.PrefetchRefusesAtWait), "test_prefetch_refuses"),
    (_deferred(planted_prefetch.CancelStillReads), "test_prefetch_cancelled"),
    (_deferred(planted_prefetch.CancelKeepsBuffer), "test_prefetch_cancelled"),
    (_deferred(planted_prefetch.CancelledSucceeds), "test_prefetch_cancelled"),
    (_deferred(planted_prefetch.CancelsWhatIsDone), "test_prefetch_cancel_late"),
    (_deferred(planted_state.DiscardFreesTooEarly), "test_prefetch_discard"),
    (_deferred(planted_state.CloseForgets), "test_prefetch_close"),
]

CRASH_CAUGHT: list[tuple[type[TierSuite], str]] = [
    (planted_crash.AcknowledgesEarlySuite, "neither as the last acknowledged flush"),
    (planted_crash.FlushesInPlaceSuite, "neither as the last acknowledged flush"),
    (planted_crash.FolderTierAsWholeSuite, "neither as the last acknowledged flush"),
    (planted_crash.OpenRewritesSuite, "neither as the last acknowledged flush"),
    (planted_crash.ForgetsInMemorySuite, "neither as the last acknowledged flush"),
    (planted_flush.FlushTakesWhatComesLaterSuite, "neither as the last acknowledged flush"),
    (planted_crash.WritesInPlaceSuite, r"process \d+, .*: layers"),
    (planted_crash.AcknowledgesEarlyByKeySuite, r"process \d+, .*: layers"),
]


@pytest.mark.parametrize(("open_one", "check"), CAUGHT)
def test_suite_catches(open_one: Open, check: str, tmp_path: Path) -> None:
    """Catches a check that lets through the bug it was written for."""
    failed = failures_of(PlantedSuite(open_one), tmp_path, only=check)
    assert {name.partition("[")[0] for name in failed} == {check}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("suite", "message"), CRASH_CAUGHT)
def test_crash_test_catches(suite: type[TierSuite], message: str, tmp_path: Path) -> None:
    """Catches kills that never meet the moment they are meant for, and a model that forgives."""
    check = "test_law_14_kills"
    failed = failures_of(suite(), tmp_path, only=check)
    assert set(failed) == {check}
    assert re.search(message, failed[check])


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    before = threading.enumerate()  # others may never end, such as those of a progress bar
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread not in before:
            thread.join()


def test_suite_catches_threads_left_behind(stop: threading.Event, tmp_path: Path) -> None:
    """Catches a close check that does not look at threads."""
    check = "test_law_12_close_releases"
    suite = PlantedSuite(lambda: planted_state.LeavesThread(stop))
    assert set(failures_of(suite, tmp_path, only=check)) == {check}


FEW = settings(
    max_examples=200,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

HANGING = [
    (planted_threads.OneWaiter, "test_law_13_another_thread_may_wait"),
    (planted_threads.WaitsForEver, "test_law_03_side_by_side"),
    (planted_threads.CloseHangs, "test_law_12_close_settles"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "check"), HANGING)
def test_suite_ends_where_a_tier_hangs(
    kind: Callable[[threading.Event], Tier], check: str, stop: threading.Event, tmp_path: Path
) -> None:
    """Catches a kit that waits for ever with the tier, and does not say what it waits for."""
    suite = PlantedSuite(lambda: kind(stop))
    suite.limit_s = 1.0
    failed = failures_of(suite, tmp_path, only=check)
    assert {name.partition("[")[0] for name in failed} == {check}
    assert all("_stop.wait()" in message for message in failed.values())


@pytest.mark.slow
def test_suite_passes_a_sound_tier(tmp_path: Path) -> None:
    """Catches a runner that reports failures of its own making."""
    suite = PlantedSuite(lambda: FaultyTier(DictTier(capacity_nbytes=16 * MiB)))
    suite.timeout_s = 30.0
    assert failures_of(suite, tmp_path) == {}


@pytest.mark.slow
def test_machine_ends_where_a_tier_hangs(stop: threading.Event) -> None:
    """Catches a state machine that waits for ever with the tier."""
    machine = machine_for(lambda folder: planted_threads.WaitsForEver(stop), timeout_s=0.2)
    with pytest.raises(AssertionError, match=r"wait\(timeout_s=0.2\) has not ended after 0.4 s"):
        run_state_machine_as_test(machine, settings=FEW)


def test_suite_passes_flushes_that_are_late(tmp_path: Path) -> None:
    """Catches checks of overlapping flushes that a sound tier fails, if it takes its time."""
    for i, check in enumerate(("test_law_14_flushes_overlap", "test_law_14_one_moment")):
        suite = PlantedSuite(Persistent(planted_flush.LateFlush))
        assert failures_of(suite, tmp_path / str(i), only=check) == {}


def test_every_law_has_a_test() -> None:
    """Catches a law that is written down and checked by nothing."""
    names = [name for name in dir(TierSuite) if name.startswith("test_law_")]
    assert {int(name.split("_")[2]) for name in names} == set(range(1, 15))


def test_every_check_has_a_planted_bug() -> None:
    """Catches a new check that nobody has seen fail."""
    elsewhere = {"test_law_12_close_releases", "test_law_14_kills"}
    tried = {check for _, check in CAUGHT} | elsewhere
    assert {name for name in dir(TierSuite) if name.startswith("test_")} == tried


MACHINE_CATCHES: list[Open] = [
    planted_bytes.ShortRead,
    planted_bytes.ReadOffByOne,
    planted_bytes.WriteClearsRest,
    planted_bytes.ShadowWriteLosesNeighbour,
    planted_bytes.StaleCache,
    planted_bytes.CompletesEarly,
    planted_bytes.AdoptsSource,
    planted_state.UsageDrifts,
    planted_state.WriteCreates,
    planted_state.DiscardIgnoresAbsent,
    lambda: planted_state.FailedReserveLeaks(capacity_nbytes=MiB),
    Persistent(planted_state.OpenTruncates),
    Persistent(planted_state.FlushForgetsOne),
    Persistent(planted_flush.JoinsRunningFlush),
    Persistent(planted_flush.OlderFlushWins),
    _deferred(planted_state.CloseForgets),
    _deferred(planted_state.DiscardFreesTooEarly),
    _deferred(planted_prefetch.PrefetchIgnoresOffset),
    _deferred(planted_prefetch.CancelledSucceeds),
]


@pytest.mark.parametrize("open_one", MACHINE_CATCHES)
def test_machine_catches(open_one: Open) -> None:
    """Catches a machine whose rules never meet, or whose model forgives."""
    machine = machine_for(lambda folder: open_in(folder, open_one), timeout_s=0.5)
    with pytest.raises(BaseException, match=r".") as caught:
        run_state_machine_as_test(machine, settings=FEW)
    assert not isinstance(caught.value, KeyboardInterrupt)
