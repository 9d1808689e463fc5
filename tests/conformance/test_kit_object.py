"""The kit on ObjectTier: a folder, memory, and a real S3 server."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from object_doors import FolderDoor, S3Door, manifest_of, peek, poke
from s3_server import CREDENTIALS, REGION, S3Server, s3_credentials, s3_server

from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import TierUrl
from zinf_core.testing import DeferredTier, Operation, TierSuite, machine_for, seeded_order
from zinf_core.testing.bench import Bench, data_of
from zinf_core.testing.crash_orders import SuiteReference
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.object_store import ObjectTier
from zinf_storage.object_store.factory import open_object

__all__ = ["s3_credentials", "s3_server"]

CAPACITY = 16 * MiB
FEW_THREADS = "num_threads=3&part_nbytes=64KiB"


def open_url(url: str) -> ObjectTier:
    return open_object(TierUrl.parse(url), capacity_nbytes=CAPACITY)


def open_folder(folder: Path, options: str = FEW_THREADS) -> ObjectTier:
    return open_url(f"object://file://{urllib.parse.quote(str(folder))}?{options}")


def open_memory(folder: Path) -> ObjectTier:
    return open_url(f"object://memory:///{folder.name}?num_threads=2&part_nbytes=4KiB")


class TestFolderObjectTier(TierSuite):
    num_kills = 6
    options = FEW_THREADS + "&verify_reads=0"

    def open_tier(self, folder: Path) -> Tier:
        self.door = FolderDoor(folder)
        return open_folder(folder, self.options)

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        return peek(self.door, key)

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        poke(self.door, key, data)
        return True


class TestMemoryObjectTier(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return open_memory(folder)


class TestDeferredObjectTier(TierSuite):
    def open_tier(self, folder: Path) -> Tier:
        return DeferredTier(open_folder(folder), order=seeded_order(1))


class S3Suite(TierSuite):
    """Opens below a prefix of one bucket; also without fixtures, in a child that is killed."""

    endpoint = ""
    bucket = ""

    def open_tier(self, folder: Path) -> Tier:
        # The child of the crash test has no fixtures, and inherits the environment.
        os.environ.update(CREDENTIALS)
        prefix = f"{folder.parent.name}/{folder.name}"
        server = f"endpoint={self.endpoint}&region={REGION}&retries=0"
        return open_url(
            f"object://s3://{self.bucket}/{prefix}?{server}&part_nbytes=256KiB&num_threads=4"
        )

    def in_child(self) -> SuiteReference:
        settings = {"endpoint": self.endpoint, "bucket": self.bucket}
        return SuiteReference.of(S3Suite, settings=settings)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
class TestS3ObjectTier(S3Suite):
    num_kills = 2

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> Iterator[None]:
        self.server, self.endpoint = s3_server, s3_server.endpoint
        self.bucket = s3_server.new_bucket()
        yield
        s3_server.num_left()

    def peek(self, tier: ObjectTier, key: TensorKey) -> bytes:
        prefix = tier._parts.bucket.url.removeprefix(f"s3://{self.bucket}/")
        return peek(S3Door(self.server, self.bucket, prefix), key)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        method = {Operation.READ: "GET", Operation.WRITE: "PUT"}[operation]
        self.server.fail_next(method, "/parts/", "cut" if operation is Operation.READ else "500")
        return True


TestFolderObjectMachine = pytest.mark.slow(machine_for(open_folder).TestCase)
TestMemoryObjectMachine = pytest.mark.slow(machine_for(open_memory).TestCase)
TestDeferredObjectMachine = pytest.mark.slow(
    machine_for(lambda folder: DeferredTier(open_folder(folder), order=seeded_order(3))).TestCase
)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_s3_machine(s3_server: S3Server) -> None:
    """Catches sequences of calls that only requests over a network get wrong."""
    suite = S3Suite()
    suite.endpoint, suite.bucket = s3_server.endpoint, s3_server.new_bucket()
    few = settings(settings(), max_examples=8)
    run_state_machine_as_test(machine_for(suite.open_tier), settings=few)


def test_peek_sees_what_the_tier_says(tmp_path: Path) -> None:
    """Catches a back door that reads through the tier, or reads nothing."""
    suite = TestFolderObjectTier()
    bench = Bench(suite, tmp_path)
    key = TensorKey.of("w", StateKind.PARAM)
    bench.store(key, data_of(200_000))
    bench.flush()
    bench.close()
    assert suite.peek(bench.tier, key) == data_of(200_000)
    assert len(manifest_of(suite.door)[key]) == 4
