"""Policies against judges that share no code with them: Belady's rule, and a simulation of every trace."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.counters import Tally
from engine.errors import CapacityUnavailable, DeviceError, InvalidRequest
from engine.weights.placement import least_granules, place
from engine.weights.policies import DYNAMIC, Resident, leaving
from tests.belady import belady, per_pass
from tests.engine.weights.bench import GRANULE, Bench
from tests.trace_sim import Count, Pass, simulate

ALL = ("hotset", "stable_resident", *DYNAMIC)
UNITS = st.lists(st.lists(st.integers(1, 9 * GRANULE), min_size=1, max_size=5), min_size=1, max_size=7)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[int]], str, int, list[Pass], list[tuple[int, int]]]:
    """A model, a policy, the load's budget, passes under budgets that shrink, and pinned pages."""
    sizes, policy = draw(UNITS), draw(st.sampled_from(ALL))
    every = [(u, t) for u, unit in enumerate(sizes) for t in range(len(unit))]
    pinned = draw(st.lists(st.sampled_from(every), max_size=3, unique=True)) if policy != "hotset" else []
    bench = Bench(sizes, policy, patterns(pinned))
    least, full = bench.residency.least_bytes // GRANULE, bench.residency.full_bytes // GRANULE
    budgets = sorted(draw(st.lists(st.integers(least, full), min_size=4, max_size=4)), reverse=True)
    reach = [draw(st.integers(1, len(sizes))) if draw(st.booleans()) else len(sizes) for _ in range(6)]
    steps = [Pass(each, budgets[min(at // 2 + 1, 3)]) for at, each in enumerate(reach)]
    return sizes, policy, budgets[0], steps, pinned


def patterns(pinned: list[tuple[int, int]]) -> tuple[str, ...]:
    return tuple(f"u{u}.t{t}" for u, t in pinned)


def counts_of(tally: Tally) -> dict[str, int]:
    return {f.name: getattr(tally, f.name) for f in fields(Count) if f.name != "evictions"}


@settings(max_examples=300, deadline=None)
@given(run=runs())
def test_every_policy_costs_what_a_simulation_of_the_trace_says_in_every_generation(run: Any) -> None:
    sizes, policy, load, steps, pinned = run
    bench = Bench(sizes, policy, patterns(pinned))
    bench.load(load)
    expected = simulate(sizes, GRANULE, policy, steps, frozenset(pinned), load=load)
    at_load = bench.residency.mapped_physical
    for _ in range(3):
        budget = load
        bench.holder.allowance = load * GRANULE
        bench.residency.promote(load * GRANULE)
        assert bench.residency.mapped_physical == at_load
        for step, want in zip(steps, expected, strict=True):
            evicted = bench.residency.evictions
            if step.budget < budget:
                budget = step.budget
                bench.reclaim(budget)
            got = bench.run(step.reach)
            assert counts_of(got) == {k: v for k, v in vars(want).items() if k != "evictions"}
            assert bench.residency.evictions - evicted == want.evictions
    bench.residency.close()
    assert bench.ledger.committed == bench.device.counters.live_granules == 0
    assert not bench.device._mapped


@settings(max_examples=100, deadline=None)
@given(run=runs())
def test_an_undone_reclaim_leaves_nothing_behind(run: Any) -> None:
    sizes, policy, load, steps, pinned = run
    plain, undone = Bench(sizes, policy, patterns(pinned)), Bench(sizes, policy, patterns(pinned))
    for bench in (plain, undone):
        bench.load(load)
        bench.run(steps[0].reach)
    evicted = undone.residency.evictions
    undo = undone.residency.reclaim(steps[-1].budget * GRANULE)
    undo()
    undone.pool.trim()
    assert undone.residency.evictions == evicted
    assert undone.residency.mapped_physical == plain.residency.mapped_physical == undone.ledger.committed
    assert counts_of(undone.run(len(sizes))) == counts_of(plain.run(len(sizes)))


@settings(max_examples=150, deadline=None)
@given(run=runs(), data=st.data())
def test_a_reclaim_that_fails_at_any_call_leaves_nothing_behind(run: Any, data: st.DataObject) -> None:
    sizes, policy, load, steps, pinned = run
    plain, failed = Bench(sizes, policy, patterns(pinned)), Bench(sizes, policy, patterns(pinned))
    for bench in (plain, failed):
        bench.load(load)
        bench.run(steps[0].reach)
    mapped = set(failed.device._mapped)
    method = data.draw(st.sampled_from(["map", "unmap", "create"]))
    failed.device.arm(method, data.draw(st.integers(1, 8)))
    try:
        undo = failed.residency.reclaim(steps[-1].budget * GRANULE)
    except DeviceError:
        pass
    else:
        failed.device.arm("none", -1)
        undo()
    failed.device.arm("none", -1)
    failed.pool.trim()
    assert set(failed.device._mapped) == mapped
    assert failed.residency.evictions == plain.residency.evictions
    assert failed.residency.mapped_physical == plain.residency.mapped_physical == failed.ledger.committed
    assert counts_of(failed.run(len(sizes))) == counts_of(plain.run(len(sizes)))


@settings(max_examples=100, deadline=None)
@given(run=runs(), data=st.data())
def test_after_a_pass_that_broke_off_a_generation_starts_like_any_other(run: Any, data: st.DataObject) -> None:
    sizes, policy, load, _, pinned = run
    bench = Bench(sizes, policy, patterns(pinned))
    bench.load(load)
    first = bench.run(len(sizes))
    bench.residency.promote(load * GRANULE)
    bench.device.arm(data.draw(st.sampled_from(["map", "unmap"])), data.draw(st.integers(1, 9)))
    with suppress(DeviceError):
        for unit in bench.units[: data.draw(st.integers(1, len(sizes)))]:
            if bench.residency.may_fill(unit):
                for fill in bench.residency.prepare(unit):
                    bench.device.copy_in(fill.address, fill.source, fill.nbytes)
                if unit.index == len(sizes) - 1:
                    bench.residency.prepare(bench.units[0])  # and it breaks off before the copies
    bench.device.arm("none", -1)
    bench.residency.promote(load * GRANULE)
    bench.pool.trim()
    assert counts_of(bench.run(len(sizes))) == counts_of(first)


@settings(max_examples=100, deadline=None)
@given(sizes=UNITS, policy=st.sampled_from(ALL))
def test_a_budget_below_the_least_is_refused_and_every_one_above_works(sizes: list[list[int]], policy: str) -> None:
    bench = Bench(sizes, policy)
    least, full = bench.residency.least_bytes // GRANULE, bench.residency.full_bytes // GRANULE
    with pytest.raises(CapacityUnavailable):
        bench.residency.load((least - 1) * GRANULE)
    bench.load(full)
    for budget in range(full - 1, least - 1, -1):
        bench.reclaim(budget)
        bench.run(len(sizes))
        assert bench.residency.mapped_physical <= budget * GRANULE


@pytest.mark.parametrize("policy", [name for name in ALL if name != "hotset"])
def test_a_pinned_page_is_never_copied_again(policy: str) -> None:
    sizes = [[GRANULE, 5 * GRANULE, 2 * GRANULE]] * 4 + [[6 * GRANULE]]
    bench = Bench(sizes, policy, ("u4.*", "u1.t1"))
    for granules in (bench.residency.least_bytes // GRANULE, 30):
        bench.holder.allowance = granules * GRANULE
        bench.residency.promote(granules * GRANULE)  # the first time, a load
        for _ in range(3):
            bench.run(5)
            lacking = {fill.address for unit in bench.units for fill in bench.residency.fills(unit)}
            for unit, role in ((4, "t0"), (1, "t1")):
                assert bench.residency.address(bench.units[unit], role) not in lacking
        assert bench.run(5).hit_bytes >= 11 * GRANULE


def test_a_pattern_that_matches_nothing_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidRequest, match=r"policy.pin=ffn: no tensor has such a name; names are like u0.t0"):
        Bench([[1]], "lru", ("ffn",))


def test_what_leaves_first() -> None:
    def page(order: int, nbytes: int, last_use: int) -> Resident:
        return Resident(order, nbytes, -(-nbytes // 100) * 100, last_use)

    pages = [page(0, 100, 7), page(1, 250, 9), page(2, 310, 8), page(3, 100, 9), page(4, 30, 6)]
    order = {name: [each.order for each in leaving(name, pages)] for name in DYNAMIC}
    assert order == {
        "lru": [4, 0, 2, 1, 3],
        "mru": [3, 1, 2, 0, 4],
        "smallest": [4, 0, 3, 1, 2],
        "largest": [2, 1, 0, 3, 4],
        "byte_aware": [4, 2, 1, 3, 0],  # keeps 0.30, 0.78, 0.83, 1 and 1 of what it takes
    }


@pytest.mark.parametrize(("count", "frames"), [(10, 6), (48, 36), (7, 1), (5, 3), (12, 10)])
def test_equal_pages_cost_what_theory_says(count: int, frames: int) -> None:
    assert per_pass(count, frames, bypass=True) == count - frames
    assert per_pass(count, frames, bypass=False) == Fraction(count * (count - frames), count - 1)
    found = {policy: _pages_per_pass(count, frames, policy) for policy in ("lru", "mru")}
    assert found == {"lru": count, "mru": Fraction(count * (count - frames), count - 1)}


def _pages_per_pass(count: int, frames: int, policy: str) -> Fraction:
    bench = Bench([[GRANULE]] * count, policy)
    bench.load(frames + 1)  # the staging area is one page
    settle = [bench.run(count) for _ in range(2 * count)]
    assert not any(tally.bypassed_page_ins for tally in settle)
    return Fraction(sum(bench.run(count).page_ins for _ in range(count - 1)), count - 1)


@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=12).map(tuple), slots=st.integers(1, 3), data=st.data())
def test_the_hot_set_is_the_optimum_with_bypass_to_the_granule(
    sizes: tuple[int, ...], slots: int, data: st.DataObject
) -> None:
    least = least_granules(sizes, slots)
    budget = data.draw(st.integers(least, sum(sizes)))
    placement = place(sizes, budget, slots)
    frames = budget - slots * placement.slot
    assert placement.hot == frames
    misses, _ = belady([1] * sum(sizes), frames, 3, bypass=True)[-1]
    assert sum(placement.cold) == misses
    # The ring is paid from the budget, and no smaller one would do: then more granules pass than it can carry.
    for slot in range(placement.slot):
        assert sum(min(size, slot) for size in sizes) < sum(sizes) - (budget - slots * slot)


def test_belady_keeps_count_of_bytes() -> None:
    assert belady([5, 3, 2], 2, 2, bypass=True) == [(3, 10), (1, 2)]
    assert belady([5, 3, 2], 2, 4, bypass=False) == [(3, 10), (1, 3), (2, 7), (1, 3)]
