"""SqliteStore: named bytes in one SQLite file; an example of a tier that is not part of zinf.

All work since the last commit is one transaction: commits are atomic, and a crash leaves the last.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator

from zinf_core.blocking import BlockingTier
from zinf_core.errors import ConfigError, TierClosedError, TierLockedError, TransferError
from zinf_core.registry import TierUrl

SET_UP = """
    PRAGMA busy_timeout = 0; PRAGMA page_size = 32768; PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL; BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS tensors (key TEXT PRIMARY KEY, data BLOB)
"""
CHUNK_NBYTES = 1 << 20


class SqliteStore:
    """One row per key. Scratch memory: SQLite's page cache, about 2 MiB, and one chunk of 1 MiB."""

    def __init__(self, path: str) -> None:
        """Open or create the file at `path`. Raises TierLockedError, TransferError."""
        with contextlib.ExitStack() as undo:
            try:
                self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                undo.callback(self._db.close)
                self._db.executescript(SET_UP)
            except sqlite3.Error as exc:
                kind = TierLockedError if "locked" in str(exc) else TransferError
                raise kind(f"sqlite: cannot use {path}: {exc}") from exc
            undo.pop_all()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each key."""
        with self._attempt():
            return dict(self._db.execute("SELECT key, length(data) FROM tensors").fetchall())

    def create(self, key: str, nbytes: int) -> None:
        """Insert a row of zeros."""
        with self._attempt():
            self._db.execute("INSERT INTO tensors VALUES (?, zeroblob(?))", (key, nbytes))

    def delete(self, key: str) -> None:
        """Delete the row."""
        with self._attempt():
            self._db.execute("DELETE FROM tensors WHERE key = ?", (key,))

    def read(self, key: str, memory: memoryview, offset: int) -> None:
        """Copy out of the row, a chunk at a time."""
        with self._attempt(), self._blob(key, readonly=True) as blob:
            blob.seek(offset)
            for start in range(0, len(memory), CHUNK_NBYTES):
                part = memory[start : start + CHUNK_NBYTES]
                part[:] = blob.read(len(part))

    def write(self, key: str, memory: memoryview, offset: int) -> None:
        """Write into the row."""
        with self._attempt(), self._blob(key, readonly=False) as blob:
            blob.seek(offset)
            blob.write(memory)

    def commit(self) -> None:
        """Commit, which `executescript` does with what is open, and begin anew."""
        with self._attempt():
            self._db.executescript("BEGIN IMMEDIATE; SAVEPOINT attempt")

    def close(self) -> None:
        """Undo what was not committed and close the file."""
        self._db.close()

    def _blob(self, key: str, *, readonly: bool) -> sqlite3.Blob:
        found = self._db.execute("SELECT rowid FROM tensors WHERE key = ?", (key,)).fetchone()
        return self._db.blobopen("tensors", "data", found[0], readonly=readonly)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Undo what fails (law 9), and raise it as OSError."""
        try:
            self._db.execute("SAVEPOINT attempt")
            yield
            self._db.execute("RELEASE attempt")
        except sqlite3.Error as exc:
            if not self._db.in_transaction:  # nobody may take the last commit for the newest
                raise TierClosedError(f"SQLite undid all since the last flush: {exc}") from exc
            self._db.execute("ROLLBACK TO attempt")
            code = getattr(exc, "sqlite_errorcode", None)
            full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(exc)) from exc


def open_sqlite(url: TierUrl, *, capacity_nbytes: int | None) -> BlockingTier:
    """Open ``sqlite:///folder/file.db``; named by the entry point."""
    url.refuse_unknown(frozenset())
    if not url.path:
        raise ConfigError("sqlite:// names no file; write sqlite:///folder/file.db")
    store = SqliteStore(url.path)
    return BlockingTier(store, name="sqlite", capacity_nbytes=capacity_nbytes, persistent=True)
