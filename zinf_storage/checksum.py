"""Checksum: the hash that tells stored bytes from bytes that were damaged."""

from __future__ import annotations

from typing import Any

import xxhash


def digest_of(data: Any) -> int:
    """Return the xxh3-64 of a bytes-like object. Other threads run meanwhile: the one-call form of
    older xxhash holds the interpreter lock."""
    digest = xxhash.xxh3_64()
    digest.update(data)
    result: int = digest.intdigest()
    return result
