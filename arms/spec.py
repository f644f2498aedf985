"""An arm: a named memory policy, described as data.

The YAML files in ``conf/arm`` hold these fields; a new arm is one such file. ``meaning.py`` turns an arm and the
settings of a run into an engine configuration.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ArmSpec(BaseModel):
    """One arm.

    Attributes
    ----------
    name
        What users type: ``arm=NAME``.
    summary
        One sentence for ``--help`` and reports.
    managed, lending, commits_on_demand
        The three conditions of elastic residency. All true: the weight budget is elastic, else static.
    cold
        How weight bytes outside the budget are served: ``copy`` through the ring, or ``in_place`` from the host store.
    lift_limit
        Ignore ``device.limit`` so that everything is resident, and say so.
    emulated
        Why the figures of this arm on this device stand for another mechanism, or None.
    batch
        Batch sizes to run one after the other; None runs the workload's own prompts as one batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str
    managed: bool = True
    lending: bool = False
    commits_on_demand: bool = True
    cold: Literal["copy", "in_place"] = "copy"
    lift_limit: bool = False
    emulated: str | None = None
    batch: tuple[int, ...] | None = Field(default=None, min_length=1)

    @property
    def elastic(self) -> bool:
        """Whether the three conditions hold, so that ``headroom`` means something."""
        return self.managed and self.lending and self.commits_on_demand
