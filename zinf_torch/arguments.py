"""Arguments: checks of what a `Runtime` is given, before anything is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Final

from zinf_core.errors import ConfigError
from zinf_core.tier import Tier

_PARTS: Final = tuple(name for name in vars(Tier) if not name.startswith("_"))


def check_arguments(tiers: Any, *, nvme: Any, nvme_capacity: Any, observers: Any) -> None:
    """Raise ConfigError for one that is of another kind than `Runtime` says."""
    _require_tiers({} if tiers is None else tiers)
    _require_folder(nvme, capacity=nvme_capacity)
    if not isinstance(observers, Sequence) or not all(map(callable, observers)):
        raise ConfigError(f"observers = {observers!r}: write observers=[function]")


def _require_tiers(tiers: Any) -> None:
    """Raise ConfigError unless `tiers` maps names to tiers or URLs."""
    if not isinstance(tiers, Mapping):
        raise ConfigError(f'tiers = {tiers!r} is no mapping; write tiers={{"mine": tier}}')
    for name, tier in tiers.items():
        if not isinstance(name, str):
            raise ConfigError(f"tiers: the name {name!r} is a {type(name).__name__}, not a str")
        missing = [part for part in _PARTS if not hasattr(tier, part)]
        if isinstance(tier, type) or (missing and not isinstance(tier, str)):
            lacks = f": it has no {', '.join(missing)}" if missing else ""
            raise ConfigError(f"tiers[{name!r}] = {tier!r} is neither a tier nor a URL{lacks}")


def _require_folder(nvme: Any, *, capacity: Any) -> None:
    """Raise ConfigError unless `nvme` may be the path of a folder, or there is none, and then no
    `capacity` either."""
    if nvme is None:
        if capacity is not None:
            raise ConfigError(f'nvme_capacity = {capacity!r} is of no folder; give nvme="/path"')
        return
    if not isinstance(nvme, str | PathLike) or not str(nvme) or "://" in str(nvme):
        raise ConfigError(
            f'nvme = {nvme!r} is no folder; write nvme="/path", and other tiers as tiers={{"mine": '
            '"scheme://path"}'
        )
