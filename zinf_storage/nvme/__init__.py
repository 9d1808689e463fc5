"""NVMe tier: keys in segment files, written by shadow paging, committed by a manifest."""

from zinf_storage.nvme.folder import FolderKind, FolderState
from zinf_storage.nvme.options import DirectIo, Engine, NvmeOptions
from zinf_storage.nvme.syscalls import SystemCalls
from zinf_storage.nvme.tier import NvmeTier

__all__ = [
    "DirectIo",
    "Engine",
    "FolderKind",
    "FolderState",
    "NvmeOptions",
    "NvmeTier",
    "SystemCalls",
]
