"""ObjectTier: what a store's refusals become, and what its URLs may say."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from object_helpers import PART, SMALL, flush, key, noise, opened, read, store, write

from zinf_core.errors import ConfigError, TierClosedError, TierFullError, TransferError
from zinf_core.registry import TierUrl, open_tier
from zinf_storage.object_store import Connection, ObjectOptions, open_bucket
from zinf_storage.object_store.factory import open_object
from zinf_storage.object_store.failures import failure_of, is_no_bucket

S3_XML = (
    "Generic S3 error: Error performing {} in 3.3ms - Server returned non-2xx status code: {}: "
    "<?xml version='1.0'?>\n<Error><Code>{}</Code><Message>{}</Message><X>y</X></Error>\n\n"
    "Debug source:\nGeneric {{ ... status: {} ... }}"
)
NO_BUCKET = S3_XML.format(
    "GET http://h/b?list-type=2", "404 Not Found", "NoSuchBucket", "none", 404
)


@pytest.mark.parametrize(
    ("text", "number", "words"),
    [
        (NO_BUCKET, errno.ENOENT, ("HTTP 404: NoSuchBucket: none", "create the bucket")),
        (
            S3_XML.format("PUT http://h/b", "403 Forbidden", "AccessDenied", "no", 403),
            errno.EACCES,
            ("HTTP 403: AccessDenied: no", "credentials"),
        ),
        (
            "Error performing GET http://h/k?X-Amz-Signature=abc in 1ms - Server returned non-2xx "
            "status code: 503 Service Unavailable: \n\nDebug source:\nabc",
            errno.EAGAIN,
            ("503 Service Unavailable", "lower num_threads"),
        ),
        ("Server returned non-2xx status code: 500 Internal: ", errno.EIO, ("500 Internal",)),
        (
            "HTTP error: error sending request\n\nDebug source:\nOs {\n  code: 111,\n kind: X }",
            errno.ECONNREFUSED,
            ("nothing listens there",),
        ),
        (
            "HTTP error: request\n\nDebug source:\nkind: Body, source: TimedOut",
            errno.ETIMEDOUT,
            ("raise timeout_s",),
        ),
        (
            "Error performing PUT http://169.254.169.254/latest/api/token in 3s - HTTP error",
            errno.EACCES,
            ("no credentials were found", "AWS_ACCESS_KEY_ID"),
        ),
    ],
)
def test_a_refusal_keeps_its_reason(text: str, number: int, words: tuple[str, ...]) -> None:
    """Catches messages without status or remedy, and signatures that end up in logs."""
    error = failure_of(RuntimeError(text), doing="object: write of w", url="s3://b/parts/x")
    message = str(error)
    assert isinstance(error, TransferError)
    assert error.errno == number
    for word in ("object: write of w failed: s3://b/parts/x", *words):
        assert word in message
    assert "Debug" not in message
    assert "Signature" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "Unable to write\n\nDebug source:\nOs {\n code: 28,\n kind: StorageFull }",
        "Server returned non-2xx status code: 507 Insufficient Storage: ",
    ],
)
def test_no_room_is_told_apart(text: str) -> None:
    """Catches a full store reported as a broken one."""
    error = failure_of(RuntimeError(text), doing="write", url="file:///x")
    assert isinstance(error, TierFullError)


def test_a_missing_bucket_is_told_from_a_missing_object() -> None:
    """Catches a whole bucket gone that reads as one corrupt object."""
    assert is_no_bucket(FileNotFoundError(NO_BUCKET))
    assert not is_no_bucket(FileNotFoundError(NO_BUCKET.replace("NoSuchBucket", "NoSuchKey")))
    assert not is_no_bucket(FileNotFoundError("No such file or directory (os error 2)"))


def test_a_full_disk_is_told_and_survived(small_disk: Path) -> None:
    """Catches parts cut short by a full disk, and a tier that stays unusable."""
    with opened(small_disk) as tier:
        store(tier, key(0), noise(20 * PART))
        flush(tier)
        tier.reserve(key(1), 100 * PART)
        for _ in range(2):
            with pytest.raises(TierFullError, match=r"layers\.1"):
                write(tier, key(1), noise(100 * PART))
            flush(tier)
        write(tier, key(0), noise(20 * PART, 1))
        flush(tier)
        assert read(tier, key(0)) == noise(20 * PART, 1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """Catches a bare FileExistsError or NotADirectoryError from deep inside."""
    (tmp_path / "file").write_bytes(b"")
    for place in ("file", "file/below"):
        with pytest.raises(TransferError, match="open failed"):
            open_bucket(f"file://{tmp_path / place}", Connection())


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    """Catches a child that hangs on threads it does not have, or deletes its parent's objects."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        pid = os.fork()
        if not pid:
            try:
                tier.usage()
            except TierClosedError as exc:
                tier.close()
                os._exit(0 if "forked" in str(exc) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        flush(tier)
        assert read(tier, key(0)) == noise(PART)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("object://", "names no store"),
        ("object://bucket/prefix", "names no store"),
        ("object://s3://", "names no store"),
        ("object://file://relative/folder", "three slashes"),
        ("object://http://host/x", "no store that can be written"),
        ("object://ftp://host/x", "object://ftp://host/x"),
        ("object://memory:///x?queue=1", "unknown option 'queue'"),
        ("object://memory:///x?part_nbytes=1KiB", "part_nbytes = 1024"),
        ("object://memory:///x?num_threads=0", "num_threads = 0"),
        ("object://memory:///x?num_threads=two", "num_threads = 'two'"),
        ("object://memory:///x?retries=-1", "retries = '-1'"),
        ("object://memory:///x?timeout_s=soon", "timeout_s = 'soon'"),
        ("object://memory:///x?timeout_s=nan", "timeout_s = nan"),
        ("object://memory:///x?verify_reads=maybe", "verify_reads = 'maybe'"),
        ("object://memory:///x?region=r", "region is a setting of services"),
        ("object://s3://b/p?endpoint=http://storage.example", "add allow_http=1"),
        ("object://gs://b/p?region=r", "region is a setting of s3"),
    ],
)
def test_urls_that_make_no_sense_are_refused(url: str, message: str) -> None:
    """Catches settings that are dropped in silence, and bytes sent in the clear by mistake."""
    with pytest.raises(ConfigError, match=message):
        open_object(TierUrl.parse(url), capacity_nbytes=None)


