"""DeferredTier: every transfer happens as late as the laws allow, in a drawn order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import Completion
from zinf_core.errors import ConfigError, TransferCancelledError, TransferTimeoutError
from zinf_core.keys import Extent, TensorKey
from zinf_core.testing.buffers import fill_host
from zinf_core.tier import Prefetch, Tier, validate_transfer

POISON: Final = 0xA5
"""Byte a destination holds from submit until its transfer happens."""

_HOST_SPACES: Final = frozenset({MemorySpace.HOST, MemorySpace.HOST_PINNED})

Order = Callable[[int], int]
"""Given how many transfers could happen next, the index of the one that does. 0 is the one that
is waited for, the others follow in the order of their submission."""


def latest(num_candidates: int) -> int:
    """Order in which nothing happens before it is waited for."""
    del num_candidates
    return 0


def seeded_order(seed: int) -> Order:
    """Return an order drawn from `seed`: what is not waited for may happen first."""
    return random.Random(seed).randrange


class DeferredTier:
    """Wrapper that makes races visible which a prompt tier hides.

    A read's destination is poisoned at submit and filled only when the transfer happens; a
    write's source is read only then. So a buffer used or reused too early gives wrong bytes every
    time, not once in a thousand runs. Transfers happen inside `wait`, on the waiting thread; what
    is still pending happens when `flush` is waited for (writes submitted before it), at `discard`
    (transfers of that key) and at `close`.

    `done` makes no progress until it was asked `polls_until_done` times; that poll performs the
    transfer, so that callers which poll are not stuck. `wait(timeout_s=0)` is such a poll.

    Owns `inner` and closes it. One lock guards the pending transfers and is held while one
    happens, so that submits and cancels of other threads wait for it. A prefetch is a deferred
    read that can be cancelled until it happens, whatever `inner` supports. Destinations and
    sources must be host memory, unless `fill` can set the bytes of others.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        order: Order = latest,
        poison: int = POISON,
        polls_until_done: int = 8,
        fill: Callable[[Buffer, bytes], None] | None = None,
    ) -> None:
        """Wrap `inner`; `fill(buffer, data)` poisons memory of any space.

        Raises ConfigError if `inner` takes no host memory and there is no `fill`.
        """
        spaces = inner.capabilities.memory_spaces
        spaces = spaces & _HOST_SPACES if fill is None else spaces
        if not spaces:
            raise ConfigError(
                f"DeferredTier needs host memory, which {inner.name} does not take; pass `fill`, "
                "which poisons memory of other spaces"
            )
        self._inner = inner
        self._capabilities = replace(inner.capabilities, memory_spaces=spaces, mappable=False)
        self._order = order
        self._poison = poison
        self._polls_until_done = polls_until_done
        self._fill = fill or fill_host
        self._pending: list[_Deferred] = []
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """Name of the inner tier."""
        return self._inner.name

    @property
    def capabilities(self) -> TierCapabilities:
        """The inner tier's, without `map` and, without `fill`, for host memory only."""
        return self._capabilities

    @property
    def num_pending(self) -> int:
        """Transfers submitted that have not happened."""
        with self._lock:
            return len(self._pending)

    def usage(self) -> TierUsage:
        """Return what the inner tier stores."""
        return self._inner.usage()

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Reserve on the inner tier."""
        return self._inner.reserve(key, nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return where `key` lies on the inner tier."""
        return self._inner.stat(key)

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the inner tier's keys."""
        return self._inner.keys()

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Poison `dst` and keep the read for later."""
        return self._deferred_read(key, dst, offset)

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        """Poison `dst` and keep the read for later, unless it is cancelled before."""
        return self._deferred_read(key, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Keep the write for later; `src` is not looked at before."""
        with self._lock:
            self._validate(key, src, offset)
            return self._defer(key, lambda: self._inner.write_from(key, src, offset=offset).wait())

    def discard(self, key: TensorKey) -> None:
        """Let the key's transfers happen, then discard it."""
        with self._lock:
            self._inner.stat(key)
            self._settle([item for item in self._pending if item.key == key])
            self._inner.discard(key)

    def flush(self) -> Completion:
        """Keep a flush for later; what was submitted before happens before it."""
        with self._lock:
            self._inner.usage()  # raises if closed
            before = list(self._pending)
            return self._defer(None, lambda: self._flush_after(before))

    def close(self) -> None:
        """Let everything pending happen in drawn order, then close the inner tier."""
        with self._lock:
            self._settle(list(self._pending))
            self._inner.close()

    def _validate(self, key: TensorKey, buffer: Buffer, offset: int) -> None:
        nbytes = self._inner.stat(key).nbytes
        validate_transfer(self.name, key, nbytes, buffer, offset, capabilities=self._capabilities)

    def _deferred_read(self, key: TensorKey, dst: Buffer, offset: int) -> _Deferred:
        with self._lock:
            self._validate(key, dst, offset)
            self._fill(dst, bytes([self._poison]) * dst.nbytes)
            return self._defer(key, lambda: self._inner.read_into(key, dst, offset=offset).wait())

    def _defer(self, key: TensorKey | None, act: Callable[[], None]) -> _Deferred:
        item = _Deferred(self, key, act)
        self._pending.append(item)
        return item

    def _flush_after(self, before: list[_Deferred]) -> None:
        self._settle(before)
        self._inner.flush().wait()

    def _settle(self, items: list[_Deferred]) -> None:
        left = [item for item in items if not item.happened]
        while left:
            left.pop(self._order(len(left))).happen()
            left = [item for item in left if not item.happened]

    def _until(self, target: _Deferred) -> None:
        """Let drawn transfers happen until `target` has."""
        with self._lock:
            while not target.happened:
                others = [item for item in self._pending if item is not target]
                [target, *others][self._order(len(others) + 1)].happen()

    def _poll(self, target: _Deferred) -> bool:
        """Count one poll of `target`; return whether it has happened."""
        with self._lock:
            target.num_polls += 1
            if not target.happened and target.num_polls >= self._polls_until_done:
                target.happen()
            return target.happened

    def _cancel(self, target: _Deferred) -> bool:
        """Make `target` happen without doing anything, unless it has happened."""
        with self._lock:
            if target.happened:
                return False
            error = TransferCancelledError(f"{self.name}: prefetch of {target.key} was cancelled")
            target.give_up(error)
            return True

    def _forget(self, target: _Deferred) -> None:
        self._pending.remove(target)


