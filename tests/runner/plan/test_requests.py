"""Requests the engine would refuse stop a sweep before its first job."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.compose import compose
from runner.errors import UserError
from runner.plan.jobs import Plan, make_plan
from runner.plan.requests import check_requests
from tests.tiny_model import Tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny().write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def plan_of(model: Path, *arguments: str) -> Plan:
    command = compose(["-m", f"model.path={model}", *arguments])
    assert command is not None
    return make_plan(command.jobs, command.sweep)


def test_a_context_too_short_for_one_job_is_told_with_its_label(model: Path) -> None:
    plan = plan_of(model, "arm=baseline", "tokens=8", "max_context=64,9", 'workload.prompts=["abcdef"]')
    with pytest.raises(UserError, match=r"^baseline max_context=9: row 0: a prompt of .* but max_context=9"):
        check_requests(plan)


def test_an_empty_prompt_is_told(model: Path) -> None:
    with pytest.raises(UserError, match=r"^baseline: row 1: the prompt is empty"):
        check_requests(plan_of(model, "arm=baseline", 'workload.prompts=["a",""]'))


def test_a_sweep_that_fits_passes(model: Path) -> None:
    check_requests(plan_of(model, "arm=baseline,elastic", "tokens=8", "max_context=64", 'workload.prompts=["a","b"]'))
