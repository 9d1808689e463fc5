"""ScratchFolder: the NVMe tier of one run, gone when the run is."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path

from zinf_core.device import Device
from zinf_core.errors import ConfigError
from zinf_core.units import format_nbytes, parse_nbytes
from zinf_storage.nvme import FolderKind, NvmeOptions, NvmeTier
from zinf_storage.profile import tuned_options


class ScratchFolder:
    """Opens an NVMe tier for one run and removes its files afterwards."""

    def __init__(
        self, folder: str | PathLike[str], *, capacity: int | str | None, device: Device | None
    ) -> None:
        """Open `folder`, reclaiming what a killed run left there, with what ``zinf bench tiers``
        found best on its drive. Memory of `device` is reached directly where that is possible.

        Raises TierLockedError if a run uses it, ConfigError if it holds a committed state, other
        TierErrors if it cannot be used.
        """
        limit = None if capacity is None else parse_nbytes(capacity, what="nvme_capacity")
        options = tuned_options(Path(folder), NvmeOptions(capacity_nbytes=limit))
        self.tier = NvmeTier.open(folder, options=options, device=device)
        try:
            self._take_over(folder)
        except BaseException:
            self.tier.close()
            raise

    def _take_over(self, folder: str | PathLike[str]) -> None:
        found = self.tier.found
        if found.kind is FolderKind.COMMITTED:
            raise ConfigError(
                f"{folder} holds a committed state of {found.num_keys} tensors "
                f"({format_nbytes(found.nbytes)}); give another folder for this run's scratch files"
            )
        if found.left_over_nbytes:
            freed = self.tier.reclaim()
            warnings.warn(
                f"{folder}: reclaimed {format_nbytes(freed)} left by a run that was killed",
                stacklevel=5,
            )

    def remove(self) -> None:
        """Close the tier, delete its files, and the folder if this run made it."""
        self.tier.remove()
