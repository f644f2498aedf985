"""Hot set and aliased ring: the default way to hold weights.

Every unit keeps its own addresses for ever. Its hot granules own physical memory; its cold tail aliases the granules of
a ring slot (unit u uses slot u mod n): the same granules stand behind the tails of all units of that slot.
A step copies each unit's cold bytes into the slot before the unit runs. Nothing is mapped during decode.

Cold granules are numbered from the unit's end: number j of every unit of a slot aliases granule j of that slot, so a
longer tail adds granules and moves none.
"""

from __future__ import annotations

from contextlib import ExitStack

from engine.device.protocol import Device, Granule
from engine.machine.protocol import WeightSource
from engine.memory.governor import Undo
from engine.memory.ledger import WEIGHTS, Ledger
from engine.memory.pool import GranulePool
from engine.weights.layout import Unit
from engine.weights.placement import Placement, least_granules, place
from engine.weights.residency import Fill, Traffic


class Hotset:
    """A :class:`engine.weights.residency.Residency` exact to the granule."""

    policy = "hotset"
    static = True

    def __init__(
        self,
        device: Device,
        store: WeightSource,
        ledger: Ledger,
        pool: GranulePool,
        ring_slots: int,
    ) -> None:
        self._device, self._store, self._ledger, self._pool = (
            device,
            store,
            ledger,
            pool,
        )
        self._granule = device.granularity
        self._units = store.units
        self._sizes = tuple(-(-unit.nbytes // self._granule) for unit in self._units)
        self._ring_slots = min(ring_slots, len(self._units))
        self._base = [device.reserve(size * self._granule) for size in self._sizes]
        self._hot: list[list[Granule]] = [[] for _ in self._units]
        self._ring: list[list[Granule]] = [[] for _ in range(self._ring_slots)]
        self._placement = Placement(self._sizes, self._sizes, self._ring_slots)
        self._aliased = [0] * len(self._units)
        self.evictions = 0
        self._traffic: tuple[Traffic, ...] = ()
        self._fills: tuple[tuple[Fill, ...], ...] = ()

    @property
    def slots(self) -> int:
        return self._ring_slots

    @property
    def least_bytes(self) -> int:
        return least_granules(self._sizes, self._ring_slots) * self._granule

    @property
    def full_bytes(self) -> int:
        return sum(self._sizes) * self._granule

    @property
    def mapped_physical(self) -> int:
        return (sum(map(len, self._hot)) + sum(map(len, self._ring))) * self._granule

    def address(self, unit: Unit, role: str) -> int:
        return self._base[unit.index] + unit.slice(role).offset

    def slot(self, unit: Unit) -> int:
        return unit.index % self._ring_slots

    def may_fill(self, unit: Unit) -> bool:
        return bool(self.fills(unit))

    def prepare(self, unit: Unit) -> tuple[Fill, ...]:
        return self.fills(unit)

    def fills(self, unit: Unit) -> tuple[Fill, ...]:
        return self._fills[unit.index]

    def traffic(self, unit: Unit) -> Traffic:
        return self._traffic[unit.index]

    def cold_range(self, unit: Unit) -> tuple[int, int]:
        """Device address and bytes of a unit's cold tail, whole granules."""
        size, cold = self._sizes[unit.index], self._placement.cold[unit.index]
        return self._base[unit.index] + (size - cold) * self._granule, cold * self._granule

    def load(self, allowance: int) -> None:
        placement = place(self._sizes, allowance // self._granule, self._ring_slots)
        for slot in self._ring:
            # Numbered from the end, so that a slot's granules ascend with the addresses they stand behind.
            slot.extend(reversed(self._take(placement.slot)))
        for unit, size, cold in zip(self._units, self._sizes, placement.cold, strict=True):
            granules = self._take(size - cold)
            try:
                self._own(unit, 0, granules)
            except BaseException:
                if not self._hot[unit.index]:  # else they stand behind the unit, and close() frees them
                    self._pool.put(granules)
                    self._ledger.release(WEIGHTS, len(granules) * self._granule)
                raise
            self._alias(unit, 0, cold)
        self._adopt(placement)

    def reclaim(self, allowance: int) -> Undo:
        before = self._placement
        after = place(self._sizes, allowance // self._granule, self._ring_slots)
        with ExitStack() as undo:
            freed = self._take_from_units(before, after, undo)
            longer_by = after.slot - before.slot
            ring_granules = self._choose_ring_granules(freed, longer_by)
            for slot, block in zip(self._ring, ring_granules, strict=True):
                slot.extend(block)
                undo.callback(_cut, slot, len(slot) - len(block))
            for unit in self._units:
                old, new = before.cold[unit.index], after.cold[unit.index]
                self._alias(unit, old, new)
                undo.callback(self._hide, unit, old, new)
            kept = {granule for block in ring_granules for granule in block}
            leaving = [granule for block in freed.values() for granule in block if granule not in kept]
            self._pool.put(leaving)
            undo.callback(self._pool.withdraw, leaving)
            self._ledger.release(WEIGHTS, len(leaving) * self._granule)
            undo.callback(self._ledger.commit, WEIGHTS, len(leaving) * self._granule)
            self._adopt(after)
            undo.callback(self._adopt, before)
            turned_cold = sum(after.cold) - sum(before.cold)
            self.evictions += turned_cold
            undo.callback(self._forget_evictions, turned_cold)
            return undo.pop_all().close

    def promote(self, allowance: int) -> None:
        before = self._placement
        after = place(self._sizes, allowance // self._granule, self._ring_slots)
        if after == before:
            return
        for unit in self._units:
            self._hide(unit, after.cold[unit.index], before.cold[unit.index])
        spare: list[Granule] = []
        for slot in self._ring:
            keep = after.slot
            spare.extend(slot[keep:])
            del slot[keep:]
        needed = sum(before.cold) - sum(after.cold)
        fresh = self._take(needed - len(spare)) if needed > len(spare) else []
        granules = sorted(spare + fresh)
        for unit in self._units:
            gained = before.cold[unit.index] - after.cold[unit.index]
            self._own(unit, len(self._hot[unit.index]), granules[:gained])
            del granules[:gained]
        self._adopt(after)

    def close(self) -> None:
        for unit, size, base in zip(self._units, self._sizes, self._base, strict=True):
            # A load that broke off has mapped a part: what stands is what is undone.
            hot, cold = len(self._hot[unit.index]), self._aliased[unit.index]
            if hot:
                self._device.unmap(base, hot)
            if cold:
                self._device.unmap(self._cold_address(unit, cold), cold)
            self._device.unreserve(base, size * self._granule)
        held = [granule for block in self._hot + self._ring for granule in block]
        self._device.release(held)
        self._ledger.release(WEIGHTS, len(held) * self._granule)
        self._hot, self._ring = [], []

    def _take_from_units(self, before: Placement, after: Placement, undo: ExitStack) -> dict[int, list[Granule]]:
        """Unmap what turns cold; return the granules by unit."""
        freed: dict[int, list[Granule]] = {}
        for unit in self._units:
            count = after.cold[unit.index] - before.cold[unit.index]
            if not count:
                continue
            hot = self._hot[unit.index]
            block, start = hot[-count:], len(hot) - count
            self._device.unmap(self._base[unit.index] + start * self._granule, count)
            del hot[start:]
            undo.callback(self._own, unit, start, block)
            freed[unit.index] = block
        return freed

    def _forget_evictions(self, count: int) -> None:
        self.evictions -= count

    def _choose_ring_granules(self, freed: dict[int, list[Granule]], count: int) -> list[list[Granule]]:
        """``count`` more granules a slot out of what was freed, whole blocks first: a block maps in one call."""
        whole = sorted((b for b in freed.values() if len(b) >= count), key=len, reverse=True)[: self._ring_slots]
        if len(whole) == self._ring_slots:
            return [block[:count][::-1] for block in whole]
        pooled = sorted(granule for block in freed.values() for granule in block)
        return [pooled[i * count : (i + 1) * count][::-1] for i in range(self._ring_slots)]

    def _take(self, count: int) -> list[Granule]:
        granules = self._pool.take(count)
        self._ledger.commit(WEIGHTS, count * self._granule)
        return granules

    def _own(self, unit: Unit, start: int, granules: list[Granule]) -> None:
        """Put a unit's own granules behind it from granule ``start`` and fill them from the store."""
        if not granules:
            return
        base = self._base[unit.index]
        self._device.map(base + start * self._granule, granules)
        self._hot[unit.index].extend(granules)
        for fill in self._copies(unit, start * self._granule, (start + len(granules)) * self._granule):
            self._device.copy_in(fill.address, fill.source, fill.nbytes)

    def _alias(self, unit: Unit, old_cold: int, new_cold: int) -> None:
        """Let cold granules ``old_cold`` to ``new_cold`` (numbered from the end) stand on the ring slot."""
        if new_cold > old_cold:
            block = self._ring[self.slot(unit)][old_cold:new_cold][::-1]
            self._device.map(self._cold_address(unit, new_cold), block)
            self._aliased[unit.index] = new_cold

    def _hide(self, unit: Unit, old_cold: int, new_cold: int) -> None:
        """Undo :meth:`_alias`."""
        if new_cold > old_cold:
            self._device.unmap(self._cold_address(unit, new_cold), new_cold - old_cold)
            self._aliased[unit.index] = old_cold

    def _cold_address(self, unit: Unit, cold: int) -> int:
        return self._base[unit.index] + (self._sizes[unit.index] - cold) * self._granule

    def _copies(self, unit: Unit, start: int, stop: int) -> tuple[Fill, ...]:
        base, source = self._base[unit.index], self._store.address(unit)
        return tuple(Fill(base + at, source + at, nbytes) for at, nbytes in unit.extents(start, stop))

    def _adopt(self, placement: Placement) -> None:
        """Derive the step's copies and their cost from a placement."""
        self._placement = placement
        fills: list[tuple[Fill, ...]] = []
        traffic: list[Traffic] = []
        for unit, size, cold in zip(self._units, self._sizes, placement.cold, strict=True):
            copies = self._copies(unit, (size - cold) * self._granule, size * self._granule)
            streamed = unit.weight_bytes_in((size - cold) * self._granule, size * self._granule)
            fills.append(copies)
            traffic.append(
                Traffic(
                    hits=size - cold,
                    hit_bytes=unit.weight_bytes - streamed,
                    page_ins=cold,
                    htod_bytes=streamed,
                    # A cold granule is never admitted: it passes through the ring.
                    bypassed_page_ins=cold,
                    bypassed_bytes=streamed,
                )
            )
        self._fills, self._traffic = tuple(fills), tuple(traffic)


def _cut(granules: list[Granule], length: int) -> None:
    del granules[length:]
