"""BlockingTier: a whole tier over plain calls that store bytes and return when they are done."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import (
    NO_ROOM,
    ConfigError,
    CorruptDataError,
    KeyAbsentError,
    KeyExistsError,
    TierClosedError,
    TierError,
    TierFullError,
    TransferError,
)
from zinf_core.keys import Extent, TensorKey
from zinf_core.tier import validate_reserve, validate_transfer

_DONE: Final = CompletedTransfer()


class Store(Protocol):
    """Named bytes behind plain blocking calls; what `BlockingTier` needs to be a tier.

    `key` is a text of printable ASCII, of any length, different for each key: the JSON list of the
    three parts of a `TensorKey`. The tier makes one call at a time, from any thread, and only with
    keys that are stored and ranges that lie inside them.

    Where the environment fails, a call raises OSError (ENOSPC, EDQUOT and EFBIG say that there is
    no room) or a TierError, and has changed nothing. A store that lost more than the call was about
    raises TierClosedError, which closes the tier. Any other exception is taken for a bug, and comes
    out of the tier's call.
    """

    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of each key that is stored. Called once, before anything else."""
        ...

    def create(self, key: str, nbytes: int) -> None:
        """Make room for `nbytes` (>= 0) under `key`, which is not stored; with any contents."""
        ...

    def delete(self, key: str) -> None:
        """Forget `key` and free its room."""
        ...

    def read(self, key: str, memory: memoryview, offset: int) -> None:
        """Fill `memory` (bytes, at least one) from byte `offset` of `key` on. Keep no reference."""
        ...

    def write(self, key: str, memory: memoryview, offset: int) -> None:
        """Replace bytes of `key` from `offset` on by those of `memory` (bytes, at least one, read
        only): all of them, or none if it fails (law 9). Keep no reference."""
        ...

    def commit(self) -> None:
        """Make durable what was done so far, if the store is persistent."""
        ...

    def close(self) -> None:
        """Release everything; what was not committed may be lost. Called again if it raises."""
        ...


