"""Every error zinf raises on purpose.

::

    ZinfError
    ├── ConfigError (ValueError)          a setting is unknown, mistyped or contradictory
    ├── BudgetError (MemoryError)         bytes asked for do not fit a budget
    │   ├── BudgetTooSmallError           refused at set-up: the largest thing does not fit
    │   ├── BudgetExceededError           everything left in the budget is in use
    │   └── PoolExhaustedError            `lease_nowait` found no room
    ├── TierError
    │   ├── KeyAbsentError (KeyError)     the tier holds no such key
    │   ├── KeyExistsError                the key is reserved already
    │   ├── RangeError (ValueError)       offset or length outside the key's bytes
    │   ├── AlignmentError (ValueError)   offset, length or address breaks the capabilities
    │   ├── UnsupportedBufferError (TypeError)  the tier cannot reach that memory space
    │   ├── TierClosedError               the tier was closed
    │   ├── TierFullError (OSError)       no room: device full, quota or budget
    │   ├── TierLockedError (OSError)     another process uses the folder
    │   ├── TransferError (OSError)       the environment failed a transfer
    │   └── CorruptDataError              stored bytes are not the bytes written
    ├── TransferCancelledError            the transfer was given up before it began
    ├── TransferTimeoutError (TimeoutError)  `wait` gave up before the transfer was done
    ├── ResidencyError                    a page was asked to make an illegal transition
    ├── UnsupportedError (TypeError)      something zinf refuses to do, and what to do instead
    └── InternalError                     a state that must not be reachable: a bug in zinf
"""

from __future__ import annotations

import errno
from typing import Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the system that mean TierFullError: the device, the quota or the file size limit is
used up."""


class ZinfError(Exception):
    """Root of every error raised by zinf."""


class ConfigError(ZinfError, ValueError):
    """A setting is unknown, mistyped, out of range or contradicts another."""


class BudgetError(ZinfError, MemoryError):
    """Bytes asked for do not fit a budget."""


class BudgetTooSmallError(BudgetError):
    """Refused at set-up: the largest thing that must be resident does not fit its budget."""


class BudgetExceededError(BudgetError):
    """Nothing in the budget can be evicted or waited for to make room."""


class PoolExhaustedError(BudgetError):
    """`BufferPool.lease_nowait` found no room; the caller decides whether to evict or wait."""


class TierError(ZinfError):
    """Root of what a tier raises."""


class KeyAbsentError(TierError, KeyError):
    """The tier holds no such key."""

    def __str__(self) -> str:
        """Return the message unquoted (KeyError would show its repr)."""
        return str(self.args[0]) if self.args else ""


class KeyExistsError(TierError):
    """The key is reserved already."""


class RangeError(TierError, ValueError):
    """Offset or length lies outside the key's bytes."""


class AlignmentError(TierError, ValueError):
    """Offset, length or address breaks the tier's capabilities."""


class UnsupportedBufferError(TierError, TypeError):
    """The tier cannot transfer with the buffer's memory space."""


class TierClosedError(TierError):
    """The tier was closed; nothing but `close` may be called on it."""


class TierFullError(TierError, OSError):
    """No room is left: device full, quota reached or budget used up."""


class TierLockedError(TierError, OSError):
    """Another process uses the tier's folder."""


class TransferError(TierError, OSError):
    """The environment failed a transfer (I/O error, short device, vanished drive)."""


class CorruptDataError(TierError):
    """Stored bytes are not the bytes that were written."""


class TransferCancelledError(ZinfError):
    """`Prefetch.cancel` gave the transfer up before it began."""


class TransferTimeoutError(ZinfError, TimeoutError):
    """`Completion.wait` gave up; the transfer goes on and may be waited for again."""


class ResidencyError(ZinfError):
    """A page was asked to make an illegal transition."""


class UnsupportedError(ZinfError, TypeError):
    """Something zinf refuses to do; the message says what to do instead."""


class InternalError(ZinfError):
    """A state that must not be reachable: a bug in zinf."""
