"""Record: bytes at rest that are believed only after they were checked.

A header (magic, version, body length), a msgpack body, and a BLAKE2b digest of both. Whoever reads
one checks the types and numbers of its body with the functions here; everything that is wrong is a
ValueError, for the caller to turn into an error that names the place.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, Final

import msgpack

_HEADER: Final = struct.Struct("<8sIQ")
_DIGEST_NBYTES: Final = 16


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One kind of record."""

    magic: bytes
    """Eight bytes that begin it."""
    version: int
    """Layout written; larger numbers are refused."""

    def seal(self, body: object) -> bytes:
        """Return the bytes of a record with `body`. Pure."""
        packed: bytes = msgpack.packb(body, unicode_errors="surrogatepass")
        framed = _HEADER.pack(self.magic, self.version, len(packed)) + packed
        return framed + _digest(framed)

    def unseal(self, data: bytes) -> Any:
        """Return the body of the record in `data`. Pure.

        Raises ValueError if length, magic, version or digest is wrong, or msgpack cannot read it.
        """
        view = memoryview(data)
        if len(view) < _HEADER.size + _DIGEST_NBYTES:
            raise ValueError(f"has only {len(view)} bytes")
        magic, version, body_nbytes = _HEADER.unpack_from(view)
        if magic != self.magic:
            raise ValueError(f"begins with {magic!r}, not with {self.magic!r}")
        if not 1 <= version <= self.version:
            raise ValueError(
                f"has version {version}, this release reads up to {self.version}; a newer release "
                "wrote it"
            )
        end = len(view) - _DIGEST_NBYTES
        if body_nbytes != end - _HEADER.size:
            raise ValueError(f"announces {body_nbytes} bytes and holds {end - _HEADER.size}")
        if _digest(view[:end]) != view[end:]:
            raise ValueError("fails its checksum")
        # Counts larger than the body are refused by msgpack before it allocates anything.
        return msgpack.unpackb(
            view[_HEADER.size : end], unicode_errors="surrogatepass", strict_map_key=True
        )


def number(value: object, what: str, *, low: int = 0, high: int = (1 << 64) - 1) -> int:
    """Return `value` if it is an int within `low` to `high`. Raises ValueError."""
    if type(value) is not int:
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    if not low <= value <= high:
        raise ValueError(f"{what} {value} is not within {low} to {high}")
    return value


def text(value: object, what: str) -> str:
    """Return `value` if it is a str. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}, not text")  # noqa: TRY004
    return value


def sequence(value: Any, what: str, *, lengths: tuple[int, ...] = ()) -> list[Any]:
    """Return `value` if it is a list, of one of `lengths` if any are given. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {type(value).__name__}, not a list")  # noqa: TRY004
    if lengths and len(value) not in lengths:
        wanted = " or ".join(map(str, lengths))
        raise ValueError(f"{what} has {len(value)} fields instead of {wanted}")
    return value


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()
