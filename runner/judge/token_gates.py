"""The first place where generations differ from what is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """Where: ``generation`` from 0 (warm-up first), ``row``, ``step``. ``expected`` and ``actual`` are a token id or a
    digest; None where there is no such step."""

    generation: int
    row: int
    step: int
    expected: int | str | None
    actual: int | str | None

    def sentence(self, text: Callable[[int], str | None]) -> str:
        """One line: place, expected, got."""
        place = f"row {self.row}, step {self.step}"
        return (
            f"{place}: expected {_shown(self.expected, text)}, got {_shown(self.actual, text)} "
            f"(generation {self.generation})"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def token_difference(generations: Sequence[Mapping[str, Any]], expected: Sequence[Sequence[int]]) -> Difference | None:
    """The first token that is not as expected, or None."""
    return _first(generations, "tokens", expected)


def digest_difference(generations: Sequence[Mapping[str, Any]], expected: Sequence[Sequence[str]]) -> Difference | None:
    """The first step whose logits are not as expected, or None."""
    return _first(generations, "digests", expected)


def _first(
    generations: Sequence[Mapping[str, Any]], field: str, expected: Sequence[Sequence[int | str]]
) -> Difference | None:
    for number, generation in enumerate(generations):
        found: list[Difference] = []
        rows = generation[field]
        for row in range(max(len(rows), len(expected))):
            got = rows[row] if row < len(rows) else []
            want = expected[row] if row < len(expected) else []
            for step in range(max(len(got), len(want))):
                a = got[step] if step < len(got) else None
                e = want[step] if step < len(want) else None
                if a != e:
                    found.append(Difference(number, row, step, e, a))
                    break
        if found:
            return min(found, key=lambda d: (d.step, d.row))
    return None


def _shown(value: int | str | None, text: Callable[[int], str | None]) -> str:
    if value is None:
        return "no token"
    if isinstance(value, str):
        return value[:16]
    words = text(value)
    return f"{value} {_quoted(words)}" if words is not None else str(value)


def _quoted(words: str) -> str:
    return '"' + words.replace("\n", "\\n").replace("\r", "\\r") + '"'
