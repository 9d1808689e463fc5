"""Element types by their safetensors names, and exact bf16/fp16 conversions on numpy views."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt


class DType(enum.Enum):
    """Element type; the value is the safetensors name."""

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    I64 = "I64"
    I32 = "I32"
    I16 = "I16"
    I8 = "I8"
    U8 = "U8"
    BOOL = "BOOL"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.F64: 8, DType.F32: 4, DType.F16: 2, DType.BF16: 2, DType.F8_E4M3: 1, DType.F8_E5M2: 1,
    DType.I64: 8, DType.I32: 4, DType.I16: 2, DType.I8: 1, DType.U8: 1, DType.BOOL: 1,
}  # fmt: skip

_BF16_QUIET_NAN = np.uint16(0x7FC0)


def bf16_to_fp32(bits_N: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the fp32 values of bf16 bit patterns, exactly. Allocates the result."""
    return (bits_N.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return bf16 bit patterns of fp32 values, rounded to nearest, ties to even.

    Overflow rounds to infinity as IEEE asks; every NaN becomes the quiet NaN 0x7FC0. Allocates
    the result.
    """
    bits_N = values_N.view(np.uint32)
    rounding_N = np.uint32(0x7FFF) + ((bits_N >> np.uint32(16)) & np.uint32(1))
    rounded_N = ((bits_N + rounding_N) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values_N), _BF16_QUIET_NAN, rounded_N)


def fp16_to_fp32(bits_N: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the fp32 values of fp16 bit patterns, exactly. Allocates the result."""
    return bits_N.view(np.float16).astype(np.float32)


def fp32_to_fp16(values_N: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return fp16 bit patterns of fp32 values, rounded to nearest, ties to even; overflow rounds
    to infinity. Allocates the result."""
    with np.errstate(over="ignore"):
        return values_N.astype(np.float16).view(np.uint16)
