"""Manifest: which objects hold which keys, as of one flush; itself one object.

Its bytes: a header (magic, layout, body length), a msgpack body, and a BLAKE2b digest of both. It
is believed only after digest, types and numbers were checked.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey

LAYOUT: Final = 1
"""Layout written by this module; others are refused."""
FOLDER: Final = "manifests"

_MAGIC: Final = b"zinf-ob\n"
_HEADER: Final = struct.Struct("<8sIQ")
_DIGEST_NBYTES: Final = 16
_MAX_NUMBER: Final = (1 << 64) - 1
_OBJECT_NAME: Final = re.compile(r"parts/[a-z0-9.-]{1,128}")
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
    body = [manifest.generation, [_packed(entry) for entry in manifest.entries]]
    packed: bytes = msgpack.packb(body, unicode_errors="surrogatepass")
    framed = _HEADER.pack(_MAGIC, LAYOUT, len(packed)) + packed
    return framed + _digest(framed)


def parse(data: bytes, *, url: str) -> Manifest:
    """Return the manifest in `data`. Pure; `url` names the object in messages.

    Raises CorruptDataError if it is damaged, of another layout, or says what cannot be.
    """
    try:
        generation, entries = _sequence(_body(data), 2)
        manifest = Manifest(
            generation=_number(generation, low=1),
            entries=tuple(_entry(item) for item in _sequence(entries)),
        )
        _require_distinct(manifest)
    except (ValueError, TypeError, RecursionError) as exc:
        raise CorruptDataError(
            f"{url} is no manifest that can be read: {exc}; restore it from a copy, or use "
            "another prefix"
        ) from exc
    return manifest


def _body(data: bytes) -> object:
    if len(data) < _HEADER.size + _DIGEST_NBYTES:
        raise ValueError(f"{len(data)} bytes are too few")
    magic, layout, nbytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    if layout != LAYOUT:
        raise ValueError(f"it has layout {layout}, this version reads {LAYOUT}")
    framed, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    if len(framed) != _HEADER.size + nbytes or _digest(framed) != digest:
        raise ValueError("its digest is wrong")
    return msgpack.unpackb(framed[_HEADER.size :], unicode_errors="surrogatepass")


def _digest(framed: bytes) -> bytes:
    return hashlib.blake2b(framed, digest_size=_DIGEST_NBYTES).digest()


def _packed(entry: ManifestEntry) -> list[object]:
    key = entry.key
    parts = [part and [part.name, part.nbytes, part.checksum] for part in entry.parts]
    return [key.name, key.kind_value, key.part, entry.nbytes, entry.part_nbytes, parts]


def _entry(item: object) -> ManifestEntry:
    name, kind, part, nbytes, part_nbytes, parts = _sequence(item, 6)
    key = TensorKey(_text(name), _text(kind), _text(part))
    total, step = _number(nbytes), _number(part_nbytes, low=1)
    found = tuple(None if part is None else _part(part) for part in _sequence(parts))
    if len(found) != -(-total // step):
        raise ValueError(f"{key} of {total} bytes has {len(found)} parts of {step}")
    for start, stored in zip(range(0, total, step), found, strict=True):
        if stored is not None and stored.nbytes != min(step, total - start):
            raise ValueError(f"{stored.name} of {stored.nbytes} bytes does not fit {key}")
    return ManifestEntry(key=key, nbytes=total, part_nbytes=step, parts=found)


def _part(item: object) -> StoredPart:
    name, nbytes, checksum = _sequence(item, 3)
    if not _OBJECT_NAME.fullmatch(_text(name)):
        raise ValueError(f"{name!r} is no name of an object of ours")
    return StoredPart(name=name, nbytes=_number(nbytes, low=1), checksum=_number(checksum))


def _require_distinct(manifest: Manifest) -> None:
    if len({entry.key for entry in manifest.entries}) != len(manifest.entries):
        raise ValueError("it names a key twice")
    names = [part.name for entry in manifest.entries for part in entry.parts if part is not None]
    if len(set(names)) != len(names):
        raise ValueError("it names an object twice")


def _number(value: object, *, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= _MAX_NUMBER:
        raise ValueError(f"{value!r} is no number from {low} on")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004 - caught as bad data
    return value


def _sequence(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in {None, len(value)}:
        raise ValueError(f"a list of {length or 'some'} fields is missing")
    return value
