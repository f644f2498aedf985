"""Placement: exact to the granule, evenly spread, nested over budgets, and as good as the arithmetic allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CapacityUnavailable
from engine.weights.placement import least_granules, place

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=14).map(tuple)
SLOTS = st.integers(1, 4)


@given(sizes=SIZES, slots=SLOTS)
def test_every_budget_from_the_least_up_is_used_to_the_granule(sizes: tuple[int, ...], slots: int) -> None:
    longer: tuple[int, ...] | None = None
    for budget in range(least_granules(sizes, slots), sum(sizes) + 1):
        placement = place(sizes, budget, slots)
        assert placement.granules == budget
        assert all(0 <= cold <= size for cold, size in zip(placement.cold, sizes, strict=True))
        if longer is not None:  # a larger budget never makes a tail longer
            assert all(now <= before for now, before in zip(placement.cold, longer, strict=True))
        longer = placement.cold
    assert place(sizes, sum(sizes), slots).slot == 0


@given(sizes=SIZES, slots=SLOTS)
def test_a_budget_below_the_least_is_refused(sizes: tuple[int, ...], slots: int) -> None:
    with pytest.raises(CapacityUnavailable):
        place(sizes, least_granules(sizes, slots) - 1, slots)


@given(units=st.integers(3, 60), size=st.integers(1, 300), slots=st.integers(1, 2), share=st.floats(0.05, 0.95))
def test_streamed_granules_stay_within_the_ring_bound(units: int, size: int, slots: int, share: float) -> None:
    least = least_granules((size,) * units, slots)
    budget = least + int((units * size - least) * share)
    missing = units * size - budget
    placement = place((size,) * units, budget, slots)
    assert sum(placement.cold) <= missing * units / (units - slots) + units
    assert max(placement.cold) - min(placement.cold) <= 1


def test_cold_granules_are_scattered_over_the_units() -> None:
    cold = place((10,) * 8, 80 - 3, 1).cold
    assert cold == place((10,) * 8, 77, 1).cold
    assert sum(cold) == 3 + max(cold)
    longest_run = max(len(run) for run in "".join(map(str, cold)).split("0"))
    assert longest_run <= 2
