"""References and baselines: what makes two runs comparable, and files that are whole or not there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import PolicyConfig
from runner.judge import identity as identity_module
from runner.judge.identity import identity_of, model_digest, run_identity
from runner.judge.references import BaselineStore, Reference, ReferenceStore, StoredRun
from runner.record.jsonfile import write_json
from tests.runner import fake_worker as fake
from tests.runner.support import BASELINE, config


def test_the_identity_is_about_tokens_and_not_about_memory() -> None:
    base = config()
    same = [
        replace(base, policy=PolicyConfig(managed=False, budget_bytes=1)),
        replace(base, device=replace(base.device, limit_bytes=None, granule_bytes=4096)),
        replace(base, warmup=0, measured=5),
        config(BASELINE),
    ]
    assert {identity_of(each, "m").hash for each in same} == {identity_of(base, "m").hash}


def test_whatever_changes_tokens_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    base = config()
    others = [
        replace(base, workload=replace(base.workload, prompts=("other", "prompt 1"))),
        replace(base, workload=replace(base.workload, tokens=9)),
        replace(base, workload=replace(base.workload, template="model")),
        replace(base, workload=replace(base.workload, ignore_eos=False)),
        replace(base, device=replace(base.device, threads=63)),
        replace(base, max_context=1024),
        replace(base, prefill_chunk=32),
        config(rows=3),
    ]
    hashes = {identity_of(each, "m").hash for each in [base, *others]} | {identity_of(base, "other model").hash}
    assert len(hashes) == len(others) + 2
    for name, value in (("engine_digest", "x"), ("cpu_digest", "x"), ("kernel_versions", {"numpy": "0"})):
        with monkeypatch.context() as patch:
            patch.setattr(identity_module, name, lambda value=value: value)
            assert identity_of(base, "m").hash not in hashes


def test_counters_have_a_narrower_identity() -> None:
    base = config()
    other = replace(base, policy=replace(base.policy, headroom_bytes=1))
    assert run_identity(base, "m").hash != run_identity(other, "m").hash
    elsewhere = replace(base, model=replace(base.model, path="/elsewhere/model.gguf"))
    assert run_identity(base, "m").hash == run_identity(elsewhere, "m").hash


def test_the_model_is_hashed_once_and_again_when_it_changes(tmp_path: Path) -> None:
    model, cache = tmp_path / "m.gguf", tmp_path / "digests.json"
    model.write_bytes(b"one")
    first = model_digest(model, cache)
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    stamp = model.stat()
    assert model_digest(model, cache) == first
    model.write_bytes(b"two")
    os.utime(model, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert model_digest(model, cache) != first
    with pytest.raises(FileNotFoundError):
        model_digest(tmp_path / "none", cache)


def test_a_reference_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    store, found = ReferenceStore(tmp_path), identity_of(config(), "m")
    assert store.find(found) is None
    reference = Reference.from_record(found, fake.record_of(config().to_dict()))
    store.save(found, reference)
    assert store.find(found) == reference
    assert store.find(identity_of(config(rows=3), "m")) is None
    assert [path.name for path in (tmp_path / "references").iterdir()] == [f"{found.hash}.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99, "hash": "x"}'])
def test_a_damaged_reference_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    store, found = ReferenceStore(tmp_path), identity_of(config(), "m")
    store.path(found).parent.mkdir()
    store.path(found).write_text(text)
    assert store.find(found) is None


@pytest.mark.parametrize("record", [{}, {"generations": []}, {"generations": [{"tokens": [[]]}]}])
def test_a_reference_needs_tokens(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no "):
        Reference.from_record(identity_of(config(), "m"), record)


def test_a_baseline_comes_back_with_where_it_is_from(tmp_path: Path) -> None:
    store, found = BaselineStore(tmp_path), run_identity(config(BASELINE), "m")
    run = StoredRun("id", "2026-01-01 00:00:00", {"counters": {"a": 1}}, {}, {}, 5)
    store.save(found, run)
    assert store.find(found) == run
    assert store.find(run_identity(config(), "m")) is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]
