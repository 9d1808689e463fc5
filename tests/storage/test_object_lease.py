"""The writer's lease of ObjectTier: one writer below one prefix, and none locked out for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import msgpack
import pytest
from object_helpers import (
    PART,
    SMALL,
    bucket_in,
    flush,
    key,
    noise,
    objects,
    opened,
    read,
    store,
    write,
)

from zinf_core.errors import TierLockedError, TransferError
from zinf_storage.object_store.lease import Holder, WriterLease

CHILD = f"""
import sys
from object_helpers import *
from object_helpers import flush, opened, store
with opened(__import__("pathlib").Path(sys.argv[1])) as tier:
    store(tier, key(0), noise({PART}))
    flush(tier)
    store(tier, key(1), noise({5 * PART}))
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer_elsewhere(folder: Path) -> Iterator[subprocess.Popen]:
    """Run a process that holds the prefix until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
    ) as child:
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def put_lease(folder: Path, holder: Holder, name: str = "other") -> None:
    (folder / "leases").mkdir(parents=True, exist_ok=True)
    (folder / "leases" / f"{name}.zinf").write_bytes(msgpack.packb(asdict(holder)))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """Catches two tiers below one prefix, and a refusal that does not say by whom or what to do."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        (held,) = objects(tmp_path, "leases")
        with pytest.raises(TierLockedError) as caught, opened(tmp_path):
            pass
        message = str(caught.value)
        assert f"process {os.getpid()} on {os.uname().nodename}" in message
        assert f"evict={held.removesuffix('.zinf')}" in message
        assert objects(tmp_path, "leases") == {held}
        flush(tier)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PART)


@pytest.mark.slow
def test_a_killed_writer_leaves_the_prefix_free(tmp_path: Path) -> None:
    """Catches prefixes locked for ever by a killed process, its last flush or its left-overs
    destroyed by the next open, and left-overs nobody can get rid of."""
    with writer_elsewhere(tmp_path) as child:
        with pytest.raises(TierLockedError, match=f"process {child.pid} "), opened(tmp_path):
            pass
        child.kill()
        child.wait()
    with opened(tmp_path) as tier:
        assert list(tier.keys()) == [key(0)]
        assert read(tier, key(0)) == noise(PART)
        assert (tier.found.num_keys, tier.found.nbytes) == (1, PART)
        assert (tier.found.num_left_over, tier.found.left_over_nbytes) == (5, 5 * PART)
        assert len(objects(tmp_path)) == 6
        assert len(objects(tmp_path, "leases")) == 1
        store(tier, key(1), noise(PART, 1))
        assert tier.reclaim() == 5 * PART
        assert tier.reclaim() == 0
        assert read(tier, key(0)) == noise(PART)
        assert read(tier, key(1)) == noise(PART, 1)


def test_a_process_that_has_the_number_of_a_dead_one_is_not_it(tmp_path: Path) -> None:
    """Catches a prefix locked by whatever process runs under the number now."""
    here = Holder.of_this_process()
    put_lease(tmp_path, replace(here, started="1"))
    with opened(tmp_path):
        assert len(objects(tmp_path, "leases")) == 1


@pytest.mark.parametrize(
    "holder",
    [
        replace(Holder.of_this_process(), namespace="another boot"),
        replace(Holder.of_this_process(), namespace="", started=""),
    ],
    ids=["another machine", "unknown"],
)
def test_a_process_that_cannot_be_seen_may_live(tmp_path: Path, holder: Holder) -> None:
    """Catches a writer on another machine taken for dead because its number is free here."""
    put_lease(tmp_path, replace(holder, pid=2**22 + 1))
    with pytest.raises(TierLockedError, match="evict=other"), opened(tmp_path):
        pass
    with opened(tmp_path, replace(SMALL, evict_lease="other")):
        assert "other.zinf" not in objects(tmp_path, "leases")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa3pid\x01"])
def test_a_lease_nobody_can_read_may_be_a_live_one(tmp_path: Path, data: bytes) -> None:
    """Catches leases of another version, or damaged ones, that are ignored."""
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "strange.zinf").write_bytes(data)
    with pytest.raises(TierLockedError, match="unknown process"), opened(tmp_path):
        pass
    assert objects(tmp_path, "leases") == {"strange.zinf"}


def test_evicting_one_lease_does_not_evict_another(tmp_path: Path) -> None:
    """Catches an option left in a script that lets it in whoever holds the prefix."""
    with (
        opened(tmp_path),
        pytest.raises(TierLockedError),
        opened(tmp_path, replace(SMALL, evict_lease="other")),
    ):
        pass


def test_of_two_that_start_together_one_at_most_wins(tmp_path: Path) -> None:
    """Catches leases that are looked for before one's own is put."""
    bucket = bucket_in(tmp_path)
    WriterLease.acquire(bucket, tier_name="one").release()
    calls = [name for name, _ in bucket.calls]
    assert calls.index("put") < calls.index("names")


def test_an_evicted_writer_cannot_commit(tmp_path: Path) -> None:
    """Catches a suspended process that wakes up and replaces the state of its successor."""
    with opened(tmp_path) as first:
        store(first, key(0), noise(PART))
        flush(first)
        (held,) = objects(tmp_path, "leases")
        evicting = replace(SMALL, evict_lease=held.removesuffix(".zinf"))
        with opened(tmp_path, evicting) as second:
            write(second, key(0), noise(PART, 1))
            flush(second)
        write(first, key(0), noise(PART, 2))
        for _ in range(2):
            with pytest.raises(TierLockedError, match="evicted: close it"):
                flush(first)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PART, 1)


@pytest.mark.parametrize("call", ["names", "get"])
def test_a_failed_open_gives_the_lease_back(tmp_path: Path, call: str) -> None:
    """Catches a prefix locked by a process that has no tier."""
    with opened(tmp_path) as tier:
        flush(tier)
    bucket = bucket_in(tmp_path)
    bucket.arm(call)
    with pytest.raises(TransferError), opened(bucket):
        pass
    assert not objects(tmp_path, "leases")


def test_close_gives_the_lease_back_though_deleting_fails(tmp_path: Path) -> None:
    """Catches an error at close that hides behind it a prefix locked for ever."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(PART))
        bucket.arm("delete")
        with pytest.raises(TransferError, match="armed delete"):
            tier.close()
        assert not objects(tmp_path, "leases")
