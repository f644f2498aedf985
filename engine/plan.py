"""What a configuration comes to for a model: shapes, charges, budget and admission. Pure; sizes in bytes.

Everything here is known before a single byte is allocated, so that a request that cannot be met is refused first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import CapacityUnavailable, InvalidRequest
from engine.kv.arena import KvLayout
from engine.machine.protocol import Workspace
from engine.memory.budget import (
    Budget,
    Conditions,
    KvShape,
    bucket_tokens,
    derive_budget,
)
from engine.memory.managing import Stakes
from engine.model.spec import ModelSpec
from engine.weights.layout import Unit


@dataclass(frozen=True)
class MemoryPlan:
    """Charges and allowances at load.

    ``workspace_buffers`` is mapped on the device, ``workspace_scratch`` is what kernels may take beside it; the charge
    is both. ``kv_floor`` and ``kv_full`` are committed bytes in whole granules. ``weights`` is the weight cache's
    allowance, ``weights_floor`` what KV growth leaves it at least.
    """

    limit: int
    lifted: bool
    workspace_buffers: int
    workspace_scratch: int
    kv_layout: KvLayout
    kv_open: int
    kv_floor: int
    kv_full: int
    budget: Budget
    headroom: int
    weights: int
    weights_floor: int

    @property
    def workspace_charge(self) -> int:
        """Bytes charged for activations and kernel scratch."""
        return self.workspace_buffers + self.workspace_scratch


@dataclass(frozen=True)
class Needs:
    """What the machine and the chosen way of holding weights need, in bytes.

    ``least`` is the smallest weight allowance that works and ``full`` the one that holds everything. ``itemsize`` is
    that of KV, ``workspace`` what a pass takes.
    """

    least: int
    full: int
    itemsize: int
    workspace: Workspace


def kv_layout(spec: ModelSpec, config: EngineConfig, itemsize: int) -> KvLayout:
    """The KV cache of the batch under ``config``."""
    rows = len(config.workload.prompts)
    return KvLayout(spec.layers, rows, spec.kv_heads, spec.head_dim, itemsize, config.max_context)


def plan_memory(spec: ModelSpec, config: EngineConfig, needs: Needs) -> MemoryPlan:
    """The memory plan of ``config``.

    Raises
    ------
    InvalidRequest
        When the context is beyond the model's.
    CapacityUnavailable
        When the plan cannot work, with the numbers and the largest context that would fit.
    """
    check_context(spec, config)
    granule, policy = config.device.granule_bytes, config.policy
    layout = kv_layout(spec, config, needs.itemsize)
    buffers, scratch = _up(needs.workspace.buffers, granule), needs.workspace.scratch
    charge = buffers + scratch
    kv_full = layout.committed_bytes(config.max_context, granule)
    kv_floor = layout.committed_bytes(bucket_tokens(1, config.max_context), granule)
    lifted = config.device.limit_bytes is None
    limit = needs.full + kv_full + charge if config.device.limit_bytes is None else config.device.limit_bytes
    kv_shape = KvShape(spec.kv_bytes_per_token(needs.itemsize), layout.rows, config.max_context)
    if lifted:
        budget = Budget(needs.full, needs.full, needs.full, "lifted", 0, ("the limit is lifted",))
    else:
        conditions = Conditions(
            managed=policy.managed,
            commits_on_demand=policy.commits_on_demand,
            lending=policy.lending,
            headroom=policy.headroom_bytes,
            override=policy.budget_bytes,
        )
        budget = derive_budget(limit, kv_shape, conditions, charge)
    on_demand = policy.managed and policy.commits_on_demand
    floor = (limit - charge - kv_full) // granule * granule
    if floor < needs.least:
        raise CapacityUnavailable(_too_small(spec, config, needs, charge, limit))
    room = (limit - charge - (kv_floor if on_demand else kv_full)) // granule * granule
    weights = min(budget.bytes // granule * granule, needs.full)
    if weights > room and budget.bound_by == "override":
        raise CapacityUnavailable(
            f"budget={budget.bytes:,}B: with KV and workspace the limit of {limit:,} B leaves weights {room:,} B"
        )
    if weights < needs.least:
        raise CapacityUnavailable(
            f"a weight budget of {budget.bytes:,} B is below the least workable {needs.least:,} B"
        )
    weights = min(weights, room)
    if policy.cold == "in_place" and on_demand and weights > floor:
        raise InvalidRequest(
            "cold=in_place with lending: kernels are bound to where each tensor lies, so weights read in place "
            "cannot give memory back while decoding; use cold=copy, or arm=wddm_legacy"
        )
    return MemoryPlan(
        limit=limit,
        lifted=lifted,
        workspace_buffers=buffers,
        workspace_scratch=scratch,
        kv_layout=layout,
        kv_open=1 if on_demand else config.max_context,
        kv_floor=kv_floor,
        kv_full=kv_full,
        budget=budget,
        headroom=policy.headroom_bytes if budget.bound_by in ("elastic", "static_floor") else 0,
        weights=weights,
        weights_floor=min(weights, floor),
    )


def stakes_of(
    spec: ModelSpec, config: EngineConfig, workspace: Workspace, itemsize: int, units: Sequence[Unit],
    lengths: Sequence[int],
) -> Stakes:  # fmt: skip
    """What managing would move and what it would save, once rows of ``lengths`` prompt tokens are at their longest.

    ``config.device.limit_bytes`` must be set.
    """
    granule, policy = config.device.granule_bytes, config.policy
    layout = kv_layout(spec, config, itemsize)
    charge = _up(workspace.buffers, granule) + workspace.scratch
    room = (config.device.limit_bytes or 0) - charge
    static = max(0, room - layout.committed_bytes(config.max_context, granule))
    reached = layout.committed_bytes(bucket_tokens(max(lengths) + config.workload.tokens, config.max_context), granule)
    managed = static
    if policy.budget_bytes is not None:
        managed = policy.budget_bytes
    elif policy.lending and policy.commits_on_demand:
        managed = max(static, room - reached - policy.headroom_bytes)
    ring = policy.ring_slots if policy.residency == "hotset" else 0
    share = len(units) / (len(units) - ring) if len(units) > ring else float(len(units))
    return Stakes(sum(unit.weight_bytes for unit in units), static, managed, share)


def check_context(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse a declared context beyond the model's. Raises InvalidRequest."""
    if config.max_context > spec.context:
        raise InvalidRequest(f"max_context={config.max_context:,} is beyond the model's context of {spec.context:,}")


