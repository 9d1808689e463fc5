"""NvmeTier and its folder: finding, locking, keeping, reclaiming, removing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvme_helpers import SMALL, buffer_of, flush, key, noise, opened, read, store, write

from zinf_core.errors import CorruptDataError, TierClosedError, TierError, TierLockedError
from zinf_storage.nvme import FolderKind, NvmeTier, SystemCalls

KILLED = """
import os, signal, sys
from nvme_helpers import *
tier = NvmeTier.open(sys.argv[1], options=SMALL)
store(tier, key(0), noise(9000))
os.kill(os.getpid(), signal.SIGKILL)
"""

HOLDING = """
import sys
from nvme_helpers import *
with opened(sys.argv[1]) as tier:
    print("open", flush=True)
    sys.stdin.read()
"""


def child(script: str, folder: Path, **kwargs: Any) -> subprocess.Popen:
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], env=environment, text=True, **kwargs
    )


def test_a_missing_folder_is_created_for_us_alone(tmp_path: Path) -> None:
    """Catches weights readable by everyone on the machine."""
    with opened(tmp_path / "a" / "b") as tier:
        assert tier.found.kind is FolderKind.FRESH
        store(tier, key(0), noise(5000))
        flush(tier)
    folder = tmp_path / "a" / "b"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in folder.iterdir()) == [
        "lock.zinf", "manifest.zinf", "segment-00000.zinf",
    ]  # fmt: skip
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_opening_finds_what_was_flushed_and_only_that(tmp_path: Path) -> None:
    """Catches keys lost, or keys and bytes that were never flushed coming back (law 14)."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(9000))
        store(tier, key(1), b"")
        tier.reserve(key(2), 5)
        flush(tier)
        write(tier, key(0), noise(9000, 1))
        store(tier, key(3), noise(100))
    with opened(tmp_path) as tier:
        assert tier.found.kind is FolderKind.COMMITTED
        assert (tier.found.num_keys, tier.found.nbytes) == (3, 9005)
        assert tier.found.left_over_nbytes == 0
        assert set(tier.keys()) == {key(0), key(1), key(2)}
        assert read(tier, key(0)) == noise(9000)


def test_opening_changes_no_file(tmp_path: Path) -> None:
    """Catches a manifest rewritten or a segment cut by merely looking."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(9000))
        flush(tier)

    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock.zinf"}

    before = files()
    with opened(tmp_path):
        pass
    assert files() == before


def test_repeated_use_does_not_grow_the_folder(tmp_path: Path) -> None:
    """Catches swap files that pile up run after run (nothing was flushed: nothing stays)."""
    for _ in range(3):
        with opened(tmp_path) as tier:
            assert tier.found.kind is FolderKind.FRESH
            store(tier, key(0), noise(9000))
        assert [p.name for p in tmp_path.iterdir()] == ["lock.zinf"]


@pytest.mark.slow
def test_left_overs_of_a_killed_process_are_named_kept_and_reclaimed(tmp_path: Path) -> None:
    """Catches garbage taken for data, deleted unasked, or written over by a new segment."""
    assert child(KILLED, tmp_path).wait(timeout=30) == -9
    (left_over,) = tmp_path.glob("segment-*")
    size, stamp = left_over.stat().st_size, left_over.stat().st_mtime_ns
    with opened(tmp_path) as tier:
        assert tier.found.kind is FolderKind.LEFT_OVER
        assert tier.found.left_over_nbytes == size
        assert list(tier.keys()) == []
        store(tier, key(0), noise(9000, 1))
        flush(tier)
        assert left_over.stat().st_mtime_ns == stamp
    with opened(tmp_path) as tier:
        assert tier.found.kind is FolderKind.COMMITTED
        assert tier.found.left_over_nbytes == size
        assert tier.reclaim() == size
        assert tier.reclaim() == 0
        assert not left_over.exists()
        assert read(tier, key(0)) == noise(9000, 1)


def test_reclaim_spares_the_segments_in_use(tmp_path: Path) -> None:
    """Catches the deletion of segments that no manifest names yet because they are new."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(9000))
        assert tier.reclaim() == 0
        flush(tier)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(9000)


