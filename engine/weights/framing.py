"""How the pager spends a budget: frames for pages, a staging area, and which pages never get a frame. Pure.

All sizes in granules. The staging area is as large as the largest page that is not pinned, and there is none while
every page fits. What of a unit does not fit into the frames that pinned pages leave bypasses: the unit's last pages,
as few as possible. The least workable budget is the one at which they just fit the area, for every unit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.errors import CapacityUnavailable
from engine.weights.pages import Key, Page

Units = Sequence[Sequence[Page]]
"""The pages of each unit, in load order."""


@dataclass(frozen=True)
class Split:
    """A budget, spent: ``frames`` hold pages, ``staging`` what passes through, ``bypassed`` who does, by unit."""

    frames: int
    staging: int
    bypassed: tuple[tuple[Page, ...], ...]


def least_budget(units: Units, pinned: Collection[Key]) -> int:
    """The smallest budget that works; every larger one does too."""
    loose = _loose(units, pinned)
    staging, frames = _largest(loose), 0
    for pages in loose:
        passing = 0
        for page in reversed(pages):
            if passing + page.granules > staging:
                break
            passing += page.granules
        frames = max(frames, _size(pages) - passing)
    total = sum(map(_size, units))
    return min(total, total - sum(map(_size, loose)) + staging + frames)


def divide(units: Units, pinned: Collection[Key], budget: int) -> Split:
    """How ``budget`` is spent. A smaller budget never bypasses less.

    Raises
    ------
    CapacityUnavailable
        When the budget is below :func:`least_budget`.
    """
    total = sum(map(_size, units))
    if budget >= total:
        return Split(total, 0, ((),) * len(units))
    least = least_budget(units, pinned)
    if budget < least:
        raise CapacityUnavailable(
            f"a weight budget of {budget:,} granules is below the {least:,} that the pinned pages, the staging area "
            "and the largest unit need"
        )
    loose = _loose(units, pinned)
    staging = _largest(loose)
    bypassed: list[tuple[Page, ...]] = []
    for pages in loose:
        room, fitting = budget - staging - (total - sum(map(_size, loose))), 0
        for page in pages:
            room -= page.granules
            if room < 0:
                break
            fitting += 1
        bypassed.append(tuple(pages[fitting:]))
    return Split(budget - staging, staging, tuple(bypassed))


def first_fit(units: Units, pinned: Collection[Key], split: Split) -> dict[Key, Page]:
    """What is resident after a load: pinned pages, then those that have a frame, each if it fits, in load order."""
    bypassed = {page.key for pages in split.bypassed for page in pages}
    pages = [page for unit in units for page in unit if page.key not in bypassed]
    pages.sort(key=lambda page: page.key not in pinned)
    chosen: dict[Key, Page] = {}
    room = split.frames
    for page in pages:
        if page.granules <= room:
            chosen[page.key] = page
            room -= page.granules
    return chosen


def _loose(units: Units, pinned: Collection[Key]) -> list[list[Page]]:
    return [[page for page in pages if page.key not in pinned] for pages in units]


def _largest(units: Units) -> int:
    return max((page.granules for pages in units for page in pages), default=0)


def _size(pages: Sequence[Page]) -> int:
    return sum(page.granules for page in pages)
