"""From command-line arguments to composed configurations, with Hydra.

Hydra's job function only collects: a job that raises or exits inside Hydra would end a sweep half-way, and
errors in later jobs would be seen only after earlier ones ran. Hydra writes nothing where the command was given.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.cli.wording import key_of
from runner.errors import UserError
from runner.plan.jobs import Composed
from runner.plan.settings import PROJECT, Settings

CONF = PROJECT / "conf"


@dataclass(frozen=True)
class Command:
    """The jobs of a command in order; ``sweep`` when it asked for several."""

    jobs: tuple[Composed, ...]
    sweep: bool


def compose(arguments: Sequence[str]) -> Command | None:
    """Compose every job of the command. None when Hydra printed something instead, as for ``--cfg job``.

    Raises
    ------
    UserError
        For anything Hydra refuses, reworded.
    """
    _check(arguments)
    arguments = [_home(text) for text in arguments]
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from runner.cli.hydra_errors import reword, reword_interpolation

    jobs: list[Composed] = []
    problems: list[UserError] = []
    sweeps: list[bool] = []

    def collect(config: DictConfig) -> None:
        about = HydraConfig.get()
        sweeps.append(about.mode == RunMode.MULTIRUN)
        overrides = tuple(str(text) for text in about.overrides.task)
        try:
            data: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            problems.append(reword_interpolation(error))
            return
        choices = {str(group): str(name) for group, name in about.runtime.choices.items() if "/" not in str(group)}
        jobs.append(Composed(data, choices, overrides))

    entry = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(collect)
    said = io.StringIO()
    with _hydra_environment(arguments), contextlib.redirect_stderr(said):
        try:
            entry()
        except SystemExit as stop:
            if stop.code not in (0, None):
                raise _reword_exit(said.getvalue()) from None
        except Exception as error:  # the job function raises nothing, so this is Hydra refusing the command
            raise reword(error, arguments, CONF, Settings) from None
    if problems:
        raise problems[0]
    return Command(tuple(jobs), any(sweeps)) if sweeps else None


def _check(arguments: Sequence[str]) -> None:
    """What Hydra would take in silence, or refuse in words that do not help."""
    first = next((at for at, text in enumerate(arguments) if "=" in text and not text.startswith("-")), len(arguments))
    for text in arguments[first:]:
        if text in ("-m", "--multirun"):
            rest = [other for other in arguments if other != text]
            raise UserError(f"{text} goes before the settings", f"python run.py -m {shlex.join(rest)}")
    seen: dict[str, str] = {}
    for text in arguments[first:]:
        key = key_of(text)
        if key in seen:
            raise UserError(f"{text}: {key} is given twice, as {seen[key]} too. Give it once.")
        seen[key] = text
        value = text.partition("=")[2]
        if (CONF / key).is_dir() and value.startswith("["):
            raise UserError(
                f"{text}: one name is expected here; several are a sweep.",
                f"python run.py -m {key}={value.strip('[]').replace(' ', '')}",
            )
        if key.startswith("hydra/"):
            raise UserError(f"{text}: jobs run one after the other on one device; {key} cannot be chosen")


def _home(text: str) -> str:
    """``paths.cache=~/x``: no shell expands a tilde there, and Hydra cannot read one."""
    key, equals, value = text.partition("=")
    is_path = key_of(text) in ("model.path", "paths.cache", "paths.store", "paths.locks")
    return f"{key}={os.path.expanduser(value)}" if equals and is_path and value.startswith("~") else text


@contextlib.contextmanager
def _hydra_environment(arguments: Sequence[str]) -> Iterator[None]:
    """What Hydra reads from the process, set for one call and put back."""
    from omegaconf import OmegaConf

    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with tempfile.TemporaryDirectory(prefix="ebb-") as scratch:
        OmegaConf.register_new_resolver("ebb_scratch", lambda: scratch, replace=True)
        sys.argv = [argv[0] if argv else "run.py", *arguments]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, instead of printing several lines and exiting with 1
        try:
            yield
        finally:
            sys.argv = argv
            del os.environ["HYDRA_FULL_ERROR"]
            if full is not None:
                os.environ["HYDRA_FULL_ERROR"] = full


def _reword_exit(said: str) -> UserError:
    """Hydra's argument parser printed its usage and one line that matters."""
    last = said.strip().splitlines()[-1] if said.strip() else "the command line cannot be read"
    reason = last.partition("error: ")[2] or last
    unknown = re.match(r"unrecognized arguments: (\S+)", reason)
    if unknown and "=" in unknown[1] and not unknown[1].startswith("-"):
        return UserError(f"{unknown[1]}: options go before the settings", "python run.py -m arm=baseline,elastic")
    return UserError(reason, "python run.py --help lists what can be set")
