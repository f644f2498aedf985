"""Counters of a run under their published names, and the window they are measured in.

Traffic is counted twice, apart: by the policy, from what it meant to do, and by the device, from what it did.
A measured window leaves warm-up out. ``*_per_token`` divides by the tokens that the window's decode passes emitted,
over all rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from engine.weights.residency import Traffic


@dataclass
class Tally:
    """Sums of what unit runs cost, by the policy's count."""

    hits: int = 0
    hit_bytes: int = 0
    page_ins: int = 0
    htod_bytes: int = 0
    bypassed_page_ins: int = 0
    in_place_bytes: int = 0
    compulsory_bytes: int = 0
    bypassed_bytes: int = 0
    refetched_bytes: int = 0

    def add(self, traffic: Traffic) -> None:
        """Add one unit run."""
        self.hits += traffic.hits
        self.hit_bytes += traffic.hit_bytes
        self.page_ins += traffic.page_ins
        self.htod_bytes += traffic.htod_bytes
        self.bypassed_page_ins += traffic.bypassed_page_ins
        self.in_place_bytes += traffic.in_place_bytes
        self.compulsory_bytes += traffic.compulsory_bytes
        self.bypassed_bytes += traffic.bypassed_bytes
        self.refetched_bytes += traffic.refetched_bytes

    @property
    def split_ok(self) -> bool:
        """Whether the three kinds of streamed bytes sum to all of them."""
        return self.compulsory_bytes + self.bypassed_bytes + self.refetched_bytes == self.htod_bytes


@dataclass
class Window:
    """The measured window: decode passes only, prefill and promotion counted beside them."""

    decode: Tally = field(default_factory=Tally)
    prefill: Tally = field(default_factory=Tally)
    decode_steps: int = 0
    emitted_tokens: int = 0
    floor_bytes: int = 0
    device_decode_htod: int = 0
    device_prefill_htod: int = 0
    promote_htod_bytes: int = 0
    evictions: int = 0
    growth_events: int = 0
    reclaim_events: int = 0
    relends: int = 0
    rebinds: int = 0
    captures: int = 0
    replays: int = 0
    fallbacks: int = 0
    invalidations: int = 0

    def report(self, budget_bytes: int, mapped_physical: int) -> dict[str, Any]:
        """The public counters; rates of nothing are None."""
        tally, tokens, steps = self.decode, self.emitted_tokens, self.decode_steps
        return {
            **asdict(tally),
            "htod_bytes_per_token": _ratio(tally.htod_bytes, tokens),
            "htod_bytes_per_step": _ratio(tally.htod_bytes, steps),
            "page_ins_per_token": _ratio(tally.page_ins, tokens),
            "in_place_bytes_per_token": _ratio(tally.in_place_bytes, tokens),
            "hit_rate": _ratio(tally.hits, tally.hits + tally.page_ins),
            "byte_hit_rate": _ratio(
                tally.hit_bytes,
                tally.hit_bytes + tally.htod_bytes + tally.in_place_bytes,
            ),
            "bypassed_byte_share": _ratio(tally.bypassed_bytes, tally.htod_bytes),
            "evictions": self.evictions,
            "budget_bytes": budget_bytes,
            "mapped_physical": mapped_physical,
            "captures": self.captures,
            "replays": self.replays,
            "fallbacks": self.fallbacks,
            "invalidations": self.invalidations,
            "streaming_floor_bytes": _ratio(self.floor_bytes, steps),
            "floor_ratio": _ratio(tally.htod_bytes + tally.in_place_bytes, self.floor_bytes),
            "decode_steps": steps,
            "emitted_tokens": tokens,
            "prefill_htod_bytes": self.prefill.htod_bytes,
            "prefill_compulsory_bytes": self.prefill.compulsory_bytes,
            "promote_htod_bytes": self.promote_htod_bytes,
            "growth_events": self.growth_events,
            "reclaim_events": self.reclaim_events,
            "relends": self.relends,
            "rebinds": self.rebinds,
        }

    def accounting(self, weight_bytes: int) -> dict[str, Any]:
        """Whether hit + htod + in-place bytes are W x steps, and the device agrees with the policy."""
        tally = self.decode
        total = tally.hit_bytes + tally.htod_bytes + tally.in_place_bytes
        return {
            "device_htod_bytes": self.device_decode_htod,
            "policy_htod_bytes": tally.htod_bytes,
            "hit_bytes": tally.hit_bytes,
            "in_place_bytes": tally.in_place_bytes,
            "weight_bytes": weight_bytes,
            "steps": self.decode_steps,
            "prefill_device_htod_bytes": self.device_prefill_htod,
            "prefill_policy_htod_bytes": self.prefill.htod_bytes,
            "ok": total == weight_bytes * self.decode_steps
            and self.device_decode_htod == tally.htod_bytes
            and self.device_prefill_htod == self.prefill.htod_bytes
            and tally.split_ok
            and self.prefill.split_ok,
        }


def _ratio(value: int, by: int) -> float | int | None:
    if by == 0:
        return None
    return value // by if value % by == 0 else value / by
