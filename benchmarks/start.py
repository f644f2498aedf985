"""What the runner costs around an arm: from the command to the first token, and the sampler's share of the time.

Runs the main job again and again with the model cached and reference and baseline in the store, as a user's second run
finds them.

    python -m benchmarks.start [--runs 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, heading, write

PROJECT = Path(__file__).parents[1]
COMMAND = ("arm=elastic", "headroom=512MiB")
FIRST_TOKEN_LIMIT_S = 6.0
SAMPLER_LIMIT = 0.02
NAMES = ("command_to_first_token_s", "sampler_cpu_fraction")


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    where = describe()
    with tempfile.TemporaryDirectory(prefix="ebb-bench-") as folder:
        command = [sys.executable, str(PROJECT / "run.py"), *COMMAND, f"paths.store={folder}", f"paths.locks={folder}"]
        for _ in range(options.runs + 1):  # the first makes reference and baseline
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = _metrics(Path(folder) / "mlflow.db")[1:]
    values = {name: [run[name] for run in found] for name in NAMES}
    first, share = (statistics.median(values[name]) for name in NAMES)
    text = heading("Around the arm (host)", where)
    text += f"`python run.py {' '.join(COMMAND)}`, model cached, reference and baseline stored, {len(found)} runs.\n\n"
    text += "| | median | runs | wanted |\n|---|---|---|---|\n"
    text += f"| command to first token, s | {first:.2f} | {_listed(values[NAMES[0]])} | ≤ {FIRST_TOKEN_LIMIT_S:.0f} |\n"
    text += f"| sampler CPU / wall | {share:.4f} | {_listed(values[NAMES[1]], 4)} | < {SAMPLER_LIMIT} |\n"
    print(text)
    print("written:", write("start", {"where": where, "runs": values}, text))


def _metrics(database: Path) -> list[dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(ids, order_by=["attributes.start_time ASC"])
    return [run.data.metrics for run in runs if run.info.run_name.startswith("elastic")]


def _listed(values: list[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


if __name__ == "__main__":
    main()
