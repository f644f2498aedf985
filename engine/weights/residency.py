"""What every way of holding weights offers the decode loop and the governor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.memory.governor import Undo
from engine.weights.layout import Unit


@dataclass(frozen=True)
class Fill:
    """One copy that must land before a unit runs: device address, host address, bytes."""

    address: int
    source: int
    nbytes: int


@dataclass(frozen=True)
class Traffic:
    """What one run of a unit costs, counted by the policy: pages and bytes by where they come from.

    A page is what the policy moves as a whole: a granule (hotset) or a tensor (paged). Bytes are weight
    bytes; ``hit_bytes + htod_bytes + in_place_bytes`` is the unit's weight bytes. ``htod_bytes`` is
    ``compulsory_bytes`` (admitted for the first time since the load) + ``bypassed_bytes`` (never admitted)
    + ``refetched_bytes`` (admitted again after an eviction).
    """

    hits: int = 0
    hit_bytes: int = 0
    page_ins: int = 0
    htod_bytes: int = 0
    bypassed_page_ins: int = 0
    in_place_bytes: int = 0
    compulsory_bytes: int = 0
    bypassed_bytes: int = 0
    refetched_bytes: int = 0


class Residency(Protocol):
    """Weights on the device, under an allowance in bytes."""

    def address(self, unit: Unit, role: str) -> int:
        """Where a kernel finds a tensor; fixed for the life of the object."""

    def load(self, allowance: int) -> None:
        """Create, map and fill what is resident under ``allowance``."""

    def may_fill(self, unit: Unit) -> bool:
        """Whether runs of ``unit`` may need copies; fixed until the allowance changes."""

    def prepare(self, unit: Unit) -> tuple[Fill, ...]:
        """Make room for what ``unit`` lacks, and return the copies to make before its next run.

        Called once before each run of a unit that may fill, when the slot's previous user has run. A static
        placement has nothing to make room for: it returns :meth:`fills`.
        """

    def fills(self, unit: Unit) -> tuple[Fill, ...]:
        """The copies a run of ``unit`` lacks as things stand; for a static placement those of every run."""

    def slot(self, unit: Unit) -> int:
        """The staging slot that ``unit`` fills; a slot may be filled again once its last user has run."""

    def traffic(self, unit: Unit) -> Traffic:
        """What the run just prepared costs."""

    def reclaim(self, allowance: int) -> Undo:
        """Shrink to ``allowance``; the granules freed go to the pool. Return what undoes it."""

    def promote(self, allowance: int) -> None:
        """Grow back to ``allowance``, to the placement that a load under it gives.

        Called before every generation, so that all start alike.
        """

    @property
    def policy(self) -> str:
        """The policy's published name."""

    @property
    def static(self) -> bool:
        """Whether every step needs the same copies as long as the allowance stays, so that a step can be replayed."""

    @property
    def evictions(self) -> int:
        """Pages that lost their memory to another page or to a reclaim, since the load."""

    @property
    def slots(self) -> int:
        """How many staging slots there are."""

    @property
    def least_bytes(self) -> int:
        """The smallest allowance that works."""

    @property
    def full_bytes(self) -> int:
        """The allowance at which everything is resident."""

    @property
    def mapped_physical(self) -> int:
        """Physical bytes held: resident weights and staging."""

    def close(self) -> None:
        """Unmap and free everything."""
