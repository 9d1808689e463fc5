"""Settings of the object store tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zinf_core.errors import ConfigError
from zinf_core.units import PAGE_NBYTES, GiB, MiB
from zinf_storage.transfers.workers import require_threads

_MAX_RETRIES: Final = 1000
_MIN_TIMEOUT_S: Final = 0.001
_MAX_TIMEOUT_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """How the tier uses its prefix."""

    part_nbytes: int = 8 * MiB
    """Bytes per object, per request and per checksum; 4096 to 1 GiB."""
    num_threads: int = 8
    """Requests in flight at once."""
    capacity_nbytes: int | None = None
    """Budget of the objects that hold keys; None for no limit of ours."""
    verify_reads: bool = True
    """Check every part that is read whole against its checksum."""
    evict_lease: str | None = None
    """Id of a writer's lease to take the prefix over from, as TierLockedError names it; only
    right when that writer is gone."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot work."""
        if not PAGE_NBYTES <= self.part_nbytes <= GiB:
            raise ConfigError(
                f"ObjectOptions.part_nbytes = {self.part_nbytes} must be {PAGE_NBYTES} to {GiB}"
            )
        require_threads("ObjectOptions", self.num_threads)
        if self.capacity_nbytes is not None and self.capacity_nbytes < 0:
            raise ConfigError(f"ObjectOptions.capacity_nbytes = {self.capacity_nbytes} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the store is reached. Credentials come from the environment, as obstore finds them."""

    endpoint: str | None = None
    """URL of the service if it is not the provider's own."""
    region: str | None = None
    """Region of an S3 bucket; None for that of the environment, or us-east-1."""
    allow_http: bool = False
    """Let bytes and signatures travel unencrypted to another machine."""
    retries: int = 8
    """Times a request is repeated after a failure that may pass, waiting longer each time."""
    timeout_s: float = 60.0
    """Seconds one request may take, its body included."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot work."""
        if not 0 <= self.retries <= _MAX_RETRIES:
            raise ConfigError(f"Connection.retries = {self.retries} is not 0 to {_MAX_RETRIES}")
        if not _MIN_TIMEOUT_S <= self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(
                f"Connection.timeout_s = {self.timeout_s} is not {_MIN_TIMEOUT_S} to "
                f"{_MAX_TIMEOUT_S} s"
            )
