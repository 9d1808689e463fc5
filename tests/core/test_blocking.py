"""BlockingTier: the kit over a store in memory, what becomes of its errors, and its locks."""

from __future__ import annotations

import errno
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from zinf_core.blocking import BlockingTier, Store
from zinf_core.completion import Completion
from zinf_core.errors import (
    ConfigError,
    CorruptDataError,
    KeyExistsError,
    RangeError,
    TierClosedError,
    TierError,
    TierFullError,
    TransferError,
)
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import Operation, TierSuite, host_buffer, machine_for
from zinf_core.tier import Tier

KEY = TensorKey.of("layer.weight", StateKind.PARAM)
OTHER = TensorKey.of("layer.bias", StateKind.PARAM)
TIMEOUT_S = 30.0


class MemoryStore:
    """Keeps bytes in a dict, fails when told to, and notes calls that overlap."""

    def __init__(self, medium: dict[str, bytes] | None = None) -> None:
        self.medium = {} if medium is None else medium
        self.stored = {key: bytearray(data) for key, data in self.medium.items()}
        self.failures: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.overlaps: list[str] = []
        self._busy = threading.Lock()

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            self.overlaps.append(name)
            raise RuntimeError(f"{name} while another call runs")
        try:
            self.calls.append(name)
            if name in self.failures:
                raise self.failures.pop(name)
            yield
        finally:
            self._busy.release()

    def sizes(self) -> dict[str, int]:
        with self._call("sizes"):
            return {key: len(data) for key, data in self.stored.items()}

    def create(self, key: str, nbytes: int) -> None:
        with self._call("create"):
            assert key not in self.stored
            self.stored[key] = bytearray(nbytes)

    def delete(self, key: str) -> None:
        with self._call("delete"):
            del self.stored[key]

    def read(self, key: str, memory: memoryview, offset: int) -> None:
        part = memory[:]
        with self._call("read"):
            part[:] = self.stored[key][offset : offset + len(part)]

    def write(self, key: str, memory: memoryview, offset: int) -> None:
        part = memory[:]
        with self._call("write"):
            assert memory.readonly
            self.stored[key][offset : offset + len(part)] = part

    def commit(self) -> None:
        with self._call("commit"):
            self.medium.clear()
            self.medium.update({key: bytes(data) for key, data in self.stored.items()})

    def close(self) -> None:
        with self._call("close"):
            self.stored.clear()


def tier_over(store: Store, *, capacity_nbytes: int | None = None) -> BlockingTier:
    return BlockingTier(store, name="mem", capacity_nbytes=capacity_nbytes)


def text_of(key: TensorKey) -> str:
    return json.dumps([key.name, key.kind_value, key.part])


class TestBlockingTier(TierSuite):
    """The laws; every call of the store that overlaps another is an error."""

    @pytest.fixture(autouse=True)
    def _media(self) -> Iterator[None]:
        self.media: dict[Path, dict[str, bytes]] = {}
        self.stores: list[MemoryStore] = []
        yield
        assert not [name for store in self.stores for name in store.overlaps]

    def open_tier(self, folder: Path) -> Tier:
        self.stores.append(MemoryStore(self.media.setdefault(folder, {})))
        return BlockingTier(self.stores[-1], name="mem", capacity_nbytes=16 << 20, persistent=True)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        return bytes(self.stores[-1].stored[text_of(key)])

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        self.stores[-1].stored[text_of(key)][:] = data
        return True

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        name = "read" if operation is Operation.READ else "write"
        self.stores[-1].failures[name] = OSError(errno.EIO, "broken")
        return True


TestBlockingMachine = pytest.mark.slow(
    machine_for(lambda folder: tier_over(MemoryStore())).TestCase
)


def submits(tier: BlockingTier) -> dict[str, Callable[[], Completion]]:
    """Return the calls that give a completion, by the name of the store's call."""
    return {
        "read": lambda: tier.read_into(KEY, host_buffer(100), offset=7),
        "write": lambda: tier.write_from(KEY, host_buffer(100), offset=7),
        "commit": tier.flush,
    }


