"""URLs that no tier can be opened by: one error of ours, that says why, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_helpers import buffer_of, flush, key, noise, read, store

from zinf_core.errors import ConfigError, TierError, TierFullError, TransferError
from zinf_core.registry import TierUrl, open_tier
from zinf_core.tier import remove_tier
from zinf_storage.nvme import NvmeTier
from zinf_storage.throttled import Limits, SystemClock, throttled

ON_FILES = [
    "nvme://{}",
    "object://file://{}",
    "striped://[nvme://{}]?shares=1",
    "compressed://[object://file://{}]",
    "throttled://[nvme://{}]?bytes_per_s=1GB",
]
IN_MEMORY = [
    "host://",
    "object://memory:///",
    "throttled://[host://]?bytes_per_s=1GB",
    "striped://[host://][host://]?shares=1,1",
    "checksummed://[host://]",
]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system that is mounted read-only; needs root."""
    folder = tmp_path / "ro"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", folder]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("template", ON_FILES)
def test_paths_that_cannot_be(tmp_path: Path, template: str) -> None:
    """Catches a Python error with the line of our code it came from, for a path that cannot be."""
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    numbers = {
        "new/" + "a" * 300: errno.ENAMETOOLONG,
        "b/" * 3000: errno.ENAMETOOLONG,
        "circle": errno.ELOOP,
        "circle/x": errno.ELOOP,
        "file": errno.ENOTDIR,
        "file/x": errno.ENOTDIR,
    }
    before = sorted(tmp_path.iterdir())
    for name, number in numbers.items():
        with pytest.raises(TransferError, match="name a folder") as caught:
            open_tier(template.format(tmp_path / name))
        assert caught.value.errno == number
    for name in ("%00", "x%00y/z"):
        with pytest.raises(ConfigError, match="zero byte"):
            open_tier(template.format(f"{tmp_path}/{name}"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("template", ON_FILES)
def test_a_read_only_place_is_told(read_only: Path, template: str) -> None:
    """Catches an input/output error told of a drive that is only mounted read-only, and a refusal
    that does not say what to do."""
    for path in (read_only, read_only / "new"):
        with pytest.raises(TransferError, match=f"{path}.*name a folder") as caught:
            open_tier(template.format(path))
        assert caught.value.errno == errno.EROFS


def test_a_path_given_as_an_object_cannot_be() -> None:
    """Catches a ValueError from below where no URL was taken apart."""
    with pytest.raises(ConfigError, match="is no path"):
        NvmeTier.open("/tmp/\0")


@pytest.mark.parametrize("url", [*IN_MEMORY, "nvme://{}", "device://cuda:0"])
@pytest.mark.parametrize("capacity", [-1, -4096, True, 1.5, "many"])
def test_capacities_that_are_none(tmp_path: Path, url: str, capacity: int) -> None:
    """Catches a tier that opens with less than no room."""
    with pytest.raises(ConfigError, match=r"capacity_nbytes = .* is (negative|not a size)"):
        open_tier(url.format(tmp_path / "new"), capacity_nbytes=capacity)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "query",
    [
        "num_threads=" + "9" * 5000,
        "num_threads=99999999999999999999",
        "num_threads=1025",
        "num_threads=0",
    ],
)
def test_threads_that_no_machine_has(tmp_path: Path, query: str) -> None:
    """Catches a machine brought to its knees by a typing error."""
    for template in ("nvme://{}", "object://file://{}", "checksummed://[nvme://{}]"):
        with pytest.raises(ConfigError, match="num_threads = "):
            open_tier(f"{template.format(tmp_path / 'new')}?{query}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "query",
    [
        "timeout_s=1e300", "timeout_s=1e13", "timeout_s=inf", "timeout_s=nan", "timeout_s=1e-300",
        "timeout_s=0", "timeout_s=-1", "retries=1000000000", "retries=99999999999999999999",
    ],
)  # fmt: skip
def test_settings_that_no_service_takes(query: str) -> None:
    """Catches an OverflowError of some library for a number that is out of its range."""
    name = query.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name} = .* is not"):
        open_tier(f"object://s3://bucket/prefix?endpoint=http://127.0.0.1:9&{query}")


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 19, "-" + "9" * 5000])
def test_numbers_without_end(text: str) -> None:
    """Catches Python's own limit on digits met by a URL."""
    url = TierUrl.parse(f"x://?n={text}")
    with pytest.raises(ConfigError, match="is not a whole number"):
        url.number("n", 0, is_signed=True)
    with pytest.raises(ConfigError, match="is not a list"):
        open_tier(f"striped://[host://][host://]?shares={text},1")


def test_a_time_that_never_comes_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an OverflowError of the system's timer for a latency of years."""
    waited: list[float] = []

    class Interrupted(Exception):
        pass

    def wait(self: object, timeout: float) -> bool:
        waited.append(timeout)
        raise Interrupted

    tier = throttled(open_tier("host://", capacity_nbytes=8192), Limits(latency_s=1e300))
    tier.reserve(key(0), 10)
    done = tier.read_into(key(0), buffer_of(bytes(10)))
    monkeypatch.setattr("threading.Event.wait", wait)
    with pytest.raises(Interrupted):
        done.wait()
    monkeypatch.undo()
    assert SystemClock().now_s() + waited[0] < 1e12
    assert not done.done()


