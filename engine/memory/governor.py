"""The governor: allowances under one managed limit, and the protocol by which a growing holder calls memory back.

Growth asks, in this order: the requester's own allowance; unassigned capacity beyond the headroom; the allowance of
reclaimable holders, lowest priority first, each down to its floor; the headroom. All or nothing: when any
step fails, every allowance and every committed byte is as it was. The requester is never its own victim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import CapacityUnavailable
from engine.memory.ledger import Ledger

Undo = Callable[[], None]
Reclaim = Callable[[int], Undo]
"""Called with the holder's new allowance in bytes; frees committed bytes above it and returns what undoes that."""


@dataclass(frozen=True)
class Reclaimable:
    """How memory is taken back from a holder: lowest ``priority`` first, never below ``floor`` bytes."""

    priority: int
    floor: int
    reclaim: Reclaim


@dataclass(frozen=True)
class Grant:
    """Where the bytes of one growth came from."""

    requester: str
    nbytes: int
    from_own: int
    from_unassigned: int
    reclaimed: dict[str, int]
    from_headroom: int

    @property
    def reclaimed_bytes(self) -> int:
        """Bytes taken back from other holders."""
        return sum(self.reclaimed.values())


class Governor:
    """Allowances of the holders of one device. All sizes in bytes.

    ``quantum`` is the granularity of transfers: unassigned capacity and reclaims move in multiples of it.
    """

    def __init__(self, ledger: Ledger, headroom: int = 0, quantum: int = 1) -> None:
        self.ledger = ledger
        self.headroom = headroom
        self.quantum = quantum
        self._reclaimable: dict[str, Reclaimable] = {}

    @property
    def limit(self) -> int:
        """The managed limit."""
        return self.ledger.limit

    @property
    def unassigned(self) -> int:
        """Capacity that is in nobody's allowance."""
        return self.limit - sum(holder.allowance for holder in self.ledger.holders.values())

    def register(self, name: str, allowance: int, reclaimable: Reclaimable | None = None) -> None:
        """Add a holder with an allowance.

        Raises
        ------
        CapacityUnavailable
            When the allowance is more than what is unassigned.
        """
        if allowance > self.unassigned:
            raise CapacityUnavailable(
                f"{name} needs {allowance:,} B, but only {self.unassigned:,} B of the limit of {self.limit:,} B is free"
            )
        self.ledger.open(name).allowance = allowance
        if reclaimable is not None:
            self._reclaimable[name] = reclaimable

    def allowance(self, name: str) -> int:
        """Bytes ``name`` may commit."""
        return self.ledger.holders[name].allowance

    def shrink(self, name: str, allowance: int) -> None:
        """Lower an allowance to ``allowance``; what is given up becomes unassigned."""
        holder = self.ledger.holders[name]
        if not holder.committed <= allowance <= holder.allowance:
            raise ValueError(f"{name}: {allowance} is not between {holder.committed} and {holder.allowance}")
        holder.allowance = allowance

    def lend(self, name: str, allowance: int) -> int:
        """Raise an allowance towards ``allowance`` from unassigned capacity beyond the headroom; return bytes added."""
        holder = self.ledger.holders[name]
        added = max(0, min(allowance - holder.allowance, self._spare(self.headroom)))
        holder.allowance += added
        return added

    @contextmanager
    def grow(self, requester: str, nbytes: int) -> Iterator[Grant]:
        """Make room for ``nbytes`` more in ``requester``; commit them inside the ``with`` block.

        An exception inside the block takes everything back: the block undoes its own device work, the governor
        returns the allowances and asks the victims to take back what they gave.

        Raises
        ------
        CapacityUnavailable
            When the bytes cannot be had; nothing has changed.
        """
        plan = self._plan(requester, nbytes)
        before = {name: holder.allowance for name, holder in self.ledger.holders.items()}
        undos: list[Undo] = []
        try:
            for victim, taken in plan.reclaimed.items():
                remaining = self.allowance(victim) - taken
                undos.append(self._reclaimable[victim].reclaim(remaining))
                self.ledger.holders[victim].allowance = remaining
            self.ledger.holders[requester].allowance += nbytes - plan.from_own
            yield plan
        except BaseException:
            # Allowances first: a victim that takes its bytes back must be allowed to hold them.
            for name, allowance in before.items():
                self.ledger.holders[name].allowance = allowance
            for undo in reversed(undos):
                undo()
            raise

    def _plan(self, requester: str, nbytes: int) -> Grant:
        holder = self.ledger.holders[requester]
        from_own = min(nbytes, holder.allowance - holder.committed)
        need = nbytes - from_own
        from_unassigned = min(need, self._spare(self.headroom))
        need -= from_unassigned
        reclaimed: dict[str, int] = {}
        for name, terms in sorted(self._reclaimable.items(), key=lambda item: item[1].priority):
            if name == requester or need == 0:
                continue
            available = max(0, self.allowance(name) - terms.floor)
            taken = min(available, -(-need // self.quantum) * self.quantum)
            if taken:
                reclaimed[name] = taken
                need = max(0, need - taken)
        from_headroom = min(need, self._spare(0) - from_unassigned)
        need -= from_headroom
        if need:
            raise CapacityUnavailable(
                f"{requester} needs {nbytes:,} B more; {nbytes - need:,} B can be had "
                f"under the limit of {self.limit:,} B"
            )
        return Grant(requester, nbytes, from_own, from_unassigned, reclaimed, from_headroom)

    def _spare(self, headroom: int) -> int:
        spare = max(0, self.unassigned - headroom)
        return spare // self.quantum * self.quantum
