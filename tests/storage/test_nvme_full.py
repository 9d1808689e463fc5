"""NvmeTier without room: budgets, full devices, and what still works then."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from nvme_helpers import (
    SMALL,
    FailingCalls,
    buffer_of,
    flush,
    key,
    noise,
    opened,
    read,
    store,
    unaccounted_nbytes,
    write,
)
from test_nvme_folder import child

from zinf_core.errors import KeyAbsentError, TierFullError
from zinf_core.keys import StateKind, TensorKey
from zinf_storage.nvme import NvmeTier

PAGE = 4096
TIGHT = replace(SMALL, segment_nbytes=16 * PAGE, capacity_nbytes=16 * PAGE)


def fill(tier: NvmeTier) -> int:
    """Reserve and write keys of two pages until refused; return how many."""
    count = 0
    while True:
        before = tier.usage()
        try:
            tier.reserve(key(count), 2 * PAGE)
        except TierFullError:
            assert tier.usage() == before, "law 8"
            with pytest.raises(KeyAbsentError):
                tier.stat(key(count))
            return count
        write(tier, key(count), noise(2 * PAGE, count))
        count += 1


def test_the_budget_is_kept_and_overwrites_always_go_ahead(tmp_path: Path) -> None:
    """Catches a budget exceeded, or one filled to the brim so that nothing can be overwritten."""
    with opened(tmp_path, TIGHT) as tier:
        assert fill(tier) == 7
        assert tier.usage().allocated_nbytes == TIGHT.capacity_nbytes
        for i in list(range(7)) * 3:
            write(tier, key(i), noise(2 * PAGE, 100 + i))
        assert [read(tier, key(i)) for i in range(7)] == [
            noise(2 * PAGE, 100 + i) for i in range(7)
        ]
        assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) == 16 * PAGE


def test_the_refusal_says_what_to_change(tmp_path: Path) -> None:
    """Catches "no space" without key, bytes, budget and remedy."""
    with opened(tmp_path, TIGHT) as tier, pytest.raises(TierFullError) as caught:
        tier.reserve(key(5), 12 * PAGE)
    for needed in (str(key(5)), str(12 * PAGE), str(tmp_path), str(16 * PAGE), "raise it"):
        assert needed in str(caught.value)


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 61, 1 << 63, 1 << 80])
def test_impossible_sizes_are_refused(tmp_path: Path, nbytes: int) -> None:
    """Catches OverflowError from a system call, a file left of the attempt, and an attempt at all:
    a file system may fill itself to the brim before it says no."""
    traced = FailingCalls()
    with opened(tmp_path, SMALL, traced.calls()) as tier:
        with pytest.raises(TierFullError):
            tier.reserve(key(0), nbytes)
        assert tier.usage().allocated_nbytes == 0
        assert list(tmp_path.glob("segment-*")) == []
        assert "fallocate" not in traced.log


def test_mixed_sizes_can_be_overwritten_in_any_order(tmp_path: Path) -> None:
    """Catches spare room that is enough in total but unusable because it is in pieces."""
    with opened(tmp_path, TIGHT) as tier:
        for i, pages in enumerate([4, 1, 2, 4]):
            store(tier, key(i), noise(pages * PAGE, i))
        for seed in range(40):
            which = seed * 7 % 4
            write(tier, key(which), noise([4, 1, 2, 4][which] * PAGE, seed))
            assert read(tier, key(which)) == noise([4, 1, 2, 4][which] * PAGE, seed)
        assert unaccounted_nbytes(tier) == 0


def test_concurrent_overwrites_wait_for_room(tmp_path: Path) -> None:
    """Catches writes failing for want of room that another write is about to free."""
    with opened(tmp_path, TIGHT) as tier:
        count = fill(tier)
        for seed in (100, 200):
            writes = [
                tier.write_from(key(i), buffer_of(noise(2 * PAGE, seed + i))) for i in range(count)
            ]
            for completion in writes:
                completion.wait(timeout_s=30)
            for i in range(count):
                assert read(tier, key(i)) == noise(2 * PAGE, seed + i)


def test_a_write_that_cannot_find_room_keeps_the_old_bytes(tmp_path: Path) -> None:
    """Catches a hang, or committed bytes given up, when a flush holds all the room there is."""
    with opened(tmp_path, TIGHT) as tier:
        count = fill(tier)
        flush(tier)
        write(tier, key(0), noise(2 * PAGE, 50))
        for _ in range(2):
            completion = tier.write_from(key(1), buffer_of(noise(2 * PAGE, 51)))
            with pytest.raises(TierFullError, match=str(key(1))):
                completion.wait(timeout_s=30)
        assert read(tier, key(1)) == noise(2 * PAGE, 1)
        flush(tier)
        write(tier, key(1), noise(2 * PAGE, 52))
        assert read(tier, key(1)) == noise(2 * PAGE, 52)
        assert count == 7


def test_a_folder_beyond_the_budget_is_refused(tmp_path: Path) -> None:
    """Catches a budget that is ignored for what was there before."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PAGE))
        flush(tier)
    with pytest.raises(TierFullError, match=rf"{1 << 20} bytes.*{16 * PAGE}"):
        NvmeTier.open(tmp_path, options=TIGHT)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PAGE)


