"""What the child process does for a reference: one generation of the plain loop."""

from __future__ import annotations

import time

from engine.config import EngineConfig
from engine.machine.open import open_reference
from engine.worker.events import Events, Progress, wait_for_go
from engine.worker.record import generation_record


def run_reference(config: EngineConfig, events: Events) -> None:
    """Load, generate once, and emit the result."""
    started = time.perf_counter()
    loop = open_reference(config)
    events.emit("loaded", load_s=time.perf_counter() - started)
    wait_for_go(events)
    events.emit("measure_start")
    generation = loop.generate(on_step=Progress(events, 1, config.workload.tokens))
    events.emit("measure_end")
    events.emit(
        "result",
        schema=1,
        source="plain loop",
        generations=[generation_record(generation)],
        text=[loop.text(row) for row in generation.tokens],
        stopped=generation.stopped,
    )
    loop.close()
