"""From validation errors to the one line a user reads: what was typed, what is wrong, what was expected."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from runner.errors import UserError

PROMPTS_FORM = """Quote the whole argument: 'workload.prompts=["First, with a comma", "Second"]'."""

_EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "finite_number": "expected a finite number",
    "path_type": "expected a path",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "missing": "is missing",
}


def explain_validation(error: ValidationError, model: type[BaseModel], overrides: Sequence[str]) -> UserError:
    """One ``UserError`` for the first problem, preferring one under a name the user typed."""
    typed = {key_of(override): override for override in overrides}
    problems = error.errors(include_url=False)
    chosen = next((p for p in problems if _name(p["loc"]) in typed), None)
    chosen = chosen or next((p for p in problems if _owner(p["loc"], typed) is not None), problems[0])
    return _explain(chosen, model, typed)


def key_of(override: str) -> str:
    """The key of ``+key=value``, ``++key=value``, ``~key`` or ``key@package=value``."""
    return override.split("=", 1)[0].lstrip("+~").split("@", 1)[0].strip()


def settings_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted name a command line can set."""
    names = []
    for field, info in model.model_fields.items():
        names.append(prefix + field)
        inner = _model_in(info.annotation)
        if inner is not None:
            names += settings_names(inner, f"{prefix}{field}.")
    return names


def nearest(key: str, names: Iterable[str]) -> str | None:
    """The name that ``key`` was probably meant to be: the same last part elsewhere, else a similar spelling."""
    candidates = [name for name in names if name != key and not key.startswith(f"{name}.")]
    last = key.rpartition(".")[2]
    same_last = [name for name in candidates if name.rpartition(".")[2] == last]
    if len(same_last) == 1:
        return same_last[0]
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.7)
    if not close:
        lasts = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        close = [lasts[match] for match in difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)]
    return close[0] if close else None


def unknown_setting(typed: str, key: str, model: type[BaseModel]) -> UserError:
    """``typed`` names a setting that does not exist."""
    names = settings_names(model)
    if key in names:  # the file that was chosen does not hold it, so Hydra wants it added
        return UserError(f"{typed}: not in the chosen file. Write +{typed} to add it.")
    meant = nearest(key, names)
    if meant is not None:
        return UserError(f"{typed}: no such setting. Did you mean {meant}?")
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if any(name.startswith(f"{parent}.") for name in names) and parent else ""
    here = [n.removeprefix(prefix) for n in names if n.startswith(prefix) and "." not in n.removeprefix(prefix)]
    where = f"Settings of {parent}" if prefix else "Settings"
    return UserError(f"{typed}: no such setting. {where}: {', '.join(sorted(here))}.", "python run.py --help says more")


def _explain(problem: ErrorDetails, model: type[BaseModel], typed: dict[str, str]) -> UserError:
    key, kind = _name(problem["loc"]), problem["type"]
    context = problem.get("ctx", {})
    if kind == "value_error" and not problem["loc"]:
        return UserError(str(context["error"]))
    owner = _owner(problem["loc"], typed)
    if owner is None and kind == "extra_forbidden":
        owner = next((name for name in typed if name.startswith(f"{key}.")), None)
    shown = typed[owner] if owner is not None else _as_override(key, problem["input"], kind)
    if kind == "extra_forbidden":
        return unknown_setting(shown, key, model)
    if owner is not None and owner != key:
        shown = f"{shown}: {key}"  # a value with parts, such as a list: say which part
    hint = None
    if kind == "value_error":
        reason = str(context["error"])
    elif kind == "literal_error":
        reason = f"expected {context['expected']}"
    elif kind in ("greater_than_equal", "greater_than"):
        bound = context.get("ge", context.get("gt"))
        reason = f"expected {'at least' if kind == 'greater_than_equal' else 'more than'} {bound:g}"
    elif kind in ("tuple_type", "string_type"):
        reason = "expected a list" if kind == "tuple_type" else "expected text"
        if key.startswith("workload.prompts"):
            reason, hint = ("expected a list of texts" if kind == "tuple_type" else reason), PROMPTS_FORM
        elif key.endswith("batch"):
            reason = "expected a list of batch sizes, such as batch=[1,2,4,8]"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        reason = f"expected a group of settings: {key}.NAME=VALUE"
    else:
        reason = _EXPECTED.get(kind, problem["msg"][:1].lower() + problem["msg"][1:])
    if kind == "missing" and shown.startswith("~"):
        return UserError(f"{shown}: this setting cannot be removed")
    if kind == "missing":
        return UserError(f"{key}: this setting is missing from the configuration")
    return UserError(f"{shown}: {reason}" + ("" if reason.endswith((".", "?")) else "."), hint)


def _name(loc: tuple[int | str, ...]) -> str:
    """The dotted name, without positions in lists."""
    return ".".join(part for part in loc if isinstance(part, str))


def _owner(loc: tuple[int | str, ...], typed: dict[str, str]) -> str | None:
    """The typed key that set this place: the name itself or the nearest of its parents."""
    parts = [part for part in loc if isinstance(part, str)]
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        # A group name (policy=hotset) chooses a file; it did not write the value inside it.
        if name in typed and (end == len(parts) or typed[name].split("=", 1)[-1].startswith("{")):
            return name
    return None


def _as_override(key: str, value: Any, kind: str) -> str:
    return key if kind == "missing" else f"{key}={'null' if value is None else value}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Annotated:
        return next((m for m in map(_model_in, typing.get_args(annotation)) if m is not None), None)
    return None