def test_a_smaller_segment_is_tried_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    """Catches a refusal because a whole segment does not fit although the key would."""
    failing = FailingCalls()
    with opened(tmp_path, SMALL, failing.calls()) as tier:
        failing.arm("fallocate", OSError(errno.ENOSPC, "full"), nth=1)  # the first: the manifest's
        store(tier, key(0), noise(PAGE))
        assert tier.usage().allocated_nbytes == 2 * PAGE
        assert [p.stat().st_size for p in tmp_path.glob("segment-*")] == [2 * PAGE]


LIMITED = f"""
import resource, sys
from nvme_helpers import *
from zinf_core.errors import TierFullError
resource.setrlimit(resource.RLIMIT_FSIZE, ({8 * PAGE}, {8 * PAGE}))
with opened(sys.argv[1], NvmeOptions(segment_nbytes={16 * PAGE}, io_nbytes={PAGE})) as tier:
    try:
        tier.reserve(key(0), {9 * PAGE})
    except TierFullError as exc:
        print(exc)
    store(tier, key(1), noise({3 * PAGE}))
    assert read(tier, key(1)) == noise({3 * PAGE})
    flush(tier)
"""


@pytest.mark.slow
def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """Catches EFBIG and SIGXFSZ mistaken for a broken drive, or a tier dead after it."""
    with child(LIMITED, tmp_path, stdout=subprocess.PIPE) as limited:
        message, _ = limited.communicate(timeout=30)
    assert limited.returncode == 0
    assert str(tmp_path) in message
    assert f"needs {18 * PAGE} bytes" in message
    assert "bytes are free there" in message
    with opened(tmp_path) as tier:
        assert read(tier, key(1)) == noise(3 * PAGE)


@pytest.mark.parametrize("is_preallocated", [True, False])
def test_a_real_full_device(small_disk: Path, is_preallocated: bool) -> None:
    """Catches short counts taken for success, and a tier that is dead after ENOSPC."""
    failing = FailingCalls()
    calls = failing.calls()
    if not is_preallocated:

        def no_fallocate(*args: object) -> None:
            raise OSError(errno.EOPNOTSUPP, "no")

        calls = replace(calls, fallocate=no_fallocate)
    options = replace(SMALL, segment_nbytes=32 * PAGE)
    with opened(small_disk, options, calls) as tier:
        stored: list[int] = []
        with pytest.raises(TierFullError, match=f"{small_disk}.*bytes are free there"):
            _store_until_refused(tier, stored)
        assert len(stored) >= 2
        assert [read(tier, key(i)) for i in stored] == [noise(8 * PAGE, i) for i in stored]
        for which in list(tier.keys())[1:]:
            tier.discard(which)
        write(tier, key(0), noise(8 * PAGE, 77))
        assert read(tier, key(0)) == noise(8 * PAGE, 77)


