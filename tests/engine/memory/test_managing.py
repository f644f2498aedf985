"""Whether managing pays, as arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.managing import Decision, Speeds, Stakes, decide

LAPTOP = Speeds(resident=110.46e9, in_place=11.41e9, copy=11.28e9, overlapped=True, driver_model="linux", probed=True)
STAKES = Stakes(weight_bytes=8_000_000_000, unmanaged_room=6_000_000_000, managed_room=7_000_000_000, ring_share=1.0)


def made(stakes: Stakes, speeds: Speeds) -> Decision:
    return decide(stakes, lambda: speeds)


def test_copying_wins_where_it_moves_fewer_bytes_over_the_same_bus() -> None:
    decision = made(STAKES, LAPTOP)
    assert decision.managed
    assert decision.managed_s == pytest.approx(1e9 / 11.28e9)
    assert decision.unmanaged_s == pytest.approx(6e9 / 110.46e9 + 2e9 / 11.41e9)


def test_reading_in_place_wins_where_copies_are_slow_and_do_not_overlap() -> None:
    decision = made(STAKES, replace(LAPTOP, copy=1e9, overlapped=False))
    assert not decision.managed
    assert "cannot pay" in decision.reason and "1.00 GB/s" in decision.reason


def test_nothing_is_measured_where_everything_fits() -> None:
    def measure() -> Speeds:
        raise AssertionError("measured")

    decision = decide(replace(STAKES, unmanaged_room=8_000_000_000), measure)
    assert not decision.managed and "all weights fit" in decision.reason


@pytest.mark.parametrize("model", ["wddm", "unknown"])
def test_a_driver_that_places_memory_itself_is_left_alone_until_a_probe_shows_otherwise(model: str) -> None:
    there = replace(LAPTOP, driver_model=model)
    assert not made(STAKES, replace(there, probed=False)).managed
    assert made(STAKES, there).managed


rates = st.floats(1e8, 1e12)


@given(
    st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**10),
    st.floats(1, 2), rates, rates, rates, st.booleans(),
)  # fmt: skip
def test_what_is_chosen_is_never_estimated_to_be_the_slower(
    weights: int, unmanaged: int, managed: int, ring: float, resident: float, in_place: float, copy: float, beside: bool
) -> None:
    stakes = Stakes(weights, unmanaged, managed, ring)
    decision = made(stakes, Speeds(resident, in_place, copy, beside, "none"))
    if decision.managed_s is None or decision.unmanaged_s is None:
        assert stakes.in_place == 0 and not decision.managed
    else:
        assert decision.managed == (decision.managed_s < decision.unmanaged_s)
