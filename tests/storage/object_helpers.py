"""What the object tier's tests share: tiers on folders, and a bucket that fails or waits."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvme_helpers import buffer_of, key, noise

from zinf_core.errors import TransferError
from zinf_core.keys import TensorKey
from zinf_storage.object_store import Connection, ObjectOptions, ObjectTier, open_bucket

__all__ = ["SMALL", "TrickyBucket", "buffer_of", "key", "noise"]

PART = 4096
SMALL = ObjectOptions(part_nbytes=PART, num_threads=2)


class TrickyBucket:
    """A bucket whose calls are counted, fail when armed and wait at a gate."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._armed: dict[str, int] = {}
        self._holding = ""
        self._gates: dict[str, threading.Event] = {}
        self.calls: list[tuple[str, object]] = []
        self.entered = threading.Event()

    def arm(self, call: str, *, times: int = 1, holding: str = "") -> None:
        """Fail the next `times` of `call` with a name that holds a text."""
        self._armed[call], self._holding = times, holding

    def hold(self, call: str) -> None:
        self._gates[call] = threading.Event()
        self.entered.clear()

    def release(self, call: str) -> None:
        self._gates.pop(call).set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in {"put", "create", "read_into", "get", "names", "delete", "make_durable"}:
            return value

        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            first = list(first) if name in {"delete", "make_durable"} else first
            self.calls.append((name, first))
            gate = self._gates.get(name)
            if gate is not None:
                self.entered.set()
                assert gate.wait(timeout=30)
            if self._armed.get(name, 0) and self._holding in str(first):
                self._armed[name] -= 1
                raise TransferError(errno.EIO, f"armed {name} of {first}")
            return value(first, *args, **kwargs)

        return call


def bucket_in(folder: Path) -> TrickyBucket:
    return TrickyBucket(open_bucket(f"file://{folder}", Connection()))


@contextmanager
def opened(
    place: Path | TrickyBucket, options: ObjectOptions = SMALL, name: str = "object"
) -> Iterator[ObjectTier]:
    bucket: Any = bucket_in(place) if isinstance(place, Path) else place
    tier = ObjectTier.open(bucket, name=name, options=options)
    try:
        yield tier
    finally:
        tier.close()


def write(tier: ObjectTier, which: TensorKey, data: bytes, offset: int = 0) -> None:
    tier.write_from(which, buffer_of(data), offset=offset).wait(timeout_s=30)


def store(tier: ObjectTier, which: TensorKey, data: bytes) -> None:
    tier.reserve(which, len(data))
    write(tier, which, data)


def read(tier: ObjectTier, which: TensorKey) -> bytes:
    buffer = buffer_of(b"\xa5" * tier.stat(which).nbytes)
    tier.read_into(which, buffer).wait(timeout_s=30)
    return buffer.array.tobytes()


def flush(tier: ObjectTier) -> None:
    tier.flush().wait(timeout_s=30)


def objects(folder: Path, kind: str = "parts") -> set[str]:
    """Return the names of the objects in one of the tier's folders."""
    place = folder / kind
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


# obstore opens three descriptors for its runtime, once per process: not in the test that is first.
open_bucket("memory:///", Connection()).names("parts", doing="start")
