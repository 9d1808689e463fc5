"""The kernel's counters against files whose way to the drive is known, and scratch places."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from zinf_core.errors import BudgetError, ConfigError
from zinf_core.registry import TierUrl
from zinf_storage.bench import disk
from zinf_storage.bench.disk import DiskWatch, Verdict, read_cache_state, read_io_counters
from zinf_storage.bench.sample import Sample
from zinf_storage.bench.scratch import (
    format_url,
    require_disk,
    require_memory,
    require_scheme,
    scratch_of,
)
from zinf_storage.probe import IoPath, probe_path

NBYTES = 4 << 20


def sample(*, read: int = 0, written: int = 0) -> Sample:
    return Sample(read_nbytes=read, written_nbytes=written, wall_s=1, cpu_s=0, latencies_s=(1.0,))


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    probe = probe_path(tmp_path)
    if probe.filesystem in disk.IN_MEMORY or probe.io_path is not IoPath.POSIX_DIRECT:
        pytest.skip(f"{probe.filesystem} is no drive that takes direct I/O")
    if read_io_counters() is None:
        pytest.skip("this kernel counts nothing")
    return tmp_path


def move(file: Path, *, flags: int, is_write: bool) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | flags)
    try:
        with mmap.mmap(-1, NBYTES) as memory:
            if is_write:
                memory.write(os.urandom(NBYTES))
                assert os.pwritev(fd, [memory], 0) == NBYTES
            else:
                assert os.preadv(fd, [memory], 0) == NBYTES
    finally:
        os.close(fd)


def judged(folder: Path, *, flags: int, is_write: bool) -> Verdict:
    watch = DiskWatch((folder,), filesystem="ext4")
    before = watch.look()
    move(folder / "file", flags=flags, is_write=is_write)
    after = watch.look()
    taken = sample(written=NBYTES) if is_write else sample(read=NBYTES)
    return watch.judge(before, after, taken).verdict


def test_the_kernel_tells_direct_from_cached(drive: Path) -> None:
    """Catches counters that do not see direct I/O, and buffered bytes called a drive's."""
    assert judged(drive, flags=os.O_DIRECT, is_write=True) is Verdict.DISK
    assert judged(drive, flags=os.O_DIRECT, is_write=False) is Verdict.DISK
    assert judged(drive, flags=0, is_write=True) is Verdict.CACHED
    assert judged(drive, flags=0, is_write=False) is Verdict.CACHED


