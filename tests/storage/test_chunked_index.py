"""Names of chunks and the index: unambiguous, exact, and believed only when they make sense."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_core.errors import CorruptDataError
from zinf_core.keys import StateKind, TensorKey
from zinf_storage.chunked.index import (
    Content,
    Index,
    IndexChunk,
    IndexEntry,
    parse,
    serialize,
)
from zinf_storage.chunked.names import PROBE_KEY, ChunkName, index_key, index_number

KEY = TensorKey.of("w", StateKind.PARAM)
_text = st.text(alphabet="ab#./0123456789", max_size=12)
_keys = st.builds(TensorKey, _text, _text, _text)
_names = st.builds(
    ChunkName,
    key=_keys,
    index=st.integers(0, 1 << 40),
    generation=st.integers(0, 1 << 40),
    mark=st.text(alphabet="0123456789abcdef", min_size=8, max_size=8),
)


@given(name=_names, other=_names)
def test_names_are_unambiguous(name: ChunkName, other: ChunkName) -> None:
    """Catches two chunks with one name, also when keys look like names of chunks."""
    assert ChunkName.parse(name.inner_key) == name
    assert (name.inner_key == other.inner_key) == (name == other)
    assert index_number(name.inner_key) is None
    assert name.inner_key != PROBE_KEY


@given(number=st.integers(0, 1 << 50))
def test_indexes_are_no_chunks(number: int) -> None:
    """Catches an index that is given back as a left-over chunk."""
    assert index_number(index_key(number)) == number
    assert ChunkName.parse(index_key(number)) is None


@pytest.mark.parametrize(
    "inner_key",
    [
        KEY,
        PROBE_KEY,
        TensorKey("w", "param", "#1.2"),
        TensorKey("w", "param", "#01.2.0123abcd"),
        TensorKey("w", "param", "#1.2.0123ABCD"),
        TensorKey("w", "param", "1.2.0123abcd"),
        TensorKey("zinf.index", "param", "01"),
        TensorKey("zinf.index", "grad", "1"),
    ],
)
def test_others_keys_are_nobodys(inner_key: TensorKey) -> None:
    """Catches keys of other writers taken for ours, which would be given back."""
    assert ChunkName.parse(inner_key) is None
    assert index_number(inner_key) is None


def coded(inner: int, generation: int, nbytes: int) -> IndexChunk:
    content = Content(nbytes, checksum=(1 << 64) - 1, codec="zstd", width=4)
    return IndexChunk(inner=inner, generation=generation, room_nbytes=nbytes, content=content)


PLAIN = IndexChunk(inner=0, generation=3, room_nbytes=4096, content=Content(4096))
UNWRITTEN = IndexChunk(inner=1, generation=4, room_nbytes=904, content=None)
ENTRY = IndexEntry(key=KEY, nbytes=9096, chunks=(PLAIN, coded(1, 5, 77), UNWRITTEN))
INDEX = Index(
    number=7,
    mark="0123abcd",
    scheme="striped",
    chunk_nbytes=4096,
    num_inner=2,
    next_generation=6,
    entries=(ENTRY, IndexEntry(key=TensorKey.of("e\ud800", StateKind.GRAD), nbytes=0, chunks=())),
)


def test_an_index_comes_back() -> None:
    """Catches fields that are lost or mixed up."""
    assert parse(serialize(INDEX), where="t") == INDEX
    empty = replace(INDEX, entries=())
    assert parse(serialize(empty), where="t") == empty


@given(at=st.integers(0, len(serialize(INDEX)) - 1), flip=st.integers(1, 255))
def test_no_damage_is_believed(at: int, flip: int) -> None:
    """Catches bytes that no checksum covers."""
    data = bytearray(serialize(INDEX))
    data[at] ^= flip
    with pytest.raises(CorruptDataError, match="somewhere: the index"):
        parse(bytes(data), where="somewhere")


@given(cut=st.integers(0, len(serialize(INDEX)) - 1))
def test_no_part_is_believed(cut: int) -> None:
    """Catches a torn write taken for an index."""
    with pytest.raises(CorruptDataError):
        parse(serialize(INDEX)[:cut], where="somewhere")


def with_entry(**changes: object) -> Index:
    return replace(INDEX, entries=(replace(ENTRY, **changes),))


def with_chunk(**changes: object) -> Index:
    return with_entry(chunks=(replace(PLAIN, **changes), *ENTRY.chunks[1:]))


def with_content(**changes: object) -> Index:
    chunk = ENTRY.chunks[1]
    content = replace(chunk.content, **changes)
    return with_entry(chunks=(PLAIN, replace(chunk, content=content), UNWRITTEN))


@pytest.mark.parametrize(
    "index",
    [
        replace(INDEX, number=0),
        replace(INDEX, mark="0123abc"),
        replace(INDEX, mark="../../.."),
        replace(INDEX, chunk_nbytes=5000),
        replace(INDEX, chunk_nbytes=0),
        replace(INDEX, num_inner=0),
        replace(INDEX, num_inner=1),
        replace(INDEX, next_generation=5),
        replace(INDEX, entries=(ENTRY, ENTRY)),
        with_entry(nbytes=4096 * 3 + 1),
        with_entry(nbytes=4096),
        with_entry(chunks=(PLAIN,)),
        with_chunk(room_nbytes=4095),
        with_chunk(room_nbytes=8192),
        with_chunk(content=Content(4095)),
        with_chunk(content=Content(0)),
        with_chunk(content=None, room_nbytes=10),
        with_content(stored_nbytes=78),
        with_content(stored_nbytes=4096),
        with_content(checksum=None),
        with_content(codec=""),
        with_content(width=3),
    ],
)
def test_no_nonsense_is_believed(index: Index) -> None:
    """Catches an index with a right checksum whose numbers would be used unchecked."""
    with pytest.raises(CorruptDataError):
        parse(serialize(index), where="t")


def framed(body: object) -> bytes:
    packed = msgpack.packb(body)
    data = struct.pack("<8sIQ", b"zinf-ix\n", 1, len(packed)) + packed
    return data + hashlib.blake2b(data, digest_size=16).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"number": "7"},
        {"number": True},
        {"mark": 1},
        {"scheme": None},
        {"entries": {}},
        {"entries": [[["w", "param", ""], 1]]},
        {"entries": [[["w", "param"], 0, []]]},
        {"entries": [[["w", "param", 1], 0, []]]},
        {"entries": [[["w", "param", ""], -1, []]]},
        {"entries": [[["w", "param", ""], 1, [[0, 0]]]]},
        {"entries": [[["w", "param", ""], 1, [[0, 0, 1, 1, None, 0, 1]]]]},
        {"entries": [[["w", "param", ""], 1, [[0, 0, 1.0]]]]},
        {"more": 1},
    ],
)
def test_no_wrong_type_is_believed(change: dict) -> None:
    """Catches types that are found out only when somebody computes with them."""
    body = msgpack.unpackb(serialize(replace(INDEX, entries=()))[20:-16])
    assert parse(framed(body), where="t") == replace(INDEX, entries=())
    with pytest.raises(CorruptDataError):
        parse(framed({**body, **change}), where="t")


def test_a_newer_version_is_not_guessed_at() -> None:
    """Catches a later layout read as if it were this one."""
    data = bytearray(serialize(INDEX)[:-16])
    struct.pack_into("<I", data, 8, 2)
    data += hashlib.blake2b(data, digest_size=16).digest()
    with pytest.raises(CorruptDataError, match="version 2"):
        parse(bytes(data), where="t")
