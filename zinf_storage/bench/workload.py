"""Workload: the test data of one tier, and the requests of each cell on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from zinf_core.buffers import Buffer, BufferAllocator
from zinf_core.errors import ConfigError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.tier import Tier
from zinf_core.units import PAGE_NBYTES, MiB, align_up
from zinf_storage.bench.grid import Cell, Operation, Order

_MAX_DATA_KEY_NBYTES: Final = 64 * MiB
_MIN_DATA_KEYS: Final = 4
_MAX_WRITE_KEYS: Final = 1024
_MAX_POSITIONS: Final = 8192
_SEED: Final = 20240229


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One transfer of a cell."""

    key: TensorKey
    offset: int
    is_write: bool


class Workload:
    """Test data on a tier: large keys that requests read parts of, and, while a cell runs, keys of
    the request's size that they write whole.

    Whole keys are written because that is what paging does, and because a tier that never writes
    in place copies the rest of a key with every part. The bytes are random, so a tier that
    compresses gains nothing. Not thread-safe.
    """

    def __init__(self, tier: Tier, *, data_nbytes: int, arena: Buffer, token: str) -> None:
        """Plan for `data_nbytes` of data, see `rounded_data`; requests in flight share `arena`,
        filled with noise. `token` makes the keys' names unlike any other's."""
        self._tier = tier
        self._data_nbytes = data_nbytes
        self._token = token
        self._key_nbytes = min(_MAX_DATA_KEY_NBYTES, data_nbytes // _MIN_DATA_KEYS)
        self._keys: list[TensorKey] = []
        self._num_cells = 0
        self._arena = arena

    def fill(self, should_stop: Callable[[], bool]) -> None:
        """Write the data, a whole key at a time, and make it durable; all of it unless
        `should_stop` says so before. Blocks. Raises what the tier raises."""
        for index in range(self._data_nbytes // self._key_nbytes):
            if should_stop():
                break
            key = self._named("data", index)
            self._tier.reserve(key, self._key_nbytes)
            self._keys.append(key)
            self._tier.write_from(key, self._arena.part(0, self._key_nbytes)).wait()
        self._tier.flush().wait()

    def slots(self, cell: Cell) -> list[Buffer]:
        """Return one buffer per request that `cell` has in flight; they share the arena."""
        nbytes = cell.nbytes
        if nbytes * cell.depth > self._arena.nbytes:
            raise ConfigError(f"{cell} needs more than the {self._arena.nbytes} bytes of the arena")
        return [self._arena.part(slot * nbytes, nbytes) for slot in range(cell.depth)]

    @contextmanager
    def requests(self, cell: Cell) -> Iterator[Sequence[Request]]:
        """Reserve what `cell` writes, and return its requests, to be repeated in this order.

        Every call starts elsewhere in the data. The keys are discarded on leaving.
        """
        self._num_cells += 1
        chance = random.Random(f"{_SEED}/{self._num_cells}")
        reads, writes = self._reads(cell, chance), []
        keys: list[TensorKey] = []
        try:
            if cell.operation is not Operation.READ:
                for index in range(self._num_write_keys(cell)):
                    key = self._named(f"write-{self._num_cells}", index)
                    self._tier.reserve(key, cell.nbytes)
                    keys.append(key)
                order = list(keys)
                if cell.order is Order.RANDOM:
                    chance.shuffle(order)
                writes = [Request(key=key, offset=0, is_write=True) for key in order]
            yield _interleaved(cell.operation, reads, writes)
        finally:
            for key in keys:
                self._tier.discard(key)

    def remove(self) -> None:
        """Discard the data and make that durable. Blocks."""
        for key in self._keys:
            self._tier.discard(key)
        self._keys.clear()
        self._tier.flush().wait()

    def _named(self, what: str, index: int) -> TensorKey:
        return TensorKey.of(f"zinf-bench-{self._token}.{what}.{index}", StateKind.PARAM)

    def _num_write_keys(self, cell: Cell) -> int:
        fitting = self._data_nbytes // 4 // cell.nbytes
        return max(cell.depth, min(fitting, _MAX_WRITE_KEYS))

    def _reads(self, cell: Cell, chance: random.Random) -> list[Request]:
        per_key = self._key_nbytes // cell.nbytes
        total = per_key * len(self._keys)
        count = min(total, _MAX_POSITIONS)
        if cell.order is Order.RANDOM:
            places = chance.sample(range(total), count)
        else:
            first = chance.randrange(total)
            places = [(first + index) % total for index in range(count)]
        return [
            Request(
                key=self._keys[place // per_key],
                offset=place % per_key * cell.nbytes,
                is_write=False,
            )
            for place in places
        ]


def rounded_data(nbytes: int) -> int:
    """Return the least size of test data from `nbytes` up that makes keys of equal size, whole
    pages each. Pure."""
    is_large = nbytes >= _MIN_DATA_KEYS * _MAX_DATA_KEY_NBYTES
    return align_up(nbytes, _MAX_DATA_KEY_NBYTES if is_large else _MIN_DATA_KEYS * PAGE_NBYTES)


def allocate_noise(nbytes: int, allocator: BufferAllocator) -> Buffer:
    """Return a page-aligned buffer of at least `nbytes` random bytes, which no drive, file system
    or tier can make smaller."""
    buffer = allocator.allocate(align_up(nbytes))
    generator = np.random.default_rng(_SEED)
    buffer.array.view(np.uint64)[:] = generator.integers(
        0, 1 << 64, buffer.nbytes // 8, np.uint64, endpoint=False
    )
    return buffer


def _interleaved(
    operation: Operation, reads: list[Request], writes: list[Request]
) -> Sequence[Request]:
    if operation is Operation.READ:
        return reads
    if operation is Operation.WRITE:
        return writes
    count = max(len(reads), len(writes))
    return [
        request
        for index in range(count)
        for request in (reads[index % len(reads)], writes[index % len(writes)])
    ]
