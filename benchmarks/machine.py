"""What a result must say about where it came from, and where it goes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Date, command, machine and versions."""
    import numpy
    import onnxruntime

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", *_module(), *sys.argv[1:]]),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "numpy": numpy.__version__,
        "commit": _commit(),
    }


def write(name: str, result: dict[str, Any], text: str) -> Path:
    """Write ``result`` as JSON and ``text`` as markdown to ``results/NAME.*``; the markdown's path."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    path = RESULTS / f"{name}.md"
    path.write_text(text)
    return path


def heading(title: str, where: dict[str, Any]) -> str:
    """The first lines of a result's markdown."""
    return (
        f"# {title}\n\n"
        f"{where['date']} · {where['cpu']}, {where['cores']} cores, {where['memory_bytes'] / 2**30:.0f} GiB · "
        f"Linux {where['kernel']} · Python {where['python']}, onnxruntime {where['onnxruntime']} · "
        f"commit {where['commit']}\n\n    {where['command']}\n\n"
    )


def _module() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name] if spec is not None else [sys.argv[0]]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"
