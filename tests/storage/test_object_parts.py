"""ObjectTier: which objects there are when, and what is left of failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from object_helpers import (
    PART,
    SMALL,
    bucket_in,
    buffer_of,
    flush,
    key,
    noise,
    objects,
    opened,
    read,
    store,
    write,
)

from zinf_core.errors import (
    CorruptDataError,
    TierFullError,
    TransferError,
    TransferTimeoutError,
)
from zinf_core.keys import StateKind, TensorKey


def test_a_small_write_replaces_only_the_parts_it_touches(tmp_path: Path) -> None:
    """Catches whole keys uploaded again for a few bytes, and parts cut at other places."""
    with opened(tmp_path) as tier:
        data = bytearray(noise(5 * PART + 7))
        store(tier, key(0), bytes(data))
        flush(tier)
        before = objects(tmp_path)
        data[PART + 5 : 2 * PART + 9] = noise(PART + 4, 1)
        write(tier, key(0), bytes(data[PART + 5 : 2 * PART + 9]), PART + 5)
        flush(tier)
        after = objects(tmp_path)
        assert (len(before), len(after), len(before & after)) == (6, 6, 4)
        assert read(tier, key(0)) == data
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == data


def test_old_objects_stay_until_the_flush(tmp_path: Path) -> None:
    """Catches objects of the last flush deleted before the next one is there."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        committed = objects(tmp_path)
        for seed in range(3):
            write(tier, key(0), noise(PART, seed))
        assert committed < objects(tmp_path)
        tier.discard(key(0))
        assert committed < objects(tmp_path)
        flush(tier)
        assert not objects(tmp_path)
        assert len(objects(tmp_path, "manifests")) == 1


def test_close_deletes_what_was_not_flushed(tmp_path: Path) -> None:
    """Catches prefixes that fill with objects nobody names."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        write(tier, key(0), noise(PART, 1))
        store(tier, key(1), noise(3 * PART))
    assert len(objects(tmp_path)) == 1
    assert not objects(tmp_path, "leases")
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PART)
        assert tier.found.num_left_over == 0


def test_much_garbage_is_not_kept_for_the_flush(tmp_path: Path) -> None:
    """Catches runs that never flush and keep every version they ever wrote."""
    with opened(tmp_path) as tier:
        tier.reserve(key(0), 100 * PART)
        for seed in range(6):
            write(tier, key(0), noise(PART, seed) * 100)
        tier._parts.scheduler.drain()
        assert len(objects(tmp_path)) <= 100 + 16


def test_a_read_in_flight_keeps_its_objects(tmp_path: Path) -> None:
    """Catches objects deleted under a read: it was submitted before the overwrite and flush."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(3 * PART))
        bucket.hold("read_into")
        dst = buffer_of(bytes(3 * PART))
        late = tier.read_into(key(0), dst)
        assert bucket.entered.wait(timeout=30)
        tier.discard(key(0))
        commit = tier.flush()
        bucket.release("read_into")
        late.wait(timeout_s=30)
        commit.wait(timeout_s=30)
        assert dst.array.tobytes() == noise(3 * PART)
        flush(tier)
        assert not objects(tmp_path)


def test_a_flush_holds_exactly_what_came_before_it(tmp_path: Path) -> None:
    """Catches checkpoints that mix two steps: later writes and discards that end first."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        for index in range(3):
            store(tier, key(index), noise(PART, index))
        bucket.hold("put")
        before = tier.write_from(key(0), buffer_of(noise(PART, 10)))
        assert bucket.entered.wait(timeout=30)
        commit = tier.flush()
        after = tier.write_from(key(1), buffer_of(noise(PART, 11)))
        tier.discard(key(2))
        bucket.release("put")
        for completion in (after, before, commit):
            completion.wait(timeout_s=30)
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PART, 10)
        assert read(tier, key(1)) == noise(PART, 1)
        assert read(tier, key(2)) == noise(PART, 2)


def test_a_failed_write_leaves_no_object(tmp_path: Path) -> None:
    """Catches parts of a failed write that stay for ever, and old parts that go with them."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(4 * PART))
        flush(tier)
        before = objects(tmp_path)
        bucket.arm("put")
        with pytest.raises(TransferError):
            write(tier, key(0), noise(4 * PART, 1))
        flush(tier)
        assert objects(tmp_path) == before
        assert read(tier, key(0)) == noise(4 * PART)


