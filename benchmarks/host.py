"""What managing costs when everything fits: the resident arm against the plain loop, in one process, interleaved.

Both run the same kernels on the same thread pool. The plain loop reads weights where the host store holds them, with
KV in plain arrays; the engine goes through governor, hot set, KV arena and step program.

A decode step reads every weight once, so memory sets the pace. How long all cores take to read as many bytes is
measured between the pairs, by a dot product of BLAS: what is left above it is what kernels and loop cost.

    python -m benchmarks.host [--pairs 12]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import describe, heading, write
from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.engine import Engine
from engine.model.fetch import default_model
from engine.reference import PlainLoop

PROMPTS = ("The capital of France is", "The three primary colors are")
TOKENS = 32
PLAIN_LIMIT_MS = 20.0
RATIO_LIMIT = 1.05


def measure(rows: int, pairs: int, model: str) -> dict[str, Any]:
    """Medians of ``pairs`` interleaved generations of each, milliseconds a step."""
    config = EngineConfig(
        model=ModelConfig(model),
        workload=WorkloadConfig(PROMPTS[:rows], tokens=TOKENS),
        device=DeviceConfig(limit_bytes=None),
        policy=PolicyConfig(),
        max_context=2048,
    )
    plain = PlainLoop(config)
    samples: dict[str, list[float]] = {"plain": [], "managed": [], "read": []}
    with Engine(config) as engine:
        run = {
            "plain": lambda index: plain.generate(index),
            "managed": lambda index: engine.loop.generate(index, engine.prompts),
        }
        expected = run["plain"](0)
        block = np.ones(engine.weight_bytes // 4, np.float32)
        assert run["managed"](0).digests == expected.digests
        for pair in range(pairs):
            order = ("plain", "managed") if pair % 2 == 0 else ("managed", "plain")
            samples["read"].append(1e3 * read_s(block))
            for name in order:
                made = run[name](pair + 1)
                assert made.digests == expected.digests
                samples[name].append(1e3 * statistics.median(made.itl_s))
        streamed = engine.loop.window.decode.htod_bytes
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = [managed / bare for managed, bare in zip(samples["managed"], samples["plain"], strict=True)]
    return {
        "rows": rows,
        "weight_bytes": block.nbytes,
        "pairs": pairs,
        "ms_per_step": samples,
        "median_ms": medians,
        "ratio_of_medians": medians["managed"] / medians["plain"],
        "median_of_pair_ratios": statistics.median(ratios),
        "htod_bytes": streamed,
    }


def read_s(block: NDArray[np.float32]) -> float:
    """Seconds that all cores take to read ``block`` once."""
    started = time.perf_counter()
    np.dot(block, block)
    return time.perf_counter() - started


def main() -> None:
    """Measure one and two rows and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    where = describe()
    model = str(default_model(cache_dir=None, progress=True))
    results = [measure(rows, options.pairs, model) for rows in (1, 2)]
    text = heading("Managed and resident against a plain loop (host)", where)
    text += "| rows | reading W once, ms | plain, ms/step | managed, ms/step | managed / plain | "
    text += "median of pair ratios | pairs |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for result in results:
        medians = result["median_ms"]
        text += (
            f"| {result['rows']} | {medians['read']:.2f} | {medians['plain']:.2f} | {medians['managed']:.2f} | "
            f"{result['ratio_of_medians']:.3f} | {result['median_of_pair_ratios']:.3f} | {result['pairs']} |\n"
        )
    bare, ratio = results[0]["median_ms"]["plain"], max(result["ratio_of_medians"] for result in results)
    read = results[0]["median_ms"]["read"]
    weights = results[0]["weight_bytes"]
    text += (
        f"\nThis machine reads the {weights:,} B of weights in {read:.1f} ms ({weights / read / 1e6:.1f} GB/s): "
        f"one row of the plain loop takes {bare / read:.2f} times that.\n"
        f"\nWanted: one row of the plain loop at most {PLAIN_LIMIT_MS:.0f} ms/token (here {bare:.1f}), "
        f"managed at most {RATIO_LIMIT} of it (here {ratio:.3f}). Nothing streams: {results[0]['htod_bytes']} B.\n"
    )
    print(text)
    print("written:", write("host", {"where": where, "results": results}, text))


if __name__ == "__main__":
    main()
