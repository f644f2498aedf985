"""The one parser of byte sizes."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sizes import SizeError, format_bytes, human_bytes, parse_size

UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20,
         "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}  # fmt: skip


@given(st.integers(0, 10**5), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_whole_numbers_are_exact(number: int, unit: str, gap: str) -> None:
    assert parse_size(f"{number}{gap}{unit}") == number * UNITS[unit]


@given(st.integers(0, 2**62))
def test_exact_bytes_come_back(nbytes: int) -> None:
    assert parse_size(f"{nbytes}B") == nbytes
    assert format_bytes(nbytes).startswith(f"{nbytes:,} B")


@given(st.decimals(0, 1000, places=3), st.sampled_from(["kB", "MB", "GB"]))
def test_fractions_of_decimal_units_are_exact(number: Decimal, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == number * UNITS[unit]


@given(st.one_of(st.text(max_size=16), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
def test_anything_else_is_a_size_or_one_line(value: object) -> None:
    try:
        nbytes = parse_size(value)
    except SizeError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert type(nbytes) is int and 0 <= nbytes < 2**63


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("512Mb", "bits are not a size here. Write 512MB (512,000,000 B) or 512MiB (536,870,912 B)."),
        ("8Gib", "bits are not a size here. Write 8GB (8,000,000,000 B) or 8GiB (8,589,934,592 B)."),
        ("8Gbit", "bits are not a size here."),
        ("8G", "'G' is not a unit here. Write 8GB (8,000,000,000 B) or 8GiB (8,589,934,592 B)."),
        ("8gib", "bits are not a size here."),
        ("8XB", "'XB' is not a unit of bytes."),
        ("0.5B", "'0.5B' is 0.5 B, not a whole number of bytes."),
        ("9999999TiB", "'9999999TiB' is more than 2**63 bytes."),
        (512, "512 has no unit."),
        ("512", "512 has no unit."),
        (8e9, "8000000000.0 has no unit."),
        (-1, "a size cannot be negative."),
        ("-1MiB", "a size cannot be negative."),
        (True, "True is not a size."),
        (None, "None is not a size."),
        ("٣MiB", "'٣MiB' is not a size."),
    ],
)
def test_refusals_say_how_to_write_it(value: object, reason: str) -> None:
    with pytest.raises(SizeError) as caught:
        parse_size(value)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("zero", [0, 0.0, "0", "0B", "0GiB"])
def test_zero_needs_no_unit(zero: object) -> None:
    assert parse_size(zero) == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1 << 30, "1,073,741,824 B (1 GiB)"), (1536, "1,536 B (1.5 KiB)")],
)
def test_sizes_are_printed_exact_and_readable(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
    assert human_bytes(513_277_952) == "489.5 MiB"
