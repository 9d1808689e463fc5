"""Broken tiers, one bug each, in what is fetched ahead of time: SupportsPrefetch."""

from __future__ import annotations

from zinf_core.buffers import Buffer
from zinf_core.errors import TierError, TransferCancelledError
from zinf_core.keys import TensorKey
from zinf_core.testing import DeferredTier
from zinf_core.tier import Prefetch


class Proxy:
    """A prefetch that passes everything on; the bugs below override one method."""

    def __init__(self, inner: Prefetch, dst: Buffer) -> None:
        self.inner = inner
        self.dst = dst

    def done(self) -> bool:
        return self.inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self.inner.wait(timeout_s)

    def cancel(self) -> bool:
        return self.inner.cancel()

    def promote(self) -> None:
        self.inner.promote()


class ProxyTier(DeferredTier):
    """DeferredTier whose prefetches are `kind`; keeps them, and so their buffers, if `keeps`."""

    kind: type[Proxy] = Proxy
    keeps = False

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        proxy = self.kind(super().prefetch_into(key, dst, offset=offset), dst)
        if self.keeps:
            self._kept = [*getattr(self, "_kept", []), proxy]
        return proxy


class CancelStillReads(ProxyTier):
    """A cancelled prefetch happens all the same, at the next flush."""

    class kind(Proxy):
        cancelled = False

        def cancel(self) -> bool:
            self.cancelled = True
            return True

        def done(self) -> bool:
            return self.cancelled or super().done()

        def wait(self, timeout_s: float | None = None) -> None:
            if self.cancelled:
                raise TransferCancelledError("cancelled")
            super().wait(timeout_s)


class CancelKeepsBuffer(ProxyTier):
    """A cancelled prefetch stays in a list, with its buffer."""

    keeps = True


class CancelledSucceeds(ProxyTier):
    """The wait for a cancelled prefetch returns as if the bytes were there."""

    class kind(Proxy):
        def wait(self, timeout_s: float | None = None) -> None:
            try:
                super().wait(timeout_s)
            except TransferCancelledError:
                return


class CancelsWhatIsDone(ProxyTier):
    """Cancel says True although the bytes have moved."""

    class kind(Proxy):
        def cancel(self) -> bool:
            super().cancel()
            return True


class PromoteCancels(ProxyTier):
    """A promoted prefetch is given up and never submitted again."""

    class kind(Proxy):
        def promote(self) -> None:
            super().cancel()


class PrefetchIgnoresOffset(DeferredTier):
    """A prefetch begins at the key's first byte, whatever was asked for."""

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        super().prefetch_into(key, dst, offset=offset)
        return super().prefetch_into(key, dst)


class _Failed:
    """A prefetch that has failed."""

    def __init__(self, error: TierError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        raise self._error

    def cancel(self) -> bool:
        return False

    def promote(self) -> None:
        return


class PrefetchRefusesAtWait(DeferredTier):
    """Bad arguments are noticed by wait."""

    def prefetch_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Prefetch:
        try:
            return super().prefetch_into(key, dst, offset=offset)
        except TierError as exc:
            return _Failed(exc)


class CloseLeavesPrefetches(DeferredTier):
    """Close settles what is waited for, and leaves prefetches for ever."""

    def close(self) -> None:
        self._pending.clear()
        super().close()
