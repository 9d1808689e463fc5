"""HostTier: what the conformance kit does not ask, mostly about its pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nvme_helpers import buffer_of, key, noise

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import KeyAbsentError, TierClosedError, TierFullError
from zinf_core.registry import open_tier
from zinf_core.runtime.pool import BufferPool
from zinf_core.tier import SupportsMap, Tier
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.host import HostTier


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool("host", budget_nbytes=8 * 4096, allocator=PageAlignedAllocator())


@pytest.fixture
def tier(pool: BufferPool) -> Iterator[HostTier]:
    tier = HostTier("host", pool=pool)
    yield tier
    tier.close()


def test_it_is_a_tier_that_maps(tier: HostTier) -> None:
    """Catches a method renamed away from the protocol, or pinning claimed without a device."""
    assert tier.path_taken == "host"
    assert isinstance(tier, Tier)
    assert isinstance(tier, SupportsMap)


def test_bytes_are_counted_by_the_pool(tier: HostTier, pool: BufferPool) -> None:
    """Catches host memory outside the budget, or a lease lost on discard."""
    tier.reserve(key(0), 4097)
    assert pool.usage().leased_nbytes == 8192
    usage = tier.usage()
    assert (usage.num_keys, usage.nbytes, usage.allocated_nbytes) == (1, 4097, 8192)
    assert usage.capacity_nbytes == 8 * 4096
    tier.discard(key(0))
    assert pool.usage().leased_nbytes == 0
    assert tier.usage().allocated_nbytes == 0


def test_an_empty_key_costs_nothing(tier: HostTier, pool: BufferPool) -> None:
    """Catches a page leased for a parameter of no elements, and a transfer of it that fails."""
    tier.reserve(key(0), 0)
    assert pool.usage().leased_nbytes == 0
    tier.write_from(key(0), buffer_of(b"")).wait()
    tier.read_into(key(0), buffer_of(b"")).wait()
    assert tier.map(key(0)).nbytes == 0
    tier.discard(key(0))


def test_a_full_pool_refuses_and_changes_nothing(tier: HostTier, pool: BufferPool) -> None:
    """Catches a key left half reserved when the pool has no room (law 8)."""
    tier.reserve(key(0), 6 * 4096)
    before = tier.usage(), pool.usage().leased_nbytes
    with pytest.raises(TierFullError, match=r"host.*layers\.1\.weight/param of 12288 bytes"):
        tier.reserve(key(1), 3 * 4096)
    assert (tier.usage(), pool.usage().leased_nbytes) == before
    with pytest.raises(KeyAbsentError):
        tier.stat(key(1))
    tier.reserve(key(1), 2 * 4096)


def test_a_map_outlives_its_key_in_the_count(tier: HostTier, pool: BufferPool) -> None:
    """Catches a page handed to the next key while someone still looks at it through a map."""
    tier.reserve(key(0), 4096)
    data = noise(4096)
    tier.write_from(key(0), buffer_of(data)).wait()
    view = tier.map(key(0)).array
    tier.discard(key(0))
    assert view.tobytes() == data
    assert pool.usage().leased_nbytes == 4096
    del view
    assert pool.usage().leased_nbytes == 0


def test_close_gives_every_lease_back(tier: HostTier, pool: BufferPool) -> None:
    """Catches memory that stays leased after the tier is gone."""
    for i in range(3):
        tier.reserve(key(i), 5000)
    tier.close()
    tier.close()
    assert pool.usage().leased_nbytes == 0
    with pytest.raises(TierClosedError):
        tier.usage()


def test_by_url_without_a_device_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a host tier that needs cupy, or says it is pinned without a device."""
    monkeypatch.setattr("zinf_storage.factories.cuda_problem", lambda: "needs a CUDA device")
    tier = open_tier("host://", capacity_nbytes=8192)
    assert tier.path_taken == "host"
    assert not tier.capabilities.takes(MemorySpace.DEVICE)
    assert tier.usage().capacity_nbytes == 8192
    tier.close()
