"""Byte sizes: one parser for the command line, YAML and the library, and one way to print them.

``GB`` is 10**9 bytes, ``GiB`` is 2**30. Bits are refused. A bare number is refused too, except 0,
which needs no unit.
"""

from __future__ import annotations

import re
from decimal import Decimal

from engine.errors import InvalidRequest

_UNITS: dict[str, int] = {"B": 1}
for _power, _letter in enumerate("kMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter.upper()}B"] = 1000**_power
    _UNITS[f"{_letter.upper()}iB"] = 1024**_power

_SHAPE = re.compile(r"^(?P<number>[0-9]+(?:_[0-9]{3})*(?:\.[0-9]+)?)[ ]?(?P<unit>[A-Za-z]*)$", re.ASCII)
_RULE = "Write a size with a unit, such as 512MiB (536,870,912 B) or 512MB (512,000,000 B); only 0 needs none."


class SizeError(InvalidRequest):
    """A byte size that cannot be read; the message holds the reason and how to write it."""


def parse_size(value: object) -> int:
    """Return ``value`` in bytes.

    ``value`` is what a YAML reader makes of the user's text: a string, an int or a float.

    Raises
    ------
    SizeError
        With one line that says what is wrong with this value and how to write it.
    """
    if value is None or isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SizeError(f"{_shown(value)} is not a size. {_RULE}")
    if isinstance(value, int | float):
        return _bare_number(value)
    text = value.strip()
    if text[:1] == "-":
        raise SizeError("a size cannot be negative.")
    match = _SHAPE.match(text)
    if match is None:
        raise SizeError(f"{_shown(value)} is not a size. {_RULE}")
    number, unit = Decimal(match["number"].replace("_", "")), match["unit"]
    if not unit:
        return _bare_number(number)
    if unit not in _UNITS:
        raise SizeError(_unit_problem(match["number"], number, unit))
    nbytes = number * _UNITS[unit]
    if nbytes != nbytes.to_integral_value():
        raise SizeError(f"{_shown(value)} is {nbytes:f} B, not a whole number of bytes.")
    if nbytes >= 2**63:
        raise SizeError(f"{_shown(value)} is more than 2**63 bytes.")
    return int(nbytes)


def format_bytes(nbytes: int) -> str:
    """Exact bytes with thousands separators, and the binary unit people read: ``1,073,741,824 B (1 GiB)``."""
    return f"{nbytes:,} B ({human_bytes(nbytes)})" if nbytes >= 1024 else f"{nbytes:,} B"


def human_bytes(nbytes: float) -> str:
    """A short reading of a byte count in binary units, one decimal: ``489.5 MiB``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            break
        amount /= 1024
    text = f"{amount:,.1f}".removesuffix(".0")
    return f"{text} {unit}"


def _bare_number(number: int | float | Decimal) -> int:
    if number == 0:
        return 0
    if number < 0:
        raise SizeError("a size cannot be negative.")
    raise SizeError(f"{_shown(number)} has no unit. {_RULE}")


def _unit_problem(written: str, number: Decimal, unit: str) -> str:
    letter = unit[:1].upper()
    if letter in "KMGT" and unit[1:] in ("b", "ib", "bit", "ibit", "B", "iB", ""):
        decimal_unit, binary_unit = f"{letter}B", f"{letter}iB"
        ways = (
            f"Write {written}{decimal_unit} ({_exact(number * _UNITS[decimal_unit])} B) "
            f"or {written}{binary_unit} ({_exact(number * _UNITS[binary_unit])} B)."
        )
        reason = "bits are not a size here." if "b" in unit[1:] else f"{unit!r} is not a unit here."
        return f"{reason} {ways}"
    return f"{unit!r} is not a unit of bytes. {_RULE}"


def _exact(number: Decimal) -> str:
    return f"{number.normalize():,f}"


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)