def _store_until_refused(tier: NvmeTier, stored: list[int]) -> None:
    for i in range(100):
        tier.reserve(key(i), 8 * PAGE)
        write(tier, key(i), noise(8 * PAGE, i))
        stored.append(i)


@pytest.fixture(params=["tmpfs", "ext4"])
def drive(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue({"tmpfs": "small_disk", "ext4": "small_ext4"}[request.param])


def fill_to_the_last_byte(drive: Path) -> None:
    """Take all there is on the drive, as somebody's log would, also what was given back since."""
    with (drive / "log").open("ab", buffering=0) as log:
        for size in (64 * PAGE, PAGE, 1):
            with suppress(OSError):
                while log.write(bytes(size)):
                    continue
        os.fsync(log.fileno())


@pytest.mark.slow
def test_a_full_drive_does_not_keep_a_flush_from_succeeding(drive: Path) -> None:
    """Catches a last checkpoint that cannot be made because somebody filled the drive, with more
    keys than before, with none written before, and time after time."""
    with opened(drive / "ours", TIGHT) as tier:
        flush(tier)
        for i in range(6):
            tier.reserve(key(i), 2 * PAGE)
        for round_ in range(4):
            fill_to_the_last_byte(drive)
            for i in range(6):
                write(tier, key(i), noise(2 * PAGE, 10 * round_ + i))
                flush(tier)
        with suppress(TierFullError):
            tier.reserve(key(6), 2 * PAGE)
        write(tier, key(0), noise(2 * PAGE, 99))
        flush(tier)
    with opened(drive / "ours", TIGHT) as tier:
        expected = [noise(2 * PAGE, 99), *(noise(2 * PAGE, 30 + i) for i in range(1, 6))]
        assert [read(tier, key(i)) for i in range(6)] == expected
        fill_to_the_last_byte(drive)
        write(tier, key(1), noise(2 * PAGE, 98))
        flush(tier)


@pytest.mark.slow
def test_keys_are_reserved_as_long_as_they_can_be_committed(drive: Path) -> None:
    """Catches room for a few keys promised to many, whose manifest does not fit."""
    with opened(drive / "ours", replace(SMALL, segment_nbytes=8 * PAGE)) as tier:
        tier.reserve(key(0), 8 * PAGE)
        tier.discard(key(0))
        fill_to_the_last_byte(drive)
        with pytest.raises(TierFullError, match="room to commit one more key"):
            _reserve_until_refused(tier)
        count = len(list(tier.keys()))
        assert count > 1
        flush(tier)
        fill_to_the_last_byte(drive)
        flush(tier)
        tier.discard(next(tier.keys()))
        tier.reserve(key(1), 4 * PAGE)
    with opened(drive / "ours", SMALL) as tier:
        assert len(list(tier.keys())) == count


def _reserve_until_refused(tier: NvmeTier) -> None:
    for i in range(10_000):
        tier.reserve(TensorKey.of(f"{i}" * 400, StateKind.PARAM), 0)


@pytest.mark.slow
def test_a_drive_filled_while_closed_keeps_its_last_flush(drive: Path) -> None:
    """Catches a folder that cannot be opened on a full drive, or a failed flush that costs the
    last one."""
    with opened(drive / "ours", TIGHT) as tier:
        store(tier, key(0), noise(2 * PAGE))
        flush(tier)
    assert not (drive / "ours" / "manifest.zinf.tmp").exists()
    fill_to_the_last_byte(drive)
    with opened(drive / "ours", TIGHT) as tier:
        write(tier, key(0), noise(2 * PAGE, 1))
        with pytest.raises(TierFullError, match=f"{drive}.*bytes are free there"):
            flush(tier)
        (drive / "log").unlink()
        flush(tier)
        fill_to_the_last_byte(drive)
        write(tier, key(0), noise(2 * PAGE, 2))
        flush(tier)
    with opened(drive / "ours", TIGHT) as tier:
        assert read(tier, key(0)) == noise(2 * PAGE, 2)
