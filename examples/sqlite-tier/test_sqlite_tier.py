"""SqliteTier keeps the laws: run ``pytest`` in this folder."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

from zinf_sqlite_tier import SqliteTier

from zinf_core.keys import TensorKey
from zinf_core.testing import TierSuite, machine_for


def open_in(folder: Path) -> SqliteTier:
    """Return a tier in a file in `folder`."""
    return SqliteTier(str(folder / "tensors.db"), capacity_nbytes=16 << 20)


def text_of(key: TensorKey) -> str:
    """Return what the tier's file calls `key`."""
    return json.dumps([key.name, key.kind_value, key.part])


class TestSqliteTier(TierSuite):
    """The laws, with back doors that know the file's table."""

    num_kills = 6

    def open_tier(self, folder: Path) -> SqliteTier:
        """Open the tier."""
        self.folder = folder
        return open_in(folder)

    def peek(self, tier: SqliteTier, key: TensorKey) -> bytes:
        """Look at what was flushed, through a connection of our own."""
        with contextlib.closing(sqlite3.connect(self.folder / "tensors.db")) as db:
            query = "SELECT data FROM tensors WHERE key = ?"
            found: tuple[bytes] = db.execute(query, (text_of(key),)).fetchone()
        return found[0]

    def poke(self, tier: SqliteTier, key: TensorKey, data: bytes) -> bool:
        """Change a row, not asking the tier; no other connection may write meanwhile."""
        update = "UPDATE tensors SET data = ? WHERE key = ?"
        tier._db.execute(update, (data, text_of(key)))  # noqa: SLF001 - a back door
        return True


TestSqliteMachine = machine_for(open_in).TestCase
