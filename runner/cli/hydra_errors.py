"""Hydra's errors, which run over several lines and speak of its own machinery, in one line of ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from runner.cli.wording import PROMPTS_FORM, key_of, nearest, settings_names, unknown_setting
from runner.errors import UserError

_PLURALS = {"policy": "Policies", "tracking": "Tracking stores"}
_SINGULARS = {"tracking": "tracking store"}


class Refused:
    """One refusal of Hydra: its message, and the command it was about."""

    def __init__(self, message: str, arguments: Sequence[str], conf: Path, model: type[BaseModel]) -> None:
        self.message = message
        self.arguments = [text for text in arguments if not text.startswith("-")]
        self.conf = conf
        self.model = model

    def typed(self, key: str) -> str:
        """What the user typed for ``key``, or the key."""
        return next((text for text in self.arguments if key_of(text) == key), key)


def reword(error: Exception, arguments: Sequence[str], conf: Path, model: type[BaseModel]) -> UserError:
    """One line for ``error``, raised by Hydra while it composed ``arguments``."""
    message = "\n".join(part for part in (str(error), str(error.__cause__ or "")) if part)
    refused = Refused(message, arguments, conf, model)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, OmegaConfBaseException):
        return reword_interpolation(error, next((text for text in refused.arguments if "${" in text), None))
    for pattern, explain in _RULES:
        match = re.search(pattern, message, re.DOTALL)
        if match is not None:
            return explain(refused, match)
    return UserError(next((line for line in message.splitlines() if line.strip()), type(error).__name__))


def reword_interpolation(error: OmegaConfBaseException, typed: str | None = None) -> UserError:
    """A ``${...}`` in a value that cannot be resolved, or a value that was left open."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = error.full_key or typed
    return UserError(f"{where}: {reason}" if where else reason)


def _no_option(refused: Refused, match: re.Match[str]) -> UserError:
    group, slash, name = match["path"].partition("/")
    if not slash:
        return UserError(f"no configuration file is called {match['path']}")
    return _unknown_option(refused, group, name)


def _unknown_option(refused: Refused, group: str, name: str) -> UserError:
    options = sorted(path.stem for path in (refused.conf / group).glob("*.yaml"))
    meant = nearest(name, options)
    guess = f" Did you mean {meant}?" if meant else ""
    hint = None
    if group == "model" and (name.endswith(".gguf") or "/" in name):
        hint = f"a GGUF file of your own is given as model.path={name}"
    listing = f" {_PLURALS.get(group, group.capitalize() + 's')}: {', '.join(options)}." if options else ""
    return UserError(f"{group}={name}: no such {_SINGULARS.get(group, group)}.{guess}{listing}", hint)


def _no_setting(refused: Refused, match: re.Match[str]) -> UserError:
    key = match["key"]
    if "@" in refused.typed(key):
        return UserError(f"{refused.typed(key)}: a group has one place here. Write {key}=NAME.")
    if key.startswith("hydra."):
        return UserError(f"{refused.typed(key)}: Hydra has no such setting", "python run.py --cfg hydra lists them")
    return unknown_setting(refused.typed(key), key, refused.model)


def _no_group(refused: Refused, match: re.Match[str]) -> UserError:
    return unknown_setting(refused.typed(match["key"]), match["key"], refused.model)


def _already(refused: Refused, match: re.Match[str]) -> UserError:
    key = match["key"]
    typed = refused.typed(key)
    return UserError(f"{typed}: {key} is a setting already. Write {typed.lstrip('+')}, without +.")


def _several(refused: Refused, match: re.Match[str]) -> UserError:
    typed = match["typed"].strip()
    key = key_of(typed)
    if key.startswith("workload.prompts"):
        return UserError(f"{typed}: a comma separates values of a sweep.", PROMPTS_FORM)
    return UserError(
        f"{typed}: several values are a sweep, which needs -m before the settings.",
        f"python run.py -m {shlex.join(refused.arguments)}",
    )


def _unreadable(typed: str) -> UserError:
    key = key_of(typed)
    if "=" not in typed or not re.fullmatch(r"[\w./-]+", key):
        return UserError(f"{typed}: expected NAME=VALUE, such as headroom=512MiB")
    if key.startswith("workload.prompts"):
        return UserError(f"{typed}: the value cannot be read.", PROMPTS_FORM)
    return UserError(
        f"{typed}: the value cannot be read.",
        f"""a value with special characters is quoted, inside the quotes of the shell: '{key}="..."'""",
    )


def _no_name(refused: Refused, match: re.Match[str]) -> UserError:
    """``arm=null`` or ``arm=3``: a group wants a name."""
    groups = {path.name for path in refused.conf.iterdir() if path.is_dir()}
    typed = next((t for t in refused.arguments if key_of(t) in groups and "=" in t), None)
    if typed is None:
        return UserError(f"{' '.join(refused.arguments)}: expected NAME=VALUE, such as headroom=512MiB")
    return _unknown_option(refused, *typed.split("=", 1))


def _cannot_delete(refused: Refused, match: re.Match[str]) -> UserError:
    key = match["key"]
    meant = nearest(key, settings_names(refused.model))
    return UserError(f"~{key}: there is nothing of that name to remove." + (f" Did you mean {meant}?" if meant else ""))


def _bad_file(refused: Refused, match: re.Match[str]) -> UserError:
    return UserError(f"{match['path']}: not valid YAML: {match['reason'].strip()}")


def _one_mode(refused: Refused, match: re.Match[str]) -> UserError:
    return UserError("only one of --run, -m, --cfg, --info and --shell-completion can be given at a time")


_RULES: list[tuple[str, Callable[[Refused, re.Match[str]], UserError]]] = [
    (r"Could not find '(?P<path>[^']+)'", _no_option),
    (r"Could not load '(?P<path>[^']+)'", _no_option),
    (r"Ambiguous value for argument '(?P<typed>.*?)'\n", _several),
    (r"Config group override must be a string or a list", _no_name),
    (r"force-add of config groups is not supported: '\+\+(?P<key>[\w/]+)", _already),
    (r"(?P<key>[\w/]+) appears more than once in the final defaults list", _already),
    (r"Multiple values for (?P<key>[\w/]+)", _already),
    (r"Could not append to config\. An item is already at '(?P<key>[^']+)'", _already),
    (r"Could not delete from config\. '?(?P<key>[^'\n]+?)'? does not exist", _cannot_delete),
    (r"Could not delete '(?P<key>[^'=]+)", _cannot_delete),
    (r"Could not override '(?P<key>[^'@]+)'\.\nDid you mean to override", _no_group),
    (r"Could not override '(?P<key>[^'@]+)", _no_setting),
    (r"(?P<reason>[^\n]*)\n\s*in \"(?P<path>[^\"]+\.yaml)\"", _bad_file),
    (r"Only one of --run", _one_mode),
]