@pytest.mark.parametrize("call", ["read", "write", "commit"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "broken", "/drive"), TransferError),
        (OSError("no number"), TransferError),
        (OSError(errno.ENOSPC, "full"), TierFullError),
        (OSError(errno.EDQUOT, "full"), TierFullError),
        (OSError(errno.EFBIG, "full"), TierFullError),
        (CorruptDataError("rotten"), CorruptDataError),
        (TierFullError("quota"), TierFullError),
    ],
)
def test_failures_of_the_environment_come_from_wait(
    call: str, error: Exception, kind: type[TierError]
) -> None:
    """Catches errors raised at submit, of the wrong kind, or that do not say what failed."""
    store = MemoryStore()
    tier = tier_over(store)
    tier.reserve(KEY, 500)
    store.failures[call] = error
    completion = submits(tier)[call]()
    assert completion.done()
    for _ in range(2):
        with pytest.raises(kind) as caught:
            completion.wait()
    assert type(caught.value) is kind
    if isinstance(error, TierError):
        assert caught.value is error
    else:
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == (error.errno or errno.EIO)
        assert caught.value.filename == error.filename
        what = "flush" if call == "commit" else f"{call} of 100 bytes of layer.weight/param at 7"
        assert f"mem: {what} failed: {error.strerror or error}" in str(caught.value)
        assert caught.value.__cause__ is error
    submits(tier)[call]().wait()


def test_a_failed_reserve_or_discard_changes_nothing() -> None:
    """Catches keys and bytes counted that the store does not have, or the other way round."""
    store = MemoryStore()
    tier = tier_over(store)
    tier.reserve(KEY, 500)
    before = tier.usage()
    store.failures["create"] = OSError(errno.ENOSPC, "full")
    with pytest.raises(
        TierFullError, match=r"reserve of 70 bytes for layer\.bias/param failed: full"
    ):
        tier.reserve(OTHER, 70)
    store.failures["delete"] = OSError(errno.EIO, "broken")
    with pytest.raises(TransferError, match=r"discard of layer\.weight/param failed: broken"):
        tier.discard(KEY)
    assert tier.usage() == before
    assert list(tier.keys()) == [KEY]
    tier.discard(KEY)
    assert tier.usage().nbytes == 0


@pytest.mark.parametrize("call", ["read", "write", "commit"])
def test_bugs_of_the_store_are_not_hidden(call: str) -> None:
    """Catches a wrong line in a store that looks like a broken drive, and a lock left taken."""
    store = MemoryStore()
    tier = tier_over(store)
    tier.reserve(KEY, 500)
    store.failures[call] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        submits(tier)[call]()
    submits(tier)[call]().wait()
    tier.close()


@pytest.mark.parametrize("call", ["read", "write", "commit", "create", "delete"])
def test_a_store_that_lost_everything_closes_the_tier(call: str) -> None:
    """Catches bytes served by a store that said they are not the newest (law 4)."""
    store = MemoryStore()
    tier = tier_over(store)
    tier.reserve(KEY, 500)
    store.failures[call] = TierClosedError("all is lost")
    calls = submits(tier) | {
        "create": lambda: tier.reserve(OTHER, 1),
        "delete": lambda: tier.discard(KEY),
    }
    with pytest.raises(TierClosedError, match="all is lost"):
        calls[call]().wait()
    before = list(store.calls)
    for refused in (*calls.values(), tier.usage, tier.keys, lambda: tier.stat(KEY)):
        with pytest.raises(TierClosedError, match="mem: the tier was closed"):
            refused()
    assert store.calls == before
    tier.close()
    assert store.calls[-1] == "close"


def test_only_what_is_valid_reaches_the_store() -> None:
    """Catches stores that see ranges outside a key, keys twice, or empty transfers."""
    store = MemoryStore()
    tier = tier_over(store, capacity_nbytes=500)
    tier.reserve(KEY, 500)
    before = list(store.calls)
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (RangeError, lambda: tier.read_into(KEY, host_buffer(100), offset=401)),
        (RangeError, lambda: tier.write_from(KEY, host_buffer(0), offset=501)),
        (KeyExistsError, lambda: tier.reserve(KEY, 1)),
        (TierFullError, lambda: tier.reserve(OTHER, 1)),
        (RangeError, lambda: tier.reserve(OTHER, -1)),
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            call()
    for submit in (tier.read_into, tier.write_from):
        submit(KEY, host_buffer(0), offset=500).wait()
    assert store.calls == before


