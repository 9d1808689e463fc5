"""URLs of chunked tiers, and the rates that decide shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chunked_helpers import GatedTier, contents, flush, key, noise, read, store

from zinf_core.completion import Completion
from zinf_core.errors import ConfigError, TransferError
from zinf_core.keys import TensorKey
from zinf_core.registry import open_tier
from zinf_core.testing import DictTier, FaultyTier, Operation
from zinf_core.tier import Tier
from zinf_core.units import KiB, MiB
from zinf_storage.chunked import ChunkedTier
from zinf_storage.chunked.rates import PROBE_NBYTES, SMALLEST_PROBED_NBYTES, measured_rate


def opened_url(url: str, capacity_nbytes: int | None = 32 * MiB) -> ChunkedTier:
    tier = open_tier(url, capacity_nbytes=capacity_nbytes)
    assert isinstance(tier, ChunkedTier)
    return tier


def test_every_option_arrives(tmp_path: Path) -> None:
    """Catches options that are accepted and dropped."""
    url = f"striped://[nvme://{tmp_path}/a][nvme://{tmp_path}/b]?shares=3,1&chunk_nbytes=64KiB"
    tier = opened_url(url + "&num_threads=2")
    try:
        assert tier._parts.inners.shares == (3, 1)
        assert tier._parts.table.chunk_nbytes == 64 * KiB
        assert len(tier._parts.machinery.scratch.benches) == 2
        inner = tier._parts.inners.tiers
        assert [one.usage().capacity_nbytes for one in inner] == [24 * MiB, 8 * MiB]
        assert tier.capabilities.persistent
        store(tier, key(0), noise(MiB))
        flush(tier)
    finally:
        tier.close()
    tier = opened_url(url)
    assert contents(tier) == {key(0): noise(MiB)}
    tier.close()


@pytest.mark.parametrize("codec", ["zstd", "lz4", "blosc2"])
def test_compressed_urls(codec: str, tmp_path: Path) -> None:
    """Catches a codec, level or width that does not arrive."""
    tier = opened_url(
        f"compressed://[striped://[nvme://{tmp_path}/a][nvme://{tmp_path}/b]?shares=1,1]"
        f"?codec={codec}&level=2&shuffle=2&chunk_nbytes=128KiB"
    )
    try:
        assert tier.name == "compressed(striped(nvme,nvme))"
        store(tier, key(0), b"ab" * MiB)
        assert read(tier, key(0)) == b"ab" * MiB
        assert tier.ratio > 20
        (chunk, *_) = tier._parts.table.entry(key(0)).version.chunks
        assert (chunk.content.codec, chunk.content.width) == (codec, 2)
    finally:
        tier.close()


def test_checksummed_and_mixed_urls(tmp_path: Path) -> None:
    """Catches nested brackets, and tiers without a folder among those with one."""
    tier = opened_url(f"checksummed://[striped://[host://][nvme://{tmp_path}/x]?shares=1,1]")
    try:
        assert tier.name == "checksummed(striped(host,nvme))"
        store(tier, key(0), noise(3 * MiB))
        assert read(tier, key(0)) == noise(3 * MiB)
    finally:
        tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "striped://",
        "striped:///path",
        "striped://[host://]?shares=1,2",
        "striped://[host://][host://]?shares=1",
        "striped://[host://][host://]?shares=1,0",
        "striped://[host://][host://]?shares=1,x",
        "striped://[host://]?codec=zstd",
        "striped://[host://]?chunk_nbytes=5",
        "striped://[host://]?chunk_nbytes=much",
        "striped://[host://]?num_threads=0",
        "striped://[host://]?num_threads=-1",
        "striped://[host://]?num_threads=two",
        "striped://[host://][nosuch://x]?shares=1,1",
        "compressed://[host://][host://]",
        "compressed://[host://]?codec=zip",
        "compressed://[host://]?codec=zstd&level=99",
        "compressed://[host://]?level=high",
        "compressed://[host://]?shuffle=3",
        "compressed://[host://]?shares=1",
        "checksummed://",
        "checksummed://[host://]?codec=zstd",
        "checksummed://[compressed://[host://]?codec=zip]",
    ],
)
def test_urls_that_cannot_work(url: str) -> None:
    """Catches options that are ignored, and inner tiers left open by a refused URL."""
    with pytest.raises(ConfigError):
        open_tier(url, capacity_nbytes=MiB)


class Ticking:
    """A clock that a tier moves on: the given bytes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s = 0.0
        self.bytes_per_s = bytes_per_s

    def __call__(self) -> float:
        return self.now_s


