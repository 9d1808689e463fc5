"""Sizes: parsing against exact arithmetic, printing, rounding."""

from __future__ import annotations

import re
from decimal import Decimal, getcontext
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zinf_core.errors import ConfigError
from zinf_core.units import PAGE_NBYTES, GiB, KiB, MiB, TiB, align_up, format_nbytes, parse_nbytes

FACTORS = {
    "": "1", "B": "1",
    "KiB": "1024", "MiB": "1048576", "GiB": "1073741824", "TiB": "1099511627776",
    "KB": "1000", "MB": "1000000", "GB": "1000000000", "TB": "1000000000000",
}  # fmt: skip
getcontext().prec = 60


def test_units_are_powers_of_1024() -> None:
    """Catches a unit that is off by a factor."""
    assert (KiB, MiB, GiB, TiB) == (1024, 1024**2, 1024**3, 1024**4)
    assert PAGE_NBYTES == 4096


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512 B", 512),
        ("16GiB", 16 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        (" 2 mib ", 2 * 1024**2),
        ("0.5KiB", 512),
        ("1.001KB", 1001),
        ("2.3TB", 2_300_000_000_000),
        ("9007199254740993.0B", 9007199254740993),
    ],
)
def test_texts(text: str, nbytes: int) -> None:
    """Catches decimal and binary units mixed up, case or space that matters, and float rounding."""
    assert parse_nbytes(text) == nbytes


@given(
    whole=st.integers(0, 10**6),
    decimals=st.text("0123456789", max_size=6),
    unit=st.sampled_from(list(FACTORS)),
)
def test_parsing_is_exact(whole: int, decimals: str, unit: str) -> None:
    """Catches arithmetic in floats: sizes that are refused or off by a byte."""
    number = f"{whole}.{decimals}" if decimals else str(whole)
    expected = Decimal(number) * Decimal(FACTORS[unit])
    if expected == expected.to_integral_value():
        assert parse_nbytes(number + unit) == int(expected)
    else:
        with pytest.raises(ConfigError, match="whole number of bytes"):
            parse_nbytes(number + unit)


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "-1", "-1GiB", "1e9", "1 GiB 2", "1,5GB", "16 Gibi", "1..5GB", ".5GB", "5.GB",
     "nan", "inf", "0x10", "1_000", True, False, 1.5, None, b"16", -1, [16]],
)  # fmt: skip
def test_what_is_no_size_is_refused(value: Any) -> None:
    """Catches a setting that is taken for something else instead of being refused."""
    with pytest.raises(ConfigError, match="host = "):
        parse_nbytes(value, what="host")


@pytest.mark.parametrize("text", ["9" * 5000, "1" + "0" * 400 + ".0", "1." + "0" * 5000 + "1"])
def test_absurd_numbers_are_refused_as_settings(text: str) -> None:
    """Catches an error of the arithmetic (OverflowError, ValueError) instead of ours."""
    with pytest.raises(ConfigError):
        parse_nbytes(text)


def test_whole_numbers_pass_through() -> None:
    """Catches a detour through floats, which loses bytes above 2**53."""
    assert parse_nbytes(2**63 + 1) == 2**63 + 1
    assert parse_nbytes(0) == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2, "1.00 MiB"),
        (3 * 1024**3 // 2, "1.50 GiB"),
        (1024**4, "1.00 TiB"),
        (5000 * 1024**4, "5000.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_printing(nbytes: int, text: str) -> None:
    """Catches a wrong unit or a loss of digits in messages."""
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 2**60))
@example(1024**2 - 1)
@example(1024**4 - 1)
def test_printed_sizes_are_right_to_two_digits(nbytes: int) -> None:
    """Catches a printed number that is not the number, and one of a unit too small."""
    number, unit = re.fullmatch(r"(\S+) (\w+)", format_nbytes(nbytes)).groups()
    factor = Decimal(FACTORS[unit])
    assert abs(Decimal(number) * factor - nbytes) <= factor / 200
    assert Decimal(number) < 1024 or unit == "TiB"


@given(st.integers(0, 2**70), st.integers(1, 2**20))
def test_align_up_is_the_next_multiple(nbytes: int, align: int) -> None:
    """Catches rounding down, rounding one too far, and floats."""
    aligned = align_up(nbytes, align)
    assert aligned % align == 0
    assert 0 <= aligned - nbytes < align


def test_align_up_goes_to_pages() -> None:
    """Catches another default than a page."""
    assert [align_up(n) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
