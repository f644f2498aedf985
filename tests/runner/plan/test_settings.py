"""Settings: what is read, under which names, and how errors are worded."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runner.cli.compose import compose
from runner.cli.wording import key_of, nearest, settings_names
from runner.errors import ArmCrashed, Contended, GateFailed, Interrupted, RunnerError, UserError
from runner.plan.durations import parse_duration
from runner.plan.settings import Settings, read_settings


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    command = compose([])
    assert command is not None
    return command.jobs[0].data


def test_settings_are_frozen(composed: dict[str, Any]) -> None:
    settings = read_settings(composed, {"arm": "elastic"})
    with pytest.raises(ValidationError):
        settings.tokens = 3
    assert settings.choices == {"arm": "elastic"}


@pytest.mark.parametrize(("text", "nbytes"), [("8GB", 8 * 10**9), ("8GiB", 2**33), (0, 0), (0.0, 0), ("0", 0)])
def test_every_route_reads_sizes_alike(composed: dict[str, Any], text: object, nbytes: int) -> None:
    data = deepcopy(composed)
    data["headroom"] = text
    assert read_settings(data, {}).headroom == nbytes


@pytest.mark.parametrize("value", [8e9, -1, 512, -0.5, True, None, "512Mb", [1], {"a": 1}])
def test_a_bad_size_is_one_line_whatever_its_type(composed: dict[str, Any], value: object) -> None:
    data = deepcopy(composed)
    data["headroom"] = value
    with pytest.raises(UserError) as caught:
        read_settings(data, {}, (f"headroom={value}",))
    assert caught.value.line.startswith("headroom=") and "\n" not in caught.value.shown().removesuffix("\n")


def test_an_unknown_key_in_a_file_is_named(composed: dict[str, Any]) -> None:
    data = deepcopy(composed)
    data["arm"]["lendign"] = True
    with pytest.raises(UserError, match=r"arm.lendign=True: no such setting. Did you mean arm.lending\?"):
        read_settings(data, {})


def test_the_name_the_user_typed_is_the_one_in_the_error(composed: dict[str, Any]) -> None:
    data = deepcopy(composed)
    data["budget"] = data["policy"]["budget"] = "6Gb"
    with pytest.raises(UserError, match=r"^budget=6Gb: "):
        read_settings(data, {}, ("budget=6Gb",))


@pytest.mark.parametrize(
    ("typed", "key"),
    [("a.b=1", "a.b"), ("+a=1", "a"), ("++a=x=y", "a"), ("~a", "a"), ("arm@x=y", "arm"), ("foo", "foo")],
)
def test_key_of(typed: str, key: str) -> None:
    assert key_of(typed) == key


@pytest.mark.parametrize(
    ("key", "meant"),
    [("headrom", "headroom"), ("limit", "device.limit"), ("max_contxt", "max_context"), ("arm.cld", "arm.cold"),
     ("paths.stor", "paths.store"), ("zzz", None)],
)  # fmt: skip
def test_nearest(key: str, meant: str | None) -> None:
    assert nearest(key, settings_names(Settings)) == meant


@given(st.text(max_size=12))
def test_nearest_never_offers_what_was_typed(key: str) -> None:
    assert nearest(key, settings_names(Settings)) != key


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10m", 600), ("1.5h", 5400), (0, 0), ("2 m", 120)])
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("value", [10, "10", "-1s", "1d", None, True, False, "inf s", ""])
def test_bad_durations(value: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("kind", "code"), [(UserError, 2), (Contended, 3), (ArmCrashed, 4), (GateFailed, 1), (Interrupted, 130)]
)
def test_errors_carry_their_exit_code(kind: type[RunnerError], code: int) -> None:
    error = kind("two\nlines", "a\nhint")
    assert error.exit_code == code
    assert error.shown() == "error: two lines\nhint: a hint"
