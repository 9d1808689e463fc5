"""Codecs and shuffle: every byte comes back, nothing damaged passes for data."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from chunked_helpers import dicts, key, opened, read, store
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_core.errors import ConfigError, CorruptDataError
from zinf_storage.chunked import ChunkedOptions, Codec, codec_named
from zinf_storage.chunked.shuffle import WIDTHS, best_width, shuffle, unshuffle

CODECS = tuple(codec_named(name) for name in ("zstd", "lz4", "blosc2"))
over_codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def bytes_like(kind: str, nbytes: int, seed: int) -> np.ndarray:
    """Return `nbytes` of what training stores, and of what it should not."""
    rng = np.random.default_rng(seed)
    count = nbytes // 4 + 1
    values = rng.standard_normal(count).astype(np.float32) * 0.02
    if kind == "constant":
        values[:] = 1.5
    elif kind == "nan payloads":
        values = (rng.integers(0, 1 << 22, count, dtype=np.uint32) | 0x7FC00000).view(np.float32)
    elif kind == "noise":
        return np.frombuffer(rng.bytes(nbytes), np.uint8)
    elif kind == "bf16":
        return np.tile((values.view(np.uint32) >> 16).astype(np.uint16), 2).view(np.uint8)[:nbytes]
    elif kind == "int8":
        return np.clip(values * 1000, -127, 127).astype(np.int8).view(np.uint8).repeat(4)[:nbytes]
    elif kind == "denormals and infinities":
        values[::2], values[1::2] = 1e-42, -np.inf
    return values.view(np.uint8)[:nbytes]


_kinds = st.sampled_from(
    ["noise", "constant", "nan payloads", "fp32", "bf16", "int8", "denormals and infinities"]
)
_sizes = st.one_of(st.sampled_from([1, 2, 3, 7, 8, 9, 4095, 4096, 4097]), st.integers(1, 40000))


@over_codecs
@given(kind=_kinds, nbytes=_sizes, width=st.sampled_from(WIDTHS), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_every_byte_comes_back(codec: Codec, kind: str, nbytes: int, width: int, seed: int) -> None:
    """Catches widths that do not divide the length, NaNs made canonical, and lost tails."""
    src = bytes_like(kind, nbytes, seed)
    scratch = np.full(nbytes, 0xA5, np.uint8)
    coded = codec.encode(src, width=width, scratch=scratch)
    dst = np.full(nbytes, 0x5A, np.uint8)
    scratch[:] = 0xA5
    codec.decode(np.frombuffer(coded, np.uint8).copy(), dst, width=width, scratch=scratch)
    assert dst.tobytes() == src.tobytes()


@over_codecs
@given(
    kind=_kinds,
    nbytes=st.one_of(st.just(0), _sizes),
    seed=st.integers(0, 99),
    shuffle=st.sampled_from([None, *WIDTHS]),
)
@settings(max_examples=15, deadline=None)
def test_a_compressed_tier_is_bit_exact(
    codec: Codec, kind: str, nbytes: int, seed: int, shuffle: int | None
) -> None:
    """Catches what goes wrong between codec and tier: chunk edges, raw and coded side by side."""
    options = ChunkedOptions(
        scheme="compressed", chunk_nbytes=8192, codec=codec, shuffle=shuffle, num_threads=2
    )
    data = bytes_like(kind, nbytes, seed).tobytes()
    with opened(dicts([{}]), options) as tier:
        store(tier, key(0), data)
        assert read(tier, key(0)) == data
        for offset in {0, nbytes // 3, nbytes}:
            assert read(tier, key(0), offset) == data[offset:]


@given(data=st.binary(min_size=1, max_size=200), width=st.sampled_from(WIDTHS))
def test_shuffle_is_a_transposition(data: bytes, width: int) -> None:
    """Catches an order of its own, which other readers of the format would not understand."""
    src = np.frombuffer(data, np.uint8)
    shuffled = shuffle(src, width, np.empty_like(src)).tobytes()
    whole = len(data) // width * width
    assert shuffled == b"".join(data[i:whole:width] for i in range(width)) + data[whole:]
    back = np.frombuffer(shuffled, np.uint8).copy()
    if width > 1:
        unshuffle(np.frombuffer(shuffled, np.uint8), width, back)
    assert back.tobytes() == data


def test_the_width_fits_the_elements() -> None:
    """Catches a choice that ignores the data."""
    codec = CODECS[0]

    def encoded_nbytes(sample: np.ndarray, width: int) -> int:
        return len(codec.encode(sample, width=width, scratch=np.empty_like(sample)))

    def chosen(kind: str) -> int:
        return best_width(bytes_like(kind, 1 << 16, 0), encoded_nbytes)

    assert (chosen("fp32"), chosen("bf16")) == (4, 2)


@over_codecs
def test_damage_is_no_data(codec: Codec) -> None:
    """Catches crashes and wrong lengths on coded bytes that no checksum protects any more."""
    src = bytes_like("constant", 8192, 0)
    scratch = np.empty(8192, np.uint8)
    coded = np.frombuffer(codec.encode(src, width=4, scratch=scratch), np.uint8).copy()
    dst = np.empty(8192, np.uint8)
    longer, shorter = np.empty(8193, np.uint8), np.empty(8191, np.uint8)
    for wrong, target in (
        (coded[:-1].copy(), dst),
        (coded[:3].copy(), dst),
        (np.full(64, 0xFF, np.uint8), dst),
        (coded, longer),
        (coded, shorter),
    ):
        with pytest.raises(CorruptDataError):
            codec.decode(wrong, target, width=4, scratch=np.empty_like(target))
    rng = np.random.default_rng(0)
    for _ in range(200):
        broken = coded.copy()
        broken[rng.integers(broken.nbytes)] ^= 1 << int(rng.integers(8))
        try:
            codec.decode(broken, dst, width=4, scratch=scratch)
        except CorruptDataError:
            continue


@pytest.mark.parametrize(
    ("name", "level"),
    [("gzip", None), ("zstd", 23), ("zstd", -51), ("lz4", 13), ("lz4", -1), ("blosc2", 10),
     ("blosc2", 0)],
)  # fmt: skip
def test_codecs_that_there_are_not(name: str, level: int | None) -> None:
    """Catches settings that fail at the first write, or are ignored."""
    with pytest.raises(ConfigError, match=name):
        codec_named(name, level=level)


@pytest.mark.parametrize("level", [-5, 1, 19])
def test_zstd_levels(level: int) -> None:
    """Catches levels that are accepted and do not work."""
    codec = codec_named("zstd", level=level)
    src, dst = bytes_like("fp32", 5000, 0), np.empty(5000, np.uint8)
    scratch = np.empty(5000, np.uint8)
    coded = codec.encode(src, width=4, scratch=scratch)
    codec.decode(np.frombuffer(coded, np.uint8), dst, width=4, scratch=scratch)
    assert dst.tobytes() == src.tobytes()


@pytest.mark.parametrize(
    ("name", "module"), [("zstd", "zstandard"), ("lz4", "lz4.block"), ("blosc2", "blosc2")]
)
def test_a_missing_package_is_named(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ImportError where the user needs to know what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install \"zinf\[compress\]\""):
        codec_named(name)
