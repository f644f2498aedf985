"""The ledger: who holds how many committed bytes under the managed limit.

It counts charges, not residency: a device may page memory out without telling. Faults do not raise, they are
counted, because a run must be able to end and report them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WEIGHTS, KV, WORKSPACE = "WeightCache", "KvCache", "Workspace"
"""The holders' published names."""


@dataclass
class Holder:
    """One holder: what it may commit (``allowance``), what it has (``committed``) and its highest mark, in bytes."""

    name: str
    allowance: int = 0
    committed: int = 0
    peak: int = 0


@dataclass
class Ledger:
    """Committed bytes by holder.

    Counters: ``oversubscribed_bytes`` is the largest excess of committed over limit (or over a holder's
    allowance) ever seen; ``byte_underflows`` counts returns of more bytes than a holder had; ``ref_underflows``
    counts releases of a holder that is not known; ``unaccounted_committed_bytes`` is what the device has
    created and no holder has committed.
    """

    limit: int
    holders: dict[str, Holder] = field(default_factory=dict)
    peak_committed: int = 0
    oversubscribed_bytes: int = 0
    ref_underflows: int = 0
    byte_underflows: int = 0
    unaccounted_committed_bytes: int = 0

    @property
    def committed(self) -> int:
        """Bytes all holders have committed."""
        return sum(holder.committed for holder in self.holders.values())

    def open(self, name: str) -> Holder:
        """Add a holder with nothing in it."""
        return self.holders.setdefault(name, Holder(name))

    def commit(self, name: str, nbytes: int) -> None:
        """Record that ``name`` committed ``nbytes`` more."""
        holder = self.holders[name]
        holder.committed += nbytes
        holder.peak = max(holder.peak, holder.committed)
        total = self.committed
        self.peak_committed = max(self.peak_committed, total)
        excess = max(total - self.limit, holder.committed - holder.allowance)
        self.oversubscribed_bytes = max(self.oversubscribed_bytes, excess)

    def release(self, name: str, nbytes: int) -> None:
        """Record that ``name`` gave back ``nbytes``."""
        holder = self.holders.get(name)
        if holder is None:
            self.ref_underflows += 1
            return
        if nbytes > holder.committed:
            self.byte_underflows += 1
        holder.committed = max(0, holder.committed - nbytes)

    def reconcile(self, created_bytes: int) -> None:
        """Compare with what the device says it has created."""
        self.unaccounted_committed_bytes = created_bytes - self.committed

    def clean(self) -> bool:
        """True when every fault counter is zero and the peak is within the limit."""
        return (
            self.oversubscribed_bytes == 0
            and self.ref_underflows == 0
            and self.byte_underflows == 0
            and self.unaccounted_committed_bytes == 0
            and self.peak_committed <= self.limit
        )

    def snapshot(self) -> dict[str, Any]:
        """The public counters as JSON types."""
        return {
            "limit": self.limit,
            "committed": self.committed,
            "peak_committed": self.peak_committed,
            "oversubscribed_bytes": self.oversubscribed_bytes,
            "ref_underflows": self.ref_underflows,
            "byte_underflows": self.byte_underflows,
            "unaccounted_committed_bytes": self.unaccounted_committed_bytes,
            "holders": {
                h.name: {
                    "allowance": h.allowance,
                    "committed": h.committed,
                    "peak": h.peak,
                }
                for h in self.holders.values()
            },
        }
