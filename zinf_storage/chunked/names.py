"""Names under which a ChunkedTier keeps things on its inner tiers. Pure.

A chunk of key ``w/param/x`` lies under ``w/param/x#3.12.9f3c01aa``: chunk number, generation, and
the mark of the tier that wrote it, so that the chunks of one tier are never taken for another's.
What has no ``#`` is the index or was not written by a ChunkedTier.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from zinf_core.keys import StateKind, TensorKey

MARK_LENGTH: Final = 8
"""Hexadecimal digits of a tier's mark."""

PROBE_KEY: Final = TensorKey.of("zinf.probe", StateKind.PARAM)
"""What rates are measured with; nothing is lost with it."""

_INDEX_NAME: Final = "zinf.index"
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_CHUNK: Final = re.compile(
    rf"(0|[1-9][0-9]{{0,17}})\.(0|[1-9][0-9]{{0,17}})\.([0-9a-f]{{{MARK_LENGTH}}})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkName:
    """What the name of a chunk on an inner tier says."""

    key: TensorKey
    index: int
    """Number of the chunk within the key."""
    generation: int
    """Which version of it; no two of one tier are equal."""
    mark: str
    """Eight hexadecimal digits drawn when the tier was first opened."""

    @property
    def inner_key(self) -> TensorKey:
        """The name itself."""
        part = f"{self.key.part}#{self.index}.{self.generation}.{self.mark}"
        return TensorKey(self.key.name, self.key.kind_value, part)

    @classmethod
    def parse(cls, inner_key: TensorKey) -> ChunkName | None:
        """Return what `inner_key` says, None if it names no chunk."""
        part, separator, tail = inner_key.part.rpartition("#")
        match = _CHUNK.fullmatch(tail) if separator else None
        if match is None:
            return None
        return cls(
            key=TensorKey(inner_key.name, inner_key.kind_value, part),
            index=int(match[1]),
            generation=int(match[2]),
            mark=match[3],
        )


def index_key(number: int) -> TensorKey:
    """Return the name of the index that commit `number` wrote."""
    return TensorKey.of(_INDEX_NAME, StateKind.PARAM, str(number))


def index_number(inner_key: TensorKey) -> int | None:
    """Return which commit wrote the index called `inner_key`, None if it names no index."""
    if inner_key.name != _INDEX_NAME or not _NUMBER.fullmatch(inner_key.part):
        return None
    number = int(inner_key.part)
    return number if inner_key == index_key(number) else None
