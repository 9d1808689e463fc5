"""PageTable: which version of each key's bytes is the current one, and who still needs old ones.

[Note: pins] A version is one extent and what is known of its bytes. It is never changed after
its first write completed; an overwrite makes another version and the table flips to that. A
version's room is freed when its last pin is dropped. Pins are held by the table (the current
version), by every transfer in flight on it, by a commit under way, and by the committed manifest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from zinf_core.errors import CorruptDataError, KeyAbsentError, KeyExistsError, TierFullError
from zinf_core.keys import Extent, TensorKey
from zinf_core.runtime.manifest import (
    Manifest,
    ManifestEntry,
    Region,
    max_entry_nbytes,
    max_manifest_nbytes,
)
from zinf_core.units import align_up
from zinf_storage.nvme.manifest_room import ManifestRoom
from zinf_storage.nvme.options import NvmeOptions
from zinf_storage.nvme.segments import SegmentStore

Checksums = tuple[int | None, ...]
"""Per block: its checksum, UNCHECKED, or None if it was never written."""
_SPARE_SEGMENTS: Final = 16
"""That may be added until there is room for more in the manifest."""
UNCHECKED: Final = -1
"""Of a block that was written without passing through the host, which alone computes checksums.
A manifest says None for it, so that a block it says None for may hold bytes."""


@dataclass(slots=True, kw_only=True, eq=False)
class Version:
    """One extent of a key. Changed under the tier's lock only."""

    regions: tuple[Region, ...]
    nbytes: int
    block_nbytes: int
    checksums: Checksums
    unverified: set[int] = field(default_factory=set)
    """Blocks that came from a manifest and were not read since."""
    pins: int = 1

    @property
    def is_written(self) -> bool:
        """Whether any byte was ever written."""
        return any(checksum is not None for checksum in self.checksums)


