"""The jobs of a command, resolved and validated before the first of them runs.

A sweep names the same work more than once when it varies a setting that some arm does not use. Such jobs have equal
engine configurations and run once; ``Job.same_as`` says what was folded in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arms.meaning import engine_config, in_effect, unused_settings
from arms.spec import ArmSpec
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.shape_name import is_shape, shape_names
from runner.cli.wording import key_of
from runner.errors import UserError
from runner.plan.settings import Settings, read_settings

# Names a user can type for one entry of arms.meaning.unused_settings.
_ALIASES = {"policy.budget": "budget", "policy.name": "policy"}
_MANAGE = {"auto": "auto", "never": "unmanaged"}
# What records and reports of a whole command rest on; one command has one of each.
_SESSION_WIDE = ("tracking", "paths", "contention", "compare")


@dataclass(frozen=True)
class Composed:
    """One job as Hydra composed it: plain values, the group choices, and what the user typed for it."""

    data: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One arm under one set of settings.

    ``configs`` has one entry, or one per batch size. ``unused`` are settings the user gave that this arm does not use,
    with the reason. ``same_as`` are the overrides of jobs that mean the same and were folded into this one.
    """

    index: int
    arm: ArmSpec
    label: str
    configs: tuple[EngineConfig, ...]
    settings: Settings
    unused: dict[str, str]
    overrides: tuple[str, ...]
    same_as: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All jobs of a command. ``settings`` are the first job's: its session-wide parts hold for every job."""

    jobs: tuple[Job, ...]
    settings: Settings
    sweep: bool


def make_plan(
    composed: Sequence[Composed],
    sweep: bool,
    *,
    default_model: Callable[[Path | None], Path] | None = None,
) -> Plan:
    """Validate every job, then find every model, then fold jobs that mean the same.

    ``default_model`` brings the model that ships with Ebb, given the cache folder; None is
    :func:`engine.model.fetch.default_model` told on stderr.

    Raises
    ------
    UserError
        For the first thing that is wrong, before anything ran.
    """
    if not composed:
        raise UserError("there is nothing to run: the sweep has no jobs")
    settings = [read_settings(job.data, job.choices, job.overrides) for job in composed]
    _check_session(settings)
    _check_platform(settings)
    _check_shapes(settings)
    model_paths = _find_models(settings, default_model or _fetch)
    jobs: list[Job] = []
    for given, read in zip(composed, settings, strict=True):
        job = _job(len(jobs), read, model_paths[read.model.path], given.overrides)
        _add(jobs, job)
    return Plan(jobs=_labelled(jobs), settings=settings[0], sweep=sweep)


def _job(index: int, settings: Settings, model_path: str, overrides: tuple[str, ...]) -> Job:
    asked, arm = settings.arm, in_effect(settings.arm, settings.manage)
    settings = settings.model_copy(update={"arm": arm})
    rows: Sequence[int | None] = arm.batch or (None,)
    configs = tuple(engine_config(arm, settings, model_path, count) for count in rows)
    label, unused = _label(asked, settings), _unused(asked, settings, overrides)
    return Job(index, arm, label, configs, settings, unused, overrides, ())


def _unused(asked: ArmSpec, settings: Settings, overrides: tuple[str, ...]) -> dict[str, str]:
    """Of the settings that mean nothing to this arm, those the user gave. ``asked`` is the arm before ``manage``."""
    reasons = dict(unused_settings(settings.arm))
    if "manage" not in unused_settings(asked):
        reasons.pop("manage", None)
    if settings.arm.batch is None:
        reasons["batch"] = "this arm runs the prompts as they are, as one batch"
    if settings.policy.name != "hotset":
        reasons.setdefault("policy.ring_slots", f"policy {settings.policy.name} has no ring")
    typed = {_ALIASES.get(key_of(override), key_of(override)) for override in overrides}
    return {key: why for key, why in reasons.items() if key in typed}


def _add(jobs: list[Job], job: Job) -> None:
    """Append ``job``, or fold it into the one that means the same."""
    for at, other in enumerate(jobs):
        if _meaning(other) == _meaning(job):
            said = " ".join(job.overrides)
            jobs[at] = replace(other, unused={**other.unused, **job.unused}, same_as=(*other.same_as, said))
            return
    jobs.append(job)