@pytest.mark.slow
def test_another_process_keeps_the_folder_locked(tmp_path: Path) -> None:
    """Catches two processes that write the same extents; the message must say who."""
    with child(HOLDING, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(TierLockedError, match=f"{tmp_path}.*process {other.pid}"):
            NvmeTier.open(tmp_path)
        other.kill()
        other.wait(timeout=30)
        with opened(tmp_path):
            pass


def test_the_same_process_may_not_open_twice(tmp_path: Path) -> None:
    """Catches a lock that a process holds against others only."""
    with opened(tmp_path), pytest.raises(TierLockedError, match=str(os.getpid())):
        NvmeTier.open(tmp_path)
    with opened(tmp_path):
        pass


def test_a_lock_file_removed_meanwhile_is_not_trusted(tmp_path: Path) -> None:
    """Catches a lock on a file that `remove` of another tier just deleted: two would hold it."""
    num_opened = 0

    def open_deleted(path: Path, flags: int, *mode: int) -> int:
        nonlocal num_opened
        fd = os.open(path, flags, *mode)
        num_opened += 1
        if num_opened == 1:
            path.unlink()
        return fd

    with opened(tmp_path, SMALL, SystemCalls(open=open_deleted)), pytest.raises(TierLockedError):
        NvmeTier.open(tmp_path)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    """Catches a lock that outlives `close` in the copy a child inherited."""
    child_end, our_end = os.pipe()
    with opened(tmp_path):
        pid = os.fork()
        if pid == 0:
            os.close(our_end)
            os.read(child_end, 1)
            os._exit(0)
    try:
        with opened(tmp_path):
            pass
    finally:
        os.close(our_end)
        os.close(child_end)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["with space", "übung-模型", "a'b\"c", "-dash"])
def test_names_of_any_kind(tmp_path: Path, name: str) -> None:
    """Catches a path that went through a shell or an ASCII encoder."""
    for kind in (FolderKind.FRESH, FolderKind.COMMITTED):
        with opened(tmp_path / name) as tier:
            assert tier.found.kind is kind
            if kind is FolderKind.FRESH:
                store(tier, key(0), noise(9000))
                flush(tier)
            assert read(tier, key(0)) == noise(9000)


def test_relative_paths_survive_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches segments created where the process happens to be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with opened(Path("rel")) as tier:
        monkeypatch.chdir(tmp_path / "elsewhere")
        store(tier, key(0), noise(9000))
        flush(tier)
        assert read(tier, key(0)) == noise(9000)
    assert (tmp_path / "rel" / "manifest.zinf").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_symbolic_link_to_a_folder(tmp_path: Path) -> None:
    """Catches a link replaced by a folder, and two names of one folder locked apart."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with opened(tmp_path / "link") as tier:
        store(tier, key(0), noise(100))
        with pytest.raises(TierLockedError):
            NvmeTier.open(tmp_path / "real")
        tier.remove()
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/no-such", "/sys/kernel"])
def test_a_place_that_cannot_be_used_is_named(tmp_path: Path, where: str) -> None:
    """Catches a bare OSError, or a descriptor lost, when the folder cannot be made or written."""
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(TierError, match=r"cannot use .*; name a folder"):
        NvmeTier.open(tmp_path / where)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_remove_deletes_ours_and_nothing_else(tmp_path: Path) -> None:
    """Catches a folder deleted with files in it that are not ours."""
    folder = tmp_path / "t"
    with opened(folder) as tier:
        store(tier, key(0), noise(9000))
        flush(tier)
        (folder / "notes.txt").write_text("mine")
        (folder / "segment-1.zinf").write_text("not our name")
        tier.remove()
        tier.remove()
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "segment-1.zinf"]


def test_remove_after_close_takes_the_folder_it_created(tmp_path: Path) -> None:
    """Catches an empty folder left behind, and one deleted that was there before us."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    for folder in (ours, theirs):
        with opened(folder) as tier:
            store(tier, key(0), noise(9000))
        tier.remove()
        with pytest.raises(TierClosedError):
            tier.usage()
    assert not ours.exists()
    assert list(theirs.iterdir()) == []


