"""HomeTiers: the tiers of one run by home name, and which of them end with it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import ConfigError, KeyAbsentError
from zinf_core.registry import open_tier
from zinf_core.runtime.pager import Pager
from zinf_core.tier import Tier, reclaim_tier, remove_tier
from zinf_core.units import format_nbytes
from zinf_torch.scratch import ScratchFolder


class HomeTiers:
    """Opens the tiers that are named by URL, and closes all.

    A tier given as an object stays the caller's: `close` discards the keys of this run from it. A
    tier opened here must be empty, and is empty again when it is closed.
    """

    def __init__(
        self,
        memory: Mapping[str, Tier],
        *,
        scratch: ScratchFolder | None,
        given: Mapping[str, Tier | str],
        urls: Sequence[str],
    ) -> None:
        """Serve the tiers of `memory`, `scratch` as ``"nvme"``, those `given` by name (objects or
        URLs), and `urls`, each under itself.

        Raises ConfigError for a name taken twice, a tier without host memory, or one opened here
        that holds something; and what opening raises. Nothing stays open then.
        """
        self._memory = dict(memory)
        self._scratch = scratch
        self._opened: dict[str, Tier] = {}
        self._borrowed: dict[str, Tier] = {}
        own = {**memory, **({} if scratch is None else {"nvme": scratch.tier})}
        if scratch is not None:
            _warn_if_cached("nvme", scratch.tier)
        try:
            for name, tier in given.items():
                _require_free_name(name, own)
                self._take(name, tier)
            for url in urls:
                self._take(url, url)
        except BaseException:
            self._close_unused()
            raise
        self.tiers: dict[str, Tier] = {**own, **self._borrowed, **self._opened}

    def paths(self) -> dict[str, str]:
        """Return the path taken by each tier that tells one."""
        paths = {name: getattr(tier, "path_taken", None) for name, tier in self.tiers.items()}
        return {name: path for name, path in paths.items() if path is not None}

    def close(self, pager: Pager) -> None:
        """Take this run's keys from the tiers, close those opened here and free all memory.
        Blocks. Goes on after an error and raises the first."""
        with ExitStack() as stack:
            for tier in self._memory.values():
                stack.callback(tier.close)
            for tier in self._opened.values():
                stack.callback(remove_tier, tier)
            for name, tier in self._borrowed.items():
                stack.callback(_discard_pages, tier, pager, name)
            if self._scratch is not None:
                stack.callback(self._scratch.remove)

    def _take(self, name: str, tier: Tier | str) -> None:
        if isinstance(tier, str):
            url, tier = tier, open_tier(tier)
            self._opened[name] = tier
            _require_empty(name, tier)
            if "direct=never" not in url:
                _warn_if_cached(name, tier)
        else:
            self._borrowed[name] = tier
        if not tier.capabilities.takes(MemorySpace.HOST_PINNED):
            raise ConfigError(f"tier {name} ({tier.name}) takes no host memory")

    def _close_unused(self) -> None:
        with ExitStack() as stack:
            for tier in (*self._memory.values(), *self._opened.values()):
                stack.callback(tier.close)
            if self._scratch is not None:
                stack.callback(self._scratch.remove)


def _require_free_name(name: str, own: Mapping[str, Tier]) -> None:
    if name in own or name == "nvme" or "://" in name:
        raise ConfigError(f"tiers: {name!r} is taken or not a name; choose another")


def _warn_if_cached(name: str, tier: Tier) -> None:
    if "posix-buffered" in getattr(tier, "path_taken", ""):
        warnings.warn(
            f"{name}: the file system refuses direct I/O, so transfers pass through the page "
            "cache; a folder on a local ext4 or XFS drive is faster",
            stacklevel=6,
        )


def _require_empty(name: str, tier: Tier) -> None:
    freed = reclaim_tier(tier)
    if freed:
        warnings.warn(
            f"{name}: reclaimed {format_nbytes(freed)} left by a run that was killed", stacklevel=6
        )
    usage = tier.usage()
    if usage.num_keys:
        raise ConfigError(
            f"{name} holds {usage.num_keys} tensors ({format_nbytes(usage.nbytes)}) already, "
            f"{next(tier.keys())} among them; empty it, or give this run a place of its own"
        )


def _discard_pages(tier: Tier, pager: Pager, home: str) -> None:
    for key in pager.keys_at(home):
        with suppress(KeyAbsentError):  # gone with its parameter meanwhile
            tier.discard(key)
