"""Budget arithmetic: how many bytes weights may hold, and why. Pure; all sizes in bytes, lengths in tokens.

Two budgets. The *static* one withholds the whole KV reservation for ever. The *elastic* one withholds the KV floor
(one bucket) and a headroom, lends the rest, and lets KV growth call it back. It never falls below the static one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIN_BUCKET_TOKENS = 256

BoundBy = Literal["static", "elastic", "static_floor", "override", "lifted", "unmanaged"]


def bucket_tokens(length: int, max_context: int, min_bucket: int = MIN_BUCKET_TOKENS) -> int:
    """KV capacity that holds ``length`` tokens: a power of two from ``min_bucket``, at most ``max_context``."""
    power = 1 << max(0, length - 1).bit_length()
    return min(max(power, min_bucket), max_context)


@dataclass(frozen=True)
class KvShape:
    """KV of one batch: bytes one token of one row takes, rows, and the declared context."""

    bytes_per_token_per_row: int
    rows: int
    max_context: int
    min_bucket: int = MIN_BUCKET_TOKENS

    def bytes_for(self, length: int) -> int:
        """Bytes of the bucket that holds ``length`` tokens in every row."""
        return self.bytes_per_token_per_row * self.rows * bucket_tokens(length, self.max_context, self.min_bucket)

    @property
    def floor(self) -> int:
        """Bytes of the first bucket."""
        return self.bytes_for(1)

    @property
    def full(self) -> int:
        """Bytes of the whole reservation."""
        return self.bytes_per_token_per_row * self.rows * self.max_context


@dataclass(frozen=True)
class Conditions:
    """The three conditions of elastic residency, and the two asks a user may add."""

    managed: bool = True
    commits_on_demand: bool = True
    lending: bool = True
    headroom: int = 0
    override: int | None = None

    def decline_reasons(self) -> tuple[str, ...]:
        """Why the budget is not elastic; empty when it is."""
        reasons = (
            (self.managed, "not managed: the governor has no say over this memory"),
            (
                self.commits_on_demand,
                "KV does not commit on demand: the whole reservation is held from the start",
            ),
            (self.lending, "lending is disabled"),
        )
        return tuple(why for holds, why in reasons if not holds)


@dataclass(frozen=True)
class Budget:
    """A weight budget and the term that bound it.

    ``bytes`` is the budget in force, ``static`` and ``elastic`` the two candidates (elastic after its clamp),
    ``bound_by`` names the term, ``reasons`` say why it is not elastic.
    """

    bytes: int
    static: int
    elastic: int
    bound_by: BoundBy
    headroom: int
    reasons: tuple[str, ...]

    def headroom_note(self, weight_bytes: int) -> str | None:
        """Why the headroom asked for did not bind, or None when it did (or none was asked for)."""
        if self.headroom == 0 or self.bound_by not in ("elastic", "static_floor"):
            return None
        if self.bytes >= weight_bytes:
            return "headroom did not bind: all weights fit beside it"
        if self.bound_by == "static_floor":
            return "headroom bound only in part: the budget does not fall below the static one"
        return None


def static_budget(limit: int, kv: KvShape, workspace: int = 0) -> int:
    """``limit - workspace - full KV reservation``, not below 0."""
    return max(0, limit - workspace - kv.full)


def elastic_budget(limit: int, kv: KvShape, headroom: int, workspace: int = 0) -> int:
    """``limit - workspace - KV floor - headroom``, never below the static budget."""
    return max(limit - workspace - kv.floor - headroom, static_budget(limit, kv, workspace))


def derive_budget(limit: int, kv: KvShape, conditions: Conditions, workspace: int = 0) -> Budget:
    """The weight budget in force under ``conditions``.

    An explicit override is adopted as given. Otherwise the elastic budget when all three conditions hold, else the
    static one. Nothing carries a budget planned earlier, so nothing can clamp the result back.
    """
    static = static_budget(limit, kv, workspace)
    elastic = elastic_budget(limit, kv, conditions.headroom, workspace)
    reasons = conditions.decline_reasons()
    bound_by: BoundBy
    if conditions.override is not None:
        nbytes, bound_by = conditions.override, "override"
    elif reasons:
        nbytes, bound_by = static, "unmanaged" if not conditions.managed else "static"
    else:
        nbytes = elastic
        bound_by = "static_floor" if limit - workspace - kv.floor - conditions.headroom < static else "elastic"
    return Budget(nbytes, static, elastic, bound_by, conditions.headroom, reasons)
