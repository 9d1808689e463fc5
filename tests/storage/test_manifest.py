"""Manifest bytes: what was written is parsed, everything else is refused by name."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvme_helpers import num_fds

from zinf_core.errors import CorruptDataError
from zinf_core.keys import TensorKey
from zinf_core.runtime.manifest import (
    Manifest,
    ManifestEntry,
    ManifestSegment,
    Region,
    SystemFileCalls,
    max_entry_nbytes,
    max_manifest_nbytes,
    parse,
    serialize,
    write_atomically,
)

PAGE = 4096
SEGMENT = ManifestSegment(number=0, name="segment-00000.zinf", nbytes=8 * PAGE)
ENTRY = ManifestEntry(
    key=TensorKey("a.weight", "param"),
    nbytes=PAGE + 1,
    block_nbytes=PAGE,
    regions=(Region(segment=0, offset=0, nbytes=2 * PAGE),),
    checksums=(2**64 - 1, None),
)
EMPTY = ManifestEntry(
    key=TensorKey("\udc80/ä", "optimizer_state", "exp_avg"),
    nbytes=0, block_nbytes=PAGE, regions=(), checksums=(),
)  # fmt: skip
GOOD = Manifest(generation=3, segments=(SEGMENT,), entries=(ENTRY, EMPTY))


def framed(body: object, *, version: int = 1, magic: bytes = b"zinf-mf\n") -> bytes:
    """Return a file with a right digest around any body, as a careful attacker would write it."""
    packed = msgpack.packb(body)
    data = struct.pack("<8sIQ", magic, version, len(packed)) + packed
    return data + hashlib.blake2b(data, digest_size=16).digest()


def raw_body(**changes: object) -> dict:
    body = {
        "generation": 3,
        "segments": [[0, "segment-00000.zinf", 8 * PAGE]],
        "entries": [[["a", "param", ""], PAGE, PAGE, [[0, 0, PAGE]], [7]]],
    }
    return body | changes


def entry(
    key: str = "a",
    nbytes: int = PAGE,
    block: int = PAGE,
    regions: list | None = None,
    checksums: list | None = None,
) -> list:
    return [
        [key, "param", ""], nbytes, block,
        [[0, 0, PAGE]] if regions is None else regions,
        [7] if checksums is None else checksums,
    ]  # fmt: skip


def test_what_was_serialized_is_parsed() -> None:
    """Catches a field left out or swapped; also names that are not valid UTF-8."""
    assert parse(serialize(GOOD), path="m") == GOOD


@given(
    st.lists(st.tuples(*[st.text(max_size=60)] * 3), max_size=9, unique=True),
    st.integers(0, 1 << 20),
    st.sampled_from([PAGE, 1 << 20]),
    st.integers(0, 70),
)
def test_no_manifest_is_larger_than_what_room_is_kept_for(
    names: list[tuple[str, str, str]], nbytes: int, block_nbytes: int, num_segments: int
) -> None:
    """Catches a field whose largest number or name nobody counted."""
    big = (1 << 62) - 1
    segments = tuple(
        ManifestSegment(number=big - i, name=f"segment-{999_999_999 - i}.zinf", nbytes=big)
        for i in range(num_segments)
    )
    entries = tuple(
        ManifestEntry(
            key=TensorKey(*name), nbytes=nbytes, block_nbytes=block_nbytes,
            regions=(Region(segment=big, offset=big, nbytes=big),) * min(8, -(-nbytes // PAGE)),
            checksums=((1 << 64) - 1,) * -(-nbytes // block_nbytes),
        )
        for name in names
    )  # fmt: skip
    data = serialize(Manifest(generation=big, segments=segments, entries=entries))
    kept = sum(max_entry_nbytes(entry.key, nbytes, block_nbytes) for entry in entries)
    assert len(data) <= max_manifest_nbytes(kept, num_segments)
    assert max_manifest_nbytes(kept, num_segments) <= 3 * len(data) + 1024


@given(st.data())
def test_every_damaged_byte_is_noticed(data: st.DataObject) -> None:
    """Catches a manifest believed although a bit of it flipped or its end is missing."""
    good = serialize(GOOD)
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(flipped), good[:at], good + good[: at + 1]):
        with pytest.raises(CorruptDataError, match="manifest the/file"):
            parse(damaged, path="the/file")


@given(st.binary(max_size=200))
def test_arbitrary_bodies_are_refused_cleanly(body: bytes) -> None:
    """Catches a parser that lets something else than CorruptDataError out."""
    data = struct.pack("<8sIQ", b"zinf-mf\n", 1, len(body)) + body
    data += hashlib.blake2b(data, digest_size=16).digest()
    with pytest.raises(CorruptDataError):
        parse(data, path="m")


def test_the_hand_made_body_is_accepted() -> None:
    """The bodies refused below differ from this one in one thing each."""
    assert parse(framed(raw_body()), path="m").entries[0].nbytes == PAGE


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (raw_body(generation=0), "generation"),
        (raw_body(generation=True), "generation is bool"),
        (raw_body(generation="3"), "generation is str"),
        (raw_body(extra=1), "other fields"),
        ([1, 2], "other fields"),
        (raw_body(segments={}), "segments is dict"),
        (raw_body(segments=[[0, "/etc/passwd", 8 * PAGE]]), "plain file name"),
        (raw_body(segments=[[0, "..", 8 * PAGE]]), "plain file name"),
        (raw_body(segments=[[0, "a/../b", 8 * PAGE]]), "plain file name"),
        (raw_body(segments=[[0, "", 8 * PAGE]]), "plain file name"),
        (raw_body(segments=[[0, b"x", 8 * PAGE]]), "not text"),
        (raw_body(segments=[[0, "s", 100]]), "whole pages"),
        (raw_body(segments=[[0, "s", 1 << 63]]), "segment size"),
        (raw_body(segments=[[0, "s", 8 * PAGE], [0, "t", PAGE]]), "segment twice"),
        (raw_body(segments=[[0, "s", 8 * PAGE], [1, "s", PAGE]]), "segment twice"),
        (raw_body(segments=[[0, "s"]]), "2 fields instead of 3"),
        (raw_body(entries=[entry(), entry()]), "key twice"),
        (raw_body(entries=[entry(), entry("b")]), "overlap"),
        (raw_body(entries=[entry(regions=[[1, 0, PAGE]])]), "ends at byte"),
        (raw_body(entries=[entry(regions=[[0, 8 * PAGE, PAGE]])]), "ends at byte"),
        (raw_body(entries=[entry(regions=[[0, 1, PAGE]])]), "whole pages"),
        (raw_body(entries=[entry(regions=[[0, -PAGE, PAGE]])]), "extent offset"),
        (raw_body(entries=[entry(regions=[])]), "hold 0 bytes for 4096"),
        (raw_body(entries=[entry(nbytes=1 << 63)]), "key size"),
        (raw_body(entries=[entry(nbytes=-1)]), "key size"),
        (raw_body(entries=[entry(nbytes=1.5)]), "key size is float"),
        (raw_body(entries=[entry(block=0)]), "block size"),
        (raw_body(entries=[entry(block=1 << 40)]), "block size"),
        (raw_body(entries=[entry(block=100)]), "whole pages"),
        (raw_body(entries=[entry(checksums=[])]), "0 checksums for 1 blocks"),
        (raw_body(entries=[entry(checksums=[-1])]), "checksum -1"),
        (raw_body(entries=[entry(checksums=["x"])]), "checksum is str"),
        (raw_body(entries=[[["a", "param"], 0, PAGE, [], []]]), "2 fields instead of 3"),
    ],
)
def test_wrong_numbers_and_types_are_named(body: object, says: str) -> None:
    """Catches a manifest with a right digest that would make us read, or allocate, nonsense."""
    with pytest.raises(CorruptDataError, match=says):
        parse(framed(body), path="m")


def test_a_huge_count_is_refused_before_anything_is_allocated() -> None:
    """Catches an array header of four thousand million entries taken at its word."""
    packed = b"\x83" + msgpack.packb("entries") + b"\xdd\xff\xff\xff\xff"
    data = struct.pack("<8sIQ", b"zinf-mf\n", 1, len(packed)) + packed
    data += hashlib.blake2b(data, digest_size=16).digest()
    with pytest.raises(CorruptDataError):
        parse(data, path="m")


def test_a_newer_version_is_named() -> None:
    """Catches a newer layout read with the rules of this one."""
    with pytest.raises(CorruptDataError, match="version 2, this release reads up to 1"):
        parse(framed(raw_body(), version=2), path="m")


def test_an_atomic_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    """Catches a temporary file left behind, and a file others may read."""
    path = tmp_path / "m.zinf"
    write_atomically(path, b"old")
    write_atomically(path, b"new bytes")
    assert path.read_bytes() == b"new bytes"
    assert [p.name for p in tmp_path.iterdir()] == ["m.zinf"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["open", "write", "ftruncate", "fsync", "replace"])
def test_a_failed_atomic_write_keeps_the_old_bytes(tmp_path: Path, name: str) -> None:
    """Catches a file truncated or half written in place when the disk is full."""
    path = tmp_path / "m.zinf"
    write_atomically(path, b"old")

    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    before = num_fds()
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new", calls=replace(SystemFileCalls(), **{name: fail}))
    assert path.read_bytes() == b"old"
    assert num_fds() == before


def test_a_short_write_goes_on(tmp_path: Path) -> None:
    """Catches a manifest cut where one write call ended."""
    calls = SystemFileCalls(write=lambda fd, data: os.write(fd, data[:3]))
    write_atomically(tmp_path / "m", b"0123456789", calls=calls)
    assert (tmp_path / "m").read_bytes() == b"0123456789"


def test_a_manifest_is_staged_in_the_blocks_that_are_there(tmp_path: Path) -> None:
    """Catches room that was taken ahead given up before the bytes are in it, and rests of it
    behind the bytes."""
    staged = tmp_path / "m.tmp"
    staged.write_bytes(b"x" * 9)
    number = staged.stat().st_ino
    write_atomically(tmp_path / "m", b"1234")
    assert (tmp_path / "m").read_bytes() == b"1234"
    assert (tmp_path / "m").stat().st_ino == number
