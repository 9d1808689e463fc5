"""Conversions of bf16 and fp16, against torch and, for ties, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch

from zinf_core.dtypes import DType, bf16_to_fp32, fp16_to_fp32, fp32_to_bf16, fp32_to_fp16

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def bits_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return values.view(np.uint32)


def fp32_of(bits: object) -> npt.NDArray[np.float32]:
    return np.asarray(bits, np.uint32).view(np.float32)


def through_torch(values: npt.NDArray[np.float32], dtype: torch.dtype) -> npt.NDArray[np.uint16]:
    return torch.from_numpy(values.copy()).to(dtype).view(torch.uint16).numpy()


def interesting_fp32() -> npt.NDArray[np.float32]:
    """Return every upper half with lower halves around the ties of bf16, and random patterns."""
    lows = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    uppers = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    drawn = np.random.default_rng(7).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    return fp32_of(np.concatenate([(uppers[:, None] | lows).ravel(), drawn]))


def halfway_fp32() -> npt.NDArray[np.float32]:
    """Return the middle of every two neighbouring fp16 numbers, and the fp32 on either side."""
    finite = ALL_16_BITS[:0x7C00].view(np.float16).astype(np.float64)
    middles = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    around = [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9e9))]
    return np.concatenate([*around, *(-part for part in around)])


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1),
     ("I64", 8), ("I32", 4), ("I16", 2), ("I8", 1), ("U8", 1), ("BOOL", 1)],
)  # fmt: skip
def test_itemsize(dtype: str, itemsize: int) -> None:
    """Catches a wrong or missing size, and a name that safetensors does not use."""
    assert DType(dtype).itemsize == itemsize


def test_every_dtype_has_a_size() -> None:
    """Catches a type that was added without its size."""
    assert len(DType) == 12
    assert all(dtype.itemsize in {1, 2, 4, 8} for dtype in DType)


def test_bf16_to_fp32_of_every_pattern() -> None:
    """Catches a wrong shift or a sign, for all 65536 patterns, NaN payloads included."""
    expected = torch.from_numpy(ALL_16_BITS.copy()).view(torch.bfloat16).float().numpy()
    found = bf16_to_fp32(ALL_16_BITS)
    assert found.dtype == np.float32
    assert np.array_equal(bits_of(found), ALL_16_BITS.astype(np.uint32) << np.uint32(16))
    assert np.array_equal(found, expected, equal_nan=True)


def test_bf16_survives_the_round_trip() -> None:
    """Catches rounding that moves a number which bf16 can represent, the infinities included."""
    back = fp32_to_bf16(bf16_to_fp32(ALL_16_BITS))
    is_nan = (ALL_16_BITS & 0x7FFF) > 0x7F80
    assert back.dtype == np.uint16
    assert np.array_equal(back[~is_nan], ALL_16_BITS[~is_nan])
    assert np.all(back[is_nan] == 0x7FC0)


def test_fp32_to_bf16_is_torchs() -> None:
    """Catches truncation, ties that do not go to even, overflow that wraps, NaN that becomes Inf.

    Which NaN comes out differs between torch's own code paths; ours is always 0x7FC0.
    """
    values = interesting_fp32()
    found, expected = fp32_to_bf16(values), through_torch(values, torch.bfloat16)
    is_nan = np.isnan(values)
    assert np.array_equal(found[~is_nan], expected[~is_nan])
    assert np.all(found[is_nan] == 0x7FC0)
    assert np.all((expected[is_nan] & 0x7FFF) > 0x7F80)


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F808000, 0x3F80),  # tie, even below
        (0x3F818000, 0x3F82),  # tie, even above
        (0x3F808001, 0x3F81),
        (0x3F80FFFF, 0x3F81),
        (0x00008000, 0x0000),  # denormal tie to zero
        (0x00018000, 0x0002),
        (0x80008001, 0x8001),
        (0x007FFFFF, 0x0080),  # largest denormal becomes the smallest normal
        (0x7F7FFFFF, 0x7F80),  # largest finite rounds to infinity
        (0x7F7F7FFF, 0x7F7F),
        (0xFF800000, 0xFF80),
        (0x80000000, 0x8000),
        (0x7F800001, 0x7FC0),  # signalling NaN whose payload is in the half that is cut off
        (0xFFFFFFFF, 0x7FC0),  # NaN that rounding would wrap round to zero
    ],
)
def test_fp32_to_bf16_by_hand(bits: int, rounded: int) -> None:
    """Catches an error that torch and numpy might share, at the edges."""
    assert fp32_to_bf16(fp32_of([bits])).tolist() == [rounded]


def test_fp32_to_bf16_rounds_to_the_nearest() -> None:
    """Catches a rounding error, in exact arithmetic and without torch."""
    values = fp32_of(np.random.default_rng(3).integers(0, 0x7F000000, 500, dtype=np.uint32))
    for value, found in zip(values, fp32_to_bf16(values).tolist(), strict=True):
        near = bf16_to_fp32(np.array([found - 1, found, found + 1], np.uint16)[found == 0 :])
        errors = [abs(Fraction(float(other)) - Fraction(float(value))) for other in near]
        assert errors[-2] == min(errors)


def test_fp16_to_fp32_of_every_pattern() -> None:
    """Catches denormals flushed to zero or a wrong exponent, for all 65536 patterns."""
    expected = torch.from_numpy(ALL_16_BITS.copy()).view(torch.float16).float().numpy()
    found = fp16_to_fp32(ALL_16_BITS)
    is_nan = np.isnan(expected)
    assert found.dtype == np.float32
    assert np.array_equal(bits_of(found)[~is_nan], bits_of(expected)[~is_nan])
    assert np.array_equal(np.isnan(found), is_nan)


def test_fp32_to_fp16_is_torchs() -> None:
    """Catches ties that do not go to even, overflow that does not become infinity, lost denormals;
    and, since warnings are errors, a warning about overflow."""
    values = np.concatenate([interesting_fp32(), halfway_fp32()])
    found, expected = fp32_to_fp16(values), through_torch(values, torch.float16)
    is_nan = np.isnan(values)
    assert found.dtype == np.uint16
    assert np.array_equal(found[~is_nan], expected[~is_nan])
    assert np.all((found[is_nan] & 0x7FFF) > 0x7C00)


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("convert", [bf16_to_fp32, fp16_to_fp32, fp32_to_bf16, fp32_to_fp16])
def test_results_are_new_and_keep_the_length(convert: object, size: int) -> None:
    """Catches a result that aliases its argument, and arrays of no or one element."""
    narrow = convert in {bf16_to_fp32, fp16_to_fp32}
    source = np.ones(size, np.uint16 if narrow else np.float32)
    result = convert(source)
    assert result.shape == (size,)
    assert not np.shares_memory(result, source)


def test_strided_views_convert_as_their_copies() -> None:
    """Catches a conversion that reinterprets memory and not elements."""
    values = np.linspace(-3, 3, 64, dtype=np.float32)
    bits = ALL_16_BITS[1000:1064]
    assert np.array_equal(fp32_to_bf16(values[::3]), fp32_to_bf16(values[::3].copy()))
    assert np.array_equal(fp32_to_fp16(values[::-2]), fp32_to_fp16(values[::-2].copy()))
    assert np.array_equal(bf16_to_fp32(bits[::3]), bf16_to_fp32(bits[::3].copy()))
    assert np.array_equal(fp16_to_fp32(bits[::-2]), fp16_to_fp32(bits[::-2].copy()))
