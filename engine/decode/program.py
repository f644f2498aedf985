"""The step program: in what order a pass copies, waits and runs. Pure data, the same for every way of running it.

A unit is filled ``slots`` units ahead of its run, into a slot whose previous user in this pass has run by then. Nothing
is filled across the end of a pass, so the last and first unit may share a slot whatever the number of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What one line of a program does."""

    FILL = "fill"  # copy a unit's cold bytes into its slot, once the slot's previous user has run
    WAIT = "wait"  # let the kernels wait for that copy
    RUN = "run"  # run the unit


@dataclass(frozen=True)
class Op:
    """One line: an action, the unit it is about, and for a fill the unit that must have run before (or None)."""

    action: Action
    unit: int
    after: int | None = None


def step_program(units: Sequence[int], slot_of: Sequence[int], cold: Sequence[bool], slots: int) -> tuple[Op, ...]:
    """The program of one pass over ``units`` (indices, in order).

    ``slot_of[u]`` is the slot of unit u and ``cold[u]`` whether it has anything to fill. At most ``slots`` cold units
    are filled ahead of time, and a fill never lands in a slot before that slot's previous user has run.
    """
    queue = [unit for unit in units if cold[unit]]
    ops: list[Op] = []
    last_user: dict[int, int] = {}
    done: set[int] = set()
    ahead = 0

    def fill_what_may_be_filled() -> None:
        nonlocal ahead
        while queue and ahead < slots:
            unit = queue[0]
            previous = last_user.get(slot_of[unit])
            if previous is not None and previous not in done:
                return
            ops.append(Op(Action.FILL, unit, previous))
            last_user[slot_of[unit]] = unit
            queue.pop(0)
            ahead += 1

    for unit in units:
        fill_what_may_be_filled()
        if cold[unit]:
            ops.append(Op(Action.WAIT, unit))
        ops.append(Op(Action.RUN, unit))
        done.add(unit)
        if cold[unit]:
            ahead -= 1
    return tuple(ops)
