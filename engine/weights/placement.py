"""Which granules of each unit are hot, for a budget. Pure; everything in granules.

Cold granules are the tail of each unit, spread evenly so that every unit streams about the same and copy and compute
can overlap throughout. A ring of ``slots`` slots, each as large as the largest cold tail, is paid out of the same
budget: with U equal units and n slots, cold = missing x U / (U - n).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import CapacityUnavailable


@dataclass(frozen=True)
class Placement:
    """``cold[u]`` granules of unit u stream; each of ``slots`` ring slots holds ``slot`` granules."""

    sizes: tuple[int, ...]
    cold: tuple[int, ...]
    slots: int

    @property
    def slot(self) -> int:
        """Granules of one ring slot: the largest cold tail."""
        return max(self.cold)

    @property
    def hot(self) -> int:
        """Granules that stay resident."""
        return sum(self.sizes) - sum(self.cold)

    @property
    def granules(self) -> int:
        """Physical granules in all: the hot ones and the ring."""
        return self.hot + self.slots * self.slot


def least_granules(sizes: tuple[int, ...], slots: int) -> int:
    """The smallest budget that works at all."""
    return sum(sizes) - max(0, _saving(sizes, slots, _best_slot(sizes, slots)))


def place(sizes: tuple[int, ...], budget: int, slots: int) -> Placement:
    """The placement of units of ``sizes`` granules in ``budget`` granules with a ring of ``slots`` slots.

    A smaller budget never makes a unit's cold tail shorter, so a reclaim only demotes.

    Raises
    ------
    CapacityUnavailable
        When the budget is below :func:`least_granules`.
    """
    missing = sum(sizes) - budget
    if missing <= 0:
        return Placement(sizes, (0,) * len(sizes), 0)
    best = _best_slot(sizes, slots)
    if _saving(sizes, slots, best) < missing:
        raise CapacityUnavailable(
            f"a weight budget of {budget:,} granules is below the least of {least_granules(sizes, slots):,} "
            f"that {len(sizes)} units and a ring of {slots} slots need"
        )
    low, high = 0, best
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _saving(sizes, slots, middle) >= missing else (middle, high)
    cold = [min(size, high) for size in sizes]
    excess = _saving(sizes, slots, high) - missing
    # A fixed order keeps the placements of smaller and larger budgets nested.
    for unit in _scattered(len(sizes)):
        if excess and cold[unit] == high:
            cold[unit] -= 1
            excess -= 1
    return Placement(sizes, tuple(cold), slots)


def _saving(sizes: tuple[int, ...], slots: int, slot: int) -> int:
    """Granules saved when every unit streams up to ``slot`` granules."""
    return sum(min(size, slot) for size in sizes) - slots * slot


def _best_slot(sizes: tuple[int, ...], slots: int) -> int:
    """The slot size that saves most: the saving is concave and bends only at unit sizes."""
    return max(sorted(set(sizes)), key=lambda slot: _saving(sizes, slots, slot))


def _scattered(count: int) -> list[int]:
    """0..count-1 in bit-reversed order, so that any prefix is spread over the whole range."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
