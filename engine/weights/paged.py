"""Pages: one per tensor, admitted whole or not at all. Kept because it is what people run today, and as a control.

``stable_resident`` is the published default: tensors are admitted first fit, in load order, and never evicted to make
room for another; a tensor that does not fit is *bypassed*. With ``cold="copy"`` a bypassed tensor is copied
into a staging area before each use (its address aliases the staging granules); with ``cold="in_place"`` the kernel
reads it from the host store, and there is no staging.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from engine.config import Cold
from engine.device.protocol import Device, Granule
from engine.errors import CapacityUnavailable
from engine.machine.protocol import WeightSource
from engine.memory.governor import Undo
from engine.memory.ledger import WEIGHTS, Ledger
from engine.memory.pool import GranulePool
from engine.weights.layout import Slice, Unit
from engine.weights.residency import Fill, Traffic

Key = tuple[int, str]


@dataclass(frozen=True)
class _Page:
    unit: Unit
    part: Slice
    granules: int
    address: int

    @property
    def key(self) -> Key:
        return self.unit.index, self.part.role


class Paged:
    """A :class:`engine.weights.residency.Residency` with the policy ``stable_resident``."""

    slots = 1

    def __init__(
        self,
        device: Device,
        store: WeightSource,
        ledger: Ledger,
        pool: GranulePool,
        cold: Cold,
    ) -> None:
        self._device, self._store, self._ledger, self._pool = (
            device,
            store,
            ledger,
            pool,
        )
        self.cold = cold
        self._granule = device.granularity
        self._pages: dict[Key, _Page] = {}
        for unit in store.units:
            for part in unit.slices:
                granules = -(-part.nbytes // self._granule)
                page = _Page(unit, part, granules, device.reserve(granules * self._granule))
                self._pages[page.key] = page
        self._resident: dict[Key, list[Granule]] = {}
        self._staging: list[Granule] = []
        self._staged: dict[Key, int] = {}

    @property
    def least_bytes(self) -> int:
        return 0 if self.cold == "in_place" else self._staging_for(set()) * self._granule

    @property
    def full_bytes(self) -> int:
        return sum(page.granules for page in self._pages.values()) * self._granule

    @property
    def mapped_physical(self) -> int:
        return (sum(map(len, self._resident.values())) + len(self._staging)) * self._granule

    def address(self, unit: Unit, role: str) -> int:
        page = self._pages[unit.index, role]
        if self.cold == "in_place" and page.key not in self._resident:
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
        source = self._store.address(unit)
        return tuple(Fill(page.address, source + page.part.offset, page.part.nbytes) for page in self._bypassed(unit))

    def traffic(self, unit: Unit) -> Traffic:
        bypassed = self._bypassed(unit)
        missing = sum(page.part.nbytes for page in bypassed)
        in_place = self.cold == "in_place"
        return Traffic(
            hits=len(unit.slices) - len(bypassed),
            hit_bytes=unit.weight_bytes - missing,
            page_ins=0 if in_place else len(bypassed),
            bypassed_page_ins=0 if in_place else len(bypassed),
            htod_bytes=0 if in_place else missing,
            in_place_bytes=missing if in_place else 0,
        )

    def load(self, allowance: int) -> None:
        for key in self._admit(allowance // self._granule):
            self._page_in(key, self._pool.take(self._pages[key].granules))
        self._stage()

    def reclaim(self, allowance: int) -> Undo:
        budget = allowance // self._granule
        with ExitStack() as undo:
            self._unstage()
            undo.callback(self._stage)
            while self._used(set(self._resident)) > budget:
                if not self._resident:
                    raise CapacityUnavailable(
                        f"a weight budget of {allowance:,} B is below the staging area of {self.least_bytes:,} B"
                    )
                # The last admitted leaves first, so what stays is what a smaller budget would have admitted.
                self._evict(next(reversed(self._resident)), undo)
            self._stage()
            undo.callback(self._unstage)
            return undo.pop_all().close

    def promote(self, allowance: int) -> None:
        wanted = self._admit(allowance // self._granule)
        if wanted == list(self._resident):
            return
        self._unstage()
        for key in wanted:
            if key not in self._resident:
                self._page_in(key, self._pool.take(self._pages[key].granules))
        self._stage()

    def close(self) -> None:
        self._unstage()
        for key, granules in self._resident.items():
            self._device.unmap(self._pages[key].address, len(granules))
            self._device.release(granules)
            self._ledger.release(WEIGHTS, len(granules) * self._granule)
        self._resident = {}
        self._pool.trim()
        for page in self._pages.values():
            self._device.unreserve(page.address, page.granules * self._granule)

    def _admit(self, budget: int) -> list[Key]:
        """First fit in load order, the staging area of what is left out paid from the same budget."""
        admitted: set[Key] = set(self._pages)
        if self._used(admitted) <= budget:
            return list(self._pages)
        reserved = self._staging_for(set())
        if reserved > budget:
            raise CapacityUnavailable(
                f"a weight budget of {budget * self._granule:,} B is below the staging area of {self.least_bytes:,} B"
            )
        chosen: list[Key] = []
        used = 0
        for key, page in self._pages.items():
            if used + page.granules + reserved <= budget:
                chosen.append(key)
                used += page.granules
        return chosen

    def _used(self, resident: set[Key]) -> int:
        return sum(self._pages[key].granules for key in resident) + self._staging_for(resident)

    def _staging_for(self, resident: set[Key]) -> int:
        """Granules of the largest set of bypassed tensors that one unit needs at once."""
        if self.cold == "in_place":
            return 0
        needs = dict.fromkeys((unit.index for unit in self._store.units), 0)
        for key, page in self._pages.items():
            if key not in resident:
                needs[page.unit.index] += page.granules
        return max(needs.values())

    def _bypassed(self, unit: Unit) -> list[_Page]:
        pages = (self._pages[unit.index, part.role] for part in unit.slices)
        return [page for page in pages if page.key not in self._resident]

    def _page_in(self, key: Key, granules: list[Granule]) -> None:
        page = self._pages[key]
        self._device.map(page.address, granules)
        self._ledger.commit(WEIGHTS, len(granules) * self._granule)
        self._device.copy_in(
            page.address,
            self._store.address(page.unit) + page.part.offset,
            page.part.nbytes,
        )
        self._resident[key] = granules

    def _evict(self, key: Key, undo: ExitStack) -> None:
        granules = self._resident[key]
        self._device.unmap(self._pages[key].address, len(granules))
        del self._resident[key]
        self._pool.put(granules)
        self._ledger.release(WEIGHTS, len(granules) * self._granule)
        undo.callback(self._page_in, key, granules)
        undo.callback(self._pool.withdraw, granules)

    def _stage(self) -> None:
        """Put the staging granules behind every bypassed tensor, side by side within a unit."""
        if self.cold == "in_place":
            return
        self._staging = self._pool.take(self._staging_for(set(self._resident)))
        self._ledger.commit(WEIGHTS, len(self._staging) * self._granule)
        try:
            for unit in self._store.units:
                at = 0
                for page in self._bypassed(unit):
                    self._device.map(page.address, self._staging[at : at + page.granules])
                    self._staged[page.key] = page.granules
                    at += page.granules
        except BaseException:
            self._unstage()
            raise

    def _unstage(self) -> None:
        for key, granules in self._staged.items():
            self._device.unmap(self._pages[key].address, granules)
        self._staged = {}
        self._pool.put(self._staging)
        self._ledger.release(WEIGHTS, len(self._staging) * self._granule)
        self._staging = []