def test_a_failed_flush_keeps_both_states(tmp_path: Path) -> None:
    """Catches objects deleted after a manifest that may or may not be there."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        write(tier, key(0), noise(PART, 1))
        bucket.arm("create")
        with pytest.raises(TransferError):
            flush(tier)
        assert len(objects(tmp_path)) == 2
        write(tier, key(0), noise(PART, 2))
        flush(tier)
        assert len(objects(tmp_path)) == 1
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PART, 2)


def test_a_flush_that_is_in_doubt_is_settled_by_the_next(tmp_path: Path) -> None:
    """Catches a manifest that was put although the flush failed, and outlives all later ones."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(PART))
        bucket.arm("make_durable", holding="manifests")
        with pytest.raises(TransferError):
            flush(tier)
        assert len(objects(tmp_path, "manifests")) == 1
        write(tier, key(0), noise(PART, 1))
        flush(tier)
        assert len(objects(tmp_path, "manifests")) == 1
        assert len(objects(tmp_path)) == 1


def test_a_flush_syncs_before_it_names(tmp_path: Path) -> None:
    """Catches a manifest that is durable before the objects it names, which only a power cut
    would show."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(2 * PART))
        bucket.calls.clear()
        flush(tier)
        flush(tier)
        calls = [(name, len(what)) for name, what in bucket.calls if name != "delete"]
        manifest = len("manifests/000000000001.zinf")
        commit = [("create", manifest), ("make_durable", 1)]
        assert calls == [("make_durable", 2), *commit, ("make_durable", 0), *commit]


def test_what_a_failed_write_put_is_deleted_at_once(tmp_path: Path) -> None:
    """Catches a full drive kept full by the write that did not fit."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(PART))
        before = objects(tmp_path)
        tier.reserve(key(1), 9 * PART)
        bucket.arm("put", holding=".8")
        with pytest.raises(TransferError):
            write(tier, key(1), noise(9 * PART))
        tier._parts.scheduler.drain()
        assert objects(tmp_path) == before


def test_a_flush_waits_for_the_room_of_a_failed_write(tmp_path: Path) -> None:
    """Catches a manifest for which a full drive has no room yet, but is about to have."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        tier.reserve(key(0), 2 * PART)
        bucket.hold("delete")
        bucket.arm("put", holding=".1")
        with pytest.raises(TransferError):
            write(tier, key(0), noise(2 * PART))
        assert bucket.entered.wait(timeout=30)
        commit = tier.flush()
        with pytest.raises(TransferTimeoutError):
            commit.wait(timeout_s=0.05)
        bucket.release("delete")
        commit.wait(timeout_s=30)


def test_refused_deletes_are_told_and_made_up_for(tmp_path: Path) -> None:
    """Catches a growing bill that nobody hears of, and names that are forgotten."""
    bucket = bucket_in(tmp_path)
    with opened(bucket) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        write(tier, key(0), noise(PART, 1))
        bucket.arm("delete", times=2)
        with pytest.raises(TransferError, match="armed delete"):
            flush(tier)
        assert len(objects(tmp_path)) == 2
        flush(tier)
        assert len(objects(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"short"), "has 5 bytes instead of 4096"),
        (lambda path: path.write_bytes(noise(PART, 9)), "has checksum"),
    ],
)
def test_a_damaged_object_is_named(tmp_path: Path, change: object, message: str) -> None:
    """Catches zeros or a bare "not found" for bytes that are gone."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        change(next((tmp_path / "parts").iterdir()))
        with pytest.raises(CorruptDataError, match=message) as caught:
            read(tier, key(0))
        assert str(key(0)) in str(caught.value)
        assert str(tmp_path / "parts") in str(caught.value)
        with pytest.raises(CorruptDataError):
            write(tier, key(0), b"part of a part", 5)
        write(tier, key(0), noise(PART, 3))
        assert read(tier, key(0)) == noise(PART, 3)


def test_names_never_clash_and_are_safe_anywhere(tmp_path: Path) -> None:
    """Catches names that differ only in case, are too long for a file, or need escaping."""
    names = ["W", "w", "../w", "w/..", "\u00e9" * 200, "", "\udc80", "w" * 5000, "CON", "%2e%2e"]
    keys = [TensorKey.of(name, StateKind.PARAM) for name in names]
    with opened(tmp_path) as tier:
        for index, which in enumerate(keys):
            store(tier, which, noise(64, index))
        flush(tier)
        found = objects(tmp_path)
        assert len({name.lower() for name in found}) == len(keys)
        assert max(map(len, found)) < 100
        assert all(name.isascii() and not name.startswith(".") for name in found)
    with opened(tmp_path) as tier:
        assert [read(tier, which) for which in keys] == [noise(64, i) for i in range(len(keys))]


