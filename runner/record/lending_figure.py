"""A picture of lending: the ledger by holder and what the device really held, over the tokens of one generation."""

from __future__ import annotations

from pathlib import Path

from runner.execution.outcome import Outcome

_MIB = 1 << 20
_HOLDERS = (("weights", "#4c78a8"), ("KV", "#f58518"), ("workspace", "#bab0ac"))


def write_lending_figure(path: Path, outcome: Outcome) -> None:
    """Write a PNG to ``path`` when growth called memory back in the outcome's first run; otherwise write nothing."""
    run = outcome.part.first if outcome.parts else None
    if run is None or not (run.record.get("counters") or {}).get("reclaim_events"):
        return
    series = [tuple(point) for point in run.record.get("memory", ())]
    first = [point for point in series if point[0] == series[0][0]] if series else []
    if len(first) < 2:
        return
    from matplotlib.figure import Figure  # half a second to import, and only a run that reclaimed needs it

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point[2] for point in first]
    layers = [[point[at] / _MIB for point in first] for at in (3, 4, 5)]
    axes.stackplot(
        tokens, layers, labels=[name for name, _ in _HOLDERS], colors=[colour for _, colour in _HOLDERS], step="post"
    )
    resident = [point[6] / _MIB for point in first]
    axes.plot(tokens, resident, "k--", drawstyle="steps-post", linewidth=1.2, label="device-resident, measured")
    limit = run.record["ledger"]["limit"]
    axes.axhline(limit / _MIB, color="#e45756", linewidth=1, label=f"limit {limit / _MIB:,.0f} MiB")
    axes.set_xlabel("tokens in the longest row")
    axes.set_ylabel("MiB")
    axes.set_title(f"{outcome.label}: committed by holder, and resident")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=120)
