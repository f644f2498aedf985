"""The pager: pages of one tensor that come when a unit needs them and leave when another needs their memory.

Physical memory is mapped behind a page when it comes and unmapped when it leaves; addresses never move. Which page
leaves is up to a replacement policy (:mod:`engine.weights.policies`); neither a pinned page nor one of the unit in
flight ever does.

What can have no frame at all is bypassed: copied into a staging area before each use, never admitted
(:mod:`engine.weights.framing`). Every generation starts from the placement of the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from engine.device.protocol import Device, Granule
from engine.machine.protocol import WeightSource
from engine.memory.governor import Undo
from engine.memory.ledger import Ledger
from engine.memory.pool import GranulePool
from engine.weights.framing import Split, divide, first_fit, least_budget
from engine.weights.layout import Unit
from engine.weights.pages import Key, Page, PageTable, Staging
from engine.weights.policies import Resident, leaving
from engine.weights.residency import Fill, Traffic


class Pager:
    """A :class:`engine.weights.residency.Residency` with a replacement policy."""

    slots = 1
    static = False

    def __init__(
        self,
        device: Device,
        store: WeightSource,
        ledger: Ledger,
        pool: GranulePool,
        policy: str,
        pin: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.evictions = 0
        self._device = device
        self._table = PageTable(device, store, ledger, pool)
        self._staging = Staging(device)
        self._pinned = self._table.pinned(pin)
        self._spare: list[Granule] = []
        self._split = Split(0, 0, ())
        self._clock = 0
        self._last_use: dict[Key, int] = {}
        self._known: set[Key] = set()
        self._unproven: set[Key] = set()
        self._costs: dict[int, Traffic] = {}

    @property
    def least_bytes(self) -> int:
        return least_budget(self._table.of, self._pinned) * self._table.granule

    @property
    def full_bytes(self) -> int:
        return self._table.total * self._table.granule

    @property
    def mapped_physical(self) -> int:
        return (self._table.held + len(self._spare) + len(self._staging.granules)) * self._table.granule

    def address(self, unit: Unit, role: str) -> int:
        return self._table.pages[unit.index, role].address

    def slot(self, unit: Unit) -> int:
        return 0

    def may_fill(self, unit: Unit) -> bool:
        return self._split.frames < self._table.total

    def fills(self, unit: Unit) -> tuple[Fill, ...]:
        return tuple(map(self._table.fill, self._table.lacking(unit)))

    def prepare(self, unit: Unit) -> tuple[Fill, ...]:
        table = self._table
        # The unit prepared before this one has run, so its copies have landed.
        self._unproven.clear()
        lacking = table.lacking(unit)
        bypassed = self._split.bypassed[unit.index]
        coming = [page for page in lacking if page not in bypassed]
        self._make_room(sum(page.granules for page in coming), unit)
        for page in coming:
            self._unproven.add(page.key)
            self._admit(page)
        self._clock += 1
        self._last_use.update((page.key, self._clock) for page in table.of[unit.index])
        self._costs[unit.index] = self._cost(unit, coming, bypassed)
        self._known.update(page.key for page in coming)
        return tuple(map(table.fill, lacking))

    def traffic(self, unit: Unit) -> Traffic:
        # Nothing is prepared while every page is resident.
        return self._costs.get(unit.index) or self._cost(unit, (), ())

    def load(self, allowance: int) -> None:
        self._settle(allowance)

    def promote(self, allowance: int) -> None:
        self._settle(allowance)

    def reclaim(self, allowance: int) -> Undo:
        table, before = self._table, self._split
        after = divide(table.of, self._pinned, allowance // table.granule)
        with ExitStack() as undo:
            self._unstage()
            undo.callback(self._stage)
            # A page that has no frame any more is bypassed from now on.
            self._evict([page for pages in after.bypassed for page in pages if page.key in table.resident], undo)
            self._evict(self._victims(table.held - after.frames), undo)
            excess = table.held + len(self._spare) - (after.frames + after.staging)
            left = [self._spare.pop() for _ in range(max(0, excess))]
            table.give(left)
            undo.callback(self._regain, left)
            self._split = after
            undo.callback(setattr, self, "_split", before)
            self._stage()
            undo.callback(self._unstage)
            return undo.pop_all().close

    def close(self) -> None:
        self._unstage()
        self._table.give(self._spare)
        self._spare = []
        self._table.close()

    def _settle(self, allowance: int) -> None:
        """Go to the placement that a load under ``allowance`` gives, and forget what was used since."""
        table = self._table
        split = divide(table.of, self._pinned, allowance // table.granule)
        wanted = first_fit(table.of, self._pinned, split)
        self._unstage()
        # A page whose copy may not have landed (the pass broke off) is no page to keep.
        for key in [key for key in table.resident if key not in wanted or key in self._unproven]:
            self._spare.extend(table.evict(key))
        for page in wanted.values():
            if page.key not in table.resident:
                self._admit(page)
                fill = table.fill(page)
                self._device.copy_in(fill.address, fill.source, fill.nbytes)
        self._split = split
        self._stage()
        table.give(self._spare)
        self._spare = []
        self._clock, self._last_use = 0, dict.fromkeys(table.pages, 0)
        self._known, self._unproven, self._costs = set(wanted), set(), {}

    def _make_room(self, needed: int, unit: Unit) -> None:
        short = needed - (self._split.frames - self._table.held)
        if short <= 0:
            return
        # Kernels of the unit before may still read what leaves.
        self._device.synchronize()
        for page in self._victims(short, unit):
            self._spare.extend(self._table.evict(page.key))
            self.evictions += 1

    def _victims(self, short: int, unit: Unit | None = None) -> list[Page]:
        """Who leaves to free ``short`` granules; nobody of ``unit``."""
        by_order: dict[int, Page] = {}
        for key in self._table.resident:
            if key not in self._pinned and (unit is None or key[0] != unit.index):
                by_order[self._table.pages[key].order] = self._table.pages[key]
        candidates = [
            Resident(order, page.part.nbytes, page.granules * self._table.granule, self._last_use[page.key])
            for order, page in by_order.items()
        ]
        victims: list[Page] = []
        for candidate in leaving(self.policy, candidates):
            if short <= 0:
                break
            victims.append(by_order[candidate.order])
            short -= victims[-1].granules
        return victims

    def _evict(self, victims: list[Page], undo: ExitStack) -> None:
        for page in victims:
            granules = self._table.evict(page.key)
            self._spare.extend(granules)
            self.evictions += 1
            undo.callback(self._readmit, page, granules)

    def _readmit(self, page: Page, granules: list[Granule]) -> None:
        """Undo an eviction."""
        mine = set(granules)
        self._spare = [granule for granule in self._spare if granule not in mine]
        self._table.page_in(page, granules)
        self.evictions -= 1

    def _regain(self, granules: list[Granule]) -> None:
        """Undo giving spare granules away."""
        self._table.regain(granules)
        self._spare.extend(granules)

    def _admit(self, page: Page) -> None:
        granules = self._take(page.granules)
        try:
            self._table.admit(page, granules)
        except BaseException:
            self._spare.extend(granules)
            raise

    def _take(self, count: int) -> list[Granule]:
        """Granules for a page or the staging area: spare ones, lowest first, and the rest from the pool."""
        fresh = self._table.take(max(0, count - len(self._spare)))
        self._spare.sort()
        kept, self._spare = self._spare[:count], self._spare[count:]
        return kept + fresh

    def _stage(self) -> None:
        granules = self._take(self._split.staging)
        try:
            self._staging.put(granules, self._split.bypassed)
        except BaseException:
            self._spare.extend(granules)
            raise

    def _unstage(self) -> None:
        self._spare.extend(self._staging.lift())

    def _cost(self, unit: Unit, coming: Sequence[Page], bypassed: Sequence[Page]) -> Traffic:
        first = sum(page.part.nbytes for page in coming if page.key not in self._known)
        streamed = sum(page.part.nbytes for page in coming)
        passing = sum(page.part.nbytes for page in bypassed)
        return Traffic(
            hits=len(unit.slices) - len(coming) - len(bypassed),
            hit_bytes=unit.weight_bytes - streamed - passing,
            page_ins=len(coming) + len(bypassed),
            htod_bytes=streamed + passing,
            bypassed_page_ins=len(bypassed),
            compulsory_bytes=first,
            bypassed_bytes=passing,
            refetched_bytes=streamed - first,
        )
