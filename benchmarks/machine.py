"""What a result must say about where it came from, and where it goes."""

from __future__ import annotations

import importlib.metadata
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
    """Date, command, machine and versions; None for a package or a GPU that is not there."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", *_module(), *sys.argv[1:]]),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "onnxruntime": _version("onnxruntime-gpu") or _version("onnxruntime"),
        "numpy": _version("numpy"),
        **_gpu(),
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
    parts = [
        where["date"],
        f"{where['cpu']}, {where['cores']} cores, {where['memory_bytes'] / 2**30:.0f} GiB",
        f"{where['gpu']}, driver {where['gpu_driver']}" if where["gpu"] else "",
        f"Linux {where['kernel']}",
        f"Python {where['python']}"
        + "".join(f", {name} {where[name]}" for name in ("onnxruntime", "cuda-bindings") if where[name]),
        f"commit {where['commit']}",
    ]
    return f"# {title}\n\n{' · '.join(filter(None, parts))}\n\n    {where['command']}\n\n"


def _module() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name] if spec is not None else [sys.argv[0]]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, str | None]:
    """Name and driver of the first GPU, as nvidia-smi tells them without opening it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        name, driver = done.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return {"gpu": None, "gpu_driver": None, "cuda-bindings": None}
    return {"gpu": name, "gpu_driver": driver, "cuda-bindings": _version("cuda-bindings")}


def _commit() -> str:
    # A copy of the files on a machine without their history is told the commit.
    if told := os.environ.get("EBB_COMMIT"):
        return told
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"
