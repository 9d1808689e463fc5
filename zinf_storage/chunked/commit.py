"""Committer: writes indexes to the first inner tier and knows what the stored one refers to.

[Note: commit] Everything is made durable on all inner tiers first, chunks of the last commit and
of this one. Then the index is written beside the last one and the first inner tier flushed: the
commit point. A crash before it leaves the last commit, one after it this commit; neither needs
anything of the other that is not there. Only then is discarded what the last commit alone needed,
its index included, and all inner tiers flushed once more: so they have its room again, and there
is one index to find, damage to which cannot be taken for a commit that did not finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from zinf_core.buffers import Buffer
from zinf_core.errors import CorruptDataError
from zinf_core.tier import Tier
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.chunked.failures import explained
from zinf_storage.chunked.index import Index, parse, serialize
from zinf_storage.chunked.inners import InnerTiers
from zinf_storage.chunked.names import index_key, index_number
from zinf_storage.chunked.table import Entry, KeyVersion, entry_of

Captured = dict[Entry, KeyVersion]

FIRST: Final = 0
"""Number of the inner tier that holds the index."""


class Committer:
    """Makes captured versions durable, one commit at a time.

    `write` and `tidy` run in a worker without the tier's lock; everything else is called under it.
    """

    def __init__(self, inners: InnerTiers, *, tier_name: str, committed: Index) -> None:
        """Go on from `committed`, stored unless its number is 0; see `adopt`."""
        self._inners = inners
        self._tier_name = tier_name
        self._header = replace(committed, entries=())
        self._pinned: list[KeyVersion] = []
        """Versions that a stored index may refer to."""
        self._in_doubt = False
        """Whether the commit that runs may be the one the next open finds."""

    def adopt(self, versions: Iterable[KeyVersion]) -> None:
        """Keep the pinned versions that the stored index refers to."""
        self._pinned = list(versions)

    def write(self, captured: Captured) -> None:
        """Make `captured` what the next open finds. Blocks.

        Raises TransferError, TierFullError; a crash then leaves this or the last commit, and what
        both refer to stays pinned until a later one succeeded.
        """
        self._in_doubt = False
        if not self._inners.is_persistent:
            return
        index = replace(
            self._header,
            number=self._header.number + 1,
            next_generation=self._inners.next_generation,
            entries=tuple(entry_of(entry, version) for entry, version in captured.items()),
        )
        what = f"{self._tier_name}: flush of {len(captured)} keys"
        with explained(what):
            self._inners.flush()
            self._in_doubt = True
            first = self._inners.tiers[FIRST]
            self._store(first, index)
            first.flush().wait()

    def conclude(self, captured: Captured, *, succeeded: bool) -> list[KeyVersion]:
        """Take note of how `write` ended; return the versions whose pins are to be dropped."""
        versions = list(captured.values())
        if not self._in_doubt:
            return versions
        self._header = replace(self._header, number=self._header.number + 1)
        if not succeeded:
            self._pinned += versions
            return []
        dropped, self._pinned = self._pinned, versions
        return dropped

    def tidy(self) -> None:
        """Remove every index but that of the last commit, which succeeded, and make it and all
        that was discarded since durable: until then inner tiers may keep the room. Blocks.

        Raises TransferError; the commit is durable all the same.
        """
        if not self._inners.is_persistent:
            return
        with explained(f"{self._tier_name}: giving back what the last commit needed"):
            remove_indexes(self._inners.tiers[FIRST], keep=self._header.number)
            self._inners.flush()

    def _store(self, first: Tier, index: Index) -> None:
        """Write `index` under its number. If it fails and nothing of it is left, no doubt is."""
        key = index_key(index.number)
        buffer = _buffer_of(serialize(index))
        try:
            first.reserve(key, buffer.nbytes)
        except BaseException:
            self._in_doubt = False
            raise
        try:
            first.write_from(key, buffer).wait()
        except BaseException:
            first.discard(key)
            self._in_doubt = False
            raise


def load_index(first: Tier, *, what: str) -> Index | None:
    """Return the index of the last commit, None if `first` holds none; `what` names it. Blocks.

    Raises CorruptDataError if it is damaged, TransferError.
    """
    numbers = {index_number(key) for key in set(first.keys())} - {None}
    damage: CorruptDataError | None = None
    for number in sorted(filter(None, numbers), reverse=True):
        # A damaged index is passed over only for one before it: then its commit did not finish.
        try:
            index = _read(first, number, what)
        except CorruptDataError as exc:
            damage = damage or exc
        else:
            return index
    if damage is not None:
        raise damage
    return None


def remove_indexes(first: Tier, *, keep: int) -> bool:
    """Discard every index but number `keep`; return whether there was one."""
    stale = [key for key in set(first.keys()) if index_number(key) not in (None, keep)]
    for key in stale:
        first.discard(key)
    return bool(stale)


def _read(first: Tier, number: int, what: str) -> Index:
    key = index_key(number)
    with explained(f"{what}: reading the index"):
        buffer = _buffer_of(bytes(first.stat(key).nbytes))
        first.read_into(key, buffer).wait()
    index = parse(buffer.array.tobytes(), where=what)
    if index.number != number:
        raise CorruptDataError(
            f"{what}: the index of commit {number} says it is that of {index.number}; restore the "
            "inner tiers from a copy"
        )
    return index


def _buffer_of(data: bytes) -> Buffer:
    buffer = PageAlignedAllocator().allocate(max(len(data), 1)).resized(len(data))
    buffer.array[:] = np.frombuffer(data, np.uint8)
    return buffer
