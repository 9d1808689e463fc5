"""Engines: what moves bytes between memory and segment files when read and write calls do not."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from zinf_core.device import Device
from zinf_core.errors import ConfigError
from zinf_storage.nvme.kvikio_file import is_cuda, open_gds
from zinf_storage.nvme.memory import Span
from zinf_storage.nvme.options import DirectIo, Engine, NvmeOptions


class DirectFile(Protocol):
    """One open file. Any number of threads may use it at once."""

    def read(self, memory: Span, offset: int) -> None:
        """Fill all of `memory`, host or device, from `offset`. Blocks until the bytes are there.

        Keeps no reference to the memory. Raises OSError; part of the memory may be filled then.
        """
        ...

    def write(self, memory: Span, offset: int) -> None:
        """Write all of `memory`, host or device, at `offset`. Blocks until the bytes are taken.

        Whoever wrote device memory must have finished before the call. Raises OSError; part of
        the bytes may be written then.
        """
        ...

    def close(self) -> None:
        """Close the file. Nothing may be in flight."""
        ...


class FileEngine(Protocol):
    """Opens files for reading and writing."""

    @property
    def path_taken(self) -> str:
        """How bytes travel, as in `NvmeTier.path_taken`."""
        ...

    @property
    def device(self) -> Device | None:
        """Device whose memory the files read into and write from; None: host memory only."""
        ...

    def open(self, path: Path) -> DirectFile:
        """Open the existing file `path`. Raises OSError."""
        ...


def choose_engine(options: NvmeOptions, device: Device | None) -> FileEngine | None:
    """Return the engine that `options` ask for; None: read and write calls.

    AUTO asks for kvikio only if `device` is a CUDA device, since host memory gains nothing by it.
    Raises ConfigError if `options` insist on kvikio and it cannot be used.
    """
    if options.engine is Engine.GDS:
        return open_gds(options, device)
    wants_gds = options.engine is Engine.AUTO and options.direct is DirectIo.AUTO
    if not wants_gds or device is None or not is_cuda(device):
        return None
    try:
        return open_gds(options, device)
    except ConfigError:
        # `NvmeTier.path_taken` tells, and `zinf doctor` why.
        return None
