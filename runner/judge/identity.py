"""What two runs must share for their tokens to be comparable, as one hash.

A reference made by other kernels, on another kind of CPU, or by other engine sources is not compared with: it is
another identity, and its reference is made anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
from engine.config import EngineConfig
from runner.record.jsonfile import digest, read_json, write_json

_KERNEL_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "numpy")


@dataclass(frozen=True)
class Identity:
    """``fields`` as they were hashed (stored with the reference, so that people can see what differs)."""

    hash: str
    fields: dict[str, Any]


def identity_of(config: EngineConfig, model_digest: str) -> Identity:
    """The identity of the tokens that ``config`` produces. Memory policy and limit have no part in it."""
    fields = {
        "model": model_digest,
        "prompts": list(config.workload.prompts),
        "template": config.workload.template,
        "ignore_eos": config.workload.ignore_eos,
        "tokens": config.workload.tokens,
        "rows": len(config.workload.prompts),
        "device": config.device.kind,
        "threads": config.device.threads or len(os.sched_getaffinity(0)),
        "max_context": config.max_context,
        "prefill_chunk": config.prefill_chunk,
        "versions": kernel_versions(),
        "engine": engine_digest(),
        "cpu": cpu_digest(),
    }
    return Identity(digest(fields), fields)


def run_identity(config: EngineConfig, model_digest: str) -> Identity:
    """The identity of a run's *counters*: that of its tokens and the whole engine configuration.

    The model counts by its content, not by where it lies.
    """
    whole = config.to_dict()
    whole["model"] = {"digest": model_digest}
    fields = {"tokens_identity": identity_of(config, model_digest).hash, "config": whole}
    return Identity(digest(fields), fields)


def model_digest(path: Path, cache: Path) -> str:
    """sha256 of a model file, remembered in ``cache`` by path, size and modification time.

    Raises
    ------
    OSError
        The model cannot be read.
    """
    status = path.stat()
    key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    known = read_json(cache)
    known = known if isinstance(known, dict) else {}
    if isinstance(known.get(key), str):
        return str(known[key])
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    known[key] = found
    with contextlib.suppress(OSError):  # it only costs the next run the time to hash it again
        write_json(cache, known)
    return found


@functools.cache
def kernel_versions() -> dict[str, str]:
    """Versions of the packages that compute, without importing them."""
    found = {}
    for name in _KERNEL_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def engine_digest() -> str:
    """sha256 over the engine's sources: names and contents, in order."""
    root = Path(next(iter(engine.__path__)))
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


@functools.cache
def cpu_digest() -> str:
    """Architecture and instruction set: kernels are chosen by it, and round differently."""
    flags = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return digest([platform.machine(), sorted(flags.partition(":")[2].split())])
