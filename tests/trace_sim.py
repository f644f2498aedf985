"""What every policy must cost, worked out from a trace alone. Shares no code with engine/weights.

A model is a list of units, a unit a list of tensor sizes in bytes. A pass reads the first ``reach`` units in order,
under a budget in granules that may only shrink. Pages are known as (unit, tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

Page = tuple[int, int]


@dataclass
class Count:
    """What a pass costs; a growth before it counts its evictions."""

    hits: int = 0
    hit_bytes: int = 0
    page_ins: int = 0
    htod_bytes: int = 0
    bypassed_page_ins: int = 0
    compulsory_bytes: int = 0
    bypassed_bytes: int = 0
    refetched_bytes: int = 0
    evictions: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))


@dataclass(frozen=True)
class Pass:
    """One pass: how many units it reads, and the budget in granules while it runs."""

    reach: int
    budget: int


def simulate(
    units: Sequence[Sequence[int]],
    granule: int,
    policy: str,
    passes: Sequence[Pass],
    pinned: frozenset[Page] = frozenset(),
    slots: int = 2,
    load: int | None = None,
) -> list[Count]:
    """Counts of each pass after a load under ``load`` granules (default: the first pass's budget)."""
    load = passes[0].budget if load is None else load
    if policy == "hotset":
        return _hotset(units, granule, passes, slots, load)
    run = _stable if policy == "stable_resident" else _replacing
    return run(_Sizes(units, granule, pinned), policy, passes, load)


class _Sizes:
    def __init__(self, units: Sequence[Sequence[int]], granule: int, pinned: frozenset[Page]) -> None:
        self.bytes = {(u, t): nbytes for u, unit in enumerate(units) for t, nbytes in enumerate(unit)}
        self.frames = {page: (nbytes + granule - 1) // granule for page, nbytes in self.bytes.items()}
        self.pinned, self.granule, self.units = pinned, granule, len(units)
        self.order = list(self.bytes)
        self.total = sum(self.frames.values())

    def unit(self, u: int) -> list[Page]:
        return [page for page in self.order if page[0] == u]

    def sum(self, pages: object) -> int:
        return sum(self.frames[page] for page in pages)  # type: ignore[attr-defined]


def _stable(sizes: _Sizes, _: str, passes: Sequence[Pass], load: int) -> list[Count]:
    def staging(resident: list[Page]) -> int:
        return max(sizes.sum(set(sizes.unit(u)) - set(resident)) for u in range(sizes.units))

    pins = [page for page in sizes.order if page in sizes.pinned]
    line = pins + [page for page in sizes.order if page not in sizes.pinned]
    resident = line[:]
    if sizes.total > load:
        resident, left = [], load - staging(pins)
        for page in line:
            if sizes.frames[page] <= left:
                resident.append(page)
                left -= sizes.frames[page]
    counts = []
    budget = load
    for each in passes:
        count = Count()
        if each.budget < budget:
            budget = each.budget
            while sizes.sum(resident) + staging(resident) > budget:
                resident.remove([page for page in resident if page not in sizes.pinned][-1])
                count.evictions += 1
        for page in (page for page in sizes.order if page[0] < each.reach):
            _note(count, sizes.bytes[page], "hit" if page in resident else "bypassed")
        counts.append(count)
    return counts


def _replacing(sizes: _Sizes, policy: str, passes: Sequence[Pass], load: int) -> list[Count]:
    loose = [page for page in sizes.order if page not in sizes.pinned]
    area = max((sizes.frames[page] for page in loose), default=0)

    def frames_of(budget: int) -> int:
        return sizes.total if budget >= sizes.total else budget - area

    def passers(frames: int) -> set[Page]:
        found: set[Page] = set()
        for u in range(sizes.units):
            room, full = frames - sizes.sum(sizes.pinned), False
            for page in (page for page in sizes.unit(u) if page not in sizes.pinned):
                room -= sizes.frames[page]
                full = full or room < 0
                if full:
                    found.add(page)
        return found

    def next_victim(resident: set[Page], used: dict[Page, int], keep: int) -> Page:
        def key(page: Page) -> tuple[object, ...]:
            nbytes, at = sizes.bytes[page], sizes.order.index(page)
            return {
                "lru": (used[page], at),
                "mru": (-used[page], -at),
                "smallest": (nbytes, used[page], at),
                "largest": (-nbytes, used[page], at),
                "byte_aware": (Fraction(nbytes, sizes.frames[page] * sizes.granule), nbytes, -used[page], -at),
            }[policy]

        return min((page for page in resident if page not in sizes.pinned and page[0] != keep), key=key)

    budget, frames = load, frames_of(load)
    passing = passers(frames)
    resident: set[Page] = set()
    for page in [p for p in sizes.order if p in sizes.pinned] + loose:
        if page not in passing and sizes.sum(resident) + sizes.frames[page] <= frames:
            resident.add(page)
    seen, used, clock = set(resident), dict.fromkeys(sizes.order, 0), 0
    counts = []
    for each in passes:
        count = Count()
        if each.budget < budget:
            budget, frames = each.budget, frames_of(each.budget)
            passing = passers(frames)
            count.evictions += len(resident & passing)
            resident -= passing
            while sizes.sum(resident) > frames:
                resident.remove(next_victim(resident, used, keep=-1))
                count.evictions += 1
        for u in range(each.reach):
            pages = sizes.unit(u)
            coming = [page for page in pages if page not in resident and page not in passing]
            while sizes.sum(resident) + sizes.sum(coming) > frames:
                resident.remove(next_victim(resident, used, keep=u))
                count.evictions += 1
            for page in pages:
                kind = "hit" if page in resident else "bypassed" if page in passing else "refetched"
                _note(count, sizes.bytes[page], "compulsory" if kind == "refetched" and page not in seen else kind)
            resident |= set(coming)
            seen |= set(coming)
            if budget < sizes.total:  # while everything fits, nobody keeps books
                clock += 1
                used |= dict.fromkeys(pages, clock)
        counts.append(count)
    return counts


def _note(count: Count, nbytes: int, kind: str) -> None:
    if kind == "hit":
        count.hits += 1
        count.hit_bytes += nbytes
        return
    count.page_ins += 1
    count.htod_bytes += nbytes
    count.bypassed_page_ins += kind == "bypassed"
    setattr(count, f"{kind}_bytes", getattr(count, f"{kind}_bytes") + nbytes)


def _hotset(units: Sequence[Sequence[int]], granule: int, passes: Sequence[Pass], slots: int, load: int) -> list[Count]:
    spans = [_spans(unit) for unit in units]
    sizes = [-(-spans_of[-1][1] // granule) for spans_of in spans]
    slots = min(slots, len(sizes))
    before = _tails(sizes, load, slots)
    counts = []
    for each in passes:
        tails = _tails(sizes, each.budget, slots)
        count = Count(evictions=sum(tails) - sum(before))
        before = tails
        for size, tail, spans_of in list(zip(sizes, tails, spans, strict=True))[: each.reach]:
            edge = (size - tail) * granule
            cold = sum(max(0, end - max(start, edge)) for start, end in spans_of)
            count.hits += size - tail
            count.hit_bytes += sum(end - start for start, end in spans_of) - cold
            count.page_ins += tail
            count.bypassed_page_ins += tail
            count.htod_bytes += cold
            count.bypassed_bytes += cold
        counts.append(count)
    return counts


def _spans(unit: Sequence[int]) -> list[tuple[int, int]]:
    """Where tensors lie in a unit: one after the other, each from a multiple of 256 B."""
    spans, at = [], 0
    for nbytes in unit:
        spans.append((at, at + nbytes))
        at = (at + nbytes + 255) // 256 * 256
    return spans


def _tails(sizes: list[int], budget: int, slots: int) -> list[int]:
    """Cold granules of each unit: the smallest ring that will do; what is left over shortens tails, spread out."""
    total = sum(sizes)
    if budget >= total:
        return [0] * len(sizes)
    slot = next(s for s in range(1, max(sizes) + 1) if sum(max(0, z - s) for z in sizes) + slots * s <= budget)
    tails = [min(size, slot) for size in sizes]
    over = budget - (total - sum(tails) + slots * slot)
    width = len(f"{len(sizes) - 1:b}")
    for unit in sorted(range(len(sizes)), key=lambda u: f"{u:0{width}b}"[::-1]):
        if over and tails[unit] == slot:
            tails[unit] -= 1
            over -= 1
    return tails
