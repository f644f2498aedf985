"""The gates: what a run must show before its figures count. Pure functions over what was recorded.

Each gives a verdict, a one-line reason and its evidence. A gate that could not look fails: "cannot see" is not a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.config import EngineConfig
from engine.sizes import human_bytes
from engine.weights.policies import DYNAMIC
from runner.judge.references import Reference
from runner.judge.token_gates import Difference, digest_difference, token_difference
from runner.watch.contention import ContentionRecord

Outcome = Literal["pass", "fail", "not_applicable", "reference"]

# A reading from outside may lag the ledger by what is in flight.
RESIDENCY_SHARE = 0.02
_EXECUTION_PROVIDER = {
    "host": "CPUExecutionProvider",
    "ledger": "none (counted only)",
    "cuda": "CUDAExecutionProvider",
}
_RECORDS_STEPS = ("cuda",)
_PREDICTED = "ledger"
_NEEDS_A_REAL_DEVICE = ("tokens", "digests", "residency", "logits")


@dataclass(frozen=True)
class Verdict:
    """One gate's verdict. ``word`` is what a report says beside a pass ("identical", "physical")."""

    name: str
    verdict: Outcome
    why: str
    word: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """What one process run left to judge. ``plan`` and ``policy`` are the child's events of those names;
    ``resident_peak`` the highest reading of device-resident bytes from outside, in bytes."""

    config: EngineConfig
    record: Mapping[str, Any]
    plan: Mapping[str, Any]
    policy: Mapping[str, Any]
    reference: Reference | None
    is_reference: bool
    resident_peak: int | None
    resident_source: str
    contention: ContentionRecord
    token_text: Callable[[int], str | None] = lambda _: None


def judge(evidence: Evidence) -> tuple[Verdict, ...]:
    """Every gate, in the order reports show them. A record that lacks what a gate needs fails that gate."""
    gates: tuple[tuple[str, Callable[[Evidence], Verdict]], ...] = (
        ("tokens", _tokens),
        ("digests", _digests),
        ("ledger", _ledger),
        ("accounting", _accounting),
        ("policy", _policy),
        ("contention", _contention),
        ("residency", _residency),
        ("logits", _logits),
        ("streaming", _streaming),
        ("floor", _floor),
        ("capture", _capture),
    )
    verdicts = []
    for name, gate in gates:
        if evidence.config.device.kind == _PREDICTED and name in _NEEDS_A_REAL_DEVICE:
            verdicts.append(Verdict(name, "not_applicable", "predicted: nothing was moved and no token was made"))
            continue
        try:
            verdicts.append(gate(evidence))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            verdicts.append(Verdict(name, "fail", f"the record lacks what this gate needs: {error!r}"))
    return tuple(verdicts)