def test_a_refusal_counts_in_whole_pages() -> None:
    """Catches "5000 asked, 5000 not leased", and a full tier without an errno."""
    tier = open_tier("host://", capacity_nbytes=5000)
    with pytest.raises(TierFullError, match=r"4.88 KiB \(8192 bytes in whole pages\)") as caught:
        tier.reserve(key(0), 5000)
    assert caught.value.errno == errno.ENOSPC
    tier.reserve(key(0), 4096)
    with pytest.raises(TierFullError, match=r"4.00 KiB asked, 904 B of 4.88 KiB"):
        tier.reserve(key(1), 4096)
    tier.close()


@pytest.mark.parametrize("template", ON_FILES)
@pytest.mark.parametrize("place", ["new", "new/a/b"])
def test_nothing_is_left_of_a_tier_that_kept_nothing(
    tmp_path: Path, template: str, place: str
) -> None:
    """Catches folders, parents and lock files that stay although nothing was ever flushed, or
    after the tier was removed with all that was."""
    (tmp_path / "theirs").mkdir()
    url = template.format(tmp_path / place)
    for is_flushed in (False, True):
        tier = open_tier(url, capacity_nbytes=1 << 24)
        store(tier, key(0), noise(5000))
        if is_flushed:
            flush(tier)
            assert (tmp_path / place).is_dir()
        (remove_tier if is_flushed or "[" in url else type(tier).close)(tier)
        assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    """Catches a parent deleted with somebody's file, and a folder that was there before."""
    (tmp_path / "before").mkdir()
    for template in ("nvme://{}", "object://file://{}"):
        tier = open_tier(template.format(tmp_path / "new" / "a"))
        (tmp_path / "new" / "theirs").write_text("x", encoding="utf-8")
        remove_tier(tier)
        assert list(tmp_path.rglob("new/*")) == [tmp_path / "new" / "theirs"]
        (tmp_path / "new" / "theirs").unlink()
        (tmp_path / "new").rmdir()
        remove_tier(open_tier(template.format(tmp_path / "before")))
        assert list((tmp_path / "before").iterdir()) == []


def test_refused_opens_leave_nothing(tmp_path: Path) -> None:
    """Catches new folders of drives that were named by mistake."""
    old = [f"[nvme://{tmp_path}/old{i}]" for i in range(2)]
    new = f"[nvme://{tmp_path}/new/x]"
    tier = open_tier(f"striped://{''.join(old)}?shares=1,1", capacity_nbytes=1 << 24)
    store(tier, key(0), noise(1 << 21))
    flush(tier)
    tier.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.zinf")}
    for url in (
        f"striped://{old[0]}{old[1]}{new}?shares=1,1,1",
        f"striped://{old[0]}{new}?shares=1,1",
        f"striped://{new}{old[1]}?shares=1,1",
        f"striped://{new}{new}?shares=1,1",
        f"striped://{new}?shares=0",
        f"compressed://{new}?level=99",
        f"object://file://{tmp_path}/new/x?part_nbytes=1",
        f"nvme://{tmp_path}/new/x?io_nbytes=1",
        f"throttled://{new}",
    ):
        with pytest.raises((ConfigError, TierError)):
            open_tier(url, capacity_nbytes=1 << 24)
        assert not (tmp_path / "new").exists(), url
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.zinf")}.keys() == before.keys()
    tier = open_tier(f"striped://{''.join(old)}?shares=1,1", capacity_nbytes=1 << 24)
    assert read(tier, key(0)) == noise(1 << 21)
    tier.close()


def test_a_tier_that_holds_too_much_keeps_it(tmp_path: Path) -> None:
    """Catches a flushed folder deleted by an open that is refused."""
    for template in ("nvme://{}/n", "object://file://{}/o"):
        url = template.format(tmp_path)
        tier = open_tier(url)
        store(tier, key(0), noise(10_000))
        flush(tier)
        tier.close()
        with pytest.raises(TierFullError):
            open_tier(url, capacity_nbytes=4096)
        tier = open_tier(url)
        assert read(tier, key(0)) == noise(10_000)
        tier.close()


def test_every_inner_tier_is_named(tmp_path: Path) -> None:
    """Catches "nvme holds …" where all drives are nvme: which one was swapped, or is empty?"""
    urls = [f"nvme://{tmp_path}/{name}" for name in "abc"]

    def opened(*chosen: str) -> TierError | ConfigError:
        with pytest.raises((TierError, ConfigError)) as caught:
            open_tier("striped://" + "".join(f"[{url}?num_threads=2]" for url in chosen) + shares)
        return caught.value

    shares = "?shares=1,1"
    tier = open_tier(f"striped://[{urls[0]}][{urls[1]}]{shares}")
    store(tier, key(0), noise(1 << 21))
    flush(tier)
    tier.close()
    assert f"{urls[2]} (inner tier 2) holds no chunk" in str(opened(urls[0], urls[2]))
    assert f"{urls[0]} (inner tier 2) holds the index" in str(opened(urls[1], urls[0]))
    assert f"{urls[1]} (inner tier 2) holds {key(0)}" in str(opened(urls[2], urls[1]))
    (tmp_path / "b" / "manifest.zinf").unlink()
    assert f"{urls[1]} (inner tier 2) holds no chunk" in str(opened(urls[0], urls[1]))
