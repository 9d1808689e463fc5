"""Whose memory a chunked tier uses: the caller's, wherever it lies, and little of its own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from chunked_helpers import CHECKED, CHUNK, SMALL, dicts, key, noise, opened, read, store

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace, TierCapabilities
from zinf_core.completion import Completion
from zinf_core.errors import AlignmentError, UnsupportedBufferError
from zinf_core.keys import TensorKey
from zinf_core.testing import DictTier, host_buffer
from zinf_core.testing.buffers import ForeignBuffer
from zinf_storage.chunked import ChunkedOptions, codec_named
from zinf_storage.chunked.scratch import WINDOW, Scratch

NBYTES = 3 * CHUNK + 512
SPACES = {
    "both": frozenset({MemorySpace.HOST, MemorySpace.DEVICE}),
    "device": frozenset({MemorySpace.DEVICE}),
}


class WatchedTier(DictTier):
    """A DictTier that notes the memory of every transfer."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.seen: list[Buffer] = []

    def read_into(self, which: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        self.seen.append(dst)
        return super().read_into(which, dst, offset=offset)

    def write_from(self, which: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        self.seen.append(src)
        return super().write_from(which, src, offset=offset)


class DeviceBuffer(ForeignBuffer):
    """Memory that the CPU must not touch: only a tier may ask for its array."""

    copying = threading.local()

    @property
    def array(self) -> np.ndarray:
        assert getattr(self.copying, "now", False), "the CPU touched device memory"
        return super().array

    def part(self, start: int, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(self.behind.part(start, nbytes), self.space)


class DeviceTier(DictTier):
    """A DictTier that takes memory of a device."""

    def __init__(self, spaces: frozenset[MemorySpace], **alignments: int) -> None:
        capabilities = TierCapabilities(memory_spaces=spaces, **alignments)
        super().__init__(capabilities=capabilities)

    def read_into(self, which: TensorKey, dst: Buffer, *, offset: int = 0) -> Completion:
        DeviceBuffer.copying.now = True
        try:
            return super().read_into(which, dst, offset=offset)
        finally:
            DeviceBuffer.copying.now = False

    def write_from(self, which: TensorKey, src: Buffer, *, offset: int = 0) -> Completion:
        DeviceBuffer.copying.now = True
        try:
            return super().write_from(which, src, offset=offset)
        finally:
            DeviceBuffer.copying.now = False


def on_device(data: bytes) -> DeviceBuffer:
    behind = host_buffer(len(data))
    behind.array[:] = np.frombuffer(data, np.uint8)
    return DeviceBuffer(behind, MemorySpace.DEVICE)


@pytest.mark.parametrize("options", [SMALL, CHECKED], ids=["striped", "checksummed"])
def test_whole_chunks_travel_without_a_copy(options: ChunkedOptions) -> None:
    """Catches chunks copied to scratch memory on their way."""
    inner = WatchedTier()
    with opened([inner], options) as tier:
        store(tier, key(0), noise(NBYTES))
        buffer = host_buffer(NBYTES)
        for submit in (tier.read_into, tier.write_from):
            inner.seen.clear()
            submit(key(0), buffer).wait(timeout_s=30)
            starts = sorted(part.address - buffer.address for part in inner.seen)
            assert starts == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]


def test_parts_of_unchecked_chunks_are_read_alone() -> None:
    """Catches whole chunks read for a few bytes where nothing needs the rest."""
    inner = WatchedTier()
    with opened([inner]) as tier:
        store(tier, key(0), noise(NBYTES))
        inner.seen.clear()
        assert read(tier, key(0), CHUNK + 10, 20) == noise(NBYTES)[CHUNK + 10 : CHUNK + 30]
        assert [part.nbytes for part in inner.seen] == [20]


def test_pinned_memory_stays_pinned_memory() -> None:
    """Catches parts handed on as pageable memory, for which a device needs another copy."""
    inner = WatchedTier()
    with opened([inner]) as tier:
        tier.reserve(key(0), NBYTES)
        buffer = HostBuffer(host_buffer(NBYTES).memory, NBYTES, space=MemorySpace.HOST_PINNED)
        for submit in (tier.write_from, tier.read_into):
            submit(key(0), buffer).wait(timeout_s=30)
        assert {part.space for part in inner.seen} == {MemorySpace.HOST_PINNED}


@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES)
def test_device_memory_is_not_touched(spaces: frozenset[MemorySpace]) -> None:
    """Catches device bytes read or written by the CPU, and edges of chunks lost with them."""
    align = {"offset_align": 512, "length_align": 4}
    inner = [DeviceTier(spaces, **align), DeviceTier(spaces)]
    with opened(inner) as tier:
        unit = 512 if MemorySpace.HOST in spaces else CHUNK
        assert (tier.capabilities.offset_align, tier.capabilities.length_align) == (unit, unit)
        tier.reserve(key(0), NBYTES)
        expected = bytearray(noise(NBYTES))
        tier.write_from(key(0), on_device(bytes(expected))).wait(timeout_s=30)
        for i, (start, end) in enumerate(((0, 1), (1, 2), (1, 5), (3, 7))):
            low, high = start * unit, min(end * unit, NBYTES)
            data = noise(max(high - low, 0), i)
            if data:
                expected[low:high] = data
                tier.write_from(key(0), on_device(data), offset=low).wait(timeout_s=30)
        for start in range(0, NBYTES, unit):
            dst = on_device(bytes(NBYTES - start))
            tier.read_into(key(0), dst, offset=start).wait(timeout_s=30)
            assert dst.behind.array.tobytes() == bytes(expected[start:])
        with pytest.raises(AlignmentError):
            tier.read_into(key(0), on_device(bytes(unit + 4)))


def test_a_part_of_nothing_can_be_written_from_a_device() -> None:
    """Catches edges read from a chunk that was never written."""
    with opened([DeviceTier(SPACES["both"])]) as tier:
        tier.reserve(key(0), NBYTES)
        tier.write_from(key(0), on_device(noise(100)), offset=CHUNK + 512).wait(timeout_s=30)
        assert read(tier, key(0), CHUNK + 512, 100) == noise(100)


def test_checked_tiers_need_host_memory() -> None:
    """Catches checksums of memory the CPU cannot read."""
    with opened([DeviceTier(SPACES["both"])], CHECKED) as tier:
        tier.reserve(key(0), 10)
        with pytest.raises(UnsupportedBufferError):
            tier.write_from(key(0), on_device(bytes(10)))


def test_scratch_is_what_is_promised() -> None:
    """Catches scratch memory that grows with transfers, or more of it than is documented."""
    for has_codec, areas in ((False, 1), (True, 2 + WINDOW)):
        scratch = Scratch(num_benches=3, chunk_nbytes=CHUNK, has_codec=has_codec)
        memory = set()
        for bench in scratch.benches:
            memory |= {bench.merged.address, bench.shuffled.address}
            memory |= {area.address for area in bench.coded}
        assert len(memory) == 3 * areas
    codec = codec_named("zstd")
    options = ChunkedOptions(scheme="compressed", chunk_nbytes=CHUNK, codec=codec, num_threads=2)
    with opened(dicts([{}]), options) as tier:
        store(tier, key(0), b"a" * 50 * CHUNK)
        read(tier, key(0), 5)
        benches = tier._parts.machinery.scratch.benches
        assert [len(bench.coded) for bench in benches] == [WINDOW, WINDOW]
