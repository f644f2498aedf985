"""Pages: one per tensor, with its own addresses for ever. What every policy that moves whole tensors shares.

Sizes are in bytes where they say ``nbytes`` and in granules elsewhere. Nothing here decides what is resident.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine.device.protocol import Device, Granule
from engine.errors import InvalidRequest
from engine.machine.protocol import WeightSource
from engine.memory.ledger import WEIGHTS, Ledger
from engine.memory.pool import GranulePool
from engine.weights.layout import Slice, Unit
from engine.weights.residency import Fill

Key = tuple[int, str]
"""A page: the index of its unit, and its role there."""


@dataclass(frozen=True)
class Page:
    """One tensor of one unit; ``order`` is its place in load order, ``granules`` what it takes when resident."""

    unit: Unit
    part: Slice
    order: int
    granules: int
    address: int

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.unit.index, self.part.role


class PageTable:
    """Every page of a model, in load order, and the granules of those that are resident."""

    def __init__(self, device: Device, store: WeightSource, ledger: Ledger, pool: GranulePool) -> None:
        self._device, self._store, self._ledger, self._pool = device, store, ledger, pool
        self.granule = device.granularity
        self.pages: dict[Key, Page] = {}
        self.of: list[tuple[Page, ...]] = []
        for unit in store.units:
            pages: list[Page] = []
            for part in unit.slices:
                granules = -(-part.nbytes // self.granule)
                address = device.reserve(granules * self.granule)
                pages.append(Page(unit, part, len(self.pages) + len(pages), granules, address))
            self.of.append(tuple(pages))
            self.pages.update((page.key, page) for page in pages)
        self.total = sum(page.granules for page in self.pages.values())
        self.resident: dict[Key, list[Granule]] = {}

    @property
    def held(self) -> int:
        """Granules of all resident pages."""
        return sum(map(len, self.resident.values()))

    def pinned(self, patterns: Sequence[str]) -> frozenset[Key]:
        """The pages of all tensors whose name matches one of ``patterns`` (shell style).

        Raises
        ------
        InvalidRequest
            When a pattern matches no tensor.
        """
        for pattern in patterns:
            if not any(fnmatchcase(page.part.tensor, pattern) for page in self.pages.values()):
                some = next(iter(self.pages.values())).part.tensor
                raise InvalidRequest(f"policy.pin={pattern}: no tensor has such a name; names are like {some}")
        return frozenset(
            key for key, page in self.pages.items() if any(fnmatchcase(page.part.tensor, p) for p in patterns)
        )

    def lacking(self, unit: Unit) -> list[Page]:
        """The pages of a unit that are not resident."""
        return [page for page in self.of[unit.index] if page.key not in self.resident]

    def fill(self, page: Page) -> Fill:
        """The copy that fills a page."""
        return Fill(page.address, self._store.address(page.unit) + page.part.offset, page.part.nbytes)

    def take(self, count: int) -> list[Granule]:
        """Granules from the pool, charged to the weights."""
        granules = self._pool.take(count)
        self._ledger.commit(WEIGHTS, count * self.granule)
        return granules

    def give(self, granules: Sequence[Granule]) -> None:
        """Granules back to the pool; the weights are no longer charged."""
        self._pool.put(granules)
        self._ledger.release(WEIGHTS, len(granules) * self.granule)

    def regain(self, granules: Sequence[Granule]) -> None:
        """Undo :meth:`give`."""
        self._pool.withdraw(granules)
        self._ledger.commit(WEIGHTS, len(granules) * self.granule)

    def admit(self, page: Page, granules: list[Granule]) -> None:
        """Put granules behind a page; whoever runs the step copies its bytes."""
        self._device.map(page.address, granules)
        self.resident[page.key] = granules

    def page_in(self, page: Page, granules: list[Granule]) -> None:
        """Put granules behind a page and copy its bytes."""
        self.admit(page, granules)
        fill = self.fill(page)
        self._device.copy_in(fill.address, fill.source, fill.nbytes)

    def evict(self, key: Key) -> list[Granule]:
        """Take a page's granules from behind it."""
        granules = self.resident[key]
        self._device.unmap(self.pages[key].address, len(granules))
        del self.resident[key]
        return granules

    def close(self) -> None:
        """Free every page and its addresses."""
        for key in list(self.resident):
            self.give(self.evict(key))
        self._pool.trim()
        for page in self.pages.values():
            self._device.unreserve(page.address, page.granules * self.granule)


class Staging:
    """Granules that stand behind every bypassed page at once: side by side within a unit, shared between units."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.granules: list[Granule] = []
        self._behind: list[tuple[Page, int]] = []

    def put(self, granules: list[Granule], units: Iterable[Sequence[Page]]) -> None:
        """Map ``granules`` behind the bypassed pages of each unit; on failure behind none."""
        self.granules = granules
        try:
            for pages in units:
                at = 0
                for page in pages:
                    self._map(page, at)
                    at += page.granules
        except BaseException:
            self.lift()
            raise

    def lift(self) -> list[Granule]:
        """Unmap the area everywhere and return its granules; on failure it stands as before."""
        lifted: list[tuple[Page, int]] = []
        try:
            while self._behind:
                page, at = self._behind[-1]
                self._device.unmap(page.address, page.granules)
                lifted.append((page, at))
                self._behind.pop()
        except BaseException:
            for page, at in reversed(lifted):
                self._map(page, at)
            raise
        granules, self.granules = self.granules, []
        return granules

    def _map(self, page: Page, at: int) -> None:
        self._device.map(page.address, self.granules[at : at + page.granules])
        self._behind.append((page, at))
