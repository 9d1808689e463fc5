"""The kit on the chunked tiers: striped, compressed, checksummed, over and under other tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash
from chunked_doors import (
    TokenCodec,
    chunks_of,
    decoded,
    index_of,
    replace_stored,
    stored,
)

from zinf_core.keys import TensorKey
from zinf_core.runtime.pool import BufferPool
from zinf_core.testing import (
    DeferredTier,
    DictTier,
    FaultyTier,
    Operation,
    TierSuite,
    machine_for,
    seeded_order,
)
from zinf_core.tier import Tier
from zinf_core.units import KiB, MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.chunked import ChunkedOptions, ChunkedTier, codec_named
from zinf_storage.chunked.index import Content
from zinf_storage.chunked.table import Chunk, KeyVersion
from zinf_storage.host import HostTier
from zinf_storage.nvme import NvmeOptions, NvmeTier

CHUNK = 16 * KiB
STRIPED = ChunkedOptions(chunk_nbytes=CHUNK)
UNEQUAL = ChunkedOptions(chunk_nbytes=CHUNK, shares=(1, 2, 5), num_threads=2)
CHECKSUMMED = ChunkedOptions(scheme="checksummed", chunk_nbytes=CHUNK, checksums=True)


def compressing(codec: str) -> ChunkedOptions:
    return ChunkedOptions(
        scheme="compressed", chunk_nbytes=CHUNK, codec=codec_named(codec), num_threads=2
    )


@dataclass
class Media:
    """What dict tiers keep when they are closed, by folder."""

    of: dict[Path, list[dict[TensorKey, bytes]]] = field(default_factory=dict)

    def dicts(self, folder: Path, count: int) -> list[Tier]:
        media = self.of.setdefault(folder, [{} for _ in range(count)])
        return [DictTier(f"dict{i}", medium=medium) for i, medium in enumerate(media)]


def open_nvme(folder: Path, name: str) -> NvmeTier:
    options = NvmeOptions(segment_nbytes=MiB, capacity_nbytes=10 * MiB, num_threads=2)
    return NvmeTier.open(folder / name, options=options)


def open_host(folder: Path) -> HostTier:
    allocator = PageAlignedAllocator()
    pool = BufferPool("host", budget_nbytes=17 * MiB, allocator=allocator)
    return HostTier(name=f"host {folder.name}", pool=pool)


class ChunkedSuite(TierSuite):
    """The back doors decode the index and the chunks from what the inner tiers store."""

    options = STRIPED
    tokens: TokenCodec | None = None

    @pytest.fixture(autouse=True)
    def _media(self) -> None:
        self.media = Media()

    def inner(self, folder: Path) -> Sequence[Tier]:
        return [FaultyTier(tier) for tier in self.media.dicts(folder, 2)]

    def open_tier(self, folder: Path) -> Tier:
        return ChunkedTier.open(self.inner(folder), options=self.options)

    def fail_next(self, tier: ChunkedTier, operation: Operation) -> bool:
        inner = tier._parts.inners.tiers
        if not all(isinstance(one, FaultyTier) for one in inner):
            return False
        # One failure: the chunks are spread, so which tier comes next depends on the key.
        for one in inner:
            one._armed.clear()
            one.fail_next(operation, damage=True)
        return True

    def peek(self, tier: ChunkedTier, key: TensorKey) -> bytes:
        inner = tier._parts.inners.tiers
        return self.assembled(key, inner[0].keys(), lambda i, name: stored(inner[i], name))

    def assembled(self, key: TensorKey, first_keys: object, read: object) -> bytes:
        index = index_of(first_keys, read)
        ledger = self.tokens.ledger if self.tokens else None
        return b"".join(
            decoded(chunk, read(chunk.inner, chunk.inner_key), ledger)
            for chunk in chunks_of(index, key)
        )

    def poke(self, tier: ChunkedTier, key: TensorKey, data: bytes) -> bool:
        inner = tier._parts.inners.tiers
        entry = tier._parts.table.entry(key)
        chunks = []
        for i, chunk in enumerate(entry.version.chunks):
            plain = data[i * CHUNK : (i + 1) * CHUNK]
            coded = self.tokens.token(plain) if self.tokens else plain
            replace_stored(inner[chunk.cell.inner], chunk.cell.inner_key, coded)
            chunks.append(Chunk(chunk.cell, self.content(coded)))
        entry.version = KeyVersion(tuple(chunks), entry.version.pins)
        return True

    def content(self, coded: bytes) -> Content:
        return Content(
            stored_nbytes=len(coded),
            checksum=xxhash.xxh3_64_intdigest(coded) if self.options.is_checked else None,
            codec="token" if self.tokens else "",
        )


class TestStripedNvme(ChunkedSuite):
    num_kills = 3

    def inner(self, folder: Path) -> Sequence[Tier]:
        return [FaultyTier(open_nvme(folder, name)) for name in "ab"]


class TestStripedThreeUnequal(ChunkedSuite):
    options = UNEQUAL

    def inner(self, folder: Path) -> Sequence[Tier]:
        return [FaultyTier(tier) for tier in self.media.dicts(folder, 3)]


class TestStripedHostAndNvme(TierSuite):
    """Not persistent, because one of the two is not."""

    def open_tier(self, folder: Path) -> Tier:
        return ChunkedTier.open([open_host(folder), open_nvme(folder, "b")], options=STRIPED)


class TestZstd(ChunkedSuite):
    options = compressing("zstd")

    def inner(self, folder: Path) -> Sequence[Tier]:
        return [FaultyTier(self.media.dicts(folder, 1)[0])]


class TestLz4(TestZstd):
    options = compressing("lz4")


class TestBlosc2(TestZstd):
    options = compressing("blosc2")


class TestToken(TestZstd):
    """Every chunk is stored coded, which noise never is with a real codec."""

    @pytest.fixture(autouse=True)
    def _tokens(self) -> None:
        self.tokens = TokenCodec()
        self.options = ChunkedOptions(
            scheme="compressed", chunk_nbytes=CHUNK, codec=self.tokens, num_threads=2
        )


class TestChecksummedHost(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return ChunkedTier.open([open_host(folder)], options=CHECKSUMMED)


class TestChecksummedDict(ChunkedSuite):
    options = CHECKSUMMED

    def inner(self, folder: Path) -> Sequence[Tier]:
        return [FaultyTier(self.media.dicts(folder, 1)[0])]


def open_compressed_striped(folder: Path) -> ChunkedTier:
    inner = [open_nvme(folder, name) for name in "ab"]
    return ChunkedTier.open([ChunkedTier.open(inner, options=STRIPED)], options=compressing("zstd"))


class TestCompressedStripedNvme(ChunkedSuite):
    options = compressing("zstd")
    num_kills = 2

    def open_tier(self, folder: Path) -> Tier:
        return open_compressed_striped(folder)

    def peek(self, tier: ChunkedTier, key: TensorKey) -> bytes:
        striped = tier._parts.inners.tiers[0]
        assert isinstance(striped, ChunkedTier)
        return self.assembled(key, striped.keys(), lambda _, name: super_peek(striped, name))

    def poke(self, tier: ChunkedTier, key: TensorKey, data: bytes) -> bool:
        return False


def super_peek(striped: ChunkedTier, key: TensorKey) -> bytes:
    """Return what a striped tier stores; never written is whatever the inner tiers hold."""
    inner = striped._parts.inners.tiers
    index = index_of(inner[0].keys(), lambda i, name: stored(inner[i], name))
    return b"".join(stored(inner[chunk.inner], chunk.inner_key) for chunk in chunks_of(index, key))


class TestStripedOverDeferred(ChunkedSuite):
    options = UNEQUAL

    def inner(self, folder: Path) -> Sequence[Tier]:
        tiers = self.media.dicts(folder, 3)
        return [DeferredTier(tier, order=seeded_order(i)) for i, tier in enumerate(tiers)]

    def peek(self, tier: ChunkedTier, key: TensorKey) -> bytes:
        inner = [one._inner for one in tier._parts.inners.tiers]
        return self.assembled(key, inner[0].keys(), lambda i, name: stored(inner[i], name))

    def poke(self, tier: ChunkedTier, key: TensorKey, data: bytes) -> bool:
        return False


class TestDeferredOverCompressed(TierSuite):
    @pytest.fixture(autouse=True)
    def _media(self) -> None:
        self.media = Media()

    def open_tier(self, folder: Path) -> Tier:
        inner = self.media.dicts(folder, 1)
        options = compressing("zstd")
        return DeferredTier(ChunkedTier.open(inner, options=options), order=seeded_order(4))


class DictFolders:
    """Opens chunked tiers over dict tiers that are found again in the same folder."""

    def __init__(self, options: ChunkedOptions, count: int) -> None:
        self.options = options
        self.count = count
        self.media = Media()

    def __call__(self, folder: Path) -> ChunkedTier:
        return ChunkedTier.open(self.media.dicts(folder, self.count), options=self.options)


def deferred_inner(folder: Path) -> ChunkedTier:
    inner = [DeferredTier(open_nvme(folder, "a"), order=seeded_order(7)), open_nvme(folder, "b")]
    return ChunkedTier.open(inner, options=ChunkedOptions(chunk_nbytes=4096))


def token_options() -> ChunkedOptions:
    return ChunkedOptions(scheme="compressed", chunk_nbytes=4096, codec=TokenCodec())


TestStripedMachine = pytest.mark.slow(
    machine_for(
        lambda folder: ChunkedTier.open(
            [open_nvme(folder, name) for name in "ab"], options=ChunkedOptions(chunk_nbytes=4096)
        )
    ).TestCase
)
TestUnequalMachine = pytest.mark.slow(
    machine_for(DictFolders(ChunkedOptions(chunk_nbytes=4096, shares=(1, 2, 5)), 3)).TestCase
)
TestTokenMachine = pytest.mark.slow(machine_for(DictFolders(token_options(), 1)).TestCase)
TestZstdMachine = pytest.mark.slow(machine_for(DictFolders(compressing("zstd"), 1)).TestCase)
TestLz4Machine = pytest.mark.slow(machine_for(DictFolders(compressing("lz4"), 1)).TestCase)
TestBlosc2Machine = pytest.mark.slow(machine_for(DictFolders(compressing("blosc2"), 1)).TestCase)
TestChecksummedMachine = pytest.mark.slow(machine_for(DictFolders(CHECKSUMMED, 1)).TestCase)
TestNestedMachine = pytest.mark.slow(machine_for(open_compressed_striped).TestCase)
TestDeferredInnerMachine = pytest.mark.slow(machine_for(deferred_inner).TestCase)
TestDeferredOverMachine = pytest.mark.slow(
    machine_for(
        lambda folder: DeferredTier(open_compressed_striped(folder), order=seeded_order(5))
    ).TestCase
)
