"""Records of a run as JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.decode.loop import BucketTraffic, Generation, GrowthAt


def generation_record(generation: Generation) -> dict[str, Any]:
    """One generation: tokens and digests by row, seconds."""
    return {
        "measured": generation.measured,
        "tokens": generation.tokens,
        "digests": generation.digests,
        "prefill_s": generation.prefill_s,
        "ttft_s": generation.ttft_s,
        "itl_s": generation.itl_s,
        "tokens_per_s": generation.tokens_per_s,
    }


def growth_record(event: GrowthAt) -> dict[str, Any]:
    """One growth of the KV bucket."""
    growth = event.growth
    return {
        "generation": event.generation,
        "step": event.step,
        "from_tokens": growth.from_tokens,
        "to_tokens": growth.to_tokens,
        "need_bytes": growth.need_bytes,
        "from_own": growth.from_own,
        "from_unassigned": growth.from_unassigned,
        "reclaimed_from_weights": growth.reclaimed_from_weights,
        "from_headroom": growth.from_headroom,
        "budget_before": growth.budget_before,
        "budget_after": growth.budget_after,
        "stall_s": growth.stall_s,
    }


def bucket_record(bucket: BucketTraffic) -> dict[str, Any]:
    """Decode traffic while one bucket was in force."""
    return {
        "generation": bucket.generation,
        "capacity_tokens": bucket.capacity_tokens,
        "budget_bytes": bucket.budget_bytes,
        "steps": bucket.steps,
        "tokens": bucket.tokens,
        "htod_bytes_per_token": bucket.htod_bytes / bucket.tokens if bucket.tokens else None,
        "htod_bytes_per_step": bucket.htod_bytes / bucket.steps if bucket.steps else None,
    }


def latency_record(generations: Sequence[Generation], growths: Sequence[GrowthAt]) -> dict[str, Any]:
    """Latencies of the measured generations: medians, and percentiles over all their decode steps (seconds)."""
    steps = [seconds for generation in generations for seconds in generation.itl_s]
    return {
        "prefill_s": float(np.median([g.prefill_s for g in generations])),
        "ttft_s": float(np.median([g.ttft_s for g in generations])),
        "itl_p50_s": float(np.percentile(steps, 50)) if steps else None,
        "itl_p99_s": float(np.percentile(steps, 99)) if steps else None,
        "itl_max_s": max(steps) if steps else None,
        "growth_stall_s": [event.growth.stall_s for event in growths],
    }
