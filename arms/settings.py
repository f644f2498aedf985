"""The settings of a run that shape the engine, validated. Sizes are bytes once read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from engine.config import Residency
from engine.sizes import parse_size


def _optional_size(value: Any) -> int | None:
    return None if value is None else parse_size(value)


def _optional_rate(value: Any) -> int | None:
    rate = _optional_size(value)
    if rate == 0:
        raise ValueError("a rate of 0 never ends. Write bytes a second, such as 4GB, or null for memory speed.")
    return rate


Manage = Literal["always", "auto", "never"]
Size = Annotated[int, BeforeValidator(parse_size)]
OptionalSize = Annotated[int | None, BeforeValidator(_optional_size)]

OptionalRate = Annotated[int | None, BeforeValidator(_optional_rate)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Frozen):
    """``path`` of None means the model that ships with Ebb (fetched once)."""

    name: str
    path: str | None = None


class DeviceSettings(_Frozen):
    """``limit`` is the managed limit in bytes; ``granule`` the physical unit; ``threads`` of None is every core.

    ``copy_rate`` and ``in_place_rate`` are bytes a second of an emulated bus (``device=host``), None for memory speed.
    """

    kind: Literal["host", "ledger", "cuda"]
    limit: Size
    granule: Size
    threads: int | None = Field(default=None, ge=1, le=1024)
    capture: bool = True
    copy_rate: OptionalRate = None
    in_place_rate: OptionalRate = None


class WorkloadSettings(_Frozen):
    """Prompts, one row each."""

    name: str
    prompts: tuple[str, ...] = Field(min_length=1)
    template: Literal["none", "model"] = "none"
    ignore_eos: bool = True


class PolicySettings(_Frozen):
    """How weights are held. ``budget`` overrides the derived weight budget; ``pin`` are patterns of tensor names."""

    name: Residency
    budget: OptionalSize = None
    ring_slots: int = Field(default=2, ge=1)
    pin: tuple[str, ...] = ()


class Generations(_Frozen):
    """Generations in one process: ``warmup`` are not measured, ``measured`` are; all must agree."""

    warmup: int = Field(default=1, ge=0)
    measured: int = Field(default=2, ge=1)


class EngineSettings(_Frozen):
    """Everything of a run that shapes the engine, whatever the arm."""

    model: ModelSettings
    device: DeviceSettings
    workload: WorkloadSettings
    policy: PolicySettings
    headroom: Size
    manage: Manage = "always"
    tokens: int = Field(ge=1)
    max_context: int = Field(ge=1)
    prefill_chunk: int = Field(default=64, ge=1)
    generations: Generations = Generations()
