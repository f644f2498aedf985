"""From an arm and the settings of a run to an engine configuration, and what of the settings went unused."""

from __future__ import annotations

from arms.settings import EngineSettings, Manage
from arms.spec import ArmSpec
from engine.config import (
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    PolicyConfig,
    Residency,
    WorkloadConfig,
)


def in_effect(arm: ArmSpec, manage: Manage) -> ArmSpec:
    """``arm`` as ``manage`` leaves it: ``never`` takes its policy away, and it runs as an unmanaged engine would."""
    if manage != "never" or not arm.managed or arm.lift_limit:
        return arm
    return arm.model_copy(
        update={"managed": False, "lending": False, "commits_on_demand": False, "cold": "in_place"}
    )  # fmt: skip


def engine_config(arm: ArmSpec, settings: EngineSettings, model_path: str, rows: int | None = None) -> EngineConfig:
    """The engine configuration that ``arm`` stands for under ``settings``.

    ``rows`` repeats or cuts the workload's prompts to that many rows (a batch sweep); None takes them as they are.
    Settings the arm does not use are left at their neutral value, so that two jobs that mean
    the same have equal configurations.
    """
    prompts = settings.workload.prompts
    if rows is not None:
        prompts = tuple(prompts[i % len(prompts)] for i in range(rows))
    unused = unused_settings(arm)
    return EngineConfig(
        model=ModelConfig(path=model_path),
        workload=WorkloadConfig(
            prompts=prompts,
            tokens=settings.tokens,
            template=settings.workload.template,
            ignore_eos=settings.workload.ignore_eos,
        ),
        device=DeviceConfig(
            kind=settings.device.kind,
            limit_bytes=None if arm.lift_limit else settings.device.limit,
            granule_bytes=settings.device.granule,
            threads=settings.device.threads,
            capture=settings.device.capture,
            copy_rate=settings.device.copy_rate,
            in_place_rate=settings.device.in_place_rate,
        ),
        policy=PolicyConfig(
            managed=arm.managed,
            lending=arm.lending,
            commits_on_demand=arm.commits_on_demand,
            headroom_bytes=0 if "headroom" in unused else settings.headroom,
            budget_bytes=None if "budget" in unused else settings.policy.budget,
            residency=_residency(arm, settings),
            ring_slots=_ring_slots(arm, settings),
            cold=arm.cold,
            pin=() if "policy.pin" in unused else settings.policy.pin,
            manage="auto" if settings.manage == "auto" and "manage" not in unused else "always",
        ),
        max_context=settings.max_context,
        prefill_chunk=settings.prefill_chunk,
        warmup=settings.generations.warmup,
        measured=settings.generations.measured,
    )


def _residency(arm: ArmSpec, settings: EngineSettings) -> Residency:
    if not arm.managed:
        return "stable_resident"  # filled once, first fit, never evicted
    return "hotset" if arm.lift_limit else settings.policy.name


def _ring_slots(arm: ArmSpec, settings: EngineSettings) -> int:
    has_ring = _residency(arm, settings) == "hotset" and not arm.lift_limit
    return settings.policy.ring_slots if has_ring else PolicyConfig.ring_slots


def unused_settings(arm: ArmSpec) -> dict[str, str]:
    """Settings that have no meaning for ``arm``: name -> why."""
    unused: dict[str, str] = {}
    if arm.lift_limit:
        unused["device.limit"] = "the limit is lifted for this arm"
        for key in ("budget", "policy", "policy.ring_slots", "policy.pin", "manage"):
            unused[key] = "all weights are resident"
    elif not arm.managed:
        for key in ("budget", "policy", "policy.ring_slots", "policy.pin", "manage"):
            unused[key] = "nothing is managed"
    if not arm.elastic or arm.lift_limit:
        unused["headroom"] = "the weight budget of this arm is not elastic"
    return unused