class _Deferred:
    """One transfer kept for later; the tier's lock guards it."""

    def __init__(self, tier: DeferredTier, key: TensorKey | None, act: Callable[[], None]) -> None:
        self.key = key
        self.num_polls = 0
        self.happened = False
        self._tier = tier
        self._act: Callable[[], None] | None = act
        self._error: Exception | None = None

    def happen(self) -> None:
        """Do the transfer now, keep its error, and let go of the buffer."""
        act, self._act = self._act, None
        self.happened = True
        self._tier._forget(self)  # noqa: SLF001 - the two classes are one unit
        try:
            if act is not None:
                act()
        except Exception as exc:  # noqa: BLE001 - raised by every wait
            self._error = exc

    def give_up(self, error: Exception) -> None:
        """Let go of the buffer without the transfer; every wait raises `error`."""
        self._act, self._error = None, error
        self.happen()

    def cancel(self) -> bool:
        return self._tier._cancel(self)  # noqa: SLF001 - the two classes are one unit

    def promote(self) -> None:
        return

    def done(self) -> bool:
        return self._tier._poll(self)  # noqa: SLF001 - the two classes are one unit

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None and timeout_s <= 0 and not self.done():
            raise TransferTimeoutError(f"{self._tier.name}: transfer of {self.key} still deferred")
        self._tier._until(self)  # noqa: SLF001 - the two classes are one unit
        if self._error is not None:
            raise self._error.with_traceback(None)
