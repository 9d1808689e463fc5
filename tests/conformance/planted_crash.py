"""Tiers on disk, one sound and the others with one bug each, that show when a process is killed.

SIGKILL loses nothing that a system call has handed over; so a missing fsync does not show here,
and each bug is one of order: what is there between two calls.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from zinf_core.buffers import Buffer
from zinf_core.completion import CompletedTransfer, Completion
from zinf_core.keys import TensorKey
from zinf_core.testing import DictTier, TierSuite
from zinf_core.testing.crash_model import FlushScope
from zinf_core.tier import Tier


def linger(delay_s: float = 2e-3) -> None:
    """Take as long as a device might."""
    threading.Event().wait(delay_s)


class FileTier(DictTier):
    """Sound: a flush writes one file beside the old one and renames it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "keys.json"
        super().__init__(medium=self._load())

    def flush(self) -> Completion:
        with self._lock:
            self._check_open()
            self._save(self._text())
        return CompletedTransfer()

    def _load(self) -> dict[TensorKey, bytes]:
        entries = json.loads(self._file.read_text()) if self._file.exists() else []
        return {TensorKey(*name): bytes.fromhex(data) for name, data in entries}

    def _text(self) -> str:
        entries = [
            ((key.name, key.kind_value, key.part), data.hex()) for key, data in self._stored.items()
        ]
        return json.dumps(entries)

    def _save(self, text: str) -> None:
        beside = self._file.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._file)


class AcknowledgesEarly(FileTier):
    """Law 14: the flush is done when its worker has begun."""

    _worker: threading.Thread | None = None

    def _save(self, text: str) -> None:
        self._join()
        self._worker = threading.Thread(target=self._work, args=(text,))
        self._worker.start()

    def _work(self, text: str) -> None:
        linger()
        super()._save(text)

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()

    def close(self) -> None:
        self._join()
        super().close()


class OpenRewrites(FileTier):
    """Law 14: open moves the file away to write it anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if self._file.exists():
            text = self._file.read_text()
            self._file.unlink()
            linger(2e-2)
            self._save(text)


class FolderTier(FileTier):
    """Sound where a flush commits each key: a file per key, renamed into its place by the write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(folder)

    def _load(self) -> dict[TensorKey, bytes]:
        found = {}
        for path in self._folder.glob("*.key"):
            name, kind, part = path.name.removesuffix(".key").split(",")
            found[TensorKey(name, kind, part)] = path.read_bytes()
        return found

    def _path(self, key: TensorKey) -> Path:
        return self._folder / f"{key.name},{key.kind_value},{key.part}.key"

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        completion = super().write_from(key, src, offset=offset)
        self._put(self._path(key), self._stored[key])
        return completion

    def discard(self, key: TensorKey) -> None:
        super().discard(key)
        self._path(key).unlink(missing_ok=True)

    def flush(self) -> Completion:
        with self._lock:
            self._check_open()
        return CompletedTransfer()

    def _put(self, path: Path, data: bytes) -> None:
        beside = path.with_suffix(".new")
        beside.write_bytes(data)
        beside.replace(path)


class FlushesInPlace(FolderTier):
    """Law 14: a flush replaces one key's file after the other."""

    def write_from(self, key: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        return DictTier.write_from(self, key, src, offset=offset)

    def discard(self, key: TensorKey) -> None:
        DictTier.discard(self, key)

    def flush(self) -> Completion:
        with self._lock:
            self._check_open()
            wanted = {self._path(key): data for key, data in self._stored.items()}
        for path in set(self._folder.glob("*.key")) - set(wanted):
            path.unlink()
            linger()
        for path, data in wanted.items():
            self._put(path, data)
            linger()
        return CompletedTransfer()


class WritesInPlace(FolderTier):
    """Law 9: a write that is cut short leaves new bytes before old ones, and nobody notices."""

    def _put(self, path: Path, data: bytes) -> None:
        path.touch()
        with path.open("rb+") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            linger()
            file.write(data[len(data) // 2 :])


class ForgetsInMemory(DictTier):
    """Law 14: what is flushed lives as long as the process."""

    def __init__(self, folder: Path) -> None:
        del folder
        super().__init__(medium={})


class CrashSuite(TierSuite):
    """Suite of one of the tiers above; a child process makes it from its class."""

    kind: type[DictTier] = FileTier
    num_kills = 30
    timeout_s = 20.0

    def open_tier(self, folder: Path) -> Tier:
        return self.kind(folder)  # type: ignore[call-arg, arg-type]


class AcknowledgesEarlySuite(CrashSuite):
    kind = AcknowledgesEarly


class OpenRewritesSuite(CrashSuite):
    kind = OpenRewrites


class FlushesInPlaceSuite(CrashSuite):
    kind = FlushesInPlace


class FolderTierAsWholeSuite(CrashSuite):
    kind = FolderTier


class FolderTierSuite(CrashSuite):
    kind = FolderTier
    flush_scope = FlushScope.KEY


class WritesInPlaceSuite(FolderTierSuite):
    kind = WritesInPlace


class AcknowledgesEarlyByKeySuite(CrashSuite):
    kind = AcknowledgesEarly
    flush_scope = FlushScope.KEY


class ForgetsInMemorySuite(CrashSuite):
    kind = ForgetsInMemory
