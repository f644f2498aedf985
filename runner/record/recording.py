"""What is kept of a job: files in a folder of its own first, then the same in MLflow."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from runner.execution.outcome import Outcome, Part, ProcessRun
from runner.plan.jobs import Job
from runner.record.figures import outcome_figures, part_figures
from runner.record.jsonfile import write_json
from runner.record.lending_figure import write_lending_figure
from runner.record.tracking import Point, RunContent, RunStatus
from runner.watch.proc import process_started_at

SCHEMA = 1
_SERIES = (
    "device_resident_bytes",
    "rss_anon_bytes",
    "rss_shmem_bytes",
    "child_cpu_percent",
    "others_cpu_percent",
)


def new_folder(store: Path, label: str) -> Path:
    """A folder for one job's files, named by time and label. Raises OSError when it cannot be made."""
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", label)[:80]
    folder = store / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    return folder


def write_files(folder: Path, job: Job, outcome: Outcome, identities: Mapping[str, Any]) -> None:
    """Everything but the report and the child's log, which is there already. Raises OSError."""
    write_json(folder / "result.json", result_data(job, outcome, identities))
    config = {"label": job.label, "overrides": list(job.overrides), "unused": dict(job.unused)}
    config["settings"] = json.loads(job.settings.model_dump_json())
    config["engine"] = [json.loads(json.dumps(c.to_dict())) for c in job.configs]
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    tokens = {f"N={p.rows}": r.record["generations"][0]["tokens"] for p in outcome.parts if (r := p.first)}
    write_json(folder / "tokens.json", tokens)
    texts = []
    for part in outcome.parts:
        if run := part.first:
            pairs = zip(part.config.workload.prompts, run.record.get("text", ()), strict=False)
            texts += [f"[N={part.rows}] {prompt!r}\n{text}\n" for prompt, text in pairs]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    write_lending_figure(folder / "lending.png", outcome)
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for number, run in enumerate(_runs(outcome)):
            for sample in run.samples.series:
                file.write(json.dumps({"process": number, **sample.to_dict()}) + "\n")


def result_data(job: Job, outcome: Outcome, identities: Mapping[str, Any]) -> dict[str, Any]:
    """The job's result as JSON types. Figures of a run that did not pass are there as evidence, marked not valid."""
    return {
        "schema": SCHEMA,
        "label": outcome.label,
        "status": outcome.status,
        "valid": outcome.valid,
        "reason": outcome.reason,
        "run_id": outcome.run_id,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "identities": dict(identities),
        "overrides": list(job.overrides),
        "parts": [_part_data(part) for part in outcome.parts],
    }


def run_status(outcome: Outcome) -> RunStatus:
    """The status MLflow shows: FINISHED only when every gate passed."""
    if outcome.status == "passed":
        return "FINISHED"
    if outcome.status in ("killed", "not run"):
        return "KILLED"
    killed = any((run.result.exit_code or 0) in (-2, -9, -15) and run.result.crash for run in _runs(outcome))
    by_others = killed and "killed by signal" in (outcome.reason or "")
    return "KILLED" if by_others else "FAILED"


def run_content(job: Job, outcome: Outcome, folder: Path | None) -> RunContent:
    """What the job's MLflow run holds. A run that is not valid gets its verdicts and samples, and no figures."""
    points: list[Point] = []
    now = time.time()
    found = outcome_figures(outcome) if outcome.stored is None else None
    if found is not None and outcome.arm.batch is None:
        points += [Point(k, v, now, 0) for k, v in found.metrics().items()]
        points += [Point("tokens_per_s_by_run", v, now, i) for i, v in enumerate(outcome.part.tokens_per_s)]
    if outcome.valid and outcome.arm.batch is not None:
        for part in outcome.parts:
            figures = part_figures(part) if part.status == "passed" else None
            if figures is not None:
                points += [Point(k, v, now, part.rows) for k, v in figures.metrics().items()]
    points += _runner_points(outcome, now)
    points += _sample_points(outcome)
    return RunContent(params(job), [p for p in points if math.isfinite(p.value)], tags(outcome), folder)


