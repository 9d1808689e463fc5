"""Broken tiers, one bug each, in what is held, refused and settled: laws 7 to 14."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from planted_bytes import Later

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import KeyAbsentError, RangeError, TierClosedError, TransferError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing import DeferredTier, DictTier, FaultyTier, Operation, Phase, host_buffer
from zinf_core.tier import validate_transfer


class UsageDrifts(DictTier):
    """Law 7: each write counts as if it were new."""

    def __init__(self) -> None:
        super().__init__()
        self._written = 0

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        self._written += src.nbytes
        return super().write_from(key, src, offset=offset)

    def usage(self) -> TierUsage:
        usage = super().usage()
        return replace(usage, nbytes=max(usage.nbytes, self._written))


class DiscardLeaksRoom(DictTier):
    """Law 7: discarded bytes are not free again."""

    def discard(self, key: TensorKey) -> None:
        self._capacity_nbytes = (self._capacity_nbytes or 0) - len(self._stored.get(key, b""))
        super().discard(key)


class FailedReserveLeaks(DictTier):
    """Law 8: a reserve that finds no room leaves the key behind."""

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        try:
            return super().reserve(key, nbytes)
        except OSError:
            self._stored.setdefault(key, b"")
            raise


class PartlyWritten(FaultyTier):
    """Law 9: a failed write has changed the first half."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        self._damaged.clear()
        return completion


class FailureSwallowed(FaultyTier):
    """Law 9: a failed write is reported as a success."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        super().write_from(key, src, offset=offset)
        return CompletedTransfer()


class FailsAtSubmit(FaultyTier):
    """Law 10: the environment's failure comes out of the call."""

    def fail_next(
        self, operation: Operation, *, phase: Phase = Phase.WAIT, damage: bool = False
    ) -> None:
        super().fail_next(operation, phase=Phase.SUBMIT, damage=damage)


class FailsOnce(FaultyTier):
    """Law 10: the second wait forgets that the transfer failed."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        return Later(super().read_into(key, dst, offset=offset).wait, done=True)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        errors: list[TransferError] = []

        def act() -> None:
            try:
                completion.wait()
            except TransferError as exc:
                if not errors:
                    errors.append(exc)
                    raise

        return Later(act, done=True)


class RangeErrorAtWait(DictTier):
    """Law 10: a bad range is noticed when it is too late to stop."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        try:
            return super().read_into(key, dst, offset=offset)
        except RangeError as exc:
            return CompletedTransfer(exc)


class NoAlignmentCheck(DictTier):
    """Law 10: capabilities ask for an alignment that no call checks."""

    def __init__(self) -> None:
        super().__init__()
        self._checked = self.capabilities
        self.capabilities = replace(self._checked, offset_align=512, address_align=512)

    def _validate(self, key: TensorKey, nbytes: int, buffer: Buffer, offset: int) -> None:
        validate_transfer(self.name, key, nbytes, buffer, offset, capabilities=self._checked)


class TakesAnyMemory(NoAlignmentCheck):
    """Law 10: memory of a space the tier cannot reach is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = self._checked
        self._checked = replace(self._checked, memory_spaces=frozenset(MemorySpace))


class Overlapping(DictTier):
    """Law 2: the end of a write spills over into the key reserved before."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        keys = list(self._stored)
        other = keys[keys.index(key) - 1]
        if other != key:
            self._stored[other] = self._stored[other][:-1] + src.array[-1:].tobytes()
        return completion


class DiscardIgnoresAbsent(DictTier):
    """Law 11: discarding a key that is not there passes."""

    def discard(self, key: TensorKey) -> None:
        try:
            super().discard(key)
        except KeyAbsentError:
            return


class WriteCreates(DictTier):
    """Law 11: a write to an absent key reserves it."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        if not self._closed and key not in self._stored:
            self.reserve(key, offset + src.nbytes)
        return super().write_from(key, src, offset=offset)


class CloseForgets(DeferredTier):
    """Law 12: transfers in flight at close never happen."""

    def close(self) -> None:
        self._pending.clear()
        super().close()


class ClosesOnce(DictTier):
    """Law 12: a second close raises."""

    def close(self) -> None:
        self._check_open()
        super().close()


class OpenAfterClose(DictTier):
    """Law 12: a closed tier still answers."""

    def usage(self) -> TierUsage:
        try:
            return super().usage()
        except TierClosedError:
            return TierUsage(num_keys=0, nbytes=0, allocated_nbytes=0)


class LeavesThread(DictTier):
    """Law 12: a worker outlives close; `stop` ends it."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._worker = threading.Thread(target=stop.wait)
        self._worker.start()


class OneThreadOnly(DictTier):
    """Law 13: a transfer can be waited for only by the thread that submitted it."""

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        super().read_into(key, dst, offset=offset)
        owner = threading.get_ident()

        def act() -> None:
            if threading.get_ident() != owner:
                raise TransferError(f"{self.name}: waited for by another thread")

        return Later(act, done=False)


class SharedScratch(DictTier):
    """Law 13: every write goes through one scratch area, with a switch of threads in between."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        self._scratch = src.array.copy()
        threading.Event().wait(1e-5)
        scratch = self._scratch[: src.nbytes]
        src.array[: len(scratch)] = scratch
        return super().write_from(key, src, offset=offset)


class OpenTruncates(DictTier):
    """Law 14: opening starts from nothing."""

    def __init__(self, medium: dict[TensorKey, bytes]) -> None:
        medium.clear()
        super().__init__(medium=medium)


class FlushForgetsOne(DictTier):
    """Law 14: a flush misses the key written last."""

    def __init__(self, medium: dict[TensorKey, bytes]) -> None:
        super().__init__(medium=medium)
        self._own_medium = medium

    def flush(self) -> Completion:
        completion = super().flush()
        if self._own_medium:
            self._own_medium.popitem()
        return completion


class DiscardFreesTooEarly(DeferredTier):
    """Discard: transfers of the key in flight meet the key that has its name next."""

    def discard(self, key: TensorKey) -> None:
        self._inner.discard(key)


class LiveKeys(DictTier):
    """Keys: iteration goes over the live table."""

    def keys(self) -> Iterator[TensorKey]:
        super().keys()
        return iter(self._stored)


class PromisesMap(DictTier):
    """Capabilities: mappable, and there is no `map`."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, mappable=True)


class MapIsACopy(PromisesMap):
    """Map: the buffer is not the key's own memory."""

    def map(self, key: TensorKey) -> Buffer:
        copy = host_buffer(self.stat(key).nbytes)
        self.read_into(key, copy).wait()
        return copy
