"""The step program against a simulation: no fill lands in a slot still needed, and every cold unit is filled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.decode.program import Action, step_program


@given(data=st.data(), count=st.integers(1, 40), slots=st.integers(1, 5))
def test_every_run_finds_its_own_bytes_in_the_slot(data: st.DataObject, count: int, slots: int) -> None:
    cold = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    first = data.draw(st.integers(0, count - 1))
    units = list(range(first, count)) if data.draw(st.booleans()) else list(range(count))
    slot_of = [unit % slots for unit in range(count)]
    content: dict[int, int] = {}
    run: list[int] = []
    waited: set[int] = set()
    for op in step_program(units, slot_of, cold, slots):
        if op.action is Action.FILL:
            assert cold[op.unit]
            previous = content.get(slot_of[op.unit])
            assert previous is None or previous in run, "filled over a unit that has not run"
            assert op.after == previous
            content[slot_of[op.unit]] = op.unit
        elif op.action is Action.WAIT:
            waited.add(op.unit)
        else:
            if cold[op.unit]:
                assert content[slot_of[op.unit]] == op.unit
                assert op.unit in waited
            run.append(op.unit)
    assert run == units


def test_fills_run_ahead_by_as_many_units_as_there_are_slots() -> None:
    ops = step_program(range(4), [0, 1, 0, 1], [True] * 4, 2)
    assert [f"{op.action.value}{op.unit}" for op in ops] == [
        "fill0", "fill1", "wait0", "run0", "fill2", "wait1", "run1", "fill3", "wait2", "run2", "wait3", "run3",
    ]  # fmt: skip
