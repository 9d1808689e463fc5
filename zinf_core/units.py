"""Bytes: binary units, parsing, printing and rounding."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from zinf_core.errors import ConfigError

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30
TiB: Final = 1 << 40

PAGE_NBYTES: Final = 4096
"""Address, offset and length alignment used for every pooled buffer and extent."""

_UNITS: Final = {
    "": 1, "B": 1,
    "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_PATTERN: Final = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def parse_nbytes(value: int | str, *, what: str = "size") -> int:
    """Return a byte count from ``16 * GiB``, ``"16GiB"``, ``"1.5 GB"`` or ``"4096"``.

    KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000. `what` names the
    setting in the error. Raises ConfigError if the text is not a size, or is negative, or not
    a whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f'{what} = {value!r} is not a size; write bytes or text like "16GiB"')
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{what} = {value} is negative")
        return value
    match = _PATTERN.fullmatch(value)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(f'{what} = {value!r} is not a size; write bytes or text like "16GiB"')
    nbytes = Fraction(match[1]) * unit
    if nbytes.denominator != 1:
        raise ConfigError(f"{what} = {value!r} is not a whole number of bytes")
    return nbytes.numerator


def format_nbytes(nbytes: int) -> str:
    """Return `nbytes` for people: ``"1.50 GiB"``, ``"512 B"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(size, 2)) < 1024:
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def align_up(nbytes: int, align: int = PAGE_NBYTES) -> int:
    """Return the smallest multiple of `align` that is at least `nbytes`."""
    return -(-nbytes // align) * align
