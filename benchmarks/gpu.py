"""The arms on a GPU at the published scale: qwen14b_shape, one row, context 8192, 16 tokens, the published limit.

What bounds a streaming step is the bus, so its ceiling (pinned memory to device) is measured in the same run.

    python -m benchmarks.gpu
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.machine import describe, heading, write
from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.engine import Engine

MIB, GB = 1 << 20, 1e9
PUBLISHED_LIMIT = 7_726_753_178
PROMPT = "The capital of France is"
CEILING_BYTES = 1 << 30
ELASTIC = PolicyConfig(lending=True, headroom_bytes=512 * MIB)
ARMS: dict[str, tuple[int | None, PolicyConfig]] = {
    "baseline": (PUBLISHED_LIMIT, PolicyConfig()),
    "elastic 512MiB": (PUBLISHED_LIMIT, ELASTIC),
    "elastic 0": (PUBLISHED_LIMIT, PolicyConfig(lending=True)),
    "resident": (None, PolicyConfig()),
}
CONTROLS: dict[str, tuple[int | None, PolicyConfig]] = {
    "wddm_legacy (emulated)": (
        PUBLISHED_LIMIT,
        PolicyConfig(managed=False, commits_on_demand=False, residency="stable_resident", cold="in_place"),
    ),
    "whole tensors, copied": (PUBLISHED_LIMIT, PolicyConfig(residency="stable_resident")),
    "cold in place (hybrid)": (PUBLISHED_LIMIT, PolicyConfig(cold="in_place", residency="stable_resident")),
    "elastic 512MiB, 3 slots": (PUBLISHED_LIMIT, PolicyConfig(lending=True, headroom_bytes=512 * MIB, ring_slots=3)),
}


def configure(
    limit: int | None, policy: PolicyConfig, rows: int = 1, tokens: int = 16, granule: int = 2 * MIB,
    capture: bool = True, measured: int = 3, model: str = "qwen14b_shape",
) -> EngineConfig:  # fmt: skip
    """One configuration of the benchmark."""
    return EngineConfig(
        model=ModelConfig(f"shape:{model}"),
        workload=WorkloadConfig((PROMPT,) * rows, tokens=tokens),
        device=DeviceConfig("cuda", limit, granule, capture=capture),
        policy=policy,
        max_context=8192,
        prefill_chunk=8,
        warmup=1,
        measured=measured,
    )


def used_bytes() -> int | None:
    """Bytes of the first GPU in use by anybody, without the driver's own part, as NVML says; None where it cannot."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except Exception:  # no NVML: the column stays empty
        return None


