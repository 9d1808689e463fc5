"""Errors of inner tiers, as errors of the tier above them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from zinf_core.errors import (
    CorruptDataError,
    KeyAbsentError,
    RangeError,
    TierError,
    TierFullError,
    TransferError,
)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise errors of an inner tier as what they mean for the one above: `what` failed."""
    try:
        yield
    except TierError as exc:
        raise _explained(exc, what) from exc


def _explained(exc: TierError, what: str) -> TierError:
    reason = getattr(exc, "strerror", None) or str(exc)
    number = getattr(exc, "errno", None)
    text = f"{what} failed: {reason}"
    if isinstance(exc, TierFullError):
        return TierFullError(number or errno.ENOSPC, text)
    if isinstance(exc, CorruptDataError):
        return CorruptDataError(text)
    if isinstance(exc, KeyAbsentError | RangeError):
        return CorruptDataError(f"{text}; the inner tier lost it or was changed by somebody else")
    return TransferError(number or errno.EIO, text)
