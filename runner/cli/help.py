"""The text of ``--help``, made from ``conf/`` so that a new arm or workload shows by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.plan.settings import PROJECT

_USAGE = """\
ebb  keeps a language model's weights in the memory its KV cache has not grown into yet

usage      python run.py arm=elastic headroom=512MiB
           python run.py -m arm=baseline,elastic headroom=0,512MiB      a sweep: every combination
           python run.py --cfg job                                      the configuration, without running
           python -m engine.generate --help                             the engine alone
"""

_SETTINGS = """\
sizes      512MiB (2**20) or 512MB (10**6); a unit is required, except for 0
exit       0 all gates pass · 1 a gate failed · 2 bad input · 3 device in use · 4 an arm crashed · 130 interrupted"""


def help_text(conf: Path = PROJECT / "conf") -> str:
    """Usage, the choices of every group with a line on each arm, and the settings with their defaults."""
    parts = [_USAGE, _arms(conf)]
    for group, title in (("model", "models"), ("workload", "workloads"), ("policy", "policies"), ("device", "devices")):
        names = [path.stem for path in sorted((conf / group).glob("*.yaml"))]
        parts.append(f"{title:<11}{', '.join(names)}" + _note(group))
    parts += ["", "settings, with their defaults", _defaults(conf / "config.yaml"), "", _SETTINGS]
    return "\n".join(parts)


def _arms(conf: Path) -> str:
    lines: list[str] = []
    for path in sorted((conf / "arm").glob("*.yaml")):
        data = _read(path)
        spec = data.get("arm", data)
        lines.append(f"{'' if lines else 'arms':<11}{path.stem:<14}{spec.get('summary', '')}")
    return "\n".join(lines)


def _note(group: str) -> str:
    return {"model": "; a GGUF file of your own: model.path=FILE", "device": "; its part: device.limit=1GiB"}.get(
        group, ""
    )


def _defaults(path: Path) -> str:
    """The commented settings of the main file, as they stand there, up to Hydra's own."""
    text = path.read_text(encoding="utf-8")
    body = text[text.index("\nheadroom:") : text.index("\nhydra:")].strip("\n")
    return "\n".join(f"  {line}".rstrip() for line in body.splitlines())


def _read(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return data if isinstance(data, dict) else {}
