"""What a command resolves to: jobs, labels, what was folded and what goes unused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from arms.spec import ArmSpec
from engine.config import EngineConfig
from engine.errors import ModelError
from runner.cli.compose import CONF, compose
from runner.errors import UserError
from runner.plan.jobs import Plan, make_plan

MODEL = Path("/models/default.gguf")


def plan_of(*arguments: str) -> Plan:
    command = compose(arguments)
    assert command is not None
    return make_plan(command.jobs, command.sweep, default_model=lambda cache: MODEL)


def labels(plan: Plan) -> list[str]:
    return [job.label for job in plan.jobs]


def only(plan: Plan) -> EngineConfig:
    assert len(plan.jobs) == 1 and len(plan.jobs[0].configs) == 1
    return plan.jobs[0].configs[0]


def test_the_canonical_command() -> None:
    plan = plan_of("arm=elastic", "headroom=512MiB")
    config = only(plan)
    assert labels(plan) == ["elastic-512MiB"] and not plan.sweep
    assert (config.device.limit_bytes, config.device.granule_bytes) == (1 << 30, 64 << 10)
    assert config.policy.headroom_bytes == 512 << 20 and config.policy.lending
    assert config.workload.prompts == ("The capital of France is", "The three primary colors are")
    assert (config.workload.tokens, config.max_context, config.prefill_chunk) == (16, 8192, 64)
    assert (config.warmup, config.measured) == (1, 2)
    assert config.workload.template == "none" and config.workload.ignore_eos
    assert config.model.path == str(MODEL)
    assert EngineConfig.from_dict(config.to_dict()) == config
    assert plan.jobs[0].settings.choices["arm"] == "elastic"


def test_a_sweep_runs_every_distinct_job_once() -> None:
    plan = plan_of("-m", "arm=baseline,elastic,wddm_legacy,resident", "headroom=0,512MiB")
    assert plan.sweep
    assert labels(plan) == ["baseline", "elastic-0", "elastic-512MiB", "wddm_legacy", "resident"]
    assert [job.index for job in plan.jobs] == [0, 1, 2, 3, 4]
    baseline, elastic = plan.jobs[0], plan.jobs[1]
    assert baseline.same_as == ("arm=baseline headroom=512MiB",)
    assert baseline.unused == {"headroom": "the weight budget of this arm is not elastic"}
    assert elastic.same_as == () and elastic.unused == {}


def test_unused_settings_are_told_only_when_given() -> None:
    assert plan_of("arm=baseline").jobs[0].unused == {}
    assert plan_of("arm=resident").jobs[0].unused == {}
    given = plan_of("arm=resident", "device.limit=2GiB", "policy.budget=1GiB", "policy=hotset", "batch=[1,2]").jobs[0]
    assert set(given.unused) == {"device.limit", "budget", "policy", "batch"}
    assert given.configs[0].device.limit_bytes is None and given.configs[0].policy.budget_bytes is None


def test_the_budget_is_reached_by_two_names() -> None:
    assert only(plan_of("budget=6GiB")).policy.budget_bytes == 6 << 30
    assert only(plan_of("policy.budget=6GiB")).policy.budget_bytes == 6 << 30
    assert only(plan_of("policy=stable_resident", "budget=6GB")).policy.budget_bytes == 6 * 10**9


def test_batch_sweep_brings_its_own_limits_and_the_command_line_wins() -> None:
    job = plan_of("arm=batch_sweep").jobs[0]
    assert job.label == "batch_sweep"
    assert [len(config.workload.prompts) for config in job.configs] == [1, 2, 4, 8]
    assert {(config.max_context, config.device.limit_bytes) for config in job.configs} == {(1024, 512 << 20)}
    asked = plan_of("arm=batch_sweep", "batch=[1,3]", "max_context=2048", "device.limit=700MB", "headroom=1MiB").jobs[0]
    assert [len(config.workload.prompts) for config in asked.configs] == [1, 3]
    assert asked.configs[0].workload.prompts[:1] == asked.configs[1].workload.prompts[::2][:1]
    assert {(c.max_context, c.device.limit_bytes, c.policy.headroom_bytes) for c in asked.configs} == {
        (2048, 700_000_000, 1 << 20)
    }


def test_the_long_workload_brings_its_own_limits_and_the_command_line_wins() -> None:
    config = only(plan_of("arm=elastic", "headroom=0", "workload=long"))
    assert config.max_context == 1024 and config.workload.tokens > 256
    assert config.device.limit_bytes is not None and config.device.limit_bytes < 1 << 30
    assert len(config.workload.prompts[0].split()) > 150 and "  " not in config.workload.prompts[0]
    assert only(plan_of("workload=long", "tokens=8", "max_context=512")).workload.tokens == 8


@pytest.mark.parametrize(
    ("condition", "field"),
    [
        ("arm.managed=false", "managed"),
        ("arm.lending=false", "lending"),
        ("arm.commits_on_demand=false", "commits_on_demand"),
    ],
)
def test_each_lending_condition_can_be_turned_off(condition: str, field: str) -> None:
    config = only(plan_of("arm=elastic", condition, "headroom=512MiB"))
    assert getattr(config.policy, field) is False
    assert config.policy.headroom_bytes == 0


def test_jobs_that_differ_otherwise_have_labels_that_differ() -> None:
    assert labels(plan_of("-m", "arm=baseline", "tokens=8,16")) == ["baseline tokens=8", "baseline tokens=16"]
    assert labels(plan_of("-m", "headroom=1MB,3B,2GiB")) == ["elastic-1MB", "elastic-3B", "elastic-2GiB"]


def test_equal_sizes_in_other_words_are_one_job() -> None:
    plan = plan_of("-m", "headroom=1GiB,1024MiB")
    assert labels(plan) == ["elastic-1GiB"] and plan.jobs[0].same_as == ("headroom=1024MiB",)


def test_prompts_with_commas_and_quotes() -> None:
    config = only(plan_of('workload.prompts=["Hello, world", "It\'s a=b"]'))
    assert config.workload.prompts == ("Hello, world", "It's a=b")


def test_every_arm_file_is_a_whole_arm() -> None:
    plan = plan_of("-m", "arm=glob(*)")
    assert {job.arm.name for job in plan.jobs} == {path.stem for path in (CONF / "arm").glob("*.yaml")}


def test_the_arm_defaults_in_the_main_file_are_those_of_the_arm() -> None:
    written = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").arm)
    fields = {name: info.default for name, info in ArmSpec.model_fields.items() if not info.is_required()}
    assert written == fields


def test_paths_start_where_the_command_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = plan_of("paths.store=here", "paths.cache=~/models").settings.paths
    assert paths.store == tmp_path / "here" and paths.cache == tmp_path / "home" / "models"
    assert plan_of().settings.paths.store == CONF.parent / "mlruns"
    assert not list(tmp_path.iterdir()), "composing and planning write nothing"


def test_the_models_are_looked_for_last_and_once() -> None:
    asked: list[Path | None] = []

    def fetch(cache: Path | None) -> Path:
        asked.append(cache)
        raise ModelError("offline")

    command = compose(["-m", "arm=baseline,elastic", "paths.cache=/c"])
    assert command is not None
    with pytest.raises(UserError, match="offline"):
        make_plan(command.jobs, command.sweep, default_model=fetch)
    assert asked == [Path("/c")]


def test_the_host_device_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    command = compose([])
    assert command is not None
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"device=host needs Linux .* and this is darwin"):
        make_plan(command.jobs, command.sweep, default_model=lambda cache: MODEL)
