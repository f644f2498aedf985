"""The settings of one job, validated: what shapes the engine (``arms.settings``) and what the runner needs besides.

Sizes are bytes once read, times are seconds (``_s``), paths are absolute once read.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from arms.settings import EngineSettings, OptionalSize
from arms.spec import ArmSpec
from engine.sizes import format_bytes
from runner.cli.wording import explain_validation
from runner.errors import UserError
from runner.plan.durations import parse_duration

PROJECT = Path(__file__).resolve().parents[2]

BatchSize = Annotated[int, Field(ge=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrackingSettings(_Frozen):
    """Where runs are recorded. ``uri`` of None is the embedded store in ``paths.store``."""

    uri: str | None = None
    experiment: str = Field(default="ebb", min_length=1)


class ContentionSettings(_Frozen):
    """``wait``: seconds to wait for a device that another process holds; written ``30s``, ``10m`` or ``2h``."""

    wait: Annotated[float, BeforeValidator(parse_duration)] = 0.0

    @property
    def wait_s(self) -> float:
        """``wait`` under a name that says its unit."""
        return self.wait


def _absolute(value: Any) -> Any:
    """A path from the folder the command was given in; ``~`` is the home folder."""
    return Path(value).expanduser().absolute() if isinstance(value, str) else value


OptionalPath = Annotated[Path | None, BeforeValidator(_absolute)]


class PathSettings(_Frozen):
    """Folders, each made when it is first needed.

    ``cache`` of None is the user's cache folder (it is the engine that knows it).
    """

    cache: OptionalPath = None
    store: Annotated[Path, BeforeValidator(lambda value: PROJECT / "mlruns" if value is None else _absolute(value))]
    locks: Annotated[
        Path,
        BeforeValidator(lambda value: Path(tempfile.gettempdir()) / "ebb-locks" if value is None else _absolute(value)),
    ]


class Settings(EngineSettings):
    """Everything a job is asked to be. ``choices`` are the names chosen in the config groups, for records."""

    arm: ArmSpec
    budget: OptionalSize = None
    batch: tuple[BatchSize, ...] | None = Field(default=None, min_length=1)
    repeats: int = Field(default=1, ge=1)
    compare: Literal["baseline", "none"] = "baseline"
    timeout_s: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    tracking: TrackingSettings = TrackingSettings()
    contention: ContentionSettings = ContentionSettings()
    paths: PathSettings

    _choices: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def choices(self) -> Mapping[str, str]:
        """Group -> chosen name, such as ``arm`` -> ``elastic``."""
        return self._choices

    @model_validator(mode="after")
    def _together(self) -> Self:
        """Values that are fine alone and wrong together, or wrong on this machine."""
        page, granule = mmap.PAGESIZE, self.device.granule
        if granule <= 0 or granule % page:
            raise ValueError(
                f"device.granule={format_bytes(granule)}: expected a positive multiple of the page size "
                f"({format_bytes(page)}). Write a size such as 64KiB."
            )
        if self.device.limit <= 0 and not self.arm.lift_limit:
            raise ValueError("device.limit=0: there must be memory to manage. Write a size such as 1GiB.")
        if self.tokens > self.max_context:
            raise ValueError(
                f"tokens={self.tokens} does not fit max_context={self.max_context}. "
                "Raise max_context, or ask for fewer tokens."
            )
        if self.budget is not None and self.policy.budget != self.budget:
            raise ValueError("budget and policy.budget are one setting and were given two values. Give one of them.")
        batch = self.arm.batch or ()
        if any(rows < 1 for rows in batch) or len(set(batch)) < len(batch):
            raise ValueError(f"batch={list(batch)}: expected different sizes of at least 1, such as batch=[1,2,4].")
        return self


def read_settings(data: Mapping[str, Any], choices: Mapping[str, str], overrides: tuple[str, ...] = ()) -> Settings:
    """Validate one composed configuration.

    ``overrides`` are what the user typed; an error is told under a name from there where one fits.

    Raises
    ------
    UserError
        With one line: the key, the value, what was expected, and the nearest name for an unknown key.
    """
    try:
        settings = Settings.model_validate(dict(data))
    except ValidationError as error:
        raise explain_validation(error, Settings, overrides) from None
    _refuse_flags_as_numbers(data, settings.model_dump(), "")
    settings._choices.update(choices)
    return settings


def _refuse_flags_as_numbers(data: Any, read: Any, key: str) -> None:
    """``tokens=true`` would be read as 1, which nobody means."""
    if isinstance(data, bool) and not isinstance(read, bool):
        raise UserError(f"{key}={str(data).lower()}: expected a number, got true or false")
    if isinstance(data, Mapping) and isinstance(read, Mapping):
        for name, value in data.items():
            _refuse_flags_as_numbers(value, read.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(data, list | tuple) and isinstance(read, list | tuple):
        for value, value_read in zip(data, read, strict=False):
            _refuse_flags_as_numbers(value, value_read, key)