def test_a_url_opens_the_tier_with_its_options(tmp_path: Path) -> None:
    """Catches options and capacity that do not arrive, and a scheme nobody registered."""
    url = f"object://file://{tmp_path}?part_nbytes=8KiB&num_threads=3"
    tier = open_tier(url, capacity_nbytes=5 * PART)
    try:
        assert tier.capabilities.preferred_io_nbytes == 8192
        assert tier.capabilities.max_in_flight == 3
        assert tier.capabilities.persistent
        assert tier.usage().capacity_nbytes == 5 * PART
        assert tier.path_taken == "obstore-local"
    finally:
        tier.close()


def test_memory_is_not_persistent_and_copies(tmp_path: Path) -> None:
    """Catches bytes shared with the caller's buffer: that store keeps what it is given."""
    bucket = open_bucket("memory:///x", Connection())
    data = bytearray(b"before")
    assert not bucket.is_persistent
    bucket.put("a", memoryview(data), doing="test")
    data[:] = b"after!"
    assert bucket.get("a", doing="test") == b"before"


def test_a_create_that_was_repeated_finds_itself(tmp_path: Path) -> None:
    """Catches a flush that fails because its request was repeated after the answer got lost."""
    bucket = open_bucket(f"file://{tmp_path}", Connection())
    assert bucket.create("manifests/1", b"mine", doing="test")
    assert bucket.create("manifests/1", b"mine", doing="test")
    assert not bucket.create("manifests/1", b"other", doing="test")
    assert bucket.get("manifests/1", doing="test") == b"mine"


def test_missing_obstore_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ImportError."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r'pip install "zinf\[object\]"'):
        open_bucket("memory:///x", Connection())


@pytest.mark.parametrize("settings", [{"capacity_nbytes": -1}, {"part_nbytes": 1 << 31}])
def test_options_that_cannot_work_are_refused(settings: dict[str, int]) -> None:
    """Catches numbers that fail only at the first transfer."""
    with pytest.raises(ConfigError):
        ObjectOptions(**settings)
    assert SMALL.part_nbytes == PART
