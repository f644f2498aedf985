"""The baseline a job is set beside."""

from __future__ import annotations

from dataclasses import replace

import yaml

from arms.meaning import engine_config
from arms.spec import ArmSpec
from runner.plan.jobs import Job
from runner.plan.settings import PROJECT

BASELINE = "baseline"


def compares(job: Job) -> bool:
    """Whether the report of ``job`` sets it beside a baseline. A batch sweep is its own comparison."""
    return job.settings.compare == BASELINE and job.arm.name != BASELINE and job.arm.batch is None


def baseline_job(job: Job) -> Job:
    """The baseline under the settings of ``job``. An overridden budget is left out: a baseline's is derived."""
    arm = ArmSpec.model_validate(yaml.safe_load((PROJECT / "conf" / "arm" / "baseline.yaml").read_text("utf-8")))
    policy = job.settings.policy.model_copy(update={"budget": None})
    settings = job.settings.model_copy(update={"policy": policy, "budget": None, "arm": arm})
    config = engine_config(arm, settings, job.configs[0].model.path)
    return replace(
        job, arm=arm, label=BASELINE, configs=(config,), settings=settings, unused={}, overrides=(), same_as=()
    )
