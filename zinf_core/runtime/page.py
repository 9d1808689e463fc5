"""Page: one stored tensor as the pager sees it."""

from __future__ import annotations

from typing import Any, Protocol

from zinf_core.buffers import Buffer
from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import Lease
from zinf_core.runtime.residency import Residency, check_transition
from zinf_core.runtime.transfers import Transfer


class PageClient(Protocol):
    """The framework's side of a page: it sees tensors where the pager sees bytes."""

    def open_view(self, buffer: Buffer) -> Any:
        """Return the framework's tensor over `buffer`. The pager drops it at eviction."""
        ...

    def was_written(self) -> bool:
        """Return whether the bytes of the view may have changed since this was asked last."""
        ...

    def close_view(self) -> None:
        """Know that the view was given up: nothing writes through it any more."""
        ...


class Page:
    """Mutable state of one page, guarded by the lock of its pager. Made by `Pager.add` only."""

    __slots__ = (
        "client",
        "home",
        "is_ahead",
        "key",
        "last_use",
        "lease",
        "mapped",
        "nbytes",
        "pins",
        "residency",
        "stored",
        "transfer",
        "view",
        "wanted",
    )

    def __init__(self, key: TensorKey, nbytes: int, home: str, client: PageClient) -> None:
        """Describe a page that has no bytes anywhere yet."""
        self.key = key
        self.nbytes = nbytes
        self.home = home
        self.client = client
        self.residency = Residency.ABSENT
        self.mapped = False
        """The home tier is the device itself: `view` is always there, nothing is moved."""
        self.stored = False
        """The home tier holds bytes that were written, perhaps older ones than memory."""
        self.lease: Lease | None = None
        """Its memory, in the device pool or the host pool."""
        self.view: Any = None
        """What the client made of the lease; None unless that is of the device pool."""
        self.transfer: Transfer | None = None
        self.wanted = False
        """Asked for while it was written back: keep it resident afterwards."""
        self.is_ahead = False
        """Fetched ahead of its use and not used since."""
        self.pins = 0
        self.last_use = 0

    @property
    def has_bytes(self) -> bool:
        """Whether there are bytes to read, in memory or at home."""
        return self.stored or self.residency is not Residency.ABSENT

    def become(self, residency: Residency) -> None:
        """Change state. Raises ResidencyError if the change is illegal."""
        check_transition(self.key, self.residency, residency)
        self.residency = residency
