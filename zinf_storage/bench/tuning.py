"""Tuning: the options of the nvme tier that are best on a folder, and how far the defaults get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import TierUrl, open_tier
from zinf_core.tier import Tier
from zinf_core.units import KiB, MiB, align_up
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.bench.disk import DiskWatch, Verdict
from zinf_storage.bench.figures import Spread, combined_rate, smallest_near_best
from zinf_storage.bench.grid import Effort, rotated, short_nbytes
from zinf_storage.bench.report import Tuning, TuningPoint
from zinf_storage.bench.sample import Sampler
from zinf_storage.bench.scratch import format_url, scratch_of
from zinf_storage.bench.session import Steering
from zinf_storage.bench.workload import Request, allocate_noise
from zinf_storage.nvme import NvmeOptions

SCHEME: Final = "nvme"
_KEY_NBYTES: Final = 32 * MiB
_NUM_KEYS: Final = 4
_NUM_IN_FLIGHT: Final = 2
"""Transfers of whole keys in flight, as when one page is brought in while the one before lands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    io_sizes: tuple[int, ...]
    threads: tuple[int, ...]
    num_rounds: int
    sample_s: float


_AXES: Final = {
    Effort.QUICK: _Axes(
        io_sizes=(MiB, 2 * MiB, 4 * MiB), threads=(2, 4), num_rounds=3, sample_s=0.15
    ),
    Effort.NORMAL: _Axes(
        io_sizes=(MiB, 2 * MiB, 4 * MiB, 8 * MiB),
        threads=(1, 2, 4, 8),
        num_rounds=3,
        sample_s=0.2,
    ),
    Effort.FULL: _Axes(
        io_sizes=tuple(256 * KiB << shift for shift in range(7)),
        threads=(1, 2, 4, 8, 16),
        num_rounds=5,
        sample_s=0.5,
    ),
}


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Setting:
    """Options that are tuned."""

    io_nbytes: int
    num_threads: int

    @property
    def cost(self) -> tuple[int, ...]:
        """What a small setting has less of: bytes in flight first, then threads."""
        return (self.io_nbytes * self.num_threads, self.num_threads)

    def __str__(self) -> str:
        """Return the form used in messages."""
        return f"requests of {short_nbytes(self.io_nbytes)}, {self.num_threads} threads"


@dataclass(slots=True, kw_only=True)
class _Rates:
    """Of one setting, one number per round."""

    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)

    def combined(self) -> list[float]:
        return [combined_rate(*pair) for pair in zip(self.reads, self.writes, strict=True)]


def default_setting() -> Setting:
    """Return what the tier does when it is told nothing."""
    default = NvmeOptions()
    return Setting(io_nbytes=default.io_nbytes, num_threads=default.num_threads)


def settings_of(effort: Effort, *, key_nbytes: int) -> tuple[Setting, ...]:
    """Return the settings to try, the default among them; requests larger than the keys of the
    traffic would all be the same. Pure."""
    axes = _AXES[effort]
    tried = {
        Setting(io_nbytes=io_nbytes, num_threads=num_threads)
        for io_nbytes in axes.io_sizes
        for num_threads in axes.threads
        if io_nbytes <= key_nbytes
    }
    return tuple(sorted({*tried, default_setting()}))


def choose(rates: dict[Setting, float]) -> Setting:
    """Return the smallest setting near the best. Pure. Raises ConfigError for none."""
    return smallest_near_best(rates, {setting: setting.cost for setting in rates})


def num_measurements(effort: Effort) -> int:
    """Return how often `tune` measures at most."""
    return len(settings_of(effort, key_nbytes=_KEY_NBYTES)) * _AXES[effort].num_rounds


def with_setting(url: str, setting: Setting) -> str:
    """Return `url` with the options of `setting`, e.g. ``nvme:///a?io_nbytes=2MiB&num_threads=4``."""
    parsed = TierUrl.parse(url)
    options = {
        **parsed.options,
        "io_nbytes": short_nbytes(setting.io_nbytes).replace(" ", ""),
        "num_threads": str(setting.num_threads),
    }
    return format_url(replace(parsed, options=options))


