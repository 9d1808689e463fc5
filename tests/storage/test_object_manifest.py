"""Manifest of ObjectTier: only what was written is believed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from object_helpers import PART, flush, key, noise, objects, opened, read, store, write

from zinf_core.errors import CorruptDataError
from zinf_core.keys import StateKind, TensorKey
from zinf_storage.object_store.manifest import (
    Manifest,
    ManifestEntry,
    StoredPart,
    generation_of,
    manifest_name,
    parse,
    serialize,
)

FIRST = StoredPart(name="parts/w.ab.0.0", nbytes=8, checksum=2**64 - 1)
SECOND = StoredPart(name="parts/w.ab.0.1", nbytes=3, checksum=0)
ENTRY = ManifestEntry(
    key=TensorKey.of("w\udc80\u00e9", StateKind.OPTIMIZER_STATE, "exp_avg"),
    nbytes=11,
    part_nbytes=8,
    parts=(FIRST, SECOND),
)


def unchecked_key(name: str, kind_value: object) -> TensorKey:
    """Return a key that its constructor refuses."""
    key = TensorKey.of(name, StateKind.PARAM)
    object.__setattr__(key, "kind_value", kind_value)
    return key


EMPTY = ManifestEntry(key=TensorKey.of("e", StateKind.PARAM), nbytes=0, part_nbytes=8, parts=())
UNWRITTEN = replace(EMPTY, key=TensorKey.of("u", StateKind.PARAM), nbytes=9, parts=(None, None))
MANIFEST = Manifest(generation=7, entries=(ENTRY, EMPTY, UNWRITTEN))


def test_what_is_serialized_is_parsed() -> None:
    """Catches fields that are lost, mixed up or cut to fewer bits."""
    assert parse(serialize(MANIFEST), url="x") == MANIFEST


def test_every_damage_is_noticed() -> None:
    """Catches a bit that no digest covers, and cut or prolonged objects."""
    data = serialize(MANIFEST)
    damaged = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    for bad in (*damaged, *(data[:i] for i in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptDataError, match="s3://b/m is no manifest"):
            parse(bad, url="s3://b/m")


@pytest.mark.parametrize(
    "entry",
    [
        replace(ENTRY, parts=(FIRST,)),
        replace(ENTRY, parts=(SECOND, FIRST)),
        replace(ENTRY, parts=(FIRST, replace(SECOND, name=FIRST.name))),
        replace(ENTRY, nbytes=-1, parts=()),
        replace(ENTRY, part_nbytes=0),
        replace(ENTRY, parts=(FIRST, replace(SECOND, checksum=-1))),
        replace(ENTRY, parts=(FIRST, replace(SECOND, name="parts/../x"))),
        replace(ENTRY, parts=(FIRST, replace(SECOND, name="manifests/1.zinf"))),
        replace(ENTRY, parts=(FIRST, replace(SECOND, name=""))),
        replace(ENTRY, key=unchecked_key("w", 5)),
        UNWRITTEN,
    ],
)
def test_what_cannot_be_is_not_believed(entry: ManifestEntry) -> None:
    """Catches objects of others that are read or deleted because a manifest names them."""
    manifest = replace(MANIFEST, entries=(entry, UNWRITTEN))
    with pytest.raises(CorruptDataError):
        parse(serialize(manifest), url="x")


def test_names_sort_and_come_back() -> None:
    """Catches a generation 10 that counts as older than 9, and names of others that count."""
    names = [manifest_name(generation) for generation in (9, 10, 11)]
    assert names == sorted(names)
    assert [generation_of(name) for name in names] == [9, 10, 11]
    assert generation_of("manifests/1.zinf") is None
    assert generation_of("manifests/000000000001.zinf.tmp") is None


def test_the_highest_manifest_counts(tmp_path: Path) -> None:
    """Catches an old manifest, left by a crash before it was deleted, that wins."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
        (name,) = objects(tmp_path, "manifests")
        old = (tmp_path / "manifests" / name).read_bytes()
        write(tier, key(0), noise(PART, 1))
        flush(tier)
    (tmp_path / "manifests" / name).write_bytes(old)
    (tmp_path / "manifests" / "notes.txt").write_bytes(b"somebody's")
    with opened(tmp_path) as tier:
        assert read(tier, key(0)) == noise(PART, 1)
        flush(tier)
        assert len(objects(tmp_path, "manifests")) == 2
        assert name not in objects(tmp_path, "manifests")


def test_a_damaged_manifest_is_named_and_nothing_is_deleted(tmp_path: Path) -> None:
    """Catches a tier that opens empty, or with an older state, and deletes the rest."""
    with opened(tmp_path) as tier:
        store(tier, key(0), noise(PART))
        flush(tier)
    (path,) = (tmp_path / "manifests").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    before = objects(tmp_path), objects(tmp_path, "manifests")
    with pytest.raises(CorruptDataError, match=str(path)), opened(tmp_path):
        pass
    assert (objects(tmp_path), objects(tmp_path, "manifests")) == before
    assert not objects(tmp_path, "leases")
