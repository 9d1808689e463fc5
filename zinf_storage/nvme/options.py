"""Settings of the NVMe tier."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zinf_core.errors import ConfigError
from zinf_core.units import PAGE_NBYTES, GiB, MiB
from zinf_storage.transfers.workers import require_threads


class DirectIo(enum.Enum):
    """Whether transfers bypass the page cache."""

    AUTO = "auto"
    """Yes where the file system allows it; `path_taken` says what came of it."""
    NEVER = "never"
    """No: through the page cache, which is asked to drop the bytes after each transfer."""


class Engine(enum.Enum):
    """What moves the bytes between memory and the files."""

    AUTO = "auto"
    """GDS if the tier is given a CUDA device and kvikio works here, else POSIX."""
    POSIX = "posix"
    """Read and write calls, on host memory only. Needs no package."""
    GDS = "gds"
    """kvikio: GPUDirect Storage, on device and host memory. See `zinf_storage.nvme.gds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """How the tier uses its folder."""

    io_nbytes: int = MiB
    """Bytes per request and per checksum; a multiple of 4096, at most 1 GiB."""
    num_threads: int = 16
    """Requests in flight at once."""
    segment_nbytes: int = 256 * MiB
    """Bytes by which the segment files grow; a multiple of 4096. Larger keys get larger ones."""
    capacity_nbytes: int | None = None
    """Budget of all segment files together; None for as much as the file system gives."""
    engine: Engine = Engine.AUTO
    direct: DirectIo = DirectIo.AUTO
    verify_reads: bool = False
    """Check every block read against its checksum, not only the first read after an open."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work."""
        for field in ("io_nbytes", "segment_nbytes"):
            nbytes = getattr(self, field)
            if nbytes < PAGE_NBYTES or nbytes % PAGE_NBYTES:
                raise ConfigError(
                    f"NvmeOptions.{field} = {nbytes} must be a positive multiple of {PAGE_NBYTES}"
                )
        if self.io_nbytes > GiB:
            raise ConfigError(f"NvmeOptions.io_nbytes = {self.io_nbytes} is more than {GiB}")
        if self.engine is Engine.GDS and self.direct is DirectIo.NEVER:
            raise ConfigError(
                "NvmeOptions: engine = gds transfers past the page cache, direct = never forbids "
                "that; leave one of the two out"
            )
        require_threads("NvmeOptions", self.num_threads)
        if self.capacity_nbytes is not None and self.capacity_nbytes < 0:
            raise ConfigError(f"NvmeOptions.capacity_nbytes = {self.capacity_nbytes} is negative")
