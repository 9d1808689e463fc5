"""Factory of the object store tier, for `zinf_core.registry.open_tier`."""

from __future__ import annotations

from typing import Final

from zinf_core.errors import ConfigError
from zinf_core.registry import TierUrl
from zinf_core.units import parse_nbytes
from zinf_storage.object_store.bucket import open_bucket
from zinf_storage.object_store.options import Connection, ObjectOptions
from zinf_storage.object_store.tier import ObjectTier

_OPTIONS: Final = frozenset(
    {
        "allow_http", "endpoint", "evict", "num_threads", "part_nbytes", "region", "retries",
        "timeout_s", "verify_reads",
    }
)  # fmt: skip
_SWITCH: Final = {"0": False, "1": True, "false": False, "true": True}


def open_object(url: TierUrl, *, capacity_nbytes: int | None) -> ObjectTier:
    """Open ``object://s3://bucket/prefix?region=eu-central-1`` or the like; see `open_bucket` for
    the stores, `ObjectOptions` and `Connection` for the options.

    Blocks on the store. Raises ConfigError for a missing store, an option that is unknown or
    mistyped, or if obstore is not installed; TierError if the store cannot be used.
    """
    url.refuse_unknown(_OPTIONS)
    options, default = url.options, ObjectOptions()
    connection = Connection(
        endpoint=options.get("endpoint"),
        region=options.get("region"),
        allow_http=_switch(url, "allow_http", default=False),
        retries=_count(url, "retries", default=Connection().retries),
        timeout_s=_seconds(url, default=Connection().timeout_s),
    )
    return ObjectTier.open(
        open_bucket(url.path, connection),
        options=ObjectOptions(
            part_nbytes=parse_nbytes(
                options.get("part_nbytes", default.part_nbytes), what="part_nbytes"
            ),
            num_threads=_count(url, "num_threads", default=default.num_threads),
            capacity_nbytes=capacity_nbytes,
            verify_reads=_switch(url, "verify_reads", default=default.verify_reads),
            evict_lease=options.get("evict"),
        ),
    )


def _count(url: TierUrl, option: str, *, default: int) -> int:
    text = url.options.get(option, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{option} = {text!r} is not a whole number")
    return int(text)


def _seconds(url: TierUrl, *, default: float) -> float:
    text = url.options.get("timeout_s", str(default))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"timeout_s = {text!r} is not a number of seconds") from None


def _switch(url: TierUrl, option: str, *, default: bool) -> bool:
    text = url.options.get(option, str(int(default)))
    if text not in _SWITCH:
        raise ConfigError(f"{option} = {text!r} is not one of {', '.join(_SWITCH)}")
    return _SWITCH[text]