@dataclass(slots=True, kw_only=True, eq=False)
class Page:
    """One reserved key. Changed under the tier's lock only."""

    key: TensorKey
    nbytes: int
    version: Version
    entry_nbytes: int
    """Most bytes it takes in a manifest."""
    discarded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A pinned version and the checksums it had at that moment."""

    version: Version
    checksums: Checksums


class PageTable:
    """The keys of one tier. Not thread-safe: every call is made under the tier's lock."""

    def __init__(
        self, segments: SegmentStore, room: ManifestRoom, *, tier_name: str, options: NvmeOptions
    ) -> None:
        """Start empty."""
        self._segments = segments
        self._room = room
        self._tier_name = tier_name
        self._options = options
        self._pages: dict[TensorKey, Page] = {}
        self._sizes: list[int] = []
        """Logical bytes of every key, sorted."""
        self._entries_nbytes = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def page(self, key: TensorKey) -> Page:
        """Return the page of `key`. Raises KeyAbsentError."""
        page = self._pages.get(key)
        if page is None:
            raise KeyAbsentError(f"{self._tier_name}: no key {key}")
        return page

    def reserve(self, key: TensorKey, nbytes: int) -> Page:
        """Add `key` with an extent, leaving room to overwrite the largest key there is, and to
        commit all.

        Raises KeyExistsError, TierFullError, TransferError; nothing changed then.
        """
        if key in self._pages:
            raise KeyExistsError(f"{self._tier_name}: {key} is reserved already; discard it first")
        largest = max(nbytes, self._sizes[-1] if self._sizes else 0)
        block_nbytes = self._options.io_nbytes
        try:
            self._room.require(self._manifest_nbytes(max_entry_nbytes(key, nbytes, block_nbytes)))
            regions = self._segments.allocate(nbytes, spare_nbytes=largest)
        except TierFullError as exc:
            raise TierFullError(exc.errno, f"no room for {key}: {exc.strerror}") from exc
        return self._add(key, self._unwritten(nbytes, regions, block_nbytes))

    def restore(self, manifest: Manifest) -> list[Snapshot]:
        """Add every key of `manifest`, whose segments are open; return its pinned snapshots.

        Raises CorruptDataError if a key is named that cannot be.
        """
        committed = []
        for entry in manifest.entries:
            for region in entry.regions:
                self._segments.claim(region)
            version = _version_of(entry)
            self._add(entry.key, version)
            committed.append(self.snapshot(version))
        if len(self._pages) != len(manifest.entries):
            raise CorruptDataError(f"{self._tier_name}: the manifest names a key twice")
        self._room.prefer(self._manifest_nbytes())
        return committed

    def discard(self, key: TensorKey) -> None:
        """Forget `key`; its room is freed with the last pin. Raises KeyAbsentError."""
        page = self.page(key)
        del self._pages[key]
        del self._sizes[bisect_left(self._sizes, page.nbytes)]
        self.nbytes -= page.nbytes
        self._entries_nbytes -= page.entry_nbytes
        page.discarded = True
        self.unpin(page.version)

    def shadow(self, page: Page, *, block_nbytes: int) -> Version:
        """Return a new version of `page`, pinned once, for a write to fill.

        Raises TierFullError, TransferError; nothing changed then.
        """
        regions = self._segments.allocate(page.nbytes)
        return self._unwritten(page.nbytes, regions, block_nbytes)

    def flip(self, page: Page, version: Version, checksums: Checksums) -> None:
        """Make `version`, whose bytes all landed, the current one of `page`."""
        version.checksums = checksums
        if page.discarded or version is page.version:
            return
        old, page.version = page.version, version
        version.pins += 1
        self.unpin(old)

    def unpin(self, version: Version) -> None:
        """Drop one pin and free the version's room if it was the last."""
        version.pins -= 1
        if version.pins == 0:
            self._segments.free(version.regions)

    def snapshot(self, version: Version) -> Snapshot:
        """Pin `version` as it is now."""
        version.pins += 1
        return Snapshot(version=version, checksums=version.checksums)

    def _add(self, key: TensorKey, version: Version) -> Page:
        block_nbytes = min(version.block_nbytes, self._options.io_nbytes)
        entry_nbytes = max_entry_nbytes(key, version.nbytes, block_nbytes)
        page = Page(key=key, nbytes=version.nbytes, version=version, entry_nbytes=entry_nbytes)
        self._pages[key] = page
        self._entries_nbytes += entry_nbytes
        insort(self._sizes, page.nbytes)
        self.nbytes += page.nbytes
        return page

    def _manifest_nbytes(self, more_nbytes: int = 0) -> int:
        """Return the most bytes that a manifest of the keys, and `more_nbytes`, can have."""
        num_segments = len(self._segments.numbers()) + _SPARE_SEGMENTS
        return max_manifest_nbytes(self._entries_nbytes + more_nbytes, num_segments)

    def _unwritten(self, nbytes: int, regions: tuple[Region, ...], block_nbytes: int) -> Version:
        num_blocks = -(-nbytes // block_nbytes)
        return Version(
            regions=regions, nbytes=nbytes, block_nbytes=block_nbytes,
            checksums=(None,) * num_blocks,
        )  # fmt: skip


def checksum_of(version: Version, index: int) -> int | None:
    """Return the checksum of a block, None if none is known."""
    checksum = version.checksums[index]
    return None if checksum == UNCHECKED else checksum


def extent_of(page: Page) -> Extent:
    """Return where `page` lies; the first region if there are several, zeros if there is none."""
    first = page.version.regions[0] if page.version.regions else None
    return Extent(
        nbytes=page.nbytes,
        allocated_nbytes=align_up(page.nbytes),
        segment=first.segment if first else 0,
        offset=first.offset if first else 0,
    )


def entry_of(key: TensorKey, snapshot: Snapshot) -> ManifestEntry:
    """Return how a manifest names a snapshot."""
    version = snapshot.version
    return ManifestEntry(
        key=key,
        nbytes=version.nbytes,
        block_nbytes=version.block_nbytes,
        regions=version.regions,
        checksums=tuple(None if c == UNCHECKED else c for c in snapshot.checksums),
    )


def _version_of(entry: ManifestEntry) -> Version:
    known = {index for index, checksum in enumerate(entry.checksums) if checksum is not None}
    return Version(
        regions=entry.regions,
        nbytes=entry.nbytes,
        block_nbytes=entry.block_nbytes,
        checksums=tuple(UNCHECKED if c is None else c for c in entry.checksums),
        unverified=known,
    )
