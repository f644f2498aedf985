"""The child process of one arm: ``python -m engine.worker``.

Reads a job as one JSON line from standard input, writes events as JSON lines to standard output, and waits for the line
``go`` before the measured window. Exit codes: 0 done, 1 logits not finite, 2 bad input, 4 device or internal error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import traceback
from typing import Any

from engine.errors import (
    CapacityUnavailable,
    DeviceError,
    EbbError,
    InvalidLogits,
    InvalidRequest,
    ModelError,
)
from engine.worker.events import Events

_KINDS: tuple[tuple[type[EbbError], str, int], ...] = (
    (InvalidRequest, "request", 2),
    (ModelError, "model", 2),
    (CapacityUnavailable, "capacity", 2),
    (DeviceError, "device", 4),
    (InvalidLogits, "logits", 1),
)


def main() -> int:
    """Run one job; the return value is the exit code."""
    events = Events(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    try:
        return _run(json.loads(sys.stdin.readline()), events)
    except EbbError as error:
        kind, code = next(
            ((name, code) for cls, name, code in _KINDS if isinstance(error, cls)),
            ("internal", 4),
        )
        where = {"row": error.row, "step": error.step, "generation": error.generation} if isinstance(
            error, InvalidLogits
        ) else {}  # fmt: skip
        events.emit("error", kind=kind, message=str(error), **where)
        return code
    except Exception as error:
        traceback.print_exc()
        events.emit("error", kind="internal", message=f"{type(error).__name__}: {error}")
        return 4


def _run(job: dict[str, Any], events: Events) -> int:
    from engine.config import EngineConfig
    from engine.device.host import MEMFD_NAME

    events.emit("hello", pid=os.getpid(), memfd=MEMFD_NAME, versions=_versions())
    config = EngineConfig.from_dict(job["config"])
    if job["mode"] == "reference":
        from engine.worker.reference import run_reference

        run_reference(config, events)
    else:
        from engine.faults import Faults
        from engine.worker.arm import run_arm

        run_arm(config, Faults.from_dict(job.get("fault")), events)
    return 0


def _versions() -> dict[str, str]:
    import numpy
    import onnxruntime

    versions = {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
    for name in ("onnx", "ebb"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


if __name__ == "__main__":
    sys.exit(main())