def params(job: Job) -> dict[str, str]:
    """Parameters as people filter by them. What the arm does not use is left out."""
    settings, config = job.settings, job.configs[0]
    values: dict[str, Any] = {
        "arm": job.arm.name,
        "model": settings.model.name,
        "device": config.device.kind,
        "workload": settings.workload.name,
        "template": config.workload.template,
        "rows": ",".join(str(len(c.workload.prompts)) for c in job.configs),
        "tokens": config.workload.tokens,
        "max_context": config.max_context,
        "prefill_chunk": config.prefill_chunk,
        "limit_bytes": config.device.limit_bytes if config.device.limit_bytes is not None else "lifted",
        "granule_bytes": config.device.granule_bytes,
        "threads": config.device.threads or "all",
        "managed": config.policy.managed,
        "lending": config.policy.lending,
        "cold": config.policy.cold,
        "warmup": config.warmup,
        "measured": config.measured,
        "repeats": settings.repeats,
    }
    if job.arm.elastic and not job.arm.lift_limit:
        values["headroom_bytes"] = config.policy.headroom_bytes
    if config.policy.managed and not job.arm.lift_limit:
        values |= {"policy": config.policy.residency, "ring_slots": config.policy.ring_slots}
        if config.policy.budget_bytes is not None:
            values["budget_override_bytes"] = config.policy.budget_bytes
    return {k: str(v) for k, v in values.items()}


def tags(outcome: Outcome) -> dict[str, str]:
    """Gate verdicts (the worst over parts), why gates failed, and how the job ended."""
    found: dict[str, str] = {"ebb.status": outcome.status, "ebb.companion": str(outcome.companion).lower()}
    if outcome.reason:
        found["ebb.reason"] = outcome.reason
    if outcome.notes:
        found["ebb.notes"] = "; ".join(outcome.notes)
    if outcome.arm.emulated:
        found["ebb.emulated"] = outcome.arm.emulated
    if outcome.folder is not None:
        found["ebb.folder"] = str(outcome.folder)
    for part in outcome.parts:
        for v in part.verdicts:
            key = f"gate.{v.name}"
            if found.get(key) != "fail":
                found[key] = v.verdict
            if v.verdict == "fail":
                found.setdefault(f"{key}.why", v.why)
        if part.reference is not None:
            found["ebb.reference"] = f"{part.reference.source} {part.reference.hash[:12]}"
    run = next(iter(_runs(outcome)), None)
    if run is not None:
        hello = run.result.event("hello") or {}
        found |= {f"version.{k}": str(v) for k, v in (hello.get("versions") or {}).items()}
        if run.contention.timing_note:
            found["timings"] = run.contention.timing_note
    return found


def _part_data(part: Part) -> dict[str, Any]:
    return {
        "rows": part.rows,
        "status": part.status,
        "reason": part.reason,
        "config": part.config.to_dict(),
        "verdicts": [asdict(v) for v in part.verdicts],
        "reference": part.reference.source if part.reference else None,
        "runs": [_run_data(run) for run in part.runs],
    }


def _run_data(run: ProcessRun) -> dict[str, Any]:
    result, samples = run.result, run.samples
    return {
        "pid": result.pid,
        "started": result.started,
        "ended": result.ended,
        "exit_code": result.exit_code,
        "crash": result.crash,
        "error": result.error,
        "record": result.record,
        "events": list(result.events),
        "contention": asdict(run.contention),
        "resident_peak": run.resident_peak,
        "resident_source": samples.source,
        "sampler": {
            "cpu_s": samples.cpu_s,
            "wall_s": samples.wall_s,
            "max_gap_s": samples.max_gap_s,
            "readings": len(samples.series),
        },
    }


def _runner_points(outcome: Outcome, now: float) -> Iterator[Point]:
    for number, run in enumerate(_runs(outcome)):
        yield Point("sampler_cpu_fraction", run.samples.cpu_fraction, now, number)
        if run.contention.others_cpu_percent is not None:
            yield Point("others_cpu_percent", run.contention.others_cpu_percent, now, number)
        loaded = run.result.event("loaded")
        if loaded and isinstance(loaded.get("load_s"), int | float):
            yield Point("load_s", float(loaded["load_s"]), now, number)
        first, begun = run.result.event("first_token"), process_started_at(os.getpid())
        if outcome.leads and number == 0 and first and begun is not None:
            yield Point("command_to_first_token_s", float(first["t"]) - begun, now, 0)


def _sample_points(outcome: Outcome) -> Iterator[Point]:
    step = 0
    for run in _runs(outcome):
        for sample in run.samples.series:
            values: dict[str, Any] = {name: getattr(sample, name) for name in _SERIES}
            if sample.gpu is not None:
                values |= {f"gpu_{k}": v for k, v in asdict(sample.gpu).items()}
            for name, value in values.items():
                if value is not None:
                    yield Point(f"samples/{name}", float(value), sample.t, step)
            step += 1


def _runs(outcome: Outcome) -> Iterator[ProcessRun]:
    for part in outcome.parts:
        yield from part.runs