def ceiling(engine: Engine) -> float:
    """GB/s of one large copy from the pinned weights into memory of its own: the median of five."""
    device, nbytes = engine.device, min(CEILING_BYTES, engine.weight_bytes)
    nbytes -= nbytes % device.granularity
    address = device.reserve(nbytes)
    granules = device.create(nbytes // device.granularity)
    device.map(address, granules)
    counted = device.counters.htod_bytes, device.counters.htod_calls
    rates = []
    for _ in range(6):
        device.synchronize()
        began = time.perf_counter()
        device.copy_in(address, engine.store.address(engine.units[0]), nbytes)
        device.synchronize()
        rates.append(nbytes / (time.perf_counter() - began) / GB)
    device.counters.htod_bytes, device.counters.htod_calls = counted
    device.unmap(address, len(granules))
    device.release(granules)
    device.unreserve(address, nbytes)
    return statistics.median(rates[1:])


def measure(config: EngineConfig) -> dict[str, Any]:
    """One arm: speed, traffic, recordings, memory by every count."""
    idle = used_bytes()
    began = time.perf_counter()
    with Engine(config) as engine:
        load_s = time.perf_counter() - began
        opened = used_bytes()
        generations = list(engine.run())
        window = engine.loop.window
        counters = window.report(engine.plan.budget.bytes, engine.residency.mapped_physical)
        ledger = engine.ledger.snapshot()
        committed = sum(holder.committed for holder in engine.ledger.holders.values())
        engine.device.synchronize()
        resident = engine.device.resident_bytes()
        now = used_bytes()
        steps = [s for made in generations if made.measured for s in made.itl_s]
        result = {
            "load_s": round(load_s, 2),
            "tokens": generations[-1].tokens,
            "digests": generations[-1].digests,
            "equal_generations": all(made.tokens == generations[0].tokens for made in generations),
            "ms_per_step": round(1e3 * statistics.median(steps), 3),
            "ms_per_step_mean": round(1e3 * statistics.fmean(steps), 3),
            "ms_per_step_least": round(1e3 * min(steps), 3),
            "ttft_ms": round(1e3 * statistics.median(made.ttft_s for made in generations[1:]), 1),
            "counters": counters,
            "accounting_ok": window.accounting(engine.weight_bytes)["ok"],
            "capture": engine.capture_record(),
            "ledger": {k: v for k, v in ledger.items() if not isinstance(v, dict)},
            "memory": {
                "committed": committed,
                "workspace_charge": engine.plan.workspace_charge,
                "workspace_buffers": engine.plan.workspace_buffers,
                "grown_by_driver": resident,
                "nvml_idle": idle,
                "nvml_loaded": opened,
                "nvml_now": now,
            },
            "growth": [
                {"to": e.growth.to_tokens, "stall_ms": round(1e3 * e.growth.stall_s, 2),
                 "reclaimed": e.growth.reclaimed_from_weights}
                for e in engine.loop.growths if e.generation == 1
            ],
            "pinned_gb_per_s": round(ceiling(engine), 2) if config.device.limit_bytes is not None else None,
        }  # fmt: skip
    gc.collect()
    return result


def sections(quick: bool) -> list[tuple[str, EngineConfig]]:
    """What is measured, by name."""
    made = [(name, configure(*arm)) for name, arm in ARMS.items()]
    made.append(("elastic 512MiB, call by call", configure(PUBLISHED_LIMIT, ELASTIC, capture=False)))
    if quick:
        return made
    for rows in (2, 4, 8):
        made.append((f"elastic 512MiB, {rows} rows", configure(PUBLISHED_LIMIT, ELASTIC, rows, measured=2)))
    made.append(("resident, 8 rows", configure(None, PolicyConfig(), 8, measured=2)))
    made += [(name, configure(*arm, measured=2)) for name, arm in CONTROLS.items()]
    made += [
        (f"elastic 0, granules of {size} MiB", configure(PUBLISHED_LIMIT, ARMS["elastic 0"][1], granule=size * MIB))
        for size in (8, 32)
    ]
    made.append(("elastic 0, 1,100 tokens", configure(PUBLISHED_LIMIT, ARMS["elastic 0"][1], tokens=1100, measured=1)))
    return made


def attempt(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``call`` measured, or why it could not."""
    try:
        return {"name": name, **call()}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {error}"}


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Set every row beside the ceiling and the resident arm of this run."""
    good = [row for row in rows if "error" not in row]
    ceilings = [row["pinned_gb_per_s"] for row in good if row["pinned_gb_per_s"]]
    top = statistics.median(ceilings) if ceilings else None
    resident = next((row["ms_per_step"] for row in good if row["name"] == "resident"), None)
    first = good[0]["tokens"] if good else None
    for row in good:
        moved = row["counters"]["htod_bytes_per_step"] or 0
        row["gb_per_s"] = round(moved / row["ms_per_step"] / 1e6, 2)
        if top:
            row["of_ceiling"] = round(row["gb_per_s"] / top, 4)
            if resident:
                row["of_bound"] = round(row["ms_per_step"] / max(resident, moved / top / 1e6), 4)
        row["digests_equal_first"] = bool(good) and row["digests"][0][:16] == good[0]["digests"][0][:16]
        row["tokens_equal_first"] = (
            bool(first) and row["tokens"][0][: len(first[0])] == first[0][: len(row["tokens"][0])]
        )
    return {"pinned_gb_per_s": top, "resident_ms": resident, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    lines = [heading("The arms on a GPU", result["where"])]
    lines.append(f"Pinned memory to device in this run: {result['pinned_gb_per_s']} GB/s.\n\n")
    columns = ["arm", "ms/step", "MB/step", "GB/s", "of ceiling", "of bound", "floor ratio",
               "recorded/replayed/fell back", "tokens", "ledger, MB", "driver, MB", "NVML, MB"]  # fmt: skip
    lines.append("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns) + "\n")
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | not run: {row['error']} |" + " |" * (len(columns) - 2) + "\n")
            continue
        counters, memory = row["counters"], row["memory"]
        grown = (memory["nvml_now"] or 0) - (memory["nvml_idle"] or 0)
        capture = row["capture"]
        floor = counters["floor_ratio"]
        cells = [
            row["name"], row["ms_per_step"], round((counters["htod_bytes_per_step"] or 0) / 1e6, 1), row["gb_per_s"],
            row.get("of_ceiling", ""), row.get("of_bound", ""), round(floor, 4) if floor else "",
            f"{capture['captures']}/{capture['replays']}/{capture['fallbacks']}",
            "equal" if row["tokens_equal_first"] and row["equal_generations"] else "DIFFER",
            round(memory["committed"] / 1e6, 1), round(memory["grown_by_driver"] / 1e6, 1), round(grown / 1e6, 1),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |\n")
    return "".join(lines)


def main() -> None:
    """Measure, print and write ``results/gpu.*``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the four arms only")
    parser.add_argument("--only", help="sections whose name holds this text; nothing is written")
    options = parser.parse_args()
    rows = []
    for name, config in sections(options.quick):
        if options.only and options.only not in name:
            continue
        rows.append(attempt(name, lambda config=config: measure(config)))  # type: ignore[misc]
        shown = {k: v for k, v in rows[-1].items() if k not in ("digests", "counters", "tokens")}
        print(name, shown, flush=True)
        if not options.only:
            save(rows)
    if options.only:
        print(judge(rows))


def save(rows: list[dict[str, Any]]) -> None:
    """Write what there is so far, so that a run cut short is not lost."""
    result = {"where": describe(), **judge(rows)}
    write("gpu", result, markdown(result))


if __name__ == "__main__":
    main()
