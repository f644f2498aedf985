"""Pages: one per tensor, admitted whole or not at all. Kept because it is what people run today, and as a control.

``stable_resident`` is the published default: tensors are admitted first fit, in load order, and never evicted to make
room for another; a tensor that does not fit is *bypassed*. With ``cold="copy"`` a bypassed tensor is copied
into a staging area before each use (its address aliases the staging granules); with ``cold="in_place"`` the kernel
reads it from the host store, and there is no staging.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from engine.config import Cold
from engine.device.protocol import Device
from engine.errors import CapacityUnavailable
from engine.machine.protocol import WeightSource
from engine.memory.governor import Undo
from engine.memory.ledger import Ledger
from engine.memory.pool import GranulePool
from engine.weights.layout import Unit
from engine.weights.pages import Key, PageTable, Staging
from engine.weights.residency import Fill, Traffic


class Paged:
    """A :class:`engine.weights.residency.Residency` with the policy ``stable_resident``."""

    policy = "stable_resident"
    static = True
    slots = 1

    def __init__(
        self,
        device: Device,
        store: WeightSource,
        ledger: Ledger,
        pool: GranulePool,
        cold: Cold,
        pin: Sequence[str] = (),
    ) -> None:
        self._device, self._store = device, store
        self.cold = cold
        self.evictions = 0
        self._table = PageTable(device, store, ledger, pool)
        self._staging = Staging(device)
        self._pinned = self._table.pinned(pin)
        # Pinned pages are admitted before all others.
        self._order = sorted(self._table.pages, key=lambda key: key not in self._pinned)

    @property
    def least_bytes(self) -> int:
        least = self._size(self._pinned) + self._staging_for(self._pinned)
        return min(self._table.total, least) * self._table.granule

    @property
    def full_bytes(self) -> int:
        return self._table.total * self._table.granule

    @property
    def mapped_physical(self) -> int:
        return (self._table.held + len(self._staging.granules)) * self._table.granule

    def address(self, unit: Unit, role: str) -> int:
        page = self._table.pages[unit.index, role]
        if self.cold == "in_place" and page.key not in self._table.resident:
            return self._store.address(unit) + page.part.offset
        return page.address

    def slot(self, unit: Unit) -> int:
        return 0

    def may_fill(self, unit: Unit) -> bool:
        return bool(self.fills(unit))

    def prepare(self, unit: Unit) -> tuple[Fill, ...]:
        return self.fills(unit)

    def fills(self, unit: Unit) -> tuple[Fill, ...]:
        if self.cold == "in_place":
            return ()
        return tuple(map(self._table.fill, self._table.lacking(unit)))

    def traffic(self, unit: Unit) -> Traffic:
        bypassed = self._table.lacking(unit)
        missing = sum(page.part.nbytes for page in bypassed)
        hits, hit_bytes = len(unit.slices) - len(bypassed), unit.weight_bytes - missing
        if self.cold == "in_place":
            return Traffic(hits=hits, hit_bytes=hit_bytes, in_place_bytes=missing)
        return Traffic(
            hits=hits,
            hit_bytes=hit_bytes,
            page_ins=len(bypassed),
            bypassed_page_ins=len(bypassed),
            htod_bytes=missing,
            bypassed_bytes=missing,
        )

    def load(self, allowance: int) -> None:
        self._admit(self._choose(allowance // self._table.granule))
        self._stage()

    def reclaim(self, allowance: int) -> Undo:
        table, budget = self._table, allowance // self._table.granule
        if budget * table.granule < self.least_bytes:
            raise CapacityUnavailable(self._too_small(budget))
        with ExitStack() as undo:
            self._unstage()
            undo.callback(self._stage)
            while self._used(set(table.resident)) > budget:
                # The last admitted leaves first, so what stays is what a smaller budget would have admitted.
                self._evict(next(key for key in reversed(table.resident) if key not in self._pinned), undo)
            self._stage()
            undo.callback(self._unstage)
            return undo.pop_all().close

    def promote(self, allowance: int) -> None:
        wanted = self._choose(allowance // self._table.granule)
        if set(wanted) == set(self._table.resident):
            return
        self._unstage()
        for key in set(self._table.resident).difference(wanted):
            self._table.give(self._table.evict(key))
        self._admit(wanted)
        self._stage()

    def close(self) -> None:
        self._unstage()
        self._table.close()

    def _choose(self, budget: int) -> list[Key]:
        """Pinned pages, then first fit in load order; the staging area of what is left out is paid from ``budget``."""
        if self._table.total <= budget:
            return self._order
        if budget * self._table.granule < self.least_bytes:
            raise CapacityUnavailable(self._too_small(budget))
        room = budget - self._staging_for(self._pinned)
        chosen: list[Key] = []
        for key in self._order:
            if self._table.pages[key].granules <= room:
                chosen.append(key)
                room -= self._table.pages[key].granules
        return chosen

    def _too_small(self, budget: int) -> str:
        pinned = " and the pinned pages" if self._pinned else ""
        return (
            f"a weight budget of {budget * self._table.granule:,} B is below the {self.least_bytes:,} B of the staging "
            f"area{pinned}"
        )

    def _size(self, keys: Collection[Key]) -> int:
        return sum(self._table.pages[key].granules for key in keys)

    def _used(self, resident: Collection[Key]) -> int:
        return self._size(resident) + self._staging_for(resident)

    def _staging_for(self, resident: Collection[Key]) -> int:
        """Granules of the largest set of bypassed tensors that one unit needs at once."""
        if self.cold == "in_place":
            return 0
        return max(sum(p.granules for p in pages if p.key not in resident) for pages in self._table.of)

    def _admit(self, wanted: list[Key]) -> None:
        for key in wanted:
            if key not in self._table.resident:
                page = self._table.pages[key]
                self._table.page_in(page, self._table.take(page.granules))

    def _evict(self, key: Key, undo: ExitStack) -> None:
        granules = self._table.evict(key)
        undo.callback(self._table.page_in, self._table.pages[key], granules)
        self._table.give(granules)
        undo.callback(self._table.regain, granules)
        self.evictions += 1
        undo.callback(self._forget_eviction)

    def _forget_eviction(self) -> None:
        self.evictions -= 1

    def _stage(self) -> None:
        """Put the staging granules behind every bypassed tensor."""
        if self.cold == "in_place":
            return
        granules = self._table.take(self._staging_for(set(self._table.resident)))
        try:
            self._staging.put(granules, [self._table.lacking(unit) for unit in self._store.units])
        except BaseException:
            self._table.give(granules)
            raise

    def _unstage(self) -> None:
        self._table.give(self._staging.lift())
