"""References and baselines kept between runs, as JSON files beside the MLflow store.

A reference is what the tokens must be. A stored baseline saves running it again for figures that cannot differ: its
counters are deterministic, its timings are not, and those are never set in ratio with a run of another session.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.judge.identity import Identity
from runner.record.jsonfile import read_json, write_json

SCHEMA = 1


@dataclass(frozen=True)
class Reference:
    """Tokens and logits digests per row, the text, and where they come from: "plain loop" or "baseline"."""

    hash: str
    source: str
    tokens: tuple[tuple[int, ...], ...]
    digests: tuple[tuple[str, ...], ...]
    text: tuple[str, ...]
    created: str

    @staticmethod
    def from_record(identity: Identity, record: dict[str, Any], source: str | None = None) -> Reference:
        """The reference in a child's result.

        Raises
        ------
        ValueError
            The record holds no tokens.
        """
        try:
            first = record["generations"][0]
            tokens = tuple(tuple(int(x) for x in row) for row in first["tokens"])
            digests = tuple(tuple(str(x) for x in row) for row in first.get("digests") or ())
            text = tuple(str(x) for x in record.get("text") or ())
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"the reference run gave no usable tokens: {error!r}") from error
        if not tokens or not all(tokens):
            raise ValueError("the reference run gave no tokens")
        name = source or str(record.get("source", "plain loop"))
        return Reference(identity.hash, name, tokens, digests, text, _now())


class ReferenceStore:
    """References under ``folder/references``, one file an identity."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "references"

    def path(self, identity: Identity) -> Path:
        """Where the reference of an identity is kept."""
        return self._folder / f"{identity.hash}.json"

    def find(self, identity: Identity) -> Reference | None:
        """The stored reference, or None. A damaged file is as good as none: it is made anew."""
        data = read_json(self.path(identity))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("hash") != identity.hash:
            return None
        try:
            return Reference(
                hash=data["hash"],
                source=data["source"],
                tokens=tuple(tuple(row) for row in data["tokens"]),
                digests=tuple(tuple(row) for row in data["digests"]),
                text=tuple(data["text"]),
                created=data["created"],
            )
        except (KeyError, TypeError):
            return None

    def save(self, identity: Identity, reference: Reference) -> None:
        """Keep ``reference``. Raises OSError when it cannot be written."""
        write_json(
            self.path(identity),
            {
                "schema": SCHEMA,
                "hash": reference.hash,
                "source": reference.source,
                "created": reference.created,
                "tokens": reference.tokens,
                "digests": reference.digests,
                "text": reference.text,
                "identity": identity.fields,
            },
        )


@dataclass(frozen=True)
class StoredRun:
    """A baseline of an earlier session: its record and plan, and the run they come from."""

    run_id: str
    created: str
    record: dict[str, Any]
    plan: dict[str, Any]
    policy: dict[str, Any]
    device_resident_peak: int | None


class BaselineStore:
    """Baselines that passed every gate, under ``folder/results``, one file an identity of counters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "results"

    def path(self, identity: Identity) -> Path:
        """Where the baseline of an identity is kept."""
        return self._folder / f"baseline-{identity.hash}.json"

    def find(self, identity: Identity) -> StoredRun | None:
        """The stored baseline, or None."""
        data = read_json(self.path(identity))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("hash") != identity.hash:
            return None
        try:
            return StoredRun(
                run_id=str(data["run_id"]),
                created=str(data["created"]),
                record=dict(data["record"]),
                plan=dict(data["plan"]),
                policy=dict(data["policy"]),
                device_resident_peak=data["device_resident_peak"],
            )
        except (KeyError, TypeError, ValueError):
            return None

    def save(self, identity: Identity, run: StoredRun) -> None:
        """Keep ``run``. Raises OSError when it cannot be written."""
        write_json(
            self.path(identity),
            {
                "schema": SCHEMA,
                "hash": identity.hash,
                "run_id": run.run_id,
                "created": run.created,
                "record": run.record,
                "plan": run.plan,
                "policy": run.policy,
                "device_resident_peak": run.device_resident_peak,
                "identity": identity.fields,
            },
        )


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
