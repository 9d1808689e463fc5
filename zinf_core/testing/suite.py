"""TierSuite: subclass it, say how to open your tier, and pytest checks every law on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec

import pytest

from zinf_core.buffers import Buffer
from zinf_core.keys import TensorKey
from zinf_core.testing import (
    laws_bytes,
    laws_crash,
    laws_faults,
    laws_flush,
    laws_large,
    laws_prefetch,
    laws_races,
    laws_room,
    laws_state,
    laws_threads,
    laws_transfers,
    laws_waits,
)
from zinf_core.testing.bench import LIMIT_S, Bench
from zinf_core.testing.buffers import fill_host, host_buffer, host_contents
from zinf_core.testing.crash_model import FlushScope
from zinf_core.testing.crash_orders import SuiteReference
from zinf_core.testing.faults import Operation
from zinf_core.testing.limits import run_limited, within_limit
from zinf_core.tier import Tier

_P = ParamSpec("_P")


def _limited(
    check: Callable[Concatenate[Bench, _P], None],
) -> staticmethod[Concatenate[Bench, _P], None]:
    return staticmethod(within_limit(check))


class TierSuite(ABC):
    """The laws of `zinf_core.tier`, as tests. In a test file of yours::

        class TestMyTier(TierSuite):
            def open_tier(self, folder):
                return MyTier(folder, budget_nbytes=16 << 20)

    Give the tier room for 16 MiB and a name of its own. `peek` and `poke` are back doors: they
    look at what is stored, and change it, without the tier's transfers, so that a wrong write and
    a wrong read cannot agree with each other. `fail_next` lets laws 9 and 10 be tested, `num_kills`
    the laws 9 and 14 on processes that are killed. Checks whose hook is missing are skipped, so
    read the list of skipped tests once.

    A tier may break no law on purpose. If yours cannot keep one, override that test with one that
    says what happens instead, and tell the users of the tier.
    """

    timeout_s: float = 30.0
    """Seconds after which a wait counts as stuck."""
    limit_s: float = LIMIT_S
    """Seconds after which a whole check counts as stuck, whatever it waits for. It fails then; its
    thread is left behind, and keeps the process from ending until what it waits for happens."""
    num_kills: int = 0
    """Processes that the crash test kills, 0 for none; 8 take a few seconds. For a persistent tier
    that keeps everything in its folder."""
    flush_scope: FlushScope = FlushScope.TIER
    """What the crash test expects of work that was cut short; see `FlushScope`."""

    @abstractmethod
    def open_tier(self, folder: Path) -> Tier:
        """Return a newly opened tier. It may keep files in `folder`, which exists."""

    def reopen(self, tier: Tier, folder: Path) -> Tier:
        """Close `tier` and return one that finds what was flushed; used if it is persistent."""
        tier.close()
        return self.open_tier(folder)

    def close(self, tier: Tier) -> None:
        """Close `tier`, and whatever `open_tier` made for it."""
        tier.close()

    def make_buffer(self, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes` (>= 0); page-aligned host memory unless overridden."""
        return host_buffer(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        """Make the buffer's bytes `data`; override for memory numpy cannot reach."""
        fill_host(buffer, data)

    def contents(self, buffer: Buffer) -> bytes:
        """Return the buffer's bytes; override for memory numpy cannot reach."""
        return host_contents(buffer)

    def peek(self, tier: Tier, key: TensorKey) -> bytes | None:
        """Return what is stored under `key` after a flush, not using `read_into`."""
        return None

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Replace what is stored under `key` by `data`, of its length, not using `write_from`."""
        return False

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        """Make the environment fail the next READ or WRITE of `tier`, once."""
        return False

    def in_child(self) -> SuiteReference:
        """Return how a process that will be killed makes this suite, by default its class.

        The class is imported and called there, without fixtures: where `open_tier` needs more,
        refer to a class of yours that does not.
        """
        return SuiteReference.of(type(self))

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        """Open a tier in a folder of its own; close it after the test."""
        folder = tmp_path / "tier"
        folder.mkdir()
        bench = Bench(self, folder, limit_s=self.limit_s)
        yield bench
        run_limited(bench.close, limit_s=self.limit_s, what="close()")

    test_law_01_written_is_read = _limited(laws_bytes.written_is_read)
    test_law_01_large_keys = _limited(laws_large.large_keys_are_read)
    test_law_01_written_is_stored = _limited(laws_bytes.written_is_stored)
    test_law_01_stored_is_read = _limited(laws_bytes.stored_is_read)
    test_law_02_keys_are_apart = _limited(laws_bytes.keys_are_apart)
    test_law_02_look_alikes_are_apart = _limited(laws_bytes.look_alikes_are_apart)
    test_law_03_reads_are_exact = _limited(laws_bytes.reads_are_exact)
    test_law_03_writes_are_exact = _limited(laws_bytes.writes_are_exact)
    test_law_03_large_ranges = _limited(laws_large.large_ranges_are_exact)
    test_law_03_large_side_by_side = _limited(laws_large.large_writes_side_by_side)
    test_law_03_side_by_side = _limited(laws_bytes.writes_side_by_side_are_exact)
    test_law_04_a_write_is_seen = _limited(laws_bytes.a_write_is_seen)
    test_law_05_reads_are_whole = _limited(laws_bytes.reads_are_whole)
    test_law_05_many_in_flight = _limited(laws_bytes.many_in_flight_are_whole)
    test_law_06_done_means_done = _limited(laws_transfers.done_means_done)
    test_law_06_source_is_free = _limited(laws_transfers.source_is_free_after_wait)
    test_law_06_destination_is_free = _limited(laws_transfers.destination_is_free_after_wait)
    test_law_06_no_reference_is_kept = _limited(laws_transfers.no_reference_is_kept)
    test_law_06_large_buffers = _limited(laws_large.large_buffers_are_free)
    test_law_06_short_waits = _limited(laws_waits.a_short_wait_tells_the_truth)
    test_law_06_transfers_stay_inside = _limited(laws_transfers.transfers_stay_inside)
    test_law_07_usage_is_the_sum = _limited(laws_state.usage_is_the_sum)
    test_law_07_room_is_used_again = _limited(laws_state.discarded_room_is_used_again)
    test_law_07_room_comes_back = _limited(laws_room.a_full_tier_empties)
    test_law_08_full_tier = _limited(laws_room.a_full_tier_stays_whole)
    test_law_08_last_room = _limited(laws_races.the_last_room_is_given_once)
    test_law_08_one_name = _limited(laws_races.one_name_has_one_owner)
    test_law_08_failed_reserve = _limited(laws_state.a_failed_reserve_changes_nothing)
    test_law_09_failed_write = _limited(laws_transfers.a_failed_write_is_noticed)
    test_law_09_one_among_many = _limited(laws_room.one_failure_among_many)
    test_law_10_failures_come_from_wait = _limited(laws_transfers.failures_come_from_wait)
    test_law_10_bad_ranges = _limited(laws_transfers.bad_ranges_raise)
    test_law_10_misalignment = _limited(laws_transfers.misalignment_raises)
    test_law_10_bad_buffers = _limited(laws_transfers.bad_buffers_raise)
    test_law_11_absent_keys = _limited(laws_state.absent_keys_raise)
    test_law_12_close_settles = _limited(laws_state.close_settles_everything)
    test_law_12_closed_tiers_refuse = _limited(laws_state.closed_tiers_refuse)
    test_law_12_close_releases = _limited(laws_state.close_releases_everything)
    test_law_12_every_close_settles = _limited(laws_races.every_close_returns_late)
    test_law_12_close_meets_submitters = _limited(laws_threads.close_meets_submitters)
    test_law_13_lifetimes = _limited(laws_threads.lifetimes_may_overlap)
    test_law_13_one_key = _limited(laws_threads.one_key_serves_all)
    test_law_13_threads = _limited(laws_transfers.threads_do_not_disturb)
    test_law_13_another_thread_may_wait = _limited(laws_waits.another_thread_may_wait)
    test_law_14_reopening = _limited(laws_state.reopening_destroys_nothing)
    test_law_14_without_flush = _limited(laws_state.reopening_without_flush_keeps_what_was_flushed)
    test_law_14_flushes_overlap = _limited(laws_flush.flushes_may_overlap)
    test_law_14_one_moment = _limited(laws_flush.a_flush_takes_one_moment)
    test_law_14_kills = staticmethod(laws_crash.survives_kills)
    test_discard_spares_transfers = _limited(laws_state.discard_leaves_transfers_alone)
    test_discard_ends_late_writes = _limited(laws_state.a_late_write_does_not_reach_the_next_key)
    test_fault_sweep = _limited(laws_faults.every_call_may_fail)
    test_keys_is_a_snapshot = _limited(laws_state.keys_is_a_snapshot)
    test_capabilities_are_sane = _limited(laws_state.capabilities_are_sane)
    test_map_is_the_key = _limited(laws_state.map_is_the_key)
    test_prefetch_is_a_read = _limited(laws_prefetch.prefetched_is_read)
    test_prefetch_refuses = _limited(laws_prefetch.prefetch_refuses_like_read)
    test_prefetch_cancelled = _limited(laws_prefetch.cancelled_prefetch_is_over)
    test_prefetch_cancel_late = _limited(laws_prefetch.cancel_comes_too_late)
    test_prefetch_discard = _limited(laws_prefetch.prefetch_outlives_its_key)
    test_prefetch_close = _limited(laws_prefetch.close_settles_prefetches)
