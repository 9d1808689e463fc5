"""Factories of the built-in tiers, for `zinf_core.registry.open_tier`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zinf_core.errors import ConfigError
from zinf_core.registry import TierUrl
from zinf_core.runtime.pool import BufferPool
from zinf_core.units import parse_nbytes
from zinf_storage.allocators import PageAlignedAllocator, PinnedAllocator
from zinf_storage.cuda import CudaDevice, cuda_problem
from zinf_storage.host import HostTier
from zinf_storage.machine import read_memory
from zinf_storage.nvme import DirectIo, Engine, NvmeOptions, NvmeTier
from zinf_storage.profile import tuned_options

_NVME_OPTIONS: Final = frozenset(
    {"direct", "engine", "io_nbytes", "num_threads", "segment_nbytes", "verify_reads"}
)
_SWITCH: Final = {"0": False, "1": True, "false": False, "true": True}


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
        io_nbytes=parse_nbytes(url.options.get("io_nbytes", default.io_nbytes), what="io_nbytes"),
        num_threads=_parse_count(url.options.get("num_threads", str(default.num_threads))),
        segment_nbytes=parse_nbytes(
            url.options.get("segment_nbytes", default.segment_nbytes), what="segment_nbytes"
        ),
        capacity_nbytes=capacity_nbytes,
        engine=_parse_engine(url.options.get("engine", default.engine.value)),
        direct=_parse_direct(url.options.get("direct", default.direct.value)),
        verify_reads=_parse_switch(url.options.get("verify_reads", "0")),
    )
    options = tuned_options(Path(url.path), options, given=frozenset(url.options))
    uses_device = options.engine is Engine.GDS and cuda_problem() is None
    device = CudaDevice(0) if uses_device else None
    return NvmeTier.open(url.path, options=options, device=device)


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"num_threads = {text!r} is not a whole number")
    return int(text)


def _parse_direct(text: str) -> DirectIo:
    choices = {member.value: member for member in DirectIo}
    if text not in choices:
        raise ConfigError(f"direct = {text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _parse_engine(text: str) -> Engine:
    choices = {member.value: member for member in Engine}
    if text not in choices:
        raise ConfigError(f"engine = {text!r} is not one of {', '.join(choices)}")
    return choices[text]


def _parse_switch(text: str) -> bool:
    if text not in _SWITCH:
        raise ConfigError(f"verify_reads = {text!r} is not one of {', '.join(_SWITCH)}")
    return _SWITCH[text]
