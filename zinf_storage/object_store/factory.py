"""Factory of the object store tier, for `zinf_core.registry.open_tier`."""

from __future__ import annotations

from typing import Final

from zinf_core.registry import TierUrl
from zinf_storage.object_store.bucket import open_bucket
from zinf_storage.object_store.options import Connection, ObjectOptions
from zinf_storage.object_store.tier import ObjectTier

_OPTIONS: Final = frozenset(
    {
        "allow_http", "endpoint", "evict", "num_threads", "part_nbytes", "region", "retries",
        "timeout_s", "verify_reads",
    }
)  # fmt: skip


def open_object(url: TierUrl, *, capacity_nbytes: int | None) -> ObjectTier:
    """Open ``object://s3://bucket/prefix?region=eu-central-1`` or the like; see `open_bucket` for
    the stores, `ObjectOptions` and `Connection` for the options.

    Blocks on the store. Raises ConfigError for a missing store, an option that is unknown or
    mistyped, or if obstore is not installed; TierError if the store cannot be used.
    """
    url.refuse_unknown(_OPTIONS)
    reach, default = Connection(), ObjectOptions()
    connection = Connection(
        endpoint=url.options.get("endpoint"),
        region=url.options.get("region"),
        allow_http=url.switch("allow_http", default=reach.allow_http),
        retries=url.number("retries", reach.retries),
        timeout_s=url.seconds("timeout_s", reach.timeout_s),
    )
    options = ObjectOptions(
        part_nbytes=url.nbytes("part_nbytes", default.part_nbytes),
        num_threads=url.number("num_threads", default.num_threads),
        capacity_nbytes=capacity_nbytes,
        verify_reads=url.switch("verify_reads", default=default.verify_reads),
        evict_lease=url.options.get("evict"),
    )
    return ObjectTier.open(open_bucket(url.path, connection), options=options)