def test_old_kernels_count_every_cached_page(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a fallback that sees nothing, and calls what is dirty in memory written."""
    monkeypatch.setattr(disk, "_cachestat", lambda fd: None)
    assert judged(drive, flags=0, is_write=True) is Verdict.CACHED
    state = read_cache_state((drive,))
    assert state is not None
    assert state.cached_nbytes == state.unsettled_nbytes == NBYTES
    (drive / "file").unlink()
    (drive / "empty").touch()
    assert judged(drive, flags=os.O_DIRECT, is_write=True) is Verdict.DISK


def test_files_that_vanish(tmp_path: Path) -> None:
    """Catches a benchmark that dies because a tier deleted a file, or follows a link out."""
    (tmp_path / "link").symlink_to("/proc/self/io")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    state = read_cache_state((tmp_path, tmp_path / "absent"))
    assert state is not None
    assert (state.cached_nbytes, state.unsettled_nbytes) == (0, 0)


@pytest.mark.parametrize("text", [None, "rchar: 5\nread_bytes: 7\n", ""])
def test_counters_that_are_not_there(text: str | None, tmp_path: Path) -> None:
    """Catches zeros read out of a file that says nothing, so that everything would be cached."""
    path = tmp_path / "io"
    if text is not None:
        path.write_text(text, encoding="ascii")
    assert read_io_counters(path) is None


@pytest.mark.parametrize(
    "url",
    [
        "nvme:///a/b",
        "nvme:///a%20b%3F%5B%5D?io_nbytes=2MiB&num_threads=4",
        "host://",
        "device://cuda:0",
        "striped://[nvme:///a][nvme:///b?num_threads=2]?chunk_nbytes=4MiB",
        "compressed://[striped://[nvme:///a][nvme:///b]]",
        "object://s3://bucket/prefix?endpoint=http://127.0.0.1:9000",
    ],
)
def test_urls_survive_being_taken_apart(url: str) -> None:
    """Catches an option or a bracket that is lost when the folder is replaced."""
    parsed = TierUrl.parse(url)
    assert TierUrl.parse(format_url(parsed)) == parsed


def test_scratch_places(tmp_path: Path) -> None:
    """Catches test data in somebody's folder, and folders that stay, or that go and should not."""
    existing = tmp_path / "existing"
    existing.mkdir()
    (existing / "precious").write_text("x", encoding="utf-8")
    absent = tmp_path / "new" / "deep"
    url = f"striped://[nvme://{existing}?num_threads=2][throttled://[nvme://{absent}]]"
    with scratch_of(url) as scratch:
        inner = TierUrl.parse(scratch.url).inner
        fresh = Path(TierUrl.parse(inner[0]).path)
        assert fresh.parent == existing
        assert TierUrl.parse(inner[0]).options == {"num_threads": "2"}
        deep = Path(TierUrl.parse(TierUrl.parse(inner[1]).inner[0]).path)
        assert deep.name == absent.name
        assert deep.parent.parent == tmp_path
        assert scratch.local_paths() == (fresh,)
        assert set(scratch.drives()) == {fresh, deep.parent}
        deep.mkdir()
        (deep / "segment").write_text("x", encoding="utf-8")
        assert scratch.local_paths() == (fresh, deep)
    assert sorted(tmp_path.iterdir()) == [existing]
    assert [item.name for item in existing.iterdir()] == ["precious"]


def test_files_and_names_that_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a data base deleted, one left behind, and a bucket's name taken for a folder."""
    monkeypatch.chdir(tmp_path)
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    old.write_text("x", encoding="utf-8")
    for url in (f"sqlite://{old}", "host://", "device://cuda:0", "object://s3://bucket/a"):
        with scratch_of(url) as scratch:
            assert scratch.url == url
            assert scratch.local_paths() == ((old,) if "sqlite" in url else ())
    with scratch_of(f"sqlite://{new}") as scratch:
        used = Path(TierUrl.parse(scratch.url).path)
        assert used.name == new.name
        for suffix in ("", "-wal"):
            used.with_name(used.name + suffix).write_text("x", encoding="utf-8")
        assert scratch.local_paths() == (used,)
    with scratch_of("sqlite://a/b.db") as scratch:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b.db").write_text("x", encoding="utf-8")
        assert scratch.local_paths() == (Path("a/b.db"),)
    folder = tmp_path / "bucket"
    folder.mkdir()
    with scratch_of(f"object://file://{folder}") as scratch:
        path = TierUrl.parse(scratch.url).path
        assert path.startswith(f"file://{folder}/.zinf-bench-")
    assert sorted(tmp_path.iterdir()) == [folder, old]


def test_scratch_is_removed_after_a_failure(tmp_path: Path) -> None:
    """Catches gigabytes left on the drive by a tier that failed."""

    def fail() -> None:
        with scratch_of(f"nvme://{tmp_path}"):
            raise BudgetError("x")

    with pytest.raises(BudgetError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path) -> None:
    """Catches a benchmark that fills a drive or the memory before it says no."""
    with scratch_of(f"nvme://{tmp_path}") as scratch:
        require_disk(scratch, 4096, url="u")
        with pytest.raises(BudgetError, match=r"u: measuring needs \d+ bytes .* has \d+ "):
            require_disk(scratch, 1 << 60, url="u")
    with pytest.raises(BudgetError, match="of memory"):
        require_memory(1 << 60, url="u")
    with pytest.raises(ConfigError, match="no installed package offers nosuch://"):
        require_scheme("striped://[nvme:///a][nosuch://b]")
    for url in ("nvme:///proc", "nvme:///proc/new"):
        with pytest.raises(ConfigError, match="cannot write in /proc"), scratch_of(url):
            pass


def test_left_overs_are_told_from_what_is_in_use(tmp_path: Path) -> None:
    """Catches a living run's folder deleted under it, a dead one's kept, and something of
    somebody else's deleted because its name begins like ours."""
    theirs = tmp_path / ".zinf-bench-notes.txt"
    theirs.write_text("precious", encoding="utf-8")
    link = tmp_path / ".zinf-bench-abcd1234"
    link.symlink_to(tmp_path)
    with scratch_of(f"nvme://{tmp_path}") as living:
        left_over = tmp_path / ".zinf-bench-dead0000"
        (left_over / "deep").mkdir(parents=True)
        (left_over / "deep" / "segment").write_text("x", encoding="utf-8")
        with scratch_of(f"nvme://{tmp_path}") as other:
            folders = {Path(TierUrl.parse(scratch.url).path) for scratch in (living, other)}
            assert set(tmp_path.iterdir()) == {theirs, link, *folders}
    assert set(tmp_path.iterdir()) == {theirs, link}


def test_without_locks_nothing_is_taken_for_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a benchmark that cannot run where there are no locks, or that deletes what may be
    in use by another machine."""
    left_over = tmp_path / ".zinf-bench-dead0000"
    left_over.mkdir()

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with scratch_of(f"nvme://{tmp_path}") as scratch:
        assert Path(TierUrl.parse(scratch.url).path).is_dir()
    assert list(tmp_path.iterdir()) == [left_over]


def test_dangling_link_is_refused(tmp_path: Path) -> None:
    """Catches a drive that is not mounted, measured on the root drive, and its link deleted."""
    link = tmp_path / "data"
    link.symlink_to(tmp_path / "not_mounted")
    with (
        pytest.raises(ConfigError, match="not_mounted, which does not exist; mount the drive"),
        scratch_of(f"nvme://{link}/zinf"),
    ):
        pass
    assert link.is_symlink()
