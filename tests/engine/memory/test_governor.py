"""Random growth, reclaim and failure: allowances add up, failures change nothing, KV reaches its declared context."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import CapacityUnavailable
from engine.memory.governor import Governor, Reclaimable, Undo
from engine.memory.ledger import KV, WEIGHTS, WORKSPACE, Ledger

QUANTUM = 16


class PlannedFailure(Exception):
    pass


class GovernorMachine(RuleBasedStateMachine):
    """Weights and KV under one limit. Weights always fill their allowance; KV grows and is given back."""

    @initialize(
        weights=st.integers(0, 200), kv_full=st.integers(1, 200), headroom=st.integers(0, 50), loose=st.integers(0, 15),
        lent=st.integers(0, 200),
    )  # fmt: skip
    def open(self, weights: int, kv_full: int, headroom: int, loose: int, lent: int) -> None:
        self.static = weights * QUANTUM
        self.kv_full = kv_full * QUANTUM
        ledger = Ledger(self.static + self.kv_full + 32 + loose)
        self.governor = Governor(ledger, headroom * QUANTUM, QUANTUM)
        self.governor.register(WORKSPACE, 32)
        self.governor.register(KV, 0)
        room = self.governor.unassigned - headroom * QUANTUM
        self.start = max(self.static, min(self.static + lent * QUANTUM, room // QUANTUM * QUANTUM))
        self.fail_reclaim = False
        self.governor.register(WEIGHTS, self.start, Reclaimable(0, self.static, self.reclaim))
        ledger.commit(WEIGHTS, self.start)

    def reclaim(self, allowance: int) -> Undo:
        if self.fail_reclaim:
            raise PlannedFailure
        freed = self.ledger.holders[WEIGHTS].committed - allowance
        self.ledger.release(WEIGHTS, freed)
        return lambda: self.ledger.commit(WEIGHTS, freed)

    @property
    def ledger(self) -> Ledger:
        return self.governor.ledger

    @property
    def kv(self) -> int:
        return self.ledger.holders[KV].committed

    def state(self) -> dict[str, tuple[int, int]]:
        return {h.name: (h.allowance, h.committed) for h in self.ledger.holders.values()}

    @rule(amount=st.integers(1, 100))
    def grow(self, amount: int) -> None:
        nbytes = min(amount * QUANTUM, self.kv_full - self.kv)
        with self.governor.grow(KV, nbytes) as grant:
            assert grant.from_own + grant.from_unassigned + grant.reclaimed_bytes + grant.from_headroom == nbytes
            self.ledger.commit(KV, nbytes)

    @rule()
    def grow_to_the_declared_context(self) -> None:
        with self.governor.grow(KV, self.kv_full - self.kv):
            self.ledger.commit(KV, self.kv_full - self.kv)
        assert self.kv == self.kv_full

    @rule(amount=st.integers(1, 100))
    def growth_that_fails_inside(self, amount: int) -> None:
        before = self.state()
        nbytes = min(amount * QUANTUM, self.kv_full - self.kv)
        with pytest.raises(PlannedFailure), self.governor.grow(KV, nbytes):
            self.ledger.commit(KV, nbytes)
            self.ledger.release(KV, nbytes)
            raise PlannedFailure
        assert self.state() == before

    @rule(amount=st.integers(1, 100))
    def growth_whose_reclaim_fails(self, amount: int) -> None:
        before = self.state()
        nbytes = min(amount * QUANTUM, self.kv_full - self.kv)
        self.fail_reclaim = True
        try:
            with self.governor.grow(KV, nbytes):
                self.ledger.commit(KV, nbytes)
        except PlannedFailure:
            assert self.state() == before
        finally:
            self.fail_reclaim = False

    @rule(beyond=st.integers(1, 100))
    def growth_that_cannot_succeed(self, beyond: int) -> None:
        before = self.state()
        nbytes = self.kv_full - self.kv + (beyond + 1) * QUANTUM
        with pytest.raises(CapacityUnavailable), self.governor.grow(KV, nbytes):
            raise AssertionError("not granted")
        assert self.state() == before

    @precondition(lambda self: self.kv > 0)
    @rule()
    def end_of_generation(self) -> None:
        self.ledger.release(KV, self.kv)
        self.governor.shrink(KV, 0)
        self.governor.lend(WEIGHTS, self.start)
        holder = self.ledger.holders[WEIGHTS]
        assert holder.allowance == self.start
        self.ledger.commit(WEIGHTS, holder.allowance - holder.committed)

    @invariant()
    def allowances_add_up(self) -> None:
        if not hasattr(self, "governor"):
            return
        allowed = sum(h.allowance for h in self.ledger.holders.values())
        assert allowed + self.governor.unassigned == self.governor.limit
        assert self.governor.unassigned >= 0
        for holder in self.ledger.holders.values():
            assert 0 <= holder.committed <= holder.allowance

    @invariant()
    def the_ledger_is_clean_and_the_static_budget_holds(self) -> None:
        if not hasattr(self, "governor"):
            return
        assert self.ledger.clean()
        assert self.governor.allowance(WEIGHTS) >= self.static


TestGovernor = GovernorMachine.TestCase
TestGovernor.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def small() -> Governor:
    governor = Governor(Ledger(1000), headroom=100, quantum=10)
    governor.register(KV, 100)
    return governor


def test_growth_uses_its_own_allowance_first_then_unassigned() -> None:
    governor = small()
    with governor.grow(KV, 150) as grant:
        governor.ledger.commit(KV, 150)
    assert (grant.from_own, grant.from_unassigned, grant.reclaimed_bytes, grant.from_headroom) == (100, 50, 0, 0)


def test_weights_give_way_before_headroom_is_touched() -> None:
    governor = small()
    freed: list[int] = []

    def reclaim(allowance: int) -> Undo:
        freed.append(allowance)
        return lambda: None

    governor.register(WEIGHTS, 800, Reclaimable(0, 0, reclaim))
    with governor.grow(KV, 300) as grant:
        governor.ledger.commit(KV, 300)
    assert (grant.reclaimed, grant.from_headroom) == ({WEIGHTS: 200}, 0)
    assert freed == [600]


def test_the_requester_is_never_its_own_victim() -> None:
    governor = Governor(Ledger(100))
    governor.register(WEIGHTS, 100, Reclaimable(0, 0, lambda allowance: lambda: None))
    governor.ledger.commit(WEIGHTS, 100)
    with pytest.raises(CapacityUnavailable), governor.grow(WEIGHTS, 10):
        pass


def test_a_holder_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityUnavailable, match="900"):
        small().register(WEIGHTS, 901)


def test_the_ledger_counts_faults_and_raises_nothing() -> None:
    ledger = Ledger(100)
    ledger.open(KV).allowance = 50
    ledger.commit(KV, 60)
    ledger.release(KV, 70)
    ledger.release("nobody", 1)
    ledger.reconcile(10)
    assert ledger.oversubscribed_bytes == 10
    assert ledger.byte_underflows == ledger.ref_underflows == 1
    assert ledger.unaccounted_committed_bytes == 10
    assert not ledger.clean()
