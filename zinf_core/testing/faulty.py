"""FaultyTier: a tier whose n-th call fails, or whose device is short or full."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import CorruptDataError, TierError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing.faults import (
    DAMAGED,
    PLANNED,
    WITHOUT_COMPLETION,
    Fault,
    FaultPlan,
    Operation,
    Phase,
    io_error,
    no_space,
)
from zinf_core.tier import Prefetch, SupportsPrefetch, Tier, validate_transfer

RUINED: Final = 0x5E
"""Byte that a failed read leaves in the first half of its destination, if it is host memory."""


class FaultyTier:
    """Wrapper that fails what its plan says and passes everything else on.

    Counts the calls it gets, so that a sweep knows how many there are to fail. A transfer with
    bad arguments raises before a fault does and is not counted. Over a tier that does not support
    prefetch, `prefetch_into` is a read that cannot be cancelled. Owns `inner` and closes it. One
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
        """Return what the inner tier stores; its capacity is at most the planned room."""
        usage = self._inner.usage()
        room, capacity = self._plan.room_nbytes, usage.capacity_nbytes
        if room is None or (capacity is not None and capacity <= room):
            return usage
        return replace(usage, capacity_nbytes=room)

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
                raise no_space(
                    f"{self.name}: no room for {nbytes} bytes of {key} on a device of {room}; "
                    "discard keys"
                )
            return self._inner.reserve(key, nbytes)

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Read from the inner tier, or fail and ruin half of `dst` if it is host memory."""
        with self._lock:
            failed = self._failed_read(Operation.READ, key, dst, offset)
            return failed or self._inner.read_into(key, dst, offset=offset)

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        """Prefetch from the inner tier, or fail as `read_into` does."""
        with self._lock:
            failed = self._failed_read(Operation.PREFETCH, key, dst, offset)
            if failed is not None:
                return _UnderWay(failed)
            if isinstance(self._inner, SupportsPrefetch):
                return self._inner.prefetch_into(key, dst, offset=offset)
            return _UnderWay(self._inner.read_into(key, dst, offset=offset))

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

    def _failed_read(
        self, operation: Operation, key: TensorKey, dst: Buffer, offset: int
    ) -> CompletedTransfer | None:
        """Count the read; return its failure, None if it shall work."""
        self._validate(key, dst, offset)
        taken = self._take(operation, key)
        if taken is not None:
            if dst.space is not MemorySpace.DEVICE:
                dst.array[: dst.nbytes // 2] = RUINED
            return CompletedTransfer(taken[1])
        if key in self._damaged:
            return CompletedTransfer(
                CorruptDataError(f"{self.name}: {key} {DAMAGED}; write it whole or discard it")
            )
        return None

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
        error = fault.error(f"{self.name}: {PLANNED} of {operation.value} of {what}")
        if fault.phase is Phase.SUBMIT or operation in WITHOUT_COMPLETION:
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


class _UnderWay:
    """A read that began at submit, as a Prefetch."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self.done: Callable[[], bool] = completion.done

    def wait(self, timeout_s: float | None = None) -> None:
        self._completion.wait(timeout_s)

    def cancel(self) -> bool:
        return False

    def promote(self) -> None:
        return