class Tuner:
    """Tries settings on one folder. Not thread-safe. Holds 64 MiB of host memory at most."""

    def __init__(
        self, url: str, *, data_nbytes: int, filesystem: str, effort: Effort, steering: Steering
    ) -> None:
        """Tune the nvme tier at `url`; each setting gets keys of `data_nbytes` / 8, 32 MiB at
        most."""
        self._url = url
        self._key_nbytes = min(_KEY_NBYTES, align_up(max(data_nbytes // 8, 1)))
        self._filesystem = filesystem
        self._axes = _AXES[effort]
        self._settings = settings_of(effort, key_nbytes=self._key_nbytes)
        self._steering = steering
        arena = allocate_noise(self._key_nbytes * _NUM_IN_FLIGHT, PageAlignedAllocator())
        self._slots = [
            arena.part(index * self._key_nbytes, self._key_nbytes)
            for index in range(_NUM_IN_FLIGHT)
        ]

    def tune(self, *, seconds: float | None = None) -> Tuning | None:
        """Measure every setting in rounds and choose; None if it was interrupted, or the page
        cache took part. `seconds` is for all settings together. Blocks."""
        axes = self._axes
        sample_s = axes.sample_s
        if seconds is not None:
            sample_s = min(sample_s, seconds / (2 * len(self._settings) * axes.num_rounds))
        found = {setting: _Rates() for setting in self._settings}
        for index in range(axes.num_rounds):
            for setting in rotated(self._settings, index, axes.num_rounds):
                if self._steering.should_stop():
                    return None
                self._steering.advance(f"tuning: {setting}")
                if not self._try(setting, found[setting], sample_s):
                    return None
        return self._concluded(found)

    def _try(self, setting: Setting, rates: _Rates, seconds: float) -> bool:
        """Measure one setting once; return whether the numbers are those of the drive.

        Nothing is flushed, so the tier deletes its files at its close.
        """
        with scratch_of(with_setting(self._url, setting)) as scratch:
            tier = open_tier(scratch.url)
            try:
                keys = [
                    TensorKey.of(f"zinf-bench.tune.{index}", StateKind.PARAM)
                    for index in range(_NUM_KEYS)
                ]
                for key in keys:
                    tier.reserve(key, self._key_nbytes)
                    tier.write_from(key, self._slots[0]).wait()
                watch = DiskWatch(scratch.local_paths(), filesystem=self._filesystem)
                writes = self._measure(tier, watch, keys, is_write=True, seconds=seconds)
                reads = self._measure(tier, watch, keys, is_write=False, seconds=seconds)
            finally:
                tier.close()
        if writes is None or reads is None:
            return False
        rates.writes.append(writes)
        rates.reads.append(reads)
        return True

    def _measure(
        self,
        tier: Tier,
        watch: DiskWatch,
        keys: Sequence[TensorKey],
        *,
        is_write: bool,
        seconds: float,
    ) -> float | None:
        """Return bytes per second, None if the page cache took part or it was interrupted."""
        sampler = Sampler(tier, should_stop=self._steering.should_stop)
        requests = [Request(key=key, offset=0, is_write=is_write) for key in keys]
        before = watch.look()
        sample = sampler.measure(requests, self._slots, seconds=seconds)
        judgement = watch.judge(before, watch.look(), sample)
        if judgement.verdict is Verdict.CACHED or not sample.latencies_s:
            return None
        return sample.bytes_per_s

    def _concluded(self, found: dict[Setting, _Rates]) -> Tuning:
        combined = {setting: rates.combined() for setting, rates in found.items()}
        chosen = choose({setting: Spread.of(rates).median for setting, rates in combined.items()})
        default = default_setting()
        shares = [
            ours / best for ours, best in zip(combined[default], combined[chosen], strict=True)
        ]
        points = {setting: _point(setting, rates) for setting, rates in found.items()}
        return Tuning(
            points=tuple(points.values()),
            default=points[default],
            chosen=points[chosen],
            default_share=Spread.of(shares),
            url=with_setting(self._url, chosen),
        )


def _point(setting: Setting, rates: _Rates) -> TuningPoint:
    return TuningPoint(
        io_nbytes=setting.io_nbytes,
        num_threads=setting.num_threads,
        read_bytes_per_s=Spread.of(rates.reads),
        write_bytes_per_s=Spread.of(rates.writes),
        combined_bytes_per_s=Spread.of(rates.combined()),
    )