def logits_failure(error: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """The verdict of a run that ended because its logits were not finite."""
    place = {key: error.get(key) for key in ("generation", "row", "step")}
    return (Verdict("logits", "fail", str(error.get("message", "logits are not finite")), evidence=place),)


def repeats_verdict(counters: list[Mapping[str, Any]]) -> Verdict:
    """Counters are deterministic: every process run of an arm must give the same."""
    if len(counters) < 2:
        return Verdict("repeats", "not_applicable", "one process run")
    for number, other in enumerate(counters[1:], start=2):
        for name in sorted(set(counters[0]) | set(other)):
            first, now = counters[0].get(name), other.get(name)
            if first != now:
                why = f"run {number} of {len(counters)}: {name} is {now}, run 1 had {first}"
                return Verdict("repeats", "fail", why, evidence={"counter": name, "run": number})
    return Verdict("repeats", "pass", f"{len(counters)} process runs gave the same counters", "equal counters")


def failed(verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """Those that failed, in order."""
    return tuple(v for v in verdicts if v.verdict == "fail")


def _tokens(evidence: Evidence) -> Verdict:
    generations = evidence.record["generations"]
    if evidence.is_reference or evidence.reference is None:
        expected = tuple(tuple(row) for row in generations[0]["tokens"])
        difference = token_difference(generations, expected)
        if difference is None:
            why = "this run is its own reference" if evidence.is_reference else "no reference to compare with"
            verdict: Outcome = "reference" if evidence.is_reference else "fail"
            return Verdict("tokens", verdict, why)
    else:
        difference = token_difference(generations, evidence.reference.tokens)
        if difference is None:
            count = len(generations)
            source = evidence.reference.source
            return Verdict("tokens", "pass", f"{count} generations equal the reference ({source})", "identical")
    why = difference.sentence(evidence.token_text)
    return Verdict("tokens", "fail", why, evidence=difference.to_dict())


def _digests(evidence: Evidence) -> Verdict:
    reference = evidence.reference
    if evidence.is_reference:
        return Verdict("digests", "reference", "this run is its own reference")
    if reference is None or not reference.digests:
        return Verdict("digests", "not_applicable", "the reference holds no logits digests")
    generations = evidence.record["generations"]
    if any(len(g["tokens"]) != len(reference.digests) for g in generations):
        return Verdict("digests", "not_applicable", "another batch shape than the reference")
    difference: Difference | None = digest_difference(generations, reference.digests)
    if difference is None:
        return Verdict("digests", "pass", "logits of every step equal the reference bit for bit", "identical")
    return Verdict("digests", "fail", difference.sentence(lambda _: None), evidence=difference.to_dict())


def _ledger(evidence: Evidence) -> Verdict:
    ledger = evidence.record["ledger"]
    faults = {
        name: ledger[name]
        for name in ("oversubscribed_bytes", "ref_underflows", "byte_underflows", "unaccounted_committed_bytes")
        if ledger[name] != 0
    }
    if faults:
        return Verdict("ledger", "fail", ", ".join(f"{k} {v:,}" for k, v in faults.items()), evidence=faults)
    peak, limit = ledger["peak_committed"], ledger["limit"]
    if limit is not None and peak > limit:
        return Verdict("ledger", "fail", f"peak committed {peak:,} B is over the limit, {limit:,} B")
    measured, charge = ledger["workspace_measured"], ledger["workspace_charge"]
    if measured is not None and measured > charge:
        return Verdict("ledger", "fail", f"workspace used {measured:,} B, its charge is {charge:,} B")
    return Verdict("ledger", "pass", f"no fault; peak committed {peak:,} B")


def _accounting(evidence: Evidence) -> Verdict:
    a = evidence.record["accounting"]
    needed = a["weight_bytes"] * a["steps"]
    served = a["hit_bytes"] + a["device_htod_bytes"] + a["in_place_bytes"]
    if a["device_htod_bytes"] != a["policy_htod_bytes"]:
        why = f"the device copied {a['device_htod_bytes']:,} B, the policy counted {a['policy_htod_bytes']:,} B"
        return Verdict("accounting", "fail", why, evidence=dict(a))
    if served != needed:
        why = f"hit + copied + in place = {served:,} B, weights x steps = {needed:,} B"
        return Verdict("accounting", "fail", why, evidence=dict(a))
    return Verdict("accounting", "pass", f"hit + copied + in place = weights x {a['steps']} steps, to the byte")


def _policy(evidence: Evidence) -> Verdict:
    policy, effective = evidence.config.policy, evidence.policy
    asked: dict[str, Any] = {
        "managed": policy.managed,
        "commits_on_demand": policy.commits_on_demand,
        "lending": policy.lending,
        "cold": policy.cold,
        "capture": _captures(evidence.config),
        "execution_provider": _EXECUTION_PROVIDER[evidence.config.device.kind],
    }
    if policy.managed and evidence.config.device.limit_bytes is not None:
        # Elsewhere there is nothing to choose: all weights are resident, or nobody manages them.
        asked["residency"] = policy.residency
    if policy.budget_bytes is not None:
        asked |= {"budget_bytes": policy.budget_bytes, "bound_by": "override"}
    for name, value in asked.items():
        if name not in effective:
            return Verdict("policy", "fail", f"{name}: asked {value}, the engine did not report it")
        if effective[name] != value:
            reasons = "; ".join(str(r) for r in effective.get("decline_reasons") or ())
            why = f"{name}: asked {value}, in force {effective[name]}" + (f" ({reasons})" if reasons else "")
            return Verdict("policy", "fail", why, evidence={"field": name})
    headroom = (evidence.plan.get("budget") or {}).get("headroom_bytes", policy.headroom_bytes)
    if headroom != policy.headroom_bytes:
        return Verdict("policy", "fail", f"headroom: asked {policy.headroom_bytes:,} B, in force {headroom:,} B")
    return Verdict("policy", "pass", f"in force as asked; budget bound by {effective.get('bound_by')}", "in force")


def _contention(evidence: Evidence) -> Verdict:
    record = evidence.contention
    if record.verdict == "clear":
        looks = ", ".join(check.when for check in record.checks)
        return Verdict("contention", "pass", f"clear {looks}", "clear")
    bad = next((c for c in record.checks if c.verdict != "clear"), None)
    why = f"{bad.verdict} {bad.when}: {bad.why}" if bad else "unknown: nobody looked"
    return Verdict("contention", "fail", why)


def _residency(evidence: Evidence) -> Verdict:
    ledger = evidence.record["ledger"]
    committed = ledger["peak_committed"] + ledger["unaccounted_committed_bytes"]
    outside = evidence.record.get("device", {}).get("unaccounted_bytes", 0)
    committed += outside
    seen = evidence.resident_peak
    if seen is None:
        return Verdict("residency", "fail", "device memory could not be seen from outside")
    granule = evidence.config.device.granule_bytes
    slack = max(granule * max(1, len(ledger["holders"])), int(RESIDENCY_SHARE * committed))
    numbers = {"resident_peak": seen, "committed_peak": committed, "slack": slack, "source": evidence.resident_source}
    if seen < committed - slack:
        why = f"spilled: {human_bytes(seen)} resident of {human_bytes(committed)} committed"
        return Verdict("residency", "fail", f"{why} ({evidence.resident_source})", evidence=numbers)
    if seen > committed + slack:
        why = f"{human_bytes(seen)} resident, only {human_bytes(committed)} in the ledger"
        return Verdict("residency", "fail", f"{why} ({evidence.resident_source})", evidence=numbers)
    why = f"{seen:,} B resident, {committed:,} B committed ({evidence.resident_source})"
    if outside:
        why += f", {outside:,} B of it outside the ledger: the kernels' scratch, code and libraries"
    return Verdict("residency", "pass", why, "physical", numbers)


def _logits(evidence: Evidence) -> Verdict:
    steps = sum(len(row) for g in evidence.record["generations"] for row in g["tokens"])
    return Verdict("logits", "pass", f"{steps} rows of logits were finite")


def _streaming(evidence: Evidence) -> Verdict:
    weights = evidence.record["accounting"]["weight_bytes"]
    # The budget in force shrinks when growth calls memory back: the smallest one of the window counts.
    windows = [w["budget_bytes"] for w in evidence.record.get("windows", ())]
    budget = min([evidence.policy["budget_bytes"], *windows])
    counters = evidence.record["counters"]
    moved = counters["htod_bytes"] + counters["in_place_bytes"]
    if budget >= weights:
        return Verdict("streaming", "not_applicable", "the budget holds every weight")
    if not counters["decode_steps"]:
        return Verdict("streaming", "not_applicable", "no decode step was measured: one token comes from prefill alone")
    if moved == 0:
        why = f"budget {budget:,} B is below the weights, {weights:,} B, but nothing was streamed or read in place"
        return Verdict("streaming", "fail", why)
    return Verdict("streaming", "pass", f"{moved:,} B came from the host in the measured window", "in force")


def _floor(evidence: Evidence) -> Verdict:
    ratio = evidence.record["counters"]["floor_ratio"]
    if ratio is None:
        return Verdict("floor", "not_applicable", "nothing has to be streamed")
    if ratio < 1.0 - 1e-9:
        return Verdict("floor", "fail", f"floor ratio {ratio:.4f}: fewer bytes than the arithmetic allows")
    return Verdict("floor", "pass", f"floor ratio {ratio:.4f}")


def _captures(config: EngineConfig) -> bool:
    """Whether decode steps are to be recorded and replayed: a policy that moves pages between steps cannot be."""
    return config.device.kind in _RECORDS_STEPS and config.device.capture and config.policy.residency not in DYNAMIC


def _capture(evidence: Evidence) -> Verdict:
    config = evidence.config
    if not _captures(config):
        why = f"no graph capture on {config.device.kind}"
        if config.device.kind in _RECORDS_STEPS:
            why = "not asked for" if not config.device.capture else f"policy={config.policy.residency} moves pages"
        return Verdict("capture", "not_applicable", why)
    whole, window = evidence.record["capture"], evidence.record["counters"]
    steps, recorded, replays = window["decode_steps"], window["captures"], window["replays"]
    numbers = {"process": dict(whole), "steps": steps, "recorded": recorded, "replays": replays}
    reasons = "; ".join(whole["reasons"]) or "no reason given"
    if whole["captures"] == 0:
        return Verdict("capture", "fail", f"nothing was recorded ({reasons})", evidence=numbers)
    if window["fallbacks"]:
        why = f"{window['fallbacks']} of {steps} steps fell back to single calls ({reasons})"
        return Verdict("capture", "fail", why, evidence=numbers)
    if replays != steps - recorded:
        why = f"{replays} steps replayed and {recorded} recorded, of {steps}"
        return Verdict("capture", "fail", why, evidence=numbers)
    if window["invalidations"] != window["growth_events"]:
        why = f"{window['invalidations']} invalidations for {window['growth_events']} growths"
        return Verdict("capture", "fail", why, evidence=numbers)
    why = f"{replays} of {steps} steps replayed, {recorded} recorded anew; {whole['captures']} recordings in all"
    return Verdict("capture", "pass", why, "replayed", numbers)
