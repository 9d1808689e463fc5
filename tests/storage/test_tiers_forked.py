"""Every built-in tier in a forked child: refused at once, whatever another thread held."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from object_helpers import buffer_of, flush, key, noise, read, store

from zinf_core.errors import TierClosedError
from zinf_core.registry import open_tier
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import SimulatedDevice
from zinf_core.tier import (
    SupportsMap,
    SupportsPrefetch,
    SupportsReclaim,
    Tier,
    reclaim_tier,
    remove_tier,
)
from zinf_storage.device import DeviceTier

URLS = [
    "host://",
    "nvme://{}",
    "object://file://{}",
    "object://memory:///",
    "striped://[nvme://{}][host://]?shares=1,1",
    "checksummed://[nvme://{}]",
    "compressed://[object://file://{}]",
    "throttled://[nvme://{}]?bytes_per_s=1GB",
    "throttled://[host://]?bytes_per_s=1GB",
]


def guard_of(tier: Any) -> Any:
    """Return the lock that the calls of a tier begin with, of the innermost one."""
    tier = getattr(tier, "_inner", tier)
    return getattr(tier, "_table", tier)._lock


def calls_of(tier: Tier) -> dict[str, Callable[[], object]]:
    buffer = buffer_of(bytes(10))
    calls: dict[str, Callable[[], object]] = {
        "usage": tier.usage,
        "reserve": lambda: tier.reserve(key(1), 10),
        "stat": lambda: tier.stat(key(0)),
        "keys": tier.keys,
        "read": lambda: tier.read_into(key(0), buffer),
        "write": lambda: tier.write_from(key(0), buffer),
        "discard": lambda: tier.discard(key(0)),
        "flush": tier.flush,
    }
    if isinstance(tier, SupportsPrefetch):
        calls["prefetch"] = lambda: tier.prefetch_into(key(0), buffer)
    if isinstance(tier, SupportsMap):
        calls["map"] = lambda: tier.map(key(0))
    if isinstance(getattr(tier, "_inner", tier), SupportsReclaim):
        calls["reclaim"] = lambda: reclaim_tier(tier)
    return calls


def refusals_in_a_child(tier: Tier) -> set[str]:
    """Return the calls that a forked child was refused, while the lock was held at the fork."""
    reader, writer = os.pipe()
    with guard_of(tier):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            for name, call in calls_of(tier).items():
                try:
                    call()
                except TierClosedError as exc:
                    if "forked" in str(exc):
                        os.write(writer, f"{name} ".encode())
            tier.close()
            try:
                remove_tier(tier)
            except TierClosedError:
                os.write(writer, b"end")
            else:
                os.write(writer, b"end")
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as results:
        words = results.read().decode().split()
    os.waitpid(pid, 0)
    assert words.pop() == "end", "the child hung"
    return set(words)


# Python 3.12 and later warn of a fork beside threads, which is what this is about.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("url", URLS)
def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path, url: str) -> None:
    """Catches a data loader that waits for a lock whose holder it does not have, or that closes or
    removes the tier of its parent."""
    tier = open_tier(url.format(tmp_path / "new"), capacity_nbytes=1 << 22)
    store(tier, key(0), noise(10))
    flush(tier)
    assert refusals_in_a_child(tier) == set(calls_of(tier))
    assert read(tier, key(0)) == noise(10)
    remove_tier(tier)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_so_is_that_of_a_device_tier() -> None:
    """Catches the same with memory of a device."""
    with SimulatedDevice() as device:
        pool = BufferPool("device", budget_nbytes=1 << 20, allocator=device)
        tier = DeviceTier("device", pool=pool, device=device)
        store(tier, key(0), noise(10))
        assert refusals_in_a_child(tier) == set(calls_of(tier))
        assert read(tier, key(0)) == noise(10)
        tier.close()
        pool.trim()
