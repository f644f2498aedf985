"""Running a step program: copies, waits and kernel runs in program order, call by call or replayed, and their cost."""

from __future__ import annotations

from collections.abc import Callable

from engine.counters import Tally
from engine.decode.program import Action, Op, step_program
from engine.decode.recordings import Recordings, Step
from engine.device.protocol import Device, Stream
from engine.faults import Faults
from engine.machine.protocol import Recorder
from engine.weights.layout import Unit
from engine.weights.residency import Fill, Residency

RunUnit = Callable[[Unit], None]


class Executor:
    """Runs passes over units. A pass is a program, made anew when the placement has changed.

    With a ``recorder``, decode passes are recorded once for each bucket and placement, and replayed from then on.
    """

    def __init__(
        self,
        device: Device,
        residency: Residency,
        units: tuple[Unit, ...],
        faults: Faults,
        recorder: Recorder | None = None,
    ) -> None:
        self._device, self._residency, self._units, self._faults = (
            device,
            residency,
            units,
            faults,
        )
        self._filled = [device.event() for _ in units]
        self._ran = [device.event() for _ in units]
        self._landed, self._begun, self._ended = device.event(), device.event(), device.event()
        self._programs: dict[bool, tuple[Op, ...]] = {}
        self._slot_of = [residency.slot(unit) for unit in units]
        self._placements: dict[tuple[tuple[Fill, ...], ...], int] = {}
        self._placement: int | None = None
        declined = None if residency.static else f"policy={residency.policy} moves pages from step to step"
        self.recordings = Recordings(device, recorder, declined)

    def invalidate(self) -> None:
        """The placement has changed: programs made so far are void."""
        self._programs.clear()
        self._placement = None

    def run(self, with_head: bool, run_unit: RunUnit, tally: Tally) -> None:
        """One pass: every layer, and the head's chunks when ``with_head``; costs are added to ``tally``."""
        self._await_copies()
        self._enqueue(with_head, run_unit, tally)

    def step(self, run_unit: RunUnit, tally: Tally, capacity: int) -> Step:
        """One decode pass in the bucket of ``capacity`` tokens, replayed where there is a recording of it."""
        recordings = self.recordings
        key = (capacity, self._placed()) if recordings.active else None
        self._await_copies()
        if key is not None and (recording := recordings.replay(key)) is not None:
            for traffic in recording.traffic:
                tally.add(traffic)
            return Step.REPLAYED
        # Kernels take their scratch in a first run; then the same calls can be recorded.
        self._enqueue(True, run_unit, tally)
        return recordings.record(
            key,
            lambda: self._enqueue(True, run_unit, Tally()),
            lambda: tuple(self._residency.traffic(unit) for unit in self._units),
        )

    def _await_copies(self) -> None:
        """Let kernels wait for what was copied since the last pass: weights that a load or a promotion brought back.

        This stands outside what is recorded, since a recording knows nothing of copies made before it.
        """
        self._device.record(self._landed, Stream.COPY)
        self._device.wait(self._landed, Stream.COMPUTE)

    def _enqueue(self, with_head: bool, run_unit: RunUnit, tally: Tally) -> None:
        device, residency = self._device, self._residency
        # No copy before the last pass has done with the slots.
        device.record(self._begun, Stream.COMPUTE)
        device.wait(self._begun, Stream.COPY)
        for op in self._program(with_head):
            unit = self._units[op.unit]
            if op.action is Action.FILL:
                if op.after is not None:
                    device.wait(self._ran[op.after], Stream.COPY)
                for fill in residency.prepare(unit):
                    if not self._faults.skip_copy:
                        device.copy_in(fill.address, fill.source, fill.nbytes)
                device.record(self._filled[op.unit], Stream.COPY)
            elif op.action is Action.WAIT:
                device.wait(self._filled[op.unit], Stream.COMPUTE)
            else:
                run_unit(unit)
                tally.add(residency.traffic(unit))
                if self._faults.poison_ring:
                    self._faults.poison(device, residency.fills(unit))
                device.record(self._ran[op.unit], Stream.COMPUTE)
        device.record(self._ended, Stream.COPY)
        device.wait(self._ended, Stream.COMPUTE)

    def _program(self, with_head: bool) -> tuple[Op, ...]:
        if with_head not in self._programs:
            units = [unit.index for unit in self._units if with_head or unit.kind == "layer"]
            cold = [self._residency.may_fill(unit) for unit in self._units]
            self._programs[with_head] = step_program(units, self._slot_of, cold, self._residency.slots)
        return self._programs[with_head]

    def _placed(self) -> int:
        """A number for the placement in force; the same copies give the same number."""
        if self._placement is None:
            fills = tuple(self._residency.fills(unit) for unit in self._units)
            self._placement = self._placements.setdefault(fills, len(self._placements))
        return self._placement
