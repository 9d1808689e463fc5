"""Settings of the chunked tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zinf_core.errors import ConfigError
from zinf_core.units import PAGE_NBYTES, GiB, MiB
from zinf_storage.chunked.codecs import Codec
from zinf_storage.chunked.shuffle import WIDTHS
from zinf_storage.transfers.workers import require_threads

DEFAULT_CHUNK_NBYTES: Final = MiB
_MAX_CHUNK_NBYTES: Final = GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedOptions:
    """What a ChunkedTier does to the chunks it spreads over its inner tiers."""

    scheme: str = "striped"
    """Name in messages, and what an existing tier must have been written as."""
    chunk_nbytes: int | None = None
    """Bytes per chunk, a multiple of 4096, at most 1 GiB. None: what an existing tier was written
    with, or 1 MiB."""
    shares: tuple[int, ...] | None = None
    """Parts of all bytes that each inner tier gets, relative to each other; None: equal parts."""
    checksums: bool = False
    """Check every chunk on every read. Needs inner tiers that take host memory."""
    codec: Codec | None = None
    """How chunks are compressed; switches `checksums` on."""
    shuffle: int | None = None
    """Bytes per element for the codec: 1, 2, 4 or 8. None: tried on the beginning of each chunk."""
    num_threads: int = 4
    """Worker threads."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot work."""
        nbytes = self.chunk_nbytes
        if nbytes is not None and not (
            PAGE_NBYTES <= nbytes <= _MAX_CHUNK_NBYTES and nbytes % PAGE_NBYTES == 0
        ):
            raise ConfigError(
                f"{self.scheme}: chunk_nbytes = {nbytes} must be a multiple of {PAGE_NBYTES} from "
                f"{PAGE_NBYTES} to {_MAX_CHUNK_NBYTES}"
            )
        if self.shares is not None and (not self.shares or min(self.shares) < 1):
            raise ConfigError(f"{self.scheme}: shares = {self.shares} must be numbers from 1 on")
        if self.shuffle is not None and self.shuffle not in WIDTHS:
            raise ConfigError(f"{self.scheme}: shuffle = {self.shuffle} is not one of {WIDTHS}")
        require_threads(self.scheme, self.num_threads)

    @property
    def is_checked(self) -> bool:
        """Whether chunks carry checksums."""
        return self.checksums or self.codec is not None
