"""What a tier's transfers and commits have to do, each in its own way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from zinf_core.buffers import Buffer
from zinf_core.keys import TensorKey
from zinf_storage.transfers.completion import TransferCompletion

Task = Callable[[], None]


class Page(Protocol):
    """One reserved key of a tier."""

    @property
    def key(self) -> TensorKey:
        """Its name."""
        ...

    @property
    def discarded(self) -> bool:
        """Whether the key is gone, so that no queued write need begin. Read with the lock held."""
        ...


class Step(Protocol):
    """A block on its way."""

    def finish(self) -> None:
        """Return when the block was moved. Blocks. Raises what that failed with."""
        ...


class Transfer(Protocol):
    """A read or a write. Belongs to the workers until its last block was moved."""

    @property
    def what(self) -> str:
        """Name in messages."""
        ...

    @property
    def completion(self) -> TransferCompletion:
        """Undone until the scheduler settles it."""
        ...

    def indices(self) -> range:
        """Return the blocks to move, at least one."""
        ...

    def block_nbytes(self, index: int) -> int:
        """Return the bytes, at least one, that block `index` brings."""
        ...

    def move(self, index: int) -> Step | None:
        """Move a block, or set it moving: then the returned step must be finished.

        Blocks; called by workers, without the lock. May raise anything.
        """
        ...

    def end(self, *, succeeded: bool) -> Task | None:
        """Drop the versions that the transfer held. Called with the lock held, once for each time
        it was begun.

        Returns what is to be done without the lock, if anything, before the transfer counts as
        ended. Raises InternalError.
        """
        ...

    def release(self) -> None:
        """Drop every reference to the caller's memory (law 6)."""
        ...


class Write(Transfer, Protocol):
    """A write of one page, queued or in flight."""

    @property
    def page(self) -> Page:
        """What it writes to."""
        ...

    def begin(self) -> None:
        """Fix which versions the write leads from and to. Called with the lock held.

        Raises TierFullError if there is no room now, TransferError; nothing changed then.
        """
        ...

    def flip(self) -> None:
        """Make what was written the page's current version. Called with the lock held, before
        `end`. Raises InternalError."""
        ...


class Commit(Protocol):
    """The current versions of all pages at one moment, to be made durable."""

    def include(self, write: Any) -> None:
        """Hold what `write`, submitted before, has just made current. Called with the lock held."""
        ...

    def run(self) -> None:
        """Make it durable and drop what nobody needs any more. Blocks; takes the lock itself."""
        ...

    def abandon(self) -> None:
        """Drop the versions, for nobody will call `run`. Called with the lock held."""
        ...


PageT_contra = TypeVar("PageT_contra", bound=Page, contravariant=True)


class TransferMaker(Protocol[PageT_contra]):
    """What a tier adds to the scheduler. Everything is called with `lock` held."""

    @property
    def lock(self) -> threading.Lock:
        """The tier's one lock."""
        ...

    def read(self, page: PageT_contra, dst: Buffer, offset: int, *, what: str) -> Transfer:
        """Return a read of the version that is current now, begun."""
        ...

    def write(self, page: PageT_contra, src: Buffer, offset: int, *, what: str) -> Write:
        """Return a write, not begun."""
        ...

    def commit(self) -> Commit:
        """Return a commit of the versions that are current now."""
        ...
