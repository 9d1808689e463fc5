"""Faults: which call of a tier fails, when and how, as data for `FaultyTier`."""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from zinf_core.errors import ConfigError, TierError, TierFullError, TransferError

PLANNED: Final = "planned failure"
DAMAGED: Final = "holds a failed write"
"""Phrases by which `stems_from_fault` knows an error."""


class Operation(enum.Enum):
    """Call of a tier that can be made to fail."""

    RESERVE = "reserve"
    READ = "read_into"
    WRITE = "write_from"
    FLUSH = "flush"
    DISCARD = "discard"
    PREFETCH = "prefetch_into"


class Phase(enum.Enum):
    """When a call fails."""

    SUBMIT = "submit"
    """The call itself raises."""
    WAIT = "wait"
    """The call returns a completion whose `wait` raises."""


WITHOUT_COMPLETION: Final = frozenset({Operation.RESERVE, Operation.DISCARD})
"""Operations that can fail at submit only."""


def io_error(message: str) -> TierError:
    """Return a TransferError with EIO: the device failed."""
    return TransferError(errno.EIO, message)


def no_space(message: str) -> TierError:
    """Return a TierFullError with ENOSPC: the device is full."""
    return TierFullError(errno.ENOSPC, message)


def stems_from_fault(error: BaseException | None) -> bool:
    """Return whether `error` is, was raised from, or groups an error of a `Fault`.

    A read of a key that a fault has damaged counts as well.
    """
    while error is not None:
        if any(phrase in str(error) for phrase in (PLANNED, DAMAGED)):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(map(stems_from_fault, error.exceptions))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One call that fails, once."""

    call: int
    """Which one, from 0, among the calls of `operation`, or among all calls."""
    operation: Operation | None = None
    """Calls that are counted; None counts all six."""
    phase: Phase = Phase.WAIT
    """`reserve` and `discard` have no completion: they fail at submit in either phase."""
    error: Callable[[str], TierError] = io_error
    """Makes the error from its message."""
    damage: bool = False
    """A write that fails leaves a mixture behind, and reads of the key raise CorruptDataError
    until it is written whole or discarded; without, it leaves the old bytes."""

    def __post_init__(self) -> None:
        """Refuse a call that cannot come."""
        if self.call < 0:
            raise ConfigError(f"Fault.call = {self.call} is negative; the first call is 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What goes wrong, and when."""

    faults: tuple[Fault, ...] = ()
    device_nbytes: int | None = None
    """Short device: a write that makes the total written exceed this fails with EIO."""
    room_nbytes: int | None = None
    """Full device: a reserve that makes the total reserved exceed this fails with ENOSPC."""