def test_a_failed_transfer_keeps_no_buffer() -> None:
    """Catches frames of the store, held by the error in the completion, that hold the memory."""
    store = MemoryStore()
    tier = tier_over(store)
    tier.reserve(KEY, 100)
    for call, submit in (("read", tier.read_into), ("write", tier.write_from)):
        buffer = host_buffer(100)
        memory = weakref.ref(buffer.array)
        store.failures[call] = OSError(errno.EIO, "broken")
        completion = submit(KEY, buffer)
        del buffer
        assert memory() is None, f"law 6: a failed {call} keeps its buffer"
        with pytest.raises(TransferError):
            completion.wait()


def test_what_is_stored_counts_after_opening() -> None:
    """Catches keys that are found but take no room."""
    store = MemoryStore({text_of(KEY): bytes(60), text_of(OTHER): b""})
    tier = tier_over(store, capacity_nbytes=100)
    assert set(tier.keys()) == {KEY, OTHER}
    assert (tier.stat(KEY).nbytes, tier.usage().nbytes, tier.usage().num_keys) == (60, 60, 2)
    third = TensorKey.of("third", StateKind.GRAD)
    with pytest.raises(TierFullError, match="of 41 bytes: 40 left of 100; discard keys"):
        tier.reserve(third, 41)
    tier.reserve(third, 40)


@pytest.mark.parametrize("text", ["plain", "5", '["a", "b"', '["a"]', '["a", "b", 5]', "{}"])
def test_foreign_contents_are_refused(text: str) -> None:
    """Catches rows of another program taken for tensors, and a store left open by the refusal."""
    store = MemoryStore({text: b""})
    with pytest.raises(CorruptDataError, match=r"mem: stores .* which is no key"):
        tier_over(store)
    assert store.calls == ["sizes", "close"]


def test_a_store_is_closed_if_the_tier_cannot_be_made() -> None:
    """Catches files that nobody can close."""
    store = MemoryStore()
    store.failures["sizes"] = OSError(errno.EIO, "broken")
    with pytest.raises(TransferError, match="mem: opening failed: broken"):
        tier_over(store)
    assert store.calls == ["sizes", "close"]
    store = MemoryStore()
    with pytest.raises(ConfigError, match="capacity_nbytes = -1 is negative"):
        tier_over(store, capacity_nbytes=-1)
    assert store.calls == ["close"]


def test_a_failed_close_can_be_repeated() -> None:
    """Catches a file left open for good by one failure, and one closed twice."""
    store = MemoryStore()
    tier = tier_over(store)
    store.failures["close"] = OSError(errno.EIO, "broken")
    with pytest.raises(TransferError, match="mem: close failed: broken"):
        tier.close()
    with pytest.raises(TierClosedError):
        tier.flush()
    tier.close()
    tier.close()
    assert store.calls == ["sizes", "close", "close"]


class SlowStore(MemoryStore):
    """Reads when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()
        self.let = threading.Event()
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()
        super().close()

    def read(self, key: str, memory: memoryview, offset: int) -> None:
        self.reading.set()
        assert self.let.wait(TIMEOUT_S)
        super().read(key, memory, offset)


def test_looking_does_not_wait_for_transfers_and_close_does() -> None:
    """Catches one lock for all, which makes `usage` block on a drive; and a close that cuts a
    transfer off."""
    store = SlowStore()
    tier = tier_over(store)
    tier.reserve(KEY, 100)
    with ThreadPoolExecutor(2) as threads:
        read = threads.submit(tier.read_into, KEY, host_buffer(100))
        try:
            assert store.reading.wait(TIMEOUT_S)
            looks = threads.submit(lambda: (tier.usage().nbytes, list(tier.keys()), tier.stat(KEY)))
            assert looks.result(TIMEOUT_S)[:2] == (100, [KEY])
            closing = threads.submit(tier.close)
            assert not store.closed.wait(0.05)
        finally:
            store.let.set()
        read.result(TIMEOUT_S).wait()
        closing.result(TIMEOUT_S)
    assert store.calls[-2:] == ["read", "close"]
