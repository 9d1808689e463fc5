"""Factories of the built-in tiers, for `zinf_core.registry.open_tier`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zinf_core.errors import ConfigError
from zinf_core.registry import TierUrl
from zinf_core.runtime.pool import BufferPool
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator
from zinf_storage.cuda import CudaDevice, cuda_problem
from zinf_storage.host import HostTier
from zinf_storage.machine import read_memory
from zinf_storage.nvme import Engine, NvmeOptions, NvmeTier
from zinf_storage.profile import tuned_options

_NVME_OPTIONS: Final = frozenset(
    {"direct", "engine", "io_nbytes", "num_threads", "segment_nbytes", "verify_reads"}
)


def open_host(url: TierUrl, *, capacity_nbytes: int | None) -> HostTier:
    """Open ``host://``: host memory of at most `capacity_nbytes`; None: what the machine has.

    It is pinned for the first CUDA device if there is one, and then takes device memory, too.

    Raises ConfigError for a path or an option: there are none.
    """
    url.refuse_unknown(frozenset())
    if url.path:
        raise ConfigError(f"host://{url.path}: host memory has no path; write host://")
    memory = read_memory()
    limit = min(memory.total_nbytes, memory.cgroup_limit_nbytes or memory.total_nbytes)
    budget = limit if capacity_nbytes is None else capacity_nbytes
    device = CudaDevice(0) if cuda_problem() is None else None
    allocator = PageAlignedAllocator() if device is None else PinnedAllocator(device)
    pool = BufferPool("host", budget_nbytes=budget, allocator=allocator)
    return HostTier("host", pool=pool, device=device)


def open_nvme(url: TierUrl, *, capacity_nbytes: int | None) -> NvmeTier:
    """Open ``nvme:///folder?num_threads=4&io_nbytes=1MiB``; options are those of NvmeOptions, by
    default what ``zinf bench tiers`` found best on the drive.

    ``engine=gds`` takes memory of the first CUDA device as well, if there is one; what
    computes on another stream than the default one needs `NvmeTier.open` with a device of its own.

    Raises ConfigError without a folder, for an option that is unknown or mistyped, or if the engine
    cannot be used; TierError if the folder cannot be used.
    """
    url.refuse_unknown(_NVME_OPTIONS)
    if not url.path:
        raise ConfigError("nvme:// names no folder; write nvme:///path/to/folder")
    default = NvmeOptions()
    options = NvmeOptions(
        io_nbytes=url.nbytes("io_nbytes", default.io_nbytes),
        num_threads=url.number("num_threads", default.num_threads),
        segment_nbytes=url.nbytes("segment_nbytes", default.segment_nbytes),
        capacity_nbytes=capacity_nbytes,
        engine=url.choice("engine", default.engine),
        direct=url.choice("direct", default.direct),
        verify_reads=url.switch("verify_reads", default=default.verify_reads),
    )
    options = tuned_options(Path(url.path), options, given=frozenset(url.options))
    uses_device = options.engine is Engine.GDS and cuda_problem() is None
    device = CudaDevice(0) if uses_device else None
    return NvmeTier.open(url.path, options=options, device=device)
