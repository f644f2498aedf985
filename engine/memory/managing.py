"""Whether managing weights pays, from measured speeds and the bytes at stake. Pure; sizes in bytes, speeds in bytes/s.

Managing copies what does not fit into device memory and reads all weights there. Leaving it reads what does not fit
where it lies. A copy pays only when reading in place is slower than copying and reading again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PLACES_BY_ITSELF = ("wddm", "unknown")
"""Driver models under which the driver moves allocations as it sees fit. What cannot be told counts as one of them."""


@dataclass(frozen=True)
class Speeds:
    """What a device was measured to do.

    Attributes
    ----------
    resident, in_place, copy
        Bytes/s of kernels reading device memory, of kernels reading host memory where it lies, and of copies.
    overlapped
        Whether copies run beside kernels.
    driver_model
        ``none`` (no driver between), ``linux``, ``tcc``, ``mcdm``, ``wddm`` or ``unknown``.
    probed
        Whether reads in place were verified by a probe, under the traffic that they would have. A short
        measurement at load is no probe.
    """

    resident: float
    in_place: float
    copy: float
    overlapped: bool
    driver_model: str
    probed: bool = False


@dataclass(frozen=True)
class Stakes:
    """Bytes of one decode step with rows at their longest.

    ``unmanaged_room`` is what weights may hold beside the whole KV reservation, ``managed_room`` beside the bucket that
    the rows reach. ``ring_share`` is U / (U - n) for U units and a ring of n slots: what the ring costs.
    """

    weight_bytes: int
    unmanaged_room: int
    managed_room: int
    ring_share: float

    @property
    def in_place(self) -> int:
        """Bytes an unmanaged step reads where they lie."""
        return max(0, self.weight_bytes - self.unmanaged_room)

    @property
    def streamed(self) -> int:
        """Bytes a managed step copies."""
        missing = max(0, self.weight_bytes - self.managed_room)
        return min(self.weight_bytes, round(missing * self.ring_share))


@dataclass(frozen=True)
class Decision:
    """Whether to manage, and why. Seconds a step are estimates of what memory alone takes; None where none was made."""

    managed: bool
    reason: str
    managed_s: float | None = None
    unmanaged_s: float | None = None


def decide(stakes: Stakes, measure: Callable[[], Speeds]) -> Decision:
    """Manage only where a managed step is estimated to take less time than an unmanaged one.

    ``measure`` is called only where speeds matter.
    """
    if stakes.in_place == 0:
        return Decision(False, "all weights fit beside the whole KV reservation: managing has nothing to save")
    speeds = measure()
    if speeds.driver_model in PLACES_BY_ITSELF and not speeds.probed:
        return Decision(
            False,
            f"driver model {speeds.driver_model}: the driver places memory by itself, and no probe shows that "
            "copying would be faster",
        )
    reading = stakes.weight_bytes / speeds.resident
    copying = stakes.streamed / speeds.copy
    managed_s = max(reading, copying) if speeds.overlapped else reading + copying
    unmanaged_s = (stakes.weight_bytes - stakes.in_place) / speeds.resident + stakes.in_place / speeds.in_place
    numbers = (
        f"copying {_mb(stakes.streamed)} a step at {_gb(speeds.copy)} against reading {_mb(stakes.in_place)} in place "
        f"at {_gb(speeds.in_place)} (resident {_gb(speeds.resident)}): {1e3 * managed_s:.1f} against "
        f"{1e3 * unmanaged_s:.1f} ms"
    )
    pays = managed_s < unmanaged_s
    return Decision(pays, f"managing {'pays' if pays else 'cannot pay'}: {numbers}", managed_s, unmanaged_s)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"
