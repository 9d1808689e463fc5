"""Byte shuffle: the first bytes of all elements, then the second ones, and so on.

Neighbouring weights have similar exponents, which compress well once they lie side by side. Bytes
behind the last whole element stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zinf_core.buffers import ByteArray

WIDTHS: Final = (1, 2, 4, 8)
"""Element widths in bytes; 1 shuffles nothing."""

_TRIED: Final = (4, 2, 1)
_SAMPLE_NBYTES: Final = 16384


def shuffle(src: ByteArray, width: int, scratch: ByteArray) -> ByteArray:
    """Return the shuffled bytes of `src`: `scratch` filled, or `src` itself for width 1."""
    if width == 1:
        return src
    num_elements = src.nbytes // width
    whole = num_elements * width
    for index in range(width):
        scratch[index * num_elements : (index + 1) * num_elements] = src[index:whole:width]
    scratch[whole:] = src[whole:]
    return scratch


def unshuffle(shuffled: ByteArray, width: int, dst: ByteArray) -> None:
    """Fill `dst` with what was shuffled; for width 1 it is there already."""
    if width == 1:
        return
    num_elements = dst.nbytes // width
    whole = num_elements * width
    for index in range(width):
        dst[index:whole:width] = shuffled[index * num_elements : (index + 1) * num_elements]
    dst[whole:] = shuffled[whole:]


def best_width(src: ByteArray, encoded_nbytes: Callable[[ByteArray, int], int]) -> int:
    """Return the width under which the beginning of `src` gets smallest.

    Decided for each chunk by itself, from 16 KiB of it, so that the outcome depends on its bytes
    only, not on the order in which threads meet chunks.
    """
    sample = src[: min(src.nbytes, _SAMPLE_NBYTES)]
    return min(_TRIED, key=lambda width: encoded_nbytes(sample, width))
