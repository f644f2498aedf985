"""What keeps host memory from being pinned: limits of the process and of its cgroup, read before asking the driver."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_CAP_IPC_LOCK = 1 << 14


@dataclass(frozen=True)
class Pinning:
    """What came of asking for pinned memory.

    Attributes
    ----------
    device_address
        Where kernels can read the memory in place; None when it stayed pageable.
    reason
        Why it stayed pageable, one line; empty when it is pinned.
    """

    device_address: int | None = None
    reason: str = ""

    @property
    def pinned(self) -> bool:
        """Whether copies from this memory run at the full speed of the bus."""
        return self.device_address is not None


@dataclass(frozen=True)
class PinLimits:
    """Bytes this process may lock and hold; None where there is no limit or none can be read.

    The cgroup's limit is kept to: what is pinned cannot be reclaimed, and passing it means being killed. The lock limit
    is only told: the driver on Linux pins past it (64 MiB at a limit of 64 KiB, unprivileged, driver 580).
    """

    memlock_bytes: int | None = None
    cgroup_bytes: int | None = None

    @classmethod
    def read(cls, root: Path = Path("/")) -> PinLimits:
        """The limits in force now. ``root`` stands in for the file system in tests."""
        return cls(_memlock_bytes(root), _cgroup_bytes(root))

    def obstacle(self, nbytes: int) -> str | None:
        """Why ``nbytes`` cannot be pinned whatever the driver says, or None."""
        if self.cgroup_bytes is not None and nbytes > self.cgroup_bytes:
            return f"pinning {nbytes:,} B would pass the memory limit of the cgroup, {self.cgroup_bytes:,} B"
        return None

    def explain(self) -> str:
        """The limits as the end of a sentence about a refusal."""
        parts = []
        if self.memlock_bytes is not None:
            parts.append(f"RLIMIT_MEMLOCK {self.memlock_bytes:,} B")
        if self.cgroup_bytes is not None:
            parts.append(f"cgroup memory limit {self.cgroup_bytes:,} B")
        return "; ".join(parts) or "no limit of the process or its cgroup is in force"


def _memlock_bytes(root: Path) -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock_anything(root):
        return None
    return soft


def _may_lock_anything(root: Path) -> bool:
    for line in _lines(root / "proc/self/status"):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _CAP_IPC_LOCK)
    return False


def _cgroup_bytes(root: Path) -> int | None:
    """The lowest memory limit from the process's cgroup up to the top: each level binds."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = base / path.lstrip("/")
        for folder in [here, *here.parents]:
            limits += [int(text) for text in _lines(folder / file) if text.isdigit()]
            if folder == base:
                break
    # Version 1 says "no limit" with a number near 2^63.
    real = [limit for limit in limits if limit < 1 << 60]
    return min(real, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