def check_lengths(config: EngineConfig, prompt_lengths: list[int]) -> None:
    """Refuse rows that cannot reach their last token within ``max_context``.

    Raises
    ------
    InvalidRequest
        With the row, the numbers, and the most tokens that would fit.
    """
    for row, length in enumerate(prompt_lengths):
        if length == 0:
            raise InvalidRequest(f"row {row}: the prompt is empty; a row needs at least one token to continue from")
        if length + config.workload.tokens > config.max_context:
            most = config.max_context - length
            advice = f"the most tokens that fit is {most:,}" if most > 0 else "the prompt alone does not fit"
            raise InvalidRequest(
                f"row {row}: a prompt of {length:,} tokens and tokens={config.workload.tokens:,} need "
                f"{length + config.workload.tokens:,}, but max_context={config.max_context:,}; {advice}"
            )


def _too_small(spec: ModelSpec, config: EngineConfig, needs: Needs, charge: int, limit: int) -> str:
    """One line for a limit that cannot hold the full KV beside the least weights, with what would fit."""
    granule, layout = config.device.granule_bytes, kv_layout(spec, config, needs.itemsize)
    rows = layout.rows
    spare = limit - charge - needs.least
    low, high = 0, config.max_context
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if layout.committed_bytes(middle, granule) <= spare else (low, middle)
    need = layout.committed_bytes(config.max_context, granule)
    least = needs.least + charge + need
    advice = f"device.limit={least:,}B would do" + (f", or max_context={low:,}" if low else "")
    return (
        f"{rows} row(s) of max_context={config.max_context:,} need {need:,} B of KV, the workspace {charge:,} B and "
        f"the weights at least {needs.least:,} B, which is more than device.limit={limit:,} B; {advice}"
    )


def _up(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
