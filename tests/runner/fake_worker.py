"""A scripted engine process for tests of the runner: speaks the child protocol, with behaviour chosen by arguments.

Run as ``python fake_worker.py [FLAG ...]``. Flags: see ``FLAGS``. It allocates a real memory file, so that what is
read from outside is real. Figures are small and consistent: every gate passes unless a flag breaks one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

FLAGS = """
die-at-load            SIGKILL itself before it is ready         segv          SIGSEGV after ready
hang                   no event for ever after hello             deaf          ignore SIGTERM, with hang
garbage                lines that are no events                  huge          one line over any bound
exit-4                 an internal error event, exit 4           exit-3        exit code 3, no event
no-result              exit 0 without a result                   linger        does not exit after its result
wrong-token            one token of generation 2 differs         wrong-digest  one digest differs
spill                  device memory is half of the ledger       not-lending   reports lending false
nan                    error of kind logits                      refuse        error of kind capacity
refuse-8               refuse when the batch has 8 rows          slow          0.2 s a step
no-plain-loop          refuse in reference mode only             reclaim       growth events with reclaims
grandchild             leaves a sleeping process behind          die-wddm      crash when unmanaged
"""

MIB = 1 << 20
GRANULE = 65536
WEIGHTS, STATIC, KV_FLOOR, WORKSPACE = 8 * MIB, 4 * MIB, MIB, MIB // 2
LIMIT = 16 * MIB


def emit(event: str, **body: Any) -> None:
    print(json.dumps({"event": event, "t": time.time(), **body}), flush=True)


def budget_of(config: dict[str, Any]) -> tuple[int, str]:
    policy = config["policy"]
    if config["device"]["limit_bytes"] is None:
        return WEIGHTS, "lifted"
    if policy["budget_bytes"] is not None:
        return policy["budget_bytes"], "override"
    if not policy["managed"]:
        return STATIC, "unmanaged"
    if policy["lending"] and policy["commits_on_demand"]:
        return 7 * MIB, "elastic"
    return STATIC, "static"


def tokens_of(config: dict[str, Any]) -> list[list[int]]:
    rows, count = len(config["workload"]["prompts"]), config["workload"]["tokens"]
    return [[100 * row + step for step in range(count)] for row in range(rows)]


def digests_of(config: dict[str, Any]) -> list[list[str]]:
    return [[f"{token:064x}" for token in row] for row in tokens_of(config)]


def record_of(config: dict[str, Any], flags: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The result event's body, with every gate passing unless ``flags`` break one."""
    rows, count = len(config["workload"]["prompts"]), config["workload"]["tokens"]
    budget, _ = budget_of(config)
    cold = max(0, WEIGHTS - budget)
    in_place = config["policy"]["cold"] == "in_place"
    steps = (count - 1) * config["measured"]
    emitted = steps * rows
    htod, placed = (0, cold * steps) if in_place else (cold * steps, 0)
    hits = WEIGHTS * steps - htod - placed
    committed = min(budget, WEIGHTS) + KV_FLOOR + WORKSPACE
    generations = [
        {
            "measured": number >= config["warmup"],
            "tokens": tokens_of(config),
            "digests": digests_of(config),
            "prefill_s": 0.02,
            "ttft_s": 0.03,
            "itl_s": [0.01] * (count - 1),
            "tokens_per_s": 50.0 + number,
        }
        for number in range(config["warmup"] + config["measured"])
    ]
    if "wrong-token" in flags:
        generations[-1]["tokens"][1][3] += 1000
    if "wrong-digest" in flags:
        generations[-1]["digests"][0][2] = "f" * 64
    growth = []
    windows = [{"capacity_tokens": 256, "budget_bytes": budget, "steps": steps, "htod_bytes_per_token": htod / emitted}]
    if "reclaim" in flags:
        growth = [
            {
                "generation": g, "step": 4, "from_tokens": 256, "to_tokens": 512, "need_bytes": MIB,
                "from_unassigned": 0, "reclaimed_from_weights": MIB, "budget_before": budget,
                "budget_after": budget - MIB, "stall_s": 0.004,
            }
            for g in (1, 2)
        ]  # fmt: skip
        windows.append({**windows[0], "capacity_tokens": 512, "htod_bytes_per_token": (htod + MIB * steps) / emitted})
    return {
        "schema": 1,
        "generations": generations,
        "text": [f" text {row}\n" for row in range(rows)],
        "stopped": [None] * rows,
        "counters": {
            "htod_bytes": htod,
            "htod_bytes_per_token": htod / emitted,
            "htod_bytes_per_step": htod / steps,
            "page_ins": 0,
            "page_ins_per_token": 0.0,
            "hits": 1,
            "hit_rate": 0.5,
            "hit_bytes": hits,
            "byte_hit_rate": hits / (WEIGHTS * steps),
            "evictions": 0,
            "bypassed_page_ins": 0,
            "in_place_bytes": placed,
            "in_place_bytes_per_token": placed / emitted,
            "budget_bytes": budget,
            "mapped_physical": min(budget, WEIGHTS),
            "captures": 0,
            "replays": 0,
            "fallbacks": 0,
            "invalidations": 0,
            "streaming_floor_bytes": cold,
            "floor_ratio": 1.0 if cold else None,
            "decode_steps": steps,
            "emitted_tokens": emitted,
            "prefill_htod_bytes": 0,
            "promote_htod_bytes": 0,
            "rebinds": len(growth),
            "growth_events": len(growth),
            "reclaim_events": len(growth),
            "relends": 0,
        },
        "accounting": {
            "device_htod_bytes": htod,
            "policy_htod_bytes": htod,
            "hit_bytes": hits,
            "in_place_bytes": placed,
            "weight_bytes": WEIGHTS,
            "steps": steps,
            "ok": True,
        },
        "ledger": {
            "limit": config["device"]["limit_bytes"] or 64 * MIB,
            "committed": committed,
            "peak_committed": committed,
            "oversubscribed_bytes": 0,
            "ref_underflows": 0,
            "byte_underflows": 0,
            "unaccounted_committed_bytes": 0,
            "holders": {
                "WeightCache": {"allowance": budget, "committed": min(budget, WEIGHTS), "peak": min(budget, WEIGHTS)},
                "KvCache": {"allowance": KV_FLOOR, "committed": KV_FLOOR, "peak": KV_FLOOR},
                "Workspace": {"allowance": WORKSPACE, "committed": WORKSPACE, "peak": WORKSPACE},
            },
            "workspace_charge": WORKSPACE,
            "workspace_measured": WORKSPACE // 2,
        },
        "growth": growth,
        "windows": windows,
        "device": {"resident_bytes_peak": committed},
        "latency": {
            "prefill_s": 0.02,
            "ttft_s": 0.03,
            "itl_p50_s": 0.01,
            "itl_p99_s": 0.012,
            "itl_max_s": 0.013,
            "growth_stall_s": [g["stall_s"] for g in growth],
        },
        "timing": {"tokens_per_s": 51.5, "wall_s": 0.5},
    }


