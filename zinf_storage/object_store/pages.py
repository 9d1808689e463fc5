"""PageTable: which objects hold each key now, and who still needs older ones.

[Note: pins] A part is one object, never changed once it was put. A version of a key is a row of
parts; a write makes another version, which shares the parts it did not touch, and the table flips
to it when all new parts were put. Versions are pinned by the table (the current one), by every
transfer in flight on them, by a commit under way and by the committed manifest. A part that no
pinned version has is garbage: nobody will read it again, and it is deleted.
"""

from __future__ import annotations

import errno
import itertools
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from zinf_core.errors import InternalError, KeyAbsentError, KeyExistsError, TierFullError
from zinf_core.keys import Extent, TensorKey
from zinf_storage.object_store.manifest import ManifestEntry, StoredPart

FOLDER: Final = "parts"
_READABLE_CHARS: Final = 48


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """One object, there or about to be."""

    name: str
    nbytes: int
    checksum: int = 0
    """xxh3-64; set before the part becomes one of a current version."""
    is_durable: bool = False
    """Whether a manifest that names it was committed."""
    num_versions: int = 0
    """Pinned versions that have it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Version:
    """Bytes of a key at one moment. `pins` changes under the tier's lock, the rest never."""

    nbytes: int
    part_nbytes: int
    parts: tuple[Part | None, ...]
    """In order; None for a part never written."""
    pins: int = 0

    def span(self, index: int) -> range:
        """Return which bytes of the key part `index` holds."""
        start = index * self.part_nbytes
        return range(start, min(start + self.part_nbytes, self.nbytes))

    def touched(self, offset: int, nbytes: int) -> range:
        """Return the parts that hold a byte of ``[offset, offset + nbytes)``; `nbytes` > 0."""
        return range(offset // self.part_nbytes, (offset + nbytes - 1) // self.part_nbytes + 1)

    @property
    def unwritten_nbytes(self) -> int:
        """Bytes of the parts that do not exist."""
        return sum(len(self.span(i)) for i, part in enumerate(self.parts) if part is None)


@dataclass(slots=True, kw_only=True, eq=False)
class Page:
    """One reserved key. Changed under the tier's lock only."""

    key: TensorKey
    version: Version
    discarded: bool = False


class PageTable:
    """The keys of one tier. Not thread-safe: every call is made under the tier's lock."""

    def __init__(
        self, *, tier_name: str, session: str, part_nbytes: int, capacity_nbytes: int | None
    ) -> None:
        """Start empty. `session` is unlike that of any other opening of the prefix."""
        self._tier_name = tier_name
        self._session = session
        self._part_nbytes = part_nbytes
        self._capacity_nbytes = capacity_nbytes
        self._pages: dict[TensorKey, Page] = {}
        self._sizes: list[int] = []
        """Bytes of every key, sorted."""
        self._numbers = itertools.count()
        self._unwritten_nbytes = 0
        self._stored_nbytes = 0
        self.nbytes = 0
        self.live: set[str] = set()
        """Names of the parts that somebody needs."""
        self.garbage: list[str] = []
        """Names of objects to delete."""

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the parts that somebody needs, and of those still to be written."""
        return self._stored_nbytes + self._unwritten_nbytes

    def page(self, key: TensorKey) -> Page:
        """Return the page of `key`. Raises KeyAbsentError."""
        page = self._pages.get(key)
        if page is None:
            raise KeyAbsentError(f"{self._tier_name}: no key {key}")
        return page

    def reserve(self, key: TensorKey, nbytes: int) -> Page:
        """Add `key`, leaving room to overwrite the largest key there is.

        Raises KeyExistsError, TierFullError; nothing changed then.
        """
        if key in self._pages:
            raise KeyExistsError(f"{self._tier_name}: {key} is reserved already; discard it first")
        largest = max(nbytes, self._sizes[-1] if self._sizes else 0)
        lacking = self.lacking_nbytes(nbytes + largest)
        if lacking:
            raise TierFullError(
                errno.ENOSPC,
                f"{self._tier_name}: no room for {key} of {nbytes} bytes and for overwriting the "
                f"largest key of {largest}: {lacking} bytes above capacity_nbytes = "
                f"{self._capacity_nbytes}; raise it, discard keys or flush",
            )
        parts = (None,) * -(-nbytes // self._part_nbytes)
        return self._add(key, Version(nbytes=nbytes, part_nbytes=self._part_nbytes, parts=parts))

    def lacking_nbytes(self, nbytes: int) -> int:
        """Return by how much `nbytes` more would exceed the capacity; 0 if they fit."""
        if self._capacity_nbytes is None:
            return 0
        return max(self.allocated_nbytes + nbytes - self._capacity_nbytes, 0)

    def restore(self, entries: tuple[ManifestEntry, ...]) -> dict[Page, Version]:
        """Add the keys of a manifest; return their versions, each pinned once for the commit."""
        committed = {}
        for entry in entries:
            parts = tuple(None if part is None else _restored(part) for part in entry.parts)
            version = Version(nbytes=entry.nbytes, part_nbytes=entry.part_nbytes, parts=parts)
            page = self._add(entry.key, version)
            committed[page] = self.pin(version)
        return committed

    def discard(self, key: TensorKey) -> None:
        """Forget `key`; its parts go with their last pin. Raises KeyAbsentError."""
        page = self.page(key)
        del self._pages[key]
        del self._sizes[bisect_left(self._sizes, page.version.nbytes)]
        self.nbytes -= page.version.nbytes
        self._unwritten_nbytes -= page.version.unwritten_nbytes
        page.discarded = True
        self.unpin(page.version)

    def shadow(self, page: Page, offset: int, nbytes: int) -> tuple[Version, range]:
        """Return a new pinned version of `page` with new parts for the bytes of a write, and
        which parts these are. Whole keys are cut anew. Raises TierFullError; nothing changed then.
        """
        old = page.version
        whole = nbytes == old.nbytes
        step = self._part_nbytes if whole else old.part_nbytes
        cut = Version(nbytes=old.nbytes, part_nbytes=step, parts=())
        touched = cut.touched(offset, nbytes)
        needed = sum(len(cut.span(i)) for i in touched)
        lacking = self.lacking_nbytes(needed)
        if lacking:
            raise TierFullError(
                errno.ENOSPC,
                f"no room for {needed} bytes beside the old ones: {lacking} bytes above "
                f"capacity_nbytes = {self._capacity_nbytes}; raise it, discard keys or flush",
            )
        stem = f"{FOLDER}/{_readable(page.key)}.{self._session}.{next(self._numbers):x}"
        kept = (None,) * len(touched) if whole else old.parts
        new = tuple(Part(name=f"{stem}.{i:x}", nbytes=len(cut.span(i))) for i in touched)
        parts = (*kept[: touched.start], *new, *kept[touched.stop :])
        version = Version(nbytes=old.nbytes, part_nbytes=step, parts=parts)
        return self.pin(version), touched

    def flip(self, page: Page, version: Version) -> None:
        """Make `version`, all of whose parts were put, the current one of `page`."""
        if page.discarded:
            return
        old, page.version = page.version, version
        self._unwritten_nbytes += version.unwritten_nbytes - old.unwritten_nbytes
        self.pin(version)
        self.unpin(old)

    def pin(self, version: Version) -> Version:
        """Keep the parts of `version` until `unpin`."""
        version.pins += 1
        if version.pins == 1:
            for part in filter(None, version.parts):
                part.num_versions += 1
                if part.num_versions == 1:
                    self._stored_nbytes += part.nbytes
                    self.live.add(part.name)
        return version

    def unpin(self, version: Version) -> None:
        """Drop one pin; with the last one, parts that no other version has become garbage."""
        version.pins -= 1
        if version.pins < 0:
            raise InternalError(f"{self._tier_name}: a version was unpinned too often")
        if version.pins == 0:
            for part in filter(None, version.parts):
                part.num_versions -= 1
                if part.num_versions == 0:
                    self._stored_nbytes -= part.nbytes
                    self.live.remove(part.name)
                    self.garbage.append(part.name)

    def take_garbage(self) -> list[str]:
        """Return the names of objects to delete; whoever fails to delete them puts them back."""
        taken, self.garbage = self.garbage, []
        return taken

    def _add(self, key: TensorKey, version: Version) -> Page:
        page = Page(key=key, version=self.pin(version))
        self._pages[key] = page
        insort(self._sizes, version.nbytes)
        self.nbytes += version.nbytes
        self._unwritten_nbytes += version.unwritten_nbytes
        return page


def extent_of(page: Page) -> Extent:
    """Return the size of `page`; objects have no address."""
    return Extent(nbytes=page.version.nbytes, allocated_nbytes=page.version.nbytes)


def entry_of(key: TensorKey, version: Version) -> ManifestEntry:
    """Return how a manifest names a version."""
    parts = tuple(None if part is None else _stored(part) for part in version.parts)
    return ManifestEntry(
        key=key, nbytes=version.nbytes, part_nbytes=version.part_nbytes, parts=parts
    )


def _stored(part: Part) -> StoredPart:
    return StoredPart(name=part.name, nbytes=part.nbytes, checksum=part.checksum)


def _restored(part: StoredPart) -> Part:
    return Part(name=part.name, nbytes=part.nbytes, checksum=part.checksum, is_durable=True)


def _readable(key: TensorKey) -> str:
    """Return what reminds a person of `key`; different keys may share it."""
    text = re.sub("[^a-z0-9]+", "-", str(key).lower()).strip("-")
    return text[:_READABLE_CHARS].strip("-") or "key"
