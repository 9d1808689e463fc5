"""Manifest: which objects hold which keys, as of one flush; itself one object.

Its bytes are a record (see `zinf_core.runtime.record`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.runtime.record import RecordFormat, number, sequence, text
from zinf_storage.object_store.names import is_part

FOLDER: Final = "manifests"

_FORMAT: Final = RecordFormat(b"zinf-ob\n", 1)
_MANIFEST_NAME: Final = re.compile(FOLDER + r"/(\d{12})\.zinf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One object that holds a part of a key."""

    name: str
    nbytes: int
    checksum: int
    """xxh3-64 of all its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One key and the objects that hold it."""

    key: TensorKey
    nbytes: int
    part_nbytes: int
    """Bytes of every part but the last."""
    parts: tuple[StoredPart | None, ...]
    """In order; None for a part that was never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a tier held at one flush."""

    generation: int
    """Number of the flush, from 1."""
    entries: tuple[ManifestEntry, ...]


def manifest_name(generation: int) -> str:
    """Return the object name of a manifest; a name is never used twice."""
    return f"{FOLDER}/{generation:012d}.zinf"


def generation_of(name: str) -> int | None:
    """Return the generation in a manifest's object name, None if it is no such name."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match else None


def serialize(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest`. Pure."""
    return _FORMAT.seal([manifest.generation, [_packed(entry) for entry in manifest.entries]])


def parse(data: bytes, *, url: str) -> Manifest:
    """Return the manifest in `data`. Pure; `url` names the object in messages.

    Raises CorruptDataError if it is damaged, of another layout, or says what cannot be.
    """
    try:
        generation, entries = sequence(_FORMAT.unseal(data), "body", lengths=(2,))
        manifest = Manifest(
            generation=number(generation, "generation", low=1),
            entries=tuple(_entry(item) for item in sequence(entries, "entries")),
        )
        _require_distinct(manifest)
    except ValueError as exc:
        raise CorruptDataError(
            f"{url} is no manifest that can be read: {exc}; restore it from a copy, or use "
            "another prefix"
        ) from exc
    return manifest


def _packed(entry: ManifestEntry) -> list[object]:
    key = entry.key
    parts = [part and [part.name, part.nbytes, part.checksum] for part in entry.parts]
    return [key.name, key.kind_value, key.part, entry.nbytes, entry.part_nbytes, parts]


def _entry(item: object) -> ManifestEntry:
    *raw_key, nbytes, part_nbytes, parts = sequence(item, "entry", lengths=(6,))
    key = TensorKey(*(text(raw, "key") for raw in raw_key))
    total, step = number(nbytes, "key size"), number(part_nbytes, "part size", low=1)
    found = tuple(None if raw is None else _part(raw) for raw in sequence(parts, "part list"))
    if len(found) != -(-total // step):
        raise ValueError(f"{key} of {total} bytes has {len(found)} parts of {step}")
    for start, stored in zip(range(0, total, step), found, strict=True):
        if stored is not None and stored.nbytes != min(step, total - start):
            raise ValueError(f"{stored.name} of {stored.nbytes} bytes does not fit {key}")
    return ManifestEntry(key=key, nbytes=total, part_nbytes=step, parts=found)


def _part(item: object) -> StoredPart:
    name, nbytes, checksum = sequence(item, "part", lengths=(3,))
    if not is_part(text(name, "part name")):
        raise ValueError(f"{name!r} is no name of an object of ours")
    return StoredPart(
        name=name,
        nbytes=number(nbytes, "part size", low=1),
        checksum=number(checksum, "checksum"),
    )


def _require_distinct(manifest: Manifest) -> None:
    if len({entry.key for entry in manifest.entries}) != len(manifest.entries):
        raise ValueError("it names a key twice")
    names = [part.name for entry in manifest.entries for part in entry.parts if part is not None]
    if len(set(names)) != len(names):
        raise ValueError("it names an object twice")
