"""FaultyTier: a tier whose n-th call fails, or whose device is short or full."""

from __future__ import annotations

import enum
import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import (
    ConfigError,
    CorruptDataError,
    TierError,
    TierFullError,
    TransferError,
)
from zinf_core.keys import Extent, TensorKey
from zinf_core.tier import Tier, validate_transfer

RUINED: Final = 0x5E
"""Byte that a failed read leaves in the first half of its destination."""


class Operation(enum.Enum):
    """Call of a tier that can be made to fail."""

    RESERVE = "reserve"
    READ = "read_into"
    WRITE = "write_from"
    FLUSH = "flush"
    DISCARD = "discard"


class Phase(enum.Enum):
    """When a call fails."""

    SUBMIT = "submit"
    """The call itself raises."""
    WAIT = "wait"
    """The call returns a completion whose `wait` raises."""


_PLANNED: Final = "planned failure"
_DAMAGED: Final = "holds a failed write"
_WITHOUT_COMPLETION: Final = frozenset({Operation.RESERVE, Operation.DISCARD})


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
        if any(phrase in str(error) for phrase in (_PLANNED, _DAMAGED)):
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
    """Calls that are counted; None counts all five."""
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


class FaultyTier:
    """Wrapper that fails what its plan says and passes everything else on.

    Counts the calls it gets, so that a sweep knows how many there are to fail. A transfer with
    bad arguments raises before a fault does and is not counted. Owns `inner` and closes it. One
    lock guards the counts and the damaged keys.
    """

    def __init__(self, inner: Tier, *, plan: FaultPlan | None = None) -> None:
        """Wrap `inner`; without a plan nothing fails until `fail_next`."""
        plan = FaultPlan() if plan is None else plan
        self._inner = inner
        self._capabilities = replace(inner.capabilities, mappable=False)
        self._plan = plan
        self._armed = list(plan.faults)
        self._fired: list[Fault] = []
        self._calls: list[Operation] = []
        self._written_nbytes = 0
        self._damaged: set[TensorKey] = set()
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """Name of the inner tier."""
        return self._inner.name

    @property
    def capabilities(self) -> TierCapabilities:
        """The inner tier's, without `map`."""
        return self._capabilities

    @property
    def calls(self) -> tuple[Operation, ...]:
        """Every call counted so far, in order."""
        with self._lock:
            return tuple(self._calls)

    @property
    def fired(self) -> tuple[Fault, ...]:
        """Faults that have happened."""
        with self._lock:
            return tuple(self._fired)

    def fail_next(
        self, operation: Operation, *, phase: Phase = Phase.WAIT, damage: bool = False
    ) -> None:
        """Make the next call of `operation` fail with EIO."""
        with self._lock:
            call = self._calls.count(operation)
            self._armed.append(Fault(call=call, operation=operation, phase=phase, damage=damage))

    def usage(self) -> TierUsage:
        """Return what the inner tier stores."""
        return self._inner.usage()

    def stat(self, key: TensorKey) -> Extent:
        """Return where `key` lies on the inner tier."""
        return self._inner.stat(key)

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the inner tier's keys."""
        return self._inner.keys()

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Reserve on the inner tier, or fail."""
        with self._lock:
            self._take(Operation.RESERVE, key)
            room = self._plan.room_nbytes
            if room is not None and self._inner.usage().nbytes + nbytes > room:
                raise no_space(f"{self.name}: {nbytes} bytes of {key} exceed a room of {room}")
            return self._inner.reserve(key, nbytes)

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Read from the inner tier, or fail and ruin half of `dst`."""
        with self._lock:
            self._validate(key, dst, offset)
            taken = self._take(Operation.READ, key)
            if taken is not None:
                dst.array[: dst.nbytes // 2] = RUINED
                return CompletedTransfer(taken[1])
            if key in self._damaged:
                return CompletedTransfer(
                    CorruptDataError(f"{self.name}: {key} {_DAMAGED}; write it whole or discard it")
                )
            return self._inner.read_into(key, dst, offset=offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Write to the inner tier, or fail and leave the old bytes or a damaged key."""
        with self._lock:
            nbytes = self._validate(key, src, offset)
            taken = self._take(Operation.WRITE, key)
            if taken is not None:
                if taken[0].damage:
                    self._damage(key, src, offset)
                return CompletedTransfer(taken[1])
            device = self._plan.device_nbytes
            if device is not None and self._written_nbytes + src.nbytes > device:
                return CompletedTransfer(
                    io_error(f"{self.name}: write of {key} ends past a device of {device} bytes")
                )
            self._written_nbytes += src.nbytes
            completion = self._inner.write_from(key, src, offset=offset)
            if key in self._damaged and src.nbytes == nbytes:
                return self._heal(key, completion)
            return completion

    def discard(self, key: TensorKey) -> None:
        """Discard from the inner tier, or fail."""
        with self._lock:
            self._inner.stat(key)
            self._take(Operation.DISCARD, key)
            self._inner.discard(key)
            self._damaged.discard(key)

    def flush(self) -> Completion:
        """Flush the inner tier, or fail."""
        with self._lock:
            self._inner.usage()  # raises if closed
            taken = self._take(Operation.FLUSH, None)
            return self._inner.flush() if taken is None else CompletedTransfer(taken[1])

    def close(self) -> None:
        """Close the inner tier."""
        self._inner.close()

    def _validate(self, key: TensorKey, buffer: Buffer, offset: int) -> int:
        nbytes = self._inner.stat(key).nbytes
        validate_transfer(self.name, key, nbytes, buffer, offset, capabilities=self._capabilities)
        return nbytes

    def _take(self, operation: Operation, key: TensorKey | None) -> tuple[Fault, TierError] | None:
        """Count the call; raise the fault that hits it at submit, return one that hits later."""
        in_all, in_own = len(self._calls), self._calls.count(operation)
        self._calls.append(operation)
        for fault in self._armed:
            if fault.call == (in_all if fault.operation is None else in_own) and (
                fault.operation in (None, operation)
            ):
                break
        else:
            return None
        self._armed.remove(fault)
        self._fired.append(fault)
        what = "all" if key is None else str(key)
        error = fault.error(f"{self.name}: {_PLANNED} of {operation.value} of {what}")
        if fault.phase is Phase.SUBMIT or operation in _WITHOUT_COMPLETION:
            raise error
        return fault, error

    def _damage(self, key: TensorKey, src: Buffer, offset: int) -> None:
        """Write the first half, in whole units, and remember that the key is a mixture."""
        unit = self._capabilities.length_align
        half = src.nbytes // 2 // unit * unit
        if half:
            self._inner.write_from(key, src.resized(half), offset=offset).wait()
        self._damaged.add(key)

    def _heal(self, key: TensorKey, completion: Completion) -> Completion:
        """Wait for a whole write of a damaged key; the key is sound again if it succeeded."""
        try:
            completion.wait()
        except TierError as exc:
            return CompletedTransfer(exc)
        self._damaged.discard(key)
        return completion
