"""JSON files that are either whole or not there, and one way to write JSON that a hash can be taken of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def canonical(data: Any) -> str:
    """The same text for the same data: sorted keys, no spaces, no NaN (ValueError)."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(data: Any) -> str:
    """sha256 of :func:`canonical`, hexadecimal."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` so that a reader, or a crash at any point, sees the old file or the new one.

    Raises
    ------
    OSError
        The folder cannot be made or written, or is full; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_json(path: Path) -> Any | None:
    """The data in ``path``, or None when there is no such file or it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
