"""What an engine is asked to be: frozen, plain values that survive a trip through JSON.

Sizes are in bytes, contexts and lengths in tokens. Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Residency = Literal["hotset", "stable_resident", "lru", "mru", "smallest", "largest", "byte_aware"]
Cold = Literal["copy", "in_place"]
Template = Literal["none", "model"]
Manage = Literal["always", "auto"]


@dataclass(frozen=True)
class ModelConfig:
    """Where the weights come from. ``path`` is a GGUF file."""

    path: str


@dataclass(frozen=True)
class DeviceConfig:
    """The device and the part of it the engine may use.

    ``limit_bytes`` is the managed limit; None lifts it (everything resident). ``granule_bytes`` is the
    unit of physical memory, a multiple of the page size. ``threads`` of None means every core
    the process may run on. ``capture`` lets a device that can replay a recorded step do so. ``copy_rate`` and
    ``in_place_rate`` (bytes/s, ``device=host`` only) emulate a bus between the host's memory and the device; None is
    memory speed.
    """

    kind: Literal["host", "ledger", "cuda"] = "host"
    limit_bytes: int | None = 1 << 30
    granule_bytes: int = 64 * 1024
    threads: int | None = None
    capture: bool = True
    copy_rate: int | None = None
    in_place_rate: int | None = None


@dataclass(frozen=True)
class PolicyConfig:
    """The memory policy.

    ``manage`` ``auto`` lets the engine decline to manage at load, where measured speeds say that it cannot pay;
    ``always`` takes the policy as it stands. ``managed`` false means no governor policy at all: the KV reservation is
    allocated whole at load and weights take what is left. ``lending`` and ``commits_on_demand`` are the other two
    conditions of elastic residency; with any of the three off the static budget holds. ``budget_bytes`` overrides the
    derived weight budget and is adopted as given. ``cold`` says how bytes outside the budget are served. ``pin`` are
    patterns of tensor names (shell style) that stay resident always, under every policy of whole tensors.
    """

    managed: bool = True
    lending: bool = False
    commits_on_demand: bool = True
    headroom_bytes: int = 0
    budget_bytes: int | None = None
    residency: Residency = "hotset"
    ring_slots: int = 2
    cold: Cold = "copy"
    pin: tuple[str, ...] = ()
    manage: Manage = "always"

    def unmanaged(self) -> PolicyConfig:
        """What is in force once managing has been declined: KV whole from the start, weights first fit, no copies."""
        return PolicyConfig(
            managed=False,
            lending=False,
            commits_on_demand=False,
            residency="stable_resident",
            cold="in_place",
            manage=self.manage,
        )


@dataclass(frozen=True)
class WorkloadConfig:
    """Prompts (one row each), how many tokens each row emits, and whether an end token stops it."""

    prompts: tuple[str, ...]
    tokens: int = 16
    template: Template = "none"
    ignore_eos: bool = True


@dataclass(frozen=True)
class EngineConfig:
    """Everything one engine process needs to know."""

    model: ModelConfig
    workload: WorkloadConfig
    device: DeviceConfig = field(default_factory=DeviceConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    max_context: int = 8192
    prefill_chunk: int = 64
    warmup: int = 1
    measured: int = 2

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON types; ``from_dict`` is its inverse."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> EngineConfig:
        """Rebuild from ``to_dict``; an unknown or missing field is a TypeError."""
        workload = dict(data["workload"])
        workload["prompts"] = tuple(workload["prompts"])
        policy = dict(data["policy"])
        policy["pin"] = tuple(policy.get("pin", ()))
        rest = {k: v for k, v in data.items() if k not in ("model", "workload", "device", "policy")}
        return EngineConfig(
            model=ModelConfig(**data["model"]),
            workload=WorkloadConfig(**workload),
            device=DeviceConfig(**data["device"]),
            policy=PolicyConfig(**policy),
            **rest,
        )
