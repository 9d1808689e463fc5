"""SqliteTier: named bytes in one SQLite file; an example of a tier that is not part of zinf.

All work since the last flush is one transaction, so a flush is atomic and a crash leaves the last.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace, TierCapabilities, TierUsage
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.errors import (
    ConfigError,
    KeyAbsentError,
    KeyExistsError,
    TierClosedError,
    TierFullError,
    TierLockedError,
    TransferError,
)
from zinf_core.keys import Extent, TensorKey
from zinf_core.registry import TierUrl
from zinf_core.tier import validate_reserve, validate_transfer

SET_UP = """
    PRAGMA page_size = 65536; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS tensors (id INTEGER PRIMARY KEY, key TEXT, data BLOB)
"""
CHUNK_NBYTES = 1 << 20
MAX_NBYTES = 999_000_000  # of a key: SQLite stores at most 1,000,000,000 bytes in a row


class SqliteTier:
    """One row per key; transfers happen at submit, one at a time. Thread-safe.

    Scratch memory: SQLite's page cache, about 2 MiB, and one chunk of 1 MiB.
    """

    name = "sqlite"
    capabilities = TierCapabilities(memory_spaces=frozenset({MemorySpace.HOST}), persistent=True)

    def __init__(self, path: str, *, capacity_nbytes: int | None = None) -> None:
        """Open or create the file at `path`; raises TierLockedError, TransferError."""
        self._capacity_nbytes = capacity_nbytes
        self._lock = threading.Lock()  # guards the connection and the rows
        self._db, found = opened(path)
        self._rows = {TensorKey(*json.loads(key)): (row, nbytes) for row, key, nbytes in found}
        self._is_open = True

    def usage(self) -> TierUsage:
        """Return what is stored now."""
        with self._lock:
            count, total = len(self._live()), sum(n for _, n in self._live().values())
        return TierUsage(
            num_keys=count,
            nbytes=total,
            allocated_nbytes=total,
            capacity_nbytes=self._capacity_nbytes,
        )

    def reserve(self, key: TensorKey, nbytes: int) -> Extent:
        """Insert a row of `nbytes` zeros. Raises as `Tier.reserve`."""
        with self._lock:
            rows = self._live()
            validate_reserve(self.name, key, nbytes)
            if key in rows:
                raise KeyExistsError(f"{self.name}: {key} is reserved already; discard it first")
            room = MAX_NBYTES
            if self._capacity_nbytes is not None:
                room = min(room, self._capacity_nbytes - sum(n for _, n in rows.values()))
            if nbytes > room:
                raise TierFullError(
                    f"{self.name}: no room for {key} of {nbytes} bytes: {room} left"
                )
            text = json.dumps([key.name, key.kind_value, key.part])
            insert = "INSERT INTO tensors (key, data) VALUES (?, zeroblob(?))"
            self._attempt(f"reserve of {key}", self._db.execute, insert, (text, nbytes)).wait()
            (row,) = self._db.execute("SELECT last_insert_rowid()").fetchone()
            rows[key] = row, nbytes
        return Extent(nbytes=nbytes, allocated_nbytes=nbytes)

    def stat(self, key: TensorKey) -> Extent:
        """Return the size of `key`. Raises KeyAbsentError."""
        with self._lock:
            _, nbytes = self._row(key)
        return Extent(nbytes=nbytes, allocated_nbytes=nbytes)

    def keys(self) -> Iterator[TensorKey]:
        """Iterate over a snapshot of the reserved keys."""
        with self._lock:
            return iter([*self._live()])

    def read_into(self, key: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        """Fill `dst` from byte `offset` of `key`, at once. Blocks."""
        with self._lock:
            row = self._valid_row(key, dst, offset)
            return self._attempt(f"read of {key}", self._fill, row, dst, offset)

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        """Replace bytes of `key` from `offset` on by those of `src`, at once. Blocks."""
        with self._lock:
            row = self._valid_row(key, src, offset)
            return self._attempt(f"write of {key}", self._put, row, src, offset)

    def discard(self, key: TensorKey) -> None:
        """Delete the row. Raises KeyAbsentError."""
        with self._lock:
            row, _ = self._row(key)
            delete = "DELETE FROM tensors WHERE id = ?"
            self._attempt(f"discard of {key}", self._db.execute, delete, (row,)).wait()
            del self._rows[key]

    def flush(self) -> Completion:
        """Commit everything, at once. Blocks until it is on the drive."""
        with self._lock:
            self._live()
            # `executescript` commits what is open before it begins anew.
            return self._attempt("flush", self._db.executescript, "BEGIN IMMEDIATE")

    def close(self) -> None:
        """Undo what was not flushed and close the file. Twice is fine."""
        with self._lock:
            self._is_open = False
            self._db.close()

    def _live(self) -> dict[TensorKey, tuple[int, int]]:
        if not self._is_open:
            raise TierClosedError(f"{self.name}: the tier was closed")
        return self._rows

    def _row(self, key: TensorKey) -> tuple[int, int]:
        if key not in self._live():
            raise KeyAbsentError(f"{self.name}: no key {key}")
        return self._rows[key]

    def _valid_row(self, key: TensorKey, buffer: Buffer, offset: int) -> int:
        (row, nbytes), limits = self._row(key), self.capabilities
        validate_transfer(self.name, key, nbytes, buffer, offset, capabilities=limits)
        return row

    def _fill(self, row: int, dst: Buffer, offset: int) -> None:
        with self._db.blobopen("tensors", "data", row, readonly=True) as blob:
            blob.seek(offset)
            for start in range(0, dst.nbytes, CHUNK_NBYTES):
                part = memoryview(dst.array)[start : start + CHUNK_NBYTES]
                part[:] = blob.read(len(part))

    def _put(self, row: int, src: Buffer, offset: int) -> None:
        self._db.execute("SAVEPOINT put")
        try:
            with self._db.blobopen("tensors", "data", row) as blob:
                blob.seek(offset)
                blob.write(memoryview(src.array))
        except sqlite3.Error:
            self._db.execute("ROLLBACK TO put")  # all or nothing (law 9)
            raise
        self._db.execute("RELEASE put")

    def _attempt(self, what: str, act: Callable[..., object], *args: object) -> Completion:
        """Return how `act` went: what SQLite raises is raised by `wait` (law 10)."""
        try:
            act(*args)
        except sqlite3.Error as exc:
            if not self._db.in_transaction:
                # SQLite undid all since the last flush: nobody may take that for the newest.
                self._is_open = False
            full = getattr(exc, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            kind = TierFullError if full else TransferError
            return CompletedTransfer(kind(f"{self.name}: {what} failed: {exc}"))
        return CompletedTransfer()


def opened(path: str) -> tuple[sqlite3.Connection, list[tuple[int, str, int]]]:
    """Return a connection that keeps other writers out, and id, key and size of every row."""
    db = None
    try:
        db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        db.executescript(SET_UP)
        return db, db.execute("SELECT id, key, length(data) FROM tensors").fetchall()
    except sqlite3.Error as exc:
        if db is not None:
            db.close()
        kind = TierLockedError if "locked" in str(exc) else TransferError
        raise kind(f"sqlite: cannot use {path}: {exc}") from exc


def open_sqlite(url: TierUrl, *, capacity_nbytes: int | None) -> SqliteTier:
    """Open ``sqlite:///folder/file.db``; named by the entry point."""
    url.refuse_unknown(frozenset())
    if not url.path:
        raise ConfigError("sqlite:// names no file; write sqlite:///folder/file.db")
    return SqliteTier(url.path, capacity_nbytes=capacity_nbytes)
