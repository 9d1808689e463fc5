"""The tier over SqliteStore keeps the laws: run ``pytest`` in this folder."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

from zinf_sqlite_tier import SqliteStore

from zinf_core.blocking import BlockingTier
from zinf_core.keys import TensorKey
from zinf_core.testing import TierSuite, machine_for
from zinf_core.tier import Tier


def tier_over(store: SqliteStore) -> Tier:
    """Return the tier that the laws are checked on."""
    return BlockingTier(store, name="sqlite", capacity_nbytes=16 << 20, persistent=True)


def open_in(folder: Path) -> Tier:
    """Return a tier in a file in `folder`."""
    return tier_over(SqliteStore(str(folder / "tensors.db")))


def text_of(key: TensorKey) -> str:
    """Return what the file calls `key`."""
    return json.dumps([key.name, key.kind_value, key.part])


class TestSqliteTier(TierSuite):
    """The laws, with back doors that know the file's table."""

    num_kills = 6

    def open_tier(self, folder: Path) -> Tier:
        """Open the tier."""
        self.folder = folder
        self.store = SqliteStore(str(folder / "tensors.db"))
        return tier_over(self.store)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        """Look at what was flushed, through a connection of our own."""
        with contextlib.closing(sqlite3.connect(self.folder / "tensors.db")) as db:
            query = "SELECT data FROM tensors WHERE key = ?"
            found: tuple[bytes] = db.execute(query, (text_of(key),)).fetchone()
        return found[0]

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        """Change a row, not asking the store; no other connection may write meanwhile."""
        update = "UPDATE tensors SET data = ? WHERE key = ?"
        self.store._db.execute(update, (data, text_of(key)))  # noqa: SLF001 - a back door
        return True


TestSqliteMachine = machine_for(open_in).TestCase
