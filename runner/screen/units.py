"""Figures as people read them. Exact values are in the files; a missing one is a dash."""

from __future__ import annotations

DASH = "–"


def mib(nbytes: float | int | None) -> str:
    """Bytes in MiB, one decimal: ``489.5 MiB``."""
    return DASH if nbytes is None else f"{nbytes / 2**20:,.1f} MiB"


def percent(share: float | None) -> str:
    """A share of 1 in percent: ``95.1 %``."""
    return DASH if share is None else f"{100 * share:.1f} %"


def number(value: float | None, decimals: int) -> str:
    """A plain number."""
    return DASH if value is None else f"{value:,.{decimals}f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds in ms, one decimal, without the unit."""
    return DASH if seconds is None else f"{1000 * seconds:,.1f}"


def seconds(value: float | None) -> str:
    """Seconds, two decimals: ``0.21 s``."""
    return DASH if value is None else f"{value:.2f} s"


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second, three digits that mean something: ``6.9``, ``68``."""
    if tokens_per_s is None:
        return DASH
    return f"{tokens_per_s:.1f}" if tokens_per_s < 20 else f"{tokens_per_s:.0f}"


def times(value: float | None) -> str:
    """A ratio: ``1.61x``; from 10 on without decimals."""
    if value is None:
        return DASH
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


def fewer(before: float | None, after: float | None) -> str:
    """How many times fewer ``after`` is than ``before``."""
    if before is None or after is None or before == 0:
        return DASH
    if after == 0:
        return "none left"
    ratio = before / after
    return f"{_ratio(ratio)} fewer" if ratio >= 1 else f"{_ratio(1 / ratio)} more"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"
