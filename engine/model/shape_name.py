"""Names of shapes: ``shape:NAME`` stands where a model's path would."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.errors import ModelError

SHAPES = Path(__file__).parent / "shapes"
_SCHEME = "shape:"


def is_shape(model: str) -> bool:
    """Whether ``model`` names a shape rather than a file."""
    return model.startswith(_SCHEME)


def shape_names() -> list[str]:
    """The shapes that ship with Ebb."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def shape_file(model: str) -> Path:
    """The file of ``shape:NAME``.

    Raises
    ------
    ModelError
        When there is none.
    """
    name = model.removeprefix(_SCHEME)
    path = SHAPES / f"{name}.json"
    if name not in shape_names():
        raise ModelError(f"no shape is called {name!r}; shapes: {', '.join(shape_names())}")
    return path


def shape_digest(model: str) -> str:
    """sha256 of the shape's file."""
    return hashlib.sha256(shape_file(model).read_bytes()).hexdigest()