def test_another_part_size_reads_what_was_written(tmp_path: Path) -> None:
    """Catches a part size taken from the options instead of the manifest."""
    data = bytearray(noise(3 * PART + 1))
    with opened(tmp_path) as tier:
        store(tier, key(0), bytes(data))
        flush(tier)
    with opened(tmp_path, replace(SMALL, part_nbytes=3 * PART)) as tier:
        assert read(tier, key(0)) == data
        data[10:20] = noise(10)
        write(tier, key(0), bytes(data[10:20]), 10)
        assert read(tier, key(0)) == data
        write(tier, key(0), bytes(data))
        flush(tier)
        assert len(objects(tmp_path)) == 2
        assert read(tier, key(0)) == data


def test_a_write_waits_for_room_that_a_read_gives_back(tmp_path: Path) -> None:
    """Catches a full tier reported although a transfer in flight is about to free its room."""
    bucket = bucket_in(tmp_path)
    with opened(bucket, replace(SMALL, capacity_nbytes=2 * PART)) as tier:
        store(tier, key(0), noise(PART))
        bucket.hold("read_into")
        dst = buffer_of(bytes(PART))
        late = tier.read_into(key(0), dst)
        assert bucket.entered.wait(timeout=30)
        write(tier, key(0), noise(PART, 1))
        second = tier.write_from(key(0), buffer_of(noise(PART, 2)))
        assert tier.usage().allocated_nbytes == 2 * PART
        assert not second.done()
        bucket.release("read_into")
        for completion in (second, late):
            completion.wait(timeout_s=30)
        assert dst.array.tobytes() == noise(PART)
        assert read(tier, key(0)) == noise(PART, 2)


def test_a_write_without_room_fails_and_changes_nothing(tmp_path: Path) -> None:
    """Catches writes that wait for ever for room that a flush alone can free."""
    with opened(tmp_path, replace(SMALL, capacity_nbytes=2 * PART)) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        write(tier, key(0), noise(PART, 1))
        with pytest.raises(TierFullError, match=r"layers\.0.*capacity_nbytes = 8192"):
            write(tier, key(0), noise(PART, 2))
        assert read(tier, key(0)) == noise(PART, 1)
        flush(tier)
        write(tier, key(0), noise(PART, 3))
        assert read(tier, key(0)) == noise(PART, 3)


def test_the_flushed_state_counts_as_room(tmp_path: Path) -> None:
    """Catches capacity that is exceeded by the copies a flush keeps."""
    with opened(tmp_path, replace(SMALL, capacity_nbytes=3 * PART)) as tier:
        with pytest.raises(TierFullError, match="capacity_nbytes = 12288"):
            tier.reserve(key(0), 2 * PART)
        store(tier, key(0), noise(PART))
        flush(tier)
        write(tier, key(0), noise(PART, 1))
        assert tier.usage().allocated_nbytes == 2 * PART
        flush(tier)
        assert tier.usage().allocated_nbytes == PART
    with (
        pytest.raises(TierFullError, match="holds 4096 bytes"),
        opened(tmp_path, replace(SMALL, capacity_nbytes=PART - 1)),
    ):
        pass
    assert not objects(tmp_path, "leases")


def test_remove_leaves_nothing(tmp_path: Path) -> None:
    """Catches objects, manifests or leases that outlive the tier's removal."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(3 * PART))
        flush(tier)
        tier.remove()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_objects_of_others_are_left_alone(tmp_path: Path) -> None:
    """Catches a tier that takes everything below its prefix for its own, and deletes it."""
    foreign = {
        tmp_path / "parts" / "2024" / "engine.step": b"cad",
        tmp_path / "parts" / "readme.md": b"text",
        tmp_path / "manifests" / "k8s.yaml": b"kind: Pod",
        tmp_path / "leases" / "contract.pdf": b"%PDF",
        tmp_path / "notes": b"mine",
    }
    for path, data in foreign.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with opened(tmp_path) as tier:
        assert tier.found.num_left_over == 0
        store(tier, key(0), noise(PART))
        flush(tier)
        assert tier.reclaim() == 0
        tier.remove()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == foreign


def test_removing_leaves_nothing(tmp_path: Path) -> None:
    """Catches objects, or folders of a local store, that stay behind."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(3 * PART))
        flush(tier)
        tier.remove()
    assert list(tmp_path.iterdir()) == []
