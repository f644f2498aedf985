"""Running a step program eagerly: copies, waits and kernel runs in program order, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

from engine.counters import Tally
from engine.decode.program import Action, Op, step_program
from engine.device.protocol import Device, Stream
from engine.faults import Faults
from engine.weights.layout import Unit
from engine.weights.residency import Residency


class Executor:
    """Runs passes over units. A pass is a program, made anew when the placement has changed."""

    def __init__(
        self,
        device: Device,
        residency: Residency,
        units: tuple[Unit, ...],
        faults: Faults,
    ) -> None:
        self._device, self._residency, self._units, self._faults = (
            device,
            residency,
            units,
            faults,
        )
        self._filled = [device.event() for _ in units]
        self._ran = [device.event() for _ in units]
        self._programs: dict[bool, tuple[Op, ...]] = {}
        self._slot_of = [residency.slot(unit) for unit in units]

    def invalidate(self) -> None:
        """The placement has changed: programs made so far are void."""
        self._programs.clear()

    def run(self, with_head: bool, run_unit: Callable[[Unit], None], tally: Tally) -> None:
        """One pass: every layer, and the head's chunks when ``with_head``; costs are added to ``tally``."""
        device, residency = self._device, self._residency
        for op in self._program(with_head):
            unit = self._units[op.unit]
            if op.action is Action.FILL:
                if op.after is not None:
                    device.wait(self._ran[op.after], Stream.COPY)
                if not self._faults.skip_copy:
                    for fill in residency.prepare(unit):
                        device.copy_in(fill.address, fill.source, fill.nbytes)
                device.record(self._filled[op.unit], Stream.COPY)
            elif op.action is Action.WAIT:
                device.wait(self._filled[op.unit], Stream.COMPUTE)
            else:
                run_unit(unit)
                device.record(self._ran[op.unit], Stream.COMPUTE)
                tally.add(residency.traffic(unit))
                if self._faults.poison_ring:
                    self._faults.poison(device, residency.fills(unit))

    def _program(self, with_head: bool) -> tuple[Op, ...]:
        if with_head not in self._programs:
            units = [unit.index for unit in self._units if with_head or unit.kind == "layer"]
            cold = [self._residency.may_fill(unit) for unit in self._units]
            self._programs[with_head] = step_program(units, self._slot_of, cold, self._residency.slots)
        return self._programs[with_head]
