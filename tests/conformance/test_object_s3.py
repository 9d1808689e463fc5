"""ObjectTier against an S3 server that refuses, fails, or is not there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from s3_server import REGION, S3Server, s3_credentials, s3_server

from zinf_core.errors import CorruptDataError, TierError, TransferError
from zinf_core.registry import open_tier
from zinf_core.testing.bench import data_of, key_of
from zinf_core.testing.buffers import host_buffer
from zinf_core.tier import Tier

__all__ = ["s3_credentials", "s3_server"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]

PART = 65536
REFUSED = "http://127.0.0.1:9"


@pytest.fixture
def bucket(s3_server: S3Server) -> Iterator[str]:
    yield s3_server.new_bucket()
    assert s3_server.num_left() == 0, "a failure that was arranged did not happen"


@contextmanager
def opened(server: S3Server, place: str, options: str = "retries=0") -> Iterator[Tier]:
    tier = open_tier(
        f"object://s3://{place}?endpoint={server.endpoint}&region={REGION}&part_nbytes={PART}"
        f"&num_threads=4&{options}"
    )
    try:
        yield tier
    finally:
        tier.close()


def write(tier: Tier, data: bytes) -> None:
    src = host_buffer(len(data))
    src.array[:] = memoryview(data)
    if key_of(0) not in set(tier.keys()):
        tier.reserve(key_of(0), len(data))
    tier.write_from(key_of(0), src).wait(timeout_s=30)


def read(tier: Tier) -> bytes:
    dst = host_buffer(tier.stat(key_of(0)).nbytes)
    tier.read_into(key_of(0), dst).wait(timeout_s=30)
    return dst.array.tobytes()


@pytest.mark.parametrize("how", ["500", "503", "cut"])
def test_failures_that_pass_are_not_noticed(s3_server: S3Server, bucket: str, how: str) -> None:
    """Catches retries that are switched off, or that change what is stored."""
    with opened(s3_server, f"{bucket}/p", "retries=3") as tier:
        s3_server.fail_next("PUT", "/parts/", how)
        write(tier, data_of(3 * PART + 1))
        s3_server.fail_next("GET", "/parts/", how)
        assert read(tier) == data_of(3 * PART + 1)
        s3_server.fail_next("PUT", "/manifests/", how)
        tier.flush().wait(timeout_s=30)
    with opened(s3_server, f"{bucket}/p") as tier:
        assert read(tier) == data_of(3 * PART + 1)


def test_failures_that_stay_say_what_happened_where(s3_server: S3Server, bucket: str) -> None:
    """Catches errors without the key, the object, the status or the remedy."""
    with opened(s3_server, f"{bucket}/p") as tier:
        write(tier, data_of(PART))
        s3_server.fail_next("GET", "/parts/", "403")
        with pytest.raises(TransferError, match="status code: 403") as caught:
            read(tier)
        assert caught.value.errno == errno.EACCES
        assert str(key_of(0)) in str(caught.value)
        assert f"s3://{bucket}/p/parts/" in str(caught.value)
        assert read(tier) == data_of(PART)


def test_an_object_that_somebody_deleted_is_named(s3_server: S3Server, bucket: str) -> None:
    """Catches a missing object that reads as zeros, or as a missing key."""
    with opened(s3_server, f"{bucket}/p") as tier:
        write(tier, data_of(2 * PART))
        tier.flush().wait(timeout_s=30)
        gone = s3_server.names(bucket, "p/parts/")[0]
        s3_server.client.delete_object(Bucket=bucket, Key=gone)
        with pytest.raises(CorruptDataError, match=f"s3://{bucket}/{gone} is missing"):
            read(tier)


def test_a_bucket_that_vanishes_is_not_corrupt_data(s3_server: S3Server, bucket: str) -> None:
    """Catches an outage that makes a training run restore every key from copies."""
    with contextlib.suppress(TransferError), opened(s3_server, f"{bucket}/p") as tier:
        write(tier, data_of(PART))
        for name in s3_server.names(bucket):
            s3_server.client.delete_object(Bucket=bucket, Key=name)
        s3_server.client.delete_bucket(Bucket=bucket)
        with pytest.raises(TransferError, match="NoSuchBucket"):
            read(tier)


def test_prefixes_of_one_bucket_are_apart(s3_server: S3Server, bucket: str) -> None:
    """Catches a prefix that also matches the names it begins."""
    with (
        opened(s3_server, f"{bucket}/run") as one,
        opened(s3_server, f"{bucket}/run2") as two,
        opened(s3_server, bucket) as whole,
    ):
        for seed, tier in enumerate((one, two, whole)):
            write(tier, data_of(PART, seed))
            tier.flush().wait(timeout_s=30)
        for seed, tier in enumerate((one, two, whole)):
            assert tier.reclaim() == 0
            assert read(tier) == data_of(PART, seed)
        two.remove()
        assert read(one) == data_of(PART, 0)


def test_close_leaves_one_manifest_and_what_it_names(s3_server: S3Server, bucket: str) -> None:
    """Catches deletes in bulk that delete nothing, and uploads that are left incomplete."""
    with opened(s3_server, f"{bucket}/p") as tier:
        for seed in range(4):
            write(tier, data_of(3 * PART, seed))
            tier.flush().wait(timeout_s=30)
        write(tier, data_of(3 * PART, 9))
    names = s3_server.names(bucket)
    assert sorted(name.split("/")[1] for name in names) == ["manifests", *["parts"] * 3]
    assert not s3_server.client.list_multipart_uploads(Bucket=bucket).get("Uploads")


@pytest.mark.parametrize(
    ("place", "endpoint", "number", "words"),
    [
        ("no-such-bucket/p", None, errno.ENOENT, "NoSuchBucket"),
        ("bucket/p", REFUSED, errno.ECONNREFUSED, "nothing listens there"),
    ],
)
def test_a_store_that_cannot_be_opened_says_why(
    s3_server: S3Server, place: str, endpoint: str | None, number: int, words: str
) -> None:
    """Catches an open that succeeds, and a first transfer that fails instead."""
    server = s3_server if endpoint is None else S3Server(9)
    with pytest.raises(TransferError, match=words) as caught, opened(server, place):
        pass
    assert caught.value.errno == number


def test_missing_credentials_are_told(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches minutes spent on asking a machine of the cloud that is not there."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", REFUSED)
    with (
        pytest.raises(TierError, match="no credentials were found; put them into the environment"),
        opened(s3_server, "bucket/p"),
    ):
        pass
