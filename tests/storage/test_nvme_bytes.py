"""NvmeTier: bytes in, the same bytes out, whatever their number, place and buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvme_helpers import (
    SMALL,
    buffer_of,
    exact_buffer_of,
    flush,
    is_guard_intact,
    key,
    noise,
    opened,
    read,
    segment_of,
    store,
    unaccounted_nbytes,
    write,
)

from zinf_core.tier import Tier
from zinf_core.units import KiB, MiB
from zinf_storage.nvme import DirectIo, NvmeOptions, NvmeTier

ODD_SIZES = (0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193, 100_000)
BUFFERED = replace(SMALL, direct=DirectIo.NEVER)


@pytest.fixture(params=[DirectIo.AUTO, DirectIo.NEVER], ids=["direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NvmeTier]:
    with opened(tmp_path / "t", replace(SMALL, direct=request.param)) as tier:
        yield tier


def test_it_is_a_tier(tier: NvmeTier) -> None:
    """Catches a method renamed away from the protocol."""
    assert isinstance(tier, Tier)


def test_the_path_taken_is_told(tmp_path: Path) -> None:
    """Catches an option that is ignored, or a silent downgrade."""
    with opened(tmp_path, SMALL) as tier:
        assert tier.path_taken == "posix-direct"
    with opened(tmp_path, BUFFERED) as tier:
        assert tier.path_taken == "posix-buffered"


def test_odd_sizes_come_back_and_lie_in_the_file(tier: NvmeTier) -> None:
    """Catches padding mixed up with length; the file itself is the second witness."""
    for i, nbytes in enumerate(ODD_SIZES):
        store(tier, key(i), noise(nbytes, i))
    flush(tier)
    for i, nbytes in enumerate(ODD_SIZES):
        assert read(tier, key(i)) == noise(nbytes, i)
        path, offset = segment_of(tier, key(i))
        assert path.read_bytes()[offset : offset + nbytes] == noise(nbytes, i)
    assert tier.usage().nbytes == sum(ODD_SIZES)
    assert unaccounted_nbytes(tier) == 0


@pytest.mark.parametrize("nbytes", [262145 * 4, 4 * MiB - 1, 4 * MiB, 4 * MiB + 1])
def test_large_odd_sizes(tmp_path: Path, nbytes: int) -> None:
    """Catches a last block lost or doubled, with the default request size."""
    options = NvmeOptions(segment_nbytes=MiB)
    with opened(tmp_path, options) as tier:
        store(tier, key(0), noise(nbytes))
        write(tier, key(0), noise(nbytes, 1))
        assert read(tier, key(0)) == noise(nbytes, 1)


def test_overwrites_move_and_the_room_is_used_again(tier: NvmeTier) -> None:
    """Catches an overwrite in place, which a crash would tear, and extents never freed."""
    store(tier, key(0), noise(20_000))
    places = [tier.stat(key(0))]
    allocated = tier.usage().allocated_nbytes
    for seed in range(1, 50):
        write(tier, key(0), noise(20_000, seed))
        assert tier.stat(key(0)) != places[-1]
        places.append(tier.stat(key(0)))
        assert read(tier, key(0)) == noise(20_000, seed)
    assert tier.usage().allocated_nbytes == allocated
    assert unaccounted_nbytes(tier) == 0


@pytest.mark.slow
@given(
    nbytes=st.sampled_from([4097, 8192, 20_000, 40_961]),
    patches=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 41_000)), max_size=6),
    is_direct=st.booleans(),
)
def test_partial_writes_against_a_bytearray(
    tmp_path_factory: pytest.TempPathFactory,
    nbytes: int,
    patches: list[tuple[int, int]],
    is_direct: bool,
) -> None:
    """Catches bytes outside the range lost or shifted, in the first and in later writes."""
    options = SMALL if is_direct else BUFFERED
    expected = bytearray(noise(nbytes))
    with opened(tmp_path_factory.mktemp("t"), options) as tier:
        store(tier, key(0), bytes(expected))
        for seed, (page, length) in enumerate(patches):
            offset = min(page * 4096, nbytes // 4096 * 4096)
            patch = noise(length, seed)[: nbytes - offset]
            write(tier, key(0), patch, offset)
            expected[offset : offset + len(patch)] = patch
        assert read(tier, key(0)) == expected
        flush(tier)
    with opened(tmp_path_factory.getbasetemp() / tier._parts.folder.path.name) as again:
        assert read(again, key(0)) == expected


def test_a_key_written_part_by_part(tier: NvmeTier) -> None:
    """Catches a first partial write whose untouched blocks are taken for written ones."""
    data = noise(50_000)
    tier.reserve(key(0), len(data))
    for offset in (40_960, 0, 16_384):
        write(tier, key(0), data[offset : offset + 24_576], offset)
        start = read(tier, key(0))[offset : offset + 24_576]
        assert start == data[offset : offset + 24_576]
    flush(tier)
    assert read(tier, key(0)) == data


def test_reads_of_ranges_into_tight_buffers(tier: NvmeTier) -> None:
    """Catches padding stored past a buffer that ends with its bytes, or a tail left out."""
    data = noise(30_000)
    store(tier, key(0), b"\0" * 30_000)
    tier.write_from(key(0), exact_buffer_of(data)).wait()
    for offset, nbytes in [(0, 1), (4096, 5000), (8192, 8192), (28_672, 1328), (0, 30_000)]:
        dst = exact_buffer_of(b"\xa5" * nbytes)
        tier.read_into(key(0), dst, offset=offset).wait()
        assert dst.array.tobytes() == data[offset : offset + nbytes]
        assert is_guard_intact(dst)


@pytest.mark.parametrize("io_nbytes", [4 * KiB, 64 * KiB, MiB])
def test_another_request_size_opens_what_was_written(tmp_path: Path, io_nbytes: int) -> None:
    """Catches checksums compared over other blocks than they were made for."""
    with opened(tmp_path, SMALL) as tier:
        store(tier, key(0), noise(50_000))
        store(tier, key(1), noise(50_000, 1))
        flush(tier)
    expected = bytearray(noise(50_000))
    with opened(tmp_path, replace(SMALL, io_nbytes=io_nbytes)) as tier:
        write(tier, key(0), noise(5000, 2), 12_288)
        expected[12_288:17_288] = noise(5000, 2)
        assert read(tier, key(0)) == expected
        assert read(tier, key(1)) == noise(50_000, 1)
        flush(tier)
    with opened(tmp_path, SMALL) as tier:
        assert read(tier, key(0)) == expected


def test_scattered_keys_come_back(tmp_path: Path) -> None:
    """Catches a key in several pieces read or committed in the wrong order."""
    options = replace(SMALL, segment_nbytes=64 * KiB, capacity_nbytes=64 * KiB)
    with opened(tmp_path, options) as tier:
        for i in range(12):
            store(tier, key(i), noise(4096, i))
        for i in range(0, 12, 2):
            tier.discard(key(i))
        store(tier, key(20), noise(20_001))
        assert len(tier._parts.table.page(key(20)).version.regions) > 1
        buffer = buffer_of(bytes(20_001 - 8192))
        tier.read_into(key(20), buffer, offset=8192).wait()
        assert buffer.array.tobytes() == noise(20_001)[8192:]
        flush(tier)
    with opened(tmp_path, options) as tier:
        assert read(tier, key(20)) == noise(20_001)
        assert all(read(tier, key(i)) == noise(4096, i) for i in range(1, 12, 2))


def test_on_tmpfs(shm_folder: Path) -> None:
    """Catches a tier that needs a disk: memory file systems take or refuse direct I/O."""
    for options in (SMALL, BUFFERED):
        with opened(shm_folder, options) as tier:
            store(tier, key(0), noise(9001))
            assert read(tier, key(0)) == noise(9001)
            tier.discard(key(0))
