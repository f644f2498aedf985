"""A residency on the ledger device, with passes run by hand and every promise of the protocol checked on the way."""

from __future__ import annotations

from typing import Any

from engine.counters import Tally
from engine.device.ledger import LedgerDevice
from engine.memory.ledger import WEIGHTS, Ledger
from engine.memory.pool import GranulePool
from engine.weights.hotset import Hotset
from engine.weights.layout import Part, Unit, units_of
from engine.weights.paged import Paged
from engine.weights.pager import Pager
from engine.weights.residency import Residency
from tests.engine.test_growth_faults import FailingDevice

GRANULE = 4096


class Watching(LedgerDevice):
    """Knows the addresses that were mapped and not yet copied to."""

    def __init__(self) -> None:
        super().__init__(GRANULE, 1 << 40)
        self.stale: set[int] = set()

    def map(self, address: int, granules: Any) -> None:
        super().map(address, granules)
        self.stale.add(address)

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        super().copy_in(address, source, nbytes)
        self.stale.discard(address)


class Bench:
    """A residency on the ledger device: one ledger, one pool, passes run by hand."""

    def __init__(self, sizes: list[list[int]], policy: str, pin: tuple[str, ...] = (), slots: int = 2) -> None:
        parts = [
            [Part(f"t{t}", f"u{u}.t{t}", (1,), nbytes) for t, nbytes in enumerate(unit)] for u, unit in enumerate(sizes)
        ]
        self.units = units_of(parts, [])
        self.device: Any = FailingDevice(Watching())
        self.ledger = Ledger(1 << 40)
        self.holder = self.ledger.open(WEIGHTS)
        self.pool = GranulePool(self.device)
        common: tuple[Any, ...] = (self.device, self, self.ledger, self.pool)
        self.residency: Residency
        if policy == "hotset":
            self.residency = Hotset(*common, slots)
        elif policy == "stable_resident":
            self.residency = Paged(*common, "copy", pin)
        else:
            self.residency = Pager(*common, policy, pin)

    weight_bytes = 0  # with address(): this bench is the weight store too

    def address(self, unit: Unit) -> int:
        return (1 << 40) + sum(before.nbytes for before in self.units[: unit.index])

    def load(self, granules: int) -> None:
        self.holder.allowance = granules * GRANULE
        self.residency.load(granules * GRANULE)

    def reclaim(self, granules: int) -> Any:
        undo = self.residency.reclaim(granules * GRANULE)
        self.holder.allowance = granules * GRANULE
        self.pool.trim()
        return undo

    def run(self, reach: int) -> Tally:
        tally = Tally()
        for unit in self.units[:reach]:
            if self.residency.may_fill(unit):
                before = self.device.counters.htod_bytes
                for fill in self.residency.prepare(unit):
                    self.device.copy_in(fill.address, fill.source, fill.nbytes)
                assert self.device.counters.htod_bytes - before == self.residency.traffic(unit).htod_bytes
            for part in unit.slices:  # a page in use is mapped, all of it
                first = self.residency.address(unit, part.role) // GRANULE
                last = (self.residency.address(unit, part.role) + part.nbytes - 1) // GRANULE
                assert all(page in self.device._mapped for page in range(first, last + 1))
                if self.residency.policy != "hotset":
                    assert self.residency.address(unit, part.role) not in self.device.stale
            tally.add(self.residency.traffic(unit))
        assert tally.split_ok
        assert self.ledger.oversubscribed_bytes == 0
        self.pool.trim()
        assert self.device.counters.live_granules * GRANULE == self.ledger.committed == self.residency.mapped_physical
        return tally
