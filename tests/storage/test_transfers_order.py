"""TransferScheduler over a tier that is a list of what was asked of it: room found late, steps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from zinf_core.buffers import Buffer
from zinf_core.errors import InternalError, TierFullError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import host_buffer
from zinf_storage.transfers.completion import TransferCompletion
from zinf_storage.transfers.scheduler import TransferScheduler
from zinf_storage.transfers.transfer import Task


@dataclass(eq=False)
class Page:
    key: TensorKey
    discarded: bool = False


@dataclass(eq=False)
class Block:
    """A step of a transfer: what `script` says happens when it is finished."""

    transfer: Moved
    index: int

    def finish(self) -> None:
        self.transfer.maker.note(f"finish {self.transfer.name}{self.index}")
        self.transfer.maker.script(self.transfer.name, self.index)


@dataclass(eq=False)
class Moved:
    """A read or a write of as many blocks as its buffer has bytes."""

    maker: Maker
    page: Page
    buffer: Buffer | None
    num_blocks: int
    what: str
    completion: TransferCompletion = field(init=False)

    def __post_init__(self) -> None:
        self.completion = TransferCompletion(self.what)
        self.name = self.page.key.name

    def indices(self) -> range:
        return range(self.num_blocks)

    def block_nbytes(self, index: int) -> int:
        return 1

    def begin(self) -> None:
        self.maker.note(f"begin {self.name}")

    def move(self, index: int) -> Block:
        assert self.buffer is not None
        self.maker.note(f"start {self.name}{index}")
        return Block(self, index)

    def flip(self) -> None:
        self.maker.note(f"flip {self.name}")

    def end(self, *, succeeded: bool) -> Task | None:
        assert self.maker.lock.locked()
        return self.maker.on_end(self.name) if self.maker.on_end else None

    def release(self) -> None:
        self.buffer = None


@dataclass(eq=False)
class Maker:
    """A TransferMaker that logs; `script` is called when a step is finished."""

    script: Callable[[str, int], None] = lambda name, index: None
    on_end: Callable[[str], Task | None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    log: list[str] = field(default_factory=list)
    made: list[Moved] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.log.append(line)

    def read(self, page: Page, dst: Buffer, offset: int, *, what: str) -> Moved:
        self.made.append(Moved(self, page, dst, dst.nbytes, what))
        return self.made[-1]

    write = read


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def scheduler(maker: Maker) -> Iterator[TransferScheduler[Page]]:
    made = TransferScheduler(maker, tier_name="t", num_threads=1, window=2, finds_room_late=True)
    yield made
    made.drain()
    made.shutdown()


def page(name: str) -> Page:
    return Page(TensorKey.of(name, StateKind.PARAM))


def writes(scheduler: TransferScheduler[Page], sizes: dict[str, int]) -> list[TransferCompletion]:
    """Submit a write of so many blocks of each page, all before a worker has one."""
    with scheduler.lock:
        return [
            scheduler.submit_write(page(name), host_buffer(size), 0) for name, size in sizes.items()
        ]


def test_blocks_of_several_transfers_are_on_their_way_together(
    maker: Maker, scheduler: TransferScheduler[Page]
) -> None:
    """Catches a worker that waits for one transfer before it starts the next, and one that starts
    more than it may."""
    for completion in writes(scheduler, {"a": 3, "b": 1}):
        completion.wait(timeout_s=30)
    assert [line for line in maker.log if line[0] in "sf" and "flip" not in line] == [
        "start a0", "start a1", "finish a0", "start a2", "finish a1", "start b0", "finish a2",
        "finish b0",
    ]  # fmt: skip


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_who_found_no_room_runs_again_alone(
    maker: Maker, scheduler: TransferScheduler[Page], names: str
) -> None:
    """Catches a write that fails although another one, which found no room either, gave back what
    it had taken meanwhile; and one that runs again next to others."""
    attempts: dict[str, int] = {}

    def script(name: str, index: int) -> None:
        attempts[name] = attempts.get(name, 0) + 1
        if name in "ab" and attempts[name] == 1:
            raise TierFullError(28, f"no room for {name}")

    maker.script = script
    for completion in writes(scheduler, dict.fromkeys(names, 1)):
        completion.wait(timeout_s=30)
    first, again = maker.log[: len(names)], maker.log[len(names) :]
    assert first == [f"begin {name}" for name in names]
    assert attempts == {name: 2 if name in "ab" else 1 for name in names}
    for name in "ab":
        at = again.index(f"begin {name}")
        assert again[at : at + 4] == [
            f"begin {name}", f"start {name}0", f"finish {name}0", f"flip {name}",
        ]  # fmt: skip


def test_who_never_finds_room_fails(maker: Maker, scheduler: TransferScheduler[Page]) -> None:
    """Catches writes that are run again for ever, or failed while one of them might still fit."""

    def script(name: str, index: int) -> None:
        raise TierFullError(28, f"no room for {name}")

    maker.script = script
    buffers = [host_buffer(1) for _ in range(3)]
    with scheduler.lock:
        pending = [
            scheduler.submit_write(page(name), buffers[i], 0) for i, name in enumerate("abc")
        ]
    for name, completion in zip("abc", pending, strict=True):
        with pytest.raises(TierFullError, match=f"no room for {name}"):
            completion.wait(timeout_s=30)
    assert not any(buffer.is_shared() for buffer in buffers)
    begun = [line for line in maker.log if line.startswith("begin")]
    assert len(begun) <= 6


def test_what_is_to_be_done_first_is_done_before_the_transfer_is(
    maker: Maker, scheduler: TransferScheduler[Page]
) -> None:
    """Catches a completion whose room was not given back yet, a lock held meanwhile, and a bug in
    it that nobody hears of."""
    gate, entered = threading.Event(), threading.Event()

    def give_back() -> None:
        assert not maker.lock.locked()
        entered.set()
        assert gate.wait(timeout=30)
        raise InternalError("told")

    maker.on_end = lambda name: give_back
    with scheduler.lock:
        completion = scheduler.submit_read(page("a"), host_buffer(1), 0)
    assert entered.wait(timeout=30)
    assert not completion.done()
    gate.set()
    with pytest.raises(InternalError, match="told"):
        completion.wait(timeout_s=30)


def test_steps_keep_nothing_of_a_transfer_that_is_done(scheduler: TransferScheduler[Page]) -> None:
    """Catches a worker that still refers to the buffer when the completion is done (law 6)."""
    buffer = host_buffer(5)
    with scheduler.lock:
        completion = scheduler.submit_write(page("a"), buffer, 0)
    completion.wait(timeout_s=30)
    assert not buffer.is_shared()
    dead = weakref.ref(buffer.memory)
    del buffer
    gc.collect()
    assert dead() is None
