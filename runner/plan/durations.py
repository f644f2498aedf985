"""Durations as people write them: ``30s``, ``10m``, ``2h``; a bare number is refused, except 0."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_SHAPE = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?)[ ]?(?P<unit>[smh])$", re.ASCII)
_RULE = "Write a duration with a unit, such as 30s, 10m or 2h; only 0 needs none."


def parse_duration(value: object) -> float:
    """Return ``value`` in seconds.

    Raises
    ------
    ValueError
        With one line that says how to write it.
    """
    if value == 0 and not isinstance(value, bool):
        return 0.0
    match = _SHAPE.match(str(value).strip())
    if match is None:
        raise ValueError(f"{value} is not a duration. {_RULE}")
    return float(match["number"]) * _UNITS_S[match["unit"]]