class BlockingTier:
    """Tier over a `Store`, which moves the bytes (laws 1, 3, 5, 9, 14); the tier keeps the others.

    Transfers happen at submit, one at a time, with host memory: their completions are done when
    submit returns. Thread-safe; `usage`, `stat` and `keys` do not wait for transfers. Takes no
    memory besides the table of sizes.

    `_turn` is held during calls of the store and by whoever changes the table; `_lock` guards the
    table, is held for an instant, and is only taken by itself or inside `_turn`.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        capacity_nbytes: int | None = None,
        persistent: bool = False,
    ) -> None:
        """Take over `store`: it is closed with the tier, and also if this raises.

        `capacity_nbytes` bounds the sum of all keys, None leaves that to the store. `persistent`
        says that what was committed is found by the next open. Raises ConfigError for a negative
        capacity, TransferError if `store.sizes` fails, CorruptDataError if it has other texts.
        """
        self.name = name
        self.capabilities = TierCapabilities(
            memory_spaces=frozenset({MemorySpace.HOST}), persistent=persistent
        )
        self._store = store
        self._capacity_nbytes = capacity_nbytes
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._is_open = True
        self._is_released = False
        with contextlib.ExitStack() as undo:
            undo.callback(store.close)
            if capacity_nbytes is not None and capacity_nbytes < 0:
                raise ConfigError(f"{name}: capacity_nbytes = {capacity_nbytes} is negative")
            with self._named("opening"):
                found = store.sizes()
            self._sizes = {_key_of(text, name): nbytes for text, nbytes in found.items()}
            undo.pop_all()
        self._nbytes = sum(self._sizes.values())

    def usage(self) -> TierUsage:
        """Return what is stored now."""
        with self._lock:
            return TierUsage(
                num_keys=len(self._table()),
                nbytes=self._nbytes,
                allocated_nbytes=self._nbytes,
                capacity_nbytes=self._capacity_nbytes,
            )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Make room for `nbytes` under `key`. Raises as `Tier.reserve`; TransferError if the store
        fails. Blocks."""
        with self._turn:
            self._require_room(key, nbytes)
            with self._named(f"reserve of {nbytes} bytes for {key}"):
                self._store.create(_text_of(key), nbytes)
            with self._lock:
                self._sizes[key] = nbytes
                self._nbytes += nbytes
        return _extent(nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key`. Raises KeyAbsentError."""
        return _extent(self._size(key))

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            return iter(list(self._table()))

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Fill `dst` from byte `offset` of `key`, at once. Blocks."""
        with self._turn:
            self._validate(key, dst, offset)
            if not dst.nbytes:
                return _DONE
            what = f"read of {dst.nbytes} bytes of {key} at {offset}"
            text, memory = _text_of(key), memoryview(dst.array)
            return self._settled(what, lambda: self._store.read(text, memory, offset))

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Replace bytes of `key` from `offset` on by those of `src`, at once. Blocks."""
        with self._turn:
            self._validate(key, src, offset)
            if not src.nbytes:
                return _DONE
            what = f"write of {src.nbytes} bytes of {key} at {offset}"
            text, memory = _text_of(key), memoryview(src.array).toreadonly()
            return self._settled(what, lambda: self._store.write(text, memory, offset))

    def discard(self, key: TensorKey) -> None:
        """Forget `key`. Raises KeyAbsentError; TransferError, and keeps it, if the store fails.
        Blocks."""
        with self._turn:
            nbytes = self._size(key)
            with self._named(f"discard of {key}"):
                self._store.delete(_text_of(key))
            with self._lock:
                del self._sizes[key]
                self._nbytes -= nbytes

    def flush(self) -> Completion:
        """Make durable what was written before, at once. Blocks."""
        with self._turn:
            with self._lock:
                self._table()
            return self._settled("flush", self._store.commit)

    def close(self) -> None:
        """Wait for the call of the store that runs, and close it. Twice is fine, also to repeat a
        close that failed. Blocks."""
        with self._turn:
            with self._lock:
                self._is_open = False
            if not self._is_released:
                with self._named("close"):
                    self._store.close()
                self._is_released = True

    def _table(self) -> dict[TensorKey, int]:
        if not self._is_open:
            raise TierClosedError(f"{self.name}: the tier was closed; open it again")
        return self._sizes

    def _size(self, key: TensorKey) -> int:
        with self._lock:
            sizes = self._table()
            if key not in sizes:
                raise KeyAbsentError(f"{self.name}: no key {key}; reserve it first")
            return sizes[key]

    def _require_room(self, key: TensorKey, nbytes: int) -> None:
        with self._lock:
            sizes = self._table()
            validate_reserve(self.name, key, nbytes)
            if key in sizes:
                raise KeyExistsError(f"{self.name}: {key} is reserved already; discard it first")
            if self._capacity_nbytes is None:
                return
            room = self._capacity_nbytes - self._nbytes
            if nbytes > room:
                raise TierFullError(
                    errno.ENOSPC,
                    f"{self.name}: no room for {key} of {nbytes} bytes: {room} left of "
                    f"{self._capacity_nbytes}; discard keys or open it with a larger capacity",
                )

    def _validate(self, key: TensorKey, buffer: Buffer, offset: int) -> None:
        nbytes, limits = self._size(key), self.capabilities
        validate_transfer(self.name, key, nbytes, buffer, offset, capabilities=limits)

    def _settled(self, what: str, call: Callable[[], None]) -> Completion:
        """Make the call and return how it went (law 10)."""
        try:
            with self._named(what):
                call()
        except TierError as exc:
            return CompletedTransfer(_without_frames(exc))
        return _DONE

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Raise the store's OSError as what it means to a tier, and obey its TierClosedError."""
        try:
            yield
        except TierError as exc:
            if isinstance(exc, TierClosedError):
                with self._lock:
                    self._is_open = False
            raise
        except OSError as exc:
            kind = TierFullError if exc.errno in NO_ROOM else TransferError
            text = f"{self.name}: {what} failed: {exc.strerror or exc}"
            raise kind(exc.errno or errno.EIO, text, exc.filename) from exc


def _text_of(key: TensorKey) -> str:
    return json.dumps([key.name, key.kind_value, key.part])


def _key_of(text: str, tier_name: str) -> TensorKey:
    try:
        return TensorKey(*json.loads(text))
    except (TypeError, ValueError) as exc:
        raise CorruptDataError(
            f"{tier_name}: stores {text!r}, which is no key of a tier; has another program "
            "written to it?"
        ) from exc


def _without_frames(error: TierError) -> TierError:
    """Drop the frames of the error and of its causes: their locals hold the buffer (law 6)."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _extent(nbytes: int) -> Extent:
    return Extent(nbytes=nbytes, allocated_nbytes=nbytes)