def plan_of(config: dict[str, Any]) -> dict[str, Any]:
    budget, bound_by = budget_of(config)
    return {
        "model": {"name": "fake", "digest": "0" * 64, "weight_bytes": WEIGHTS, "layers": 2, "units": 3,
                  "kv_bytes_per_token": 64},
        "rows": len(config["workload"]["prompts"]),
        "limit_bytes": config["device"]["limit_bytes"],
        "workspace_charge": WORKSPACE,
        "kv_full_bytes": 6 * MIB,
        "kv_floor_bytes": KV_FLOOR,
        "budget": {
            "bytes": budget, "bound_by": bound_by, "static_bytes": STATIC, "elastic_bytes": 7 * MIB,
            "headroom_bytes": config["policy"]["headroom_bytes"], "headroom_bound": True, "headroom_note": None,
            "override": bound_by == "override",
        },
    }  # fmt: skip


def policy_of(config: dict[str, Any], flags: frozenset[str] = frozenset()) -> dict[str, Any]:
    budget, bound_by = budget_of(config)
    policy = config["policy"]
    lending = policy["lending"] and "not-lending" not in flags
    return {
        "managed": policy["managed"],
        "commits_on_demand": policy["commits_on_demand"],
        "lending": lending,
        "residency": policy["residency"],
        "cold": policy["cold"],
        "capture": False,
        "budget_bytes": budget,
        "bound_by": bound_by,
        "execution_provider": "CPUExecutionProvider",
        "decline_reasons": [] if lending else ["lending is disabled"],
    }


def main(flags: frozenset[str]) -> int:
    job = json.loads(sys.stdin.readline())
    config, mode = job["config"], job["mode"]
    if "deaf" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in flags and os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    fd = os.memfd_create("ebb-device")
    emit("hello", pid=os.getpid(), memfd="ebb-device", versions={"python": "3", "numpy": "2"})
    if "hang" in flags:
        time.sleep(600)
    if "exit-3" in flags:
        print("something went wrong here", file=sys.stderr)
        return 3
    if "refuse" in flags or ("refuse-8" in flags and mode == "arm" and len(config["workload"]["prompts"]) == 8):
        emit("error", kind="capacity", message="the KV reservation does not fit the limit")
        return 2
    if "no-plain-loop" in flags and mode == "reference":
        emit("error", kind="capacity", message="the weights do not fit this machine")
        return 2
    if "garbage" in flags:
        print("not json\n[1, 2]\n{}\n\n" + json.dumps({"event": 7}), flush=True)
        sys.stdout.buffer.write(b"\xff\xfe\x00\n")
        sys.stdout.flush()
    if "huge" in flags:
        for _ in range(70):
            sys.stdout.write("x" * MIB)
        sys.stdout.write("\n")
        sys.stdout.flush()
    if "die-at-load" in flags or ("die-wddm" in flags and not config["policy"]["managed"]):
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit-4" in flags:
        emit("error", kind="internal", message="a bug was met")
        return 4
    emit("plan", **plan_of(config))
    emit("policy", **policy_of(config, flags))
    record = record_of(config, flags)
    size = record["ledger"]["peak_committed"]
    os.posix_fallocate(fd, 0, size // 2 if "spill" in flags else size)
    emit("loaded", load_s=0.01, phases={})
    steps, total = config["workload"]["tokens"], config["warmup"] + config["measured"]
    for generation in range(total):
        if generation == config["warmup"]:
            emit("ready")
            if sys.stdin.readline().strip() != "go":
                return 4
            if "segv" in flags:
                os.kill(os.getpid(), signal.SIGSEGV)
            emit("measure_start")
        for step in range(1, steps + 1):
            if "slow" in flags and mode == "arm":
                time.sleep(0.2)
            emit("progress", generation=generation, generations=total, step=step, steps=steps, phase="decode")
        if generation == 0:
            emit("first_token", generation=0)
    if "nan" in flags:
        emit("error", kind="logits", message="logits are not finite: generation 1, row 0, step 3", generation=1, row=0,
             step=3)  # fmt: skip
        return 1
    emit("measure_end")
    if "no-result" in flags:
        return 0
    if mode == "reference":
        kept = [{**record["generations"][0], "tokens": tokens_of(config), "digests": digests_of(config)}]
        emit("result", schema=1, generations=kept, text=record["text"], source="plain loop", versions={})
    else:
        emit("result", **record)
    if "linger" in flags:
        time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(frozenset(sys.argv[1:])))
