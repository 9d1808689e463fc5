"""The fault sweep: what it goes through, and which workloads it rejects."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from zinf_core.completion import Completion
from zinf_core.errors import TierError, UnsupportedError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.runtime.pool import BufferPool, Lease
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    Operation,
    host_buffer,
    seeded_order,
    sweep_faults,
)
from zinf_core.tier import SupportsPrefetch, Tier
from zinf_core.units import MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.host import HostTier
from zinf_storage.nvme import NvmeOptions, NvmeTier

KEYS = tuple(TensorKey.of(name, StateKind.PARAM) for name in "ab")
NBYTES = 5000


def new_pool() -> BufferPool:
    return BufferPool("staging", budget_nbytes=MiB, allocator=PageAlignedAllocator())


def settle(completions: list[Completion]) -> None:
    for completion in completions:
        try:
            completion.wait()
        except TierError:
            continue


class Careful:
    """Stores two keys, flushes, reads them back, discards one; cleans up whatever happens."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def __call__(self, tier: Tier) -> None:
        leases: list[Lease] = []
        completions: list[Completion] = []
        try:
            self.transfer(tier, leases, completions)
        finally:
            settle(completions)
            self.release(leases)

    def transfer(self, tier: Tier, leases: list[Lease], completions: list[Completion]) -> None:
        for value, key in enumerate(KEYS):
            leases.append(self.pool.lease_nowait(NBYTES))
            leases[-1].buffer.array[:] = value
            tier.reserve(key, NBYTES)
            completions.append(tier.write_from(key, leases[-1].buffer))
        for completion in completions:
            completion.wait()
        tier.flush().wait()
        for value, key in enumerate(KEYS):
            leases[value].buffer.array[:] = 99
            completions.append(tier.read_into(key, leases[value].buffer))
            completions[-1].wait()
            assert (leases[value].buffer.array == value).all()
        tier.discard(KEYS[0])

    def release(self, leases: list[Lease]) -> None:
        for lease in leases:
            lease.release()


class Leaky(Careful):
    """Releases nothing unless all went well."""

    def __call__(self, tier: Tier) -> None:
        leases: list[Lease] = []
        completions: list[Completion] = []
        try:
            self.transfer(tier, leases, completions)
        finally:
            settle(completions)
        self.release(leases)


class Misleading(Careful):
    """Hides the failure behind another error."""

    def __call__(self, tier: Tier) -> None:
        try:
            super().__call__(tier)
        except TierError:
            raise TierError("something went wrong") from None


class Unforgiving(Careful):
    """Refuses to work after it has failed once."""

    broken = False

    def __call__(self, tier: Tier) -> None:
        if self.broken:
            raise UnsupportedError("broken by an earlier failure")
        self.broken = True
        super().__call__(tier)
        self.broken = False


class Fickle(Careful):
    """Makes fewer calls each time."""

    num_keys = 2

    def __call__(self, tier: Tier) -> None:
        for key in KEYS[: self.num_keys]:
            tier.reserve(key, 1)
        self.num_keys = 0


def open_host() -> Tier:
    return HostTier("host", pool=new_pool())


@pytest.fixture
def open_nvme(tmp_path: Path) -> Callable[[], Tier]:
    options = NvmeOptions(segment_nbytes=MiB, num_threads=2)
    numbers = count()
    return lambda: NvmeTier.open(tmp_path / str(next(numbers)), options=options)


def test_every_call_fails_once_in_every_way() -> None:
    """Catches calls or phases that the sweep leaves out."""
    pool = new_pool()
    report = sweep_faults(Careful(pool), open_tier=DictTier, pools=[pool])
    names = "RESERVE WRITE RESERVE WRITE FLUSH READ READ DISCARD"
    assert " ".join(operation.name for operation in report.calls) == names
    assert report.num_runs == 3 * 1 + 2 * 3 + 3 * 2
    assert report.num_raised == report.num_runs


def test_prefetches_fail_too() -> None:
    """Catches a sweep that lets every prefetch through."""

    def prefetch_one(tier: Tier) -> None:
        tier.reserve(KEYS[0], 8)
        assert isinstance(tier, SupportsPrefetch)
        tier.prefetch_into(KEYS[0], host_buffer(8)).wait()

    report = sweep_faults(prefetch_one, open_tier=DictTier)
    assert report.calls == (Operation.RESERVE, Operation.PREFETCH)
    assert report.num_runs == report.num_raised == 3


def test_deferred_tier_survives_the_sweep() -> None:
    """Catches transfers left pending in the wrapper after a failure beside them."""
    pool = new_pool()
    sweep_faults(
        Careful(pool),
        open_tier=lambda: DeferredTier(DictTier(), order=seeded_order(0)),
        pools=[pool],
    )


def test_host_tier_survives_the_sweep() -> None:
    """Catches a tier left unusable by a workload that stopped half-way."""
    pool = new_pool()
    sweep_faults(Careful(pool), open_tier=open_host, pools=[pool])


@pytest.mark.slow
def test_nvme_tier_survives_the_sweep(open_nvme: Callable[[], Tier]) -> None:
    """Catches extents, threads or locks lost by a workload that stopped half-way."""
    pool = new_pool()
    sweep_faults(Careful(pool), open_tier=open_nvme, pools=[pool])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Leaky, "leases 4096|leases 8192|leases 16384"),
        (Misleading, "something else"),
        (Unforgiving, "second run failed"),
        (Fickle, "never came"),
    ],
)
def test_bad_workload_is_rejected(kind: type[Careful], message: str) -> None:
    """Catches a sweep that passes whatever the workload does."""
    pool = new_pool()
    with pytest.raises(AssertionError, match=message):
        sweep_faults(kind(pool), open_tier=DictTier, pools=[pool])


def test_tier_that_cannot_be_emptied_is_rejected() -> None:
    """Catches a sweep that does not look at what a failure leaves on the tier."""

    class Sticky(DictTier):
        def discard(self, key: TensorKey) -> None:
            self._stored[key] = b""

    def reserve_one(tier: Tier) -> None:
        tier.reserve(KEYS[0], 1)
        tier.flush().wait()

    with pytest.raises(AssertionError, match="everything was discarded"):
        sweep_faults(reserve_one, open_tier=Sticky)