def _meaning(job: Job) -> tuple[Any, ...]:
    return job.arm, job.configs, job.settings.repeats, job.settings.timeout_s


def _label(asked: ArmSpec, settings: Settings) -> str:
    arm = settings.arm
    name = arm.name
    if arm.elastic and not arm.lift_limit and arm.batch is None:
        name = f"{arm.name}-{_short_size(settings.headroom)}"
    if settings.manage == "always" or "manage" in unused_settings(asked):
        return name
    return f"{name}-{_MANAGE[settings.manage]}"


def _short_size(nbytes: int) -> str:
    """A size exact and short, for names: ``512MiB``, ``500MB``, ``1000001B``, ``0``."""
    if nbytes == 0:
        return "0"
    units = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6, "KiB": 1 << 10, "kB": 10**3, "B": 1}
    unit = next(unit for unit, size in units.items() if nbytes % size == 0)
    return f"{nbytes // units[unit]}{unit}"


def _labelled(jobs: list[Job]) -> tuple[Job, ...]:
    """Jobs with one name each: where names meet, the overrides that differ are added."""
    done = []
    for job in jobs:
        namesakes = [other for other in jobs if other.label == job.label]
        shared = set.intersection(*(set(other.overrides) for other in namesakes))
        extra = [text for text in job.overrides if text not in shared and key_of(text) not in ("arm", "headroom")]
        label = job.label if len(namesakes) == 1 else " ".join([job.label, *extra])
        done.append(replace(job, label=label))
    return tuple(done)


def _check_session(settings: Sequence[Settings]) -> None:
    for name in _SESSION_WIDE:
        values = {str(getattr(each, name)): each for each in settings}
        if len(values) > 1:
            raise UserError(f"{name}: one sweep has one value for it, and {len(values)} were given")


def _check_platform(settings: Sequence[Settings]) -> None:
    if sys.platform != "linux" and any(each.device.kind == "host" for each in settings):
        raise UserError(
            f"device=host needs Linux (memfd and hole punching), and this is {sys.platform}. "
            "Run it in a Linux container or virtual machine."
        )


def _check_shapes(settings: Sequence[Settings]) -> None:
    for each in settings:
        shape = each.model.path is not None and is_shape(each.model.path)
        if each.device.kind == "cuda" and not shape:
            raise UserError(
                f"device=cuda runs on a model's shape so far, and model={each.model.name} is none.",
                f"python run.py device=cuda model={shape_names()[-2]} arm={each.arm.name}",
            )
        if each.device.kind == "ledger" and not shape:
            raise UserError(
                f"device=ledger counts on a model's shape, and model={each.model.name} is none.",
                f"python run.py device=ledger model={shape_names()[-2]} arm={each.arm.name}",
            )
        if shape and each.device.kind == "host":
            raise UserError(
                f"model={each.model.name} is a shape without weights, and device={each.device.kind} needs weights.",
                f"python run.py device=ledger model={each.model.name} arm={each.arm.name}",
            )


def _find_models(settings: Sequence[Settings], default_model: Callable[[Path | None], Path]) -> dict[str | None, str]:
    """Where each model asked for lies, looked at once each; the default model comes last, as it may be a download."""
    found: dict[str | None, str] = {}
    for asked in sorted({each.model.path for each in settings}, key=lambda path: path is None):
        if asked is not None and is_shape(asked):
            found[asked] = asked
            continue
        try:
            path = default_model(settings[0].paths.cache) if asked is None else _own_model(asked)
            found[asked] = str(path)
        except ModelError as error:
            raise UserError(str(error)) from None
    return found


def _own_model(asked: str) -> Path:
    from engine.model.gguf_file import open_gguf

    path = Path(asked).expanduser().absolute()
    if not path.exists():
        raise UserError(f"model.path={asked}: no such file. Give the path of a GGUF file.")
    if not path.is_file():
        raise UserError(f"model.path={asked}: not a file. Give the path of a GGUF file.")
    open_gguf(path)
    return path


def _fetch(cache: Path | None) -> Path:
    from engine.model.fetch import default_model

    return default_model(cache, progress=True)
