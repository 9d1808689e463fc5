"""ThrottledTier: another tier, as slow as one wishes; for plans and tests of drives one lacks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from zinf_core.buffers import Buffer
from zinf_core.capabilities import TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.errors import ConfigError, TransferTimeoutError
from zinf_core.keys import Extent, TensorKey
from zinf_core.registry import TierUrl, open_tier
from zinf_core.tier import Prefetch, SupportsPrefetch, Tier, reclaim_tier, remove_tier

_OPTIONS: Final = frozenset({"bytes_per_s", "latency_s", "read_bytes_per_s", "write_bytes_per_s"})


class Clock(Protocol):
    """What time it is, and waiting for a time."""

    def now_s(self) -> float:
        """Return the seconds since some moment; never less than before."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return when it is `time_s`. Blocks, and can be interrupted."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return the seconds since the machine started."""
        return time.monotonic()

    def wait_until(self, time_s: float) -> None:
        """Return when it is `time_s`."""
        while (left_s := time_s - self.now_s()) > 0:
            threading.Event().wait(min(left_s, threading.TIMEOUT_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How fast a ThrottledTier is."""

    read_bytes_per_s: float = math.inf
    write_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    """Seconds that each transfer takes besides; those of several transfers overlap."""
    is_shared: bool = False
    """Reads and writes take turns on one lane instead of each having its own."""

    def __post_init__(self) -> None:
        """Refuse rates at which nothing would ever end."""
        for field in ("read_bytes_per_s", "write_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"throttled: {field} = {getattr(self, field)} must be above 0")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"throttled: latency_s = {self.latency_s} must be from 0 on")


class Lane:
    """The time until which bytes are on their way. Thread-safe: the lock guards it."""

    def __init__(self) -> None:
        """Start free."""
        self._lock = threading.Lock()
        self._free_s = -math.inf

    @property
    def free_s(self) -> float:
        """When everything booked so far is over."""
        with self._lock:
            return self._free_s

    def book(self, duration_s: float, *, now_s: float) -> float:
        """Take the lane for `duration_s` from when it is free on; return when that ends."""
        with self._lock:
            self._free_s = max(self._free_s, now_s) + duration_s
            return self._free_s

    def give_back(self, end_s: float, duration_s: float) -> None:
        """Undo a booking that ends at `end_s`, if it is the last one."""
        with self._lock:
            if math.isclose(self._free_s, end_s, rel_tol=0.0, abs_tol=1e-9):
                self._free_s = end_s - duration_s


class ThrottledTier:
    """Passes everything on to `inner` at once, and completes transfers when they would be done.

    A transfer takes a lane for its bytes once those before it are through, and the latency on top.
    Arithmetic on `clock` only: no threads, no scratch memory. `map` is not passed on, for it would
    go round the limits. Owns `inner` and closes it. Make one with `throttled`.
    """

    def __init__(self, inner: Tier, limits: Limits, *, clock: Clock | None = None) -> None:
        """Wrap `inner`, within `limits`."""
        self._inner = inner
        self._limits = limits
        self._clock = clock or SystemClock()
        self._reads = Lane()
        self._writes = self._reads if limits.is_shared else Lane()
        self._capabilities = replace(inner.capabilities, mappable=False)

    @property
    def name(self) -> str:
        """Name used in messages, with that of the inner tier."""
        return f"throttled({self._inner.name})"

    @property
    def capabilities(self) -> TierCapabilities:
        """The inner tier's, without `map`."""
        return self._capabilities

    @property
    def path_taken(self) -> str:
        """The inner tier's, and the limits."""
        limits = self._limits
        inner = getattr(self._inner, "path_taken", self._inner.name)
        return (
            f"{inner}, throttled to {limits.read_bytes_per_s:.4g} B/s read, "
            f"{limits.write_bytes_per_s:.4g} B/s written, {limits.latency_s:.4g} s latency"
        )

    def usage(self) -> TierUsage:
        """Return what the inner tier stores."""
        return self._inner.usage()

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Reserve on the inner tier."""
        return self._inner.reserve(key, nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return where `key` lies on the inner tier."""
        return self._inner.stat(key)

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the inner tier's keys."""
        return self._inner.keys()

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Submit a read to the inner tier; the bytes may be there before it is done."""
        inner = self._inner.read_into(key, dst, offset=offset)
        return self._booked(inner, self._reads, dst.nbytes / self._limits.read_bytes_per_s)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Submit a write to the inner tier."""
        inner = self._inner.write_from(key, src, offset=offset)
        return self._booked(inner, self._writes, src.nbytes / self._limits.write_bytes_per_s)

    def discard(self, key: TensorKey) -> None:
        """Discard from the inner tier."""
        self._inner.discard(key)

    def flush(self) -> Completion:
        """Flush the inner tier; done after what was written before."""
        return self._booked(self._inner.flush(), self._writes, 0.0)

    def reclaim(self) -> int:
        """Delete what killed processes left on the inner tier; return its bytes. Blocks."""
        return reclaim_tier(self._inner)

    def close(self) -> None:
        """Wait until everything in flight would be done, then close the inner tier."""
        self._settle()
        self._inner.close()

    def remove(self) -> None:
        """Wait until everything in flight would be done, then remove the inner tier."""
        self._settle()
        remove_tier(self._inner)

    def _settle(self) -> None:
        self._clock.wait_until(
            max(self._reads.free_s, self._writes.free_s) + self._limits.latency_s
        )

    def _booked(self, inner: Completion, lane: Lane, duration_s: float) -> DueCompletion:
        end_s = lane.book(duration_s, now_s=self._clock.now_s())
        return DueCompletion(
            inner, due_s=end_s + self._limits.latency_s, clock=self._clock, what=self.name
        )


class PrefetchingThrottledTier(ThrottledTier):
    """A ThrottledTier over a tier that prefetches. Prefetches take the lane like any read."""

    def __init__(
        self, inner: Tier, limits: Limits, *, prefetch: SupportsPrefetch, clock: Clock | None = None
    ) -> None:
        """Wrap `inner`, which is `prefetch` as well."""
        super().__init__(inner, limits, clock=clock)
        self._prefetch = prefetch

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        """Submit a prefetch to the inner tier."""
        inner = self._prefetch.prefetch_into(key, dst, offset=offset)
        duration_s = dst.nbytes / self._limits.read_bytes_per_s
        due = self._booked(inner, self._reads, duration_s)
        end_s = due.due_s - self._limits.latency_s
        return DuePrefetch(inner, due, lambda: self._reads.give_back(end_s, duration_s))


def throttled(inner: Tier, limits: Limits, *, clock: Clock | None = None) -> ThrottledTier:
    """Return `inner` within `limits`; it prefetches if `inner` does."""
    if isinstance(inner, SupportsPrefetch):
        return PrefetchingThrottledTier(inner, limits, prefetch=inner, clock=clock)
    return ThrottledTier(inner, limits, clock=clock)


class DueCompletion:
    """Done when the inner transfer is, but not before it is due."""

    __slots__ = ("_clock", "_inner", "_what", "due_s")

    def __init__(self, inner: Completion, *, due_s: float, clock: Clock, what: str) -> None:
        """Hold `inner` back until `due_s`."""
        self._inner = inner
        self.due_s = due_s
        self._clock = clock
        self._what = what

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._clock.now_s() >= self.due_s and self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when done, or raise what the inner transfer failed with, then.

        Raises TransferTimeoutError if `timeout_s` seconds passed first.
        """
        start_s = self._clock.now_s()
        if timeout_s is not None and self.due_s > start_s + timeout_s:
            self._clock.wait_until(start_s + timeout_s)
            raise TransferTimeoutError(
                f"{self._what}: transfer is due {self.due_s - start_s - timeout_s:.3g} s after "
                f"{timeout_s} s"
            )
        self._clock.wait_until(self.due_s)
        left_s = None
        if timeout_s is not None:
            left_s = max(start_s + timeout_s - self._clock.now_s(), 0.0)
        self._inner.wait(left_s)


class DuePrefetch:
    """A prefetch that is done when the inner one is, but not before it is due."""

    __slots__ = ("_due", "_give_back", "_inner", "_is_cancelled")

    def __init__(self, inner: Prefetch, due: DueCompletion, give_back: Callable[[], None]) -> None:
        """Hold `inner` back like `due`; `give_back` undoes its booking."""
        self._inner = inner
        self._due = due
        self._give_back = give_back
        self._is_cancelled = False

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._inner.done() if self._is_cancelled else self._due.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait as `DueCompletion.wait`; a cancelled one raises TransferCancelledError at once."""
        if self._is_cancelled:
            self._inner.wait(timeout_s)
        else:
            self._due.wait(timeout_s)

    def cancel(self) -> bool:
        """Cancel the inner prefetch; its time on the lane is given back if it is the last."""
        if self._inner.cancel() and not self._is_cancelled:
            self._is_cancelled = True
            self._give_back()
        return self._is_cancelled

    def promote(self) -> None:
        """Promote the inner prefetch; its place on the lane stays."""
        self._inner.promote()


def open_throttled(url: TierUrl, *, capacity_nbytes: int | None) -> ThrottledTier:
    """Open ``throttled://[url]?read_bytes_per_s=2GB&write_bytes_per_s=1GB&latency_s=0.0001``.

    ``bytes_per_s`` instead of the two makes reads and writes share one lane. Raises ConfigError
    for an option that is unknown, mistyped or contradicts another, and unless one tier is named.
    """
    url.refuse_unknown(_OPTIONS)
    if len(url.inner) != 1 or url.path:
        raise ConfigError("throttled names one tier: throttled://[nvme:///folder]?bytes_per_s=1GB")
    limits = _limits_of(url)
    return throttled(open_tier(url.inner[0], capacity_nbytes=capacity_nbytes), limits)


def _limits_of(url: TierUrl) -> Limits:
    rates = {
        name: float(url.nbytes(name, 0))
        for name in sorted(_OPTIONS - {"latency_s"})
        if name in url.options
    }
    if not url.options:
        raise ConfigError(f"throttled limits nothing; set one of {', '.join(sorted(_OPTIONS))}")
    both = rates.pop("bytes_per_s", None)
    if both is not None and rates:
        raise ConfigError("throttled: bytes_per_s and another rate contradict each other")
    latency_s = url.seconds("latency_s", 0.0)
    if both is not None:
        return Limits(
            read_bytes_per_s=both, write_bytes_per_s=both, latency_s=latency_s, is_shared=True
        )
    return Limits(
        read_bytes_per_s=rates.get("read_bytes_per_s", math.inf),
        write_bytes_per_s=rates.get("write_bytes_per_s", math.inf),
        latency_s=latency_s,
    )