def test_remove_respects_the_next_owner(tmp_path: Path) -> None:
    """Catches a closed tier that deletes the files of the one opened after it."""
    with opened(tmp_path) as first:
        pass
    with opened(tmp_path) as second:
        store(second, key(0), noise(9000))
        with pytest.raises(TierLockedError):
            first.remove()
        assert read(second, key(0)) == noise(9000)


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    """Catches other numbers returned without a word (fault P14): whole reads, parts, and merges."""
    for damage in ("whole", "part", "merge"):
        with opened(tmp_path / damage) as tier:
            store(tier, key(0), noise(30_000))
            flush(tier)
            path, offset = _flip(tier, 20_000)
        with opened(tmp_path / damage) as tier:
            with pytest.raises(CorruptDataError) as caught:
                _use(tier, damage)
            for needed in (str(path), str(offset), str(key(0))):
                assert needed in str(caught.value)
            write(tier, key(0), noise(30_000, 1))
            assert read(tier, key(0)) == noise(30_000, 1)


def _flip(tier: NvmeTier, at: int) -> tuple[Path, int]:
    extent = tier.stat(key(0))
    path = tier._parts.folder.segment_path(extent.segment)
    with path.open("r+b") as file:
        file.seek(extent.offset + at)
        (byte,) = file.read(1)
        file.seek(extent.offset + at)
        file.write(bytes([byte ^ 1]))
    return path, extent.offset + at // SMALL.io_nbytes * SMALL.io_nbytes


def _use(tier: NvmeTier, how: str) -> None:
    if how == "whole":
        read(tier, key(0))
    elif how == "part":
        tier.read_into(key(0), buffer_of(bytes(100)), offset=16_384).wait(timeout_s=30)
    else:
        write(tier, key(0), noise(100), 16_384)


def test_verify_reads_checks_every_read(tmp_path: Path) -> None:
    """Catches an option that checks the first read only."""
    with opened(tmp_path, replace(SMALL, verify_reads=True)) as tier:
        store(tier, key(0), noise(30_000))
        assert read(tier, key(0)) == noise(30_000)
        _flip(tier, 5)
        with pytest.raises(CorruptDataError):
            read(tier, key(0))


@pytest.mark.parametrize("cut", [1, 4096, 1 << 20])
def test_a_cut_file_is_named(tmp_path: Path, cut: int) -> None:
    """Catches zeros or stale bytes in place of those a shortened file no longer has."""
    nbytes = (1 << 20) - 8192
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(8192))
        store(tier, key(1), noise(nbytes))
        flush(tier)
        path = tier._parts.folder.segment_path(tier.stat(key(1)).segment)
        end = tier.stat(key(1)).offset + nbytes
    with path.open("r+b") as file:
        file.truncate(max(end - cut, 0))
    wanted = rf"(?s){key(1)}.*{path} was cut to"
    with opened(tmp_path) as tier, pytest.raises(CorruptDataError, match=wanted):
        read(tier, key(1))


def test_a_missing_segment_and_a_damaged_manifest_are_named(tmp_path: Path) -> None:
    """Catches an open that goes on without half of the keys, or loses its lock on failure."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(9000))
        flush(tier)
    segment, manifest = tmp_path / "segment-00000.zinf", tmp_path / "manifest.zinf"
    segment.rename(tmp_path / "hidden")
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=str(segment)):
            NvmeTier.open(tmp_path)
    (tmp_path / "hidden").rename(segment)
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-1])
    with pytest.raises(CorruptDataError, match=str(manifest)):
        NvmeTier.open(tmp_path)
    manifest.write_bytes(good)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(9000)