class SlowTier(DictTier):
    def __init__(self, clock: Ticking) -> None:
        super().__init__(capacity_nbytes=SMALLEST_PROBED_NBYTES)
        self.clock = clock
        self.num_calls = 0

    def read_into(self, which: TensorKey, dst: object, *, offset: int = 0) -> Completion:
        self._take(dst.nbytes)
        return super().read_into(which, dst, offset=offset)

    def write_from(self, which: TensorKey, src: object, *, offset: int = 0) -> Completion:
        self._take(src.nbytes)
        return super().write_from(which, src, offset=offset)

    def _take(self, nbytes: int) -> None:
        self.num_calls += 1
        self.clock.now_s += nbytes / self.clock.bytes_per_s


def test_rates_are_measured_and_nothing_is_left() -> None:
    """Catches rates of the wrong unit, probes left behind, and slow tiers tried for ever."""
    for bytes_per_s, num_calls in ((1e9, 8), (1e6, 2)):
        clock = Ticking(bytes_per_s)
        tier = SlowTier(clock)
        assert measured_rate(tier, clock=clock) == pytest.approx(bytes_per_s)
        assert tier.num_calls == num_calls
        assert list(tier.keys()) == []


def test_small_and_full_tiers_are_not_probed() -> None:
    """Catches a probe that takes room from those who need it."""
    assert measured_rate(DictTier(capacity_nbytes=SMALLEST_PROBED_NBYTES - 1)) is None
    full = DictTier(capacity_nbytes=SMALLEST_PROBED_NBYTES)
    full.reserve(key(0), SMALLEST_PROBED_NBYTES - PROBE_NBYTES + 1)
    assert measured_rate(full) is None
    assert list(full.keys()) == [key(0)]


def test_a_failed_probe_leaves_nothing() -> None:
    """Catches a probe's key left on a drive that failed."""
    inner = FaultyTier(DictTier())
    inner.fail_next(Operation.READ)
    with pytest.raises(TransferError):
        measured_rate(inner)
    assert list(inner.keys()) == []


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tier]]:
    """Have the factories open tiers of known rates, and list them."""
    tiers: list[Tier] = []

    def open_it(url: str, *, capacity_nbytes: int | None) -> Tier:
        tiers.append(GatedTier(url, capacity_nbytes=capacity_nbytes))
        return tiers[-1]

    rates = {"fast": 3e9, "slow": 1e9, "small": None}
    module = "zinf_storage.chunked.factories"
    monkeypatch.setattr(f"{module}.open_tier", open_it)
    monkeypatch.setattr(f"{module}.measured_rate", lambda tier: rates[tier.name])
    return tiers


def test_bandwidth_decides_the_shares(gated: list[Tier]) -> None:
    """Catches capacities or chunks split evenly over unequal drives."""
    tier = opened_url("striped://[fast][slow]")
    with_capacity = [one.usage().capacity_nbytes for one in gated[2:]]
    assert tier._parts.inners.shares == (100, 33)
    assert sum(with_capacity) <= 32 * MiB
    assert with_capacity[0] / with_capacity[1] == pytest.approx(100 / 33, rel=0.01)
    assert tier.path_taken == "75 % fast: direct call; 25 % slow: direct call"
    tier.close()


def test_unknown_rates_mean_equal_shares(gated: list[Tier]) -> None:
    """Catches a tier that gets nothing, or all, because it was too small to be measured."""
    tier = opened_url("striped://[fast][small]", None)
    assert tier._parts.inners.shares == (1, 1)
    assert [one.usage().capacity_nbytes for one in gated[2:]] == [None, None]
    tier.close()
