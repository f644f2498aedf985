"""The KV arena: keys and values of every layer at fixed addresses, committed bucket by bucket.

Each layer has one range for keys and one for values, reserved for the whole context. Inside, a range is
[rows, kv_heads, capacity, head_dim]; when the bucket grows the capacity does, so every head's block moves to its new
stride in place, last block first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.device.protocol import Device, Granule
from engine.errors import InvalidRequest
from engine.memory.budget import bucket_tokens
from engine.memory.governor import Governor
from engine.memory.ledger import KV, WEIGHTS
from engine.memory.pool import GranulePool


@dataclass(frozen=True)
class KvLayout:
    """Shape of the cache of one batch; ``itemsize`` in bytes."""

    layers: int
    rows: int
    kv_heads: int
    head_dim: int
    itemsize: int
    max_context: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head, key or value."""
        return self.head_dim * self.itemsize

    def range_bytes(self, capacity: int) -> int:
        """Bytes of one layer's keys (or values) at ``capacity`` tokens."""
        return self.rows * self.kv_heads * capacity * self.token_bytes

    def committed_bytes(self, capacity: int, granule: int) -> int:
        """Bytes all ranges take at ``capacity``, whole granules."""
        return 2 * self.layers * -(-self.range_bytes(capacity) // granule) * granule


@dataclass(frozen=True)
class Growth:
    """One growth of the bucket: tokens, bytes, where they came from, and how long decode stood still."""

    from_tokens: int
    to_tokens: int
    need_bytes: int
    from_own: int
    from_unassigned: int
    reclaimed_from_weights: int
    from_headroom: int
    budget_before: int
    budget_after: int
    stall_s: float


class KvArena:
    """Keys and values on a device.

    Attributes
    ----------
    capacity
        Tokens each row can hold now.
    """

    def __init__(self, device: Device, governor: Governor, pool: GranulePool, layout: KvLayout) -> None:
        self._device, self._governor, self._pool, self.layout = (
            device,
            governor,
            pool,
            layout,
        )
        self._granule = device.granularity
        reserved = layout.range_bytes(layout.max_context)
        self._ranges = [device.reserve(reserved) for _ in range(2 * layout.layers)]
        self._held: list[list[Granule]] = [[] for _ in self._ranges]
        self.capacity = 0

    def key_address(self, layer: int) -> int:
        """Address of a layer's keys."""
        return self._ranges[2 * layer]

    def value_address(self, layer: int) -> int:
        """Address of a layer's values."""
        return self._ranges[2 * layer + 1]

    def row_offset(self, row: int) -> int:
        """Bytes from a range's start to ``row`` at the present capacity."""
        return row * self.layout.kv_heads * self.capacity * self.layout.token_bytes

    def open(self, tokens: int) -> None:
        """Commit the first bucket: the one that holds ``tokens``."""
        capacity = bucket_tokens(tokens, self.layout.max_context)
        self._extend(capacity)
        self.capacity = capacity

    def ensure(self, tokens: int, lengths: list[int]) -> Growth | None:
        """Make room for ``tokens`` in every row; ``lengths`` are the tokens each row holds now.

        Returns what the growth cost, or None when the bucket already holds them. On failure nothing has changed.

        Raises
        ------
        InvalidRequest
            When ``tokens`` is beyond the declared context.
        CapacityUnavailable, DeviceError
            When the bytes cannot be had.
        """
        if tokens <= self.capacity:
            return None
        if tokens > self.layout.max_context:
            raise InvalidRequest(f"a row of {tokens:,} tokens is beyond max_context={self.layout.max_context:,}")
        started = time.perf_counter()
        old, new = self.capacity, bucket_tokens(tokens, self.layout.max_context)
        need = self.layout.committed_bytes(new, self._granule) - self.layout.committed_bytes(old, self._granule)
        budget_before = self._governor.allowance(WEIGHTS)
        with self._governor.grow(KV, need) as grant:
            self._extend(new)
        self._pool.trim()
        self._restride(old, new, lengths)
        self.capacity = new
        self._device.synchronize()
        return Growth(
            from_tokens=old,
            to_tokens=new,
            need_bytes=need,
            from_own=grant.from_own,
            from_unassigned=grant.from_unassigned,
            reclaimed_from_weights=grant.reclaimed_bytes,
            from_headroom=grant.from_headroom,
            budget_before=budget_before,
            budget_after=self._governor.allowance(WEIGHTS),
            stall_s=time.perf_counter() - started,
        )

    def reset(self, tokens: int = 1) -> int:
        """End of a generation: give back all but the first bucket and return the bytes given back."""
        capacity = bucket_tokens(tokens, self.layout.max_context)
        if capacity >= self.capacity:
            return 0
        keep = -(-self.layout.range_bytes(capacity) // self._granule)
        given = self._cut([keep] * len(self._ranges))
        self._governor.shrink(KV, self._governor.allowance(KV) - given)
        self.capacity = capacity
        return given

    def close(self) -> None:
        """Unmap and free everything."""
        self._cut([0] * len(self._ranges))
        self._pool.trim()
        for address in self._ranges:
            self._device.unreserve(address, self.layout.range_bytes(self.layout.max_context))

    def _extend(self, capacity: int) -> None:
        """Put granules behind every range up to ``capacity``; on failure take all of them back."""
        wanted = -(-self.layout.range_bytes(capacity) // self._granule)
        before = [len(held) for held in self._held]
        missing = sum(wanted - count for count in before)
        granules = self._pool.take(missing)
        self._governor.ledger.commit(KV, missing * self._granule)
        try:
            for address, held in zip(self._ranges, self._held, strict=True):
                block = granules[: wanted - len(held)]
                self._device.map(address + len(held) * self._granule, block)
                held.extend(block)
                del granules[: len(block)]
                # New memory is zeroed: kernels may read past a row's length and mask afterwards.
                self._device.fill(
                    address + (wanted - len(block)) * self._granule,
                    len(block) * self._granule,
                    0,
                )
        except BaseException:
            self._cut(before)
            self._pool.put(granules)
            self._governor.ledger.release(KV, len(granules) * self._granule)
            raise

    def _cut(self, keep: list[int]) -> int:
        """Take granules beyond ``keep[i]`` from behind range i into the pool; return their bytes."""
        given = 0
        for address, held, count in zip(self._ranges, self._held, keep, strict=True):
            block = held[count:]
            if block:
                self._device.unmap(address + count * self._granule, len(block))
                del held[count:]
                self._pool.put(block)
                given += len(block) * self._granule
        self._governor.ledger.release(KV, given)
        return given

    def _restride(self, old: int, new: int, lengths: list[int]) -> None:
        """Move every head's block from stride ``old`` to stride ``new``, last first, so that none is overwritten."""
        token, heads = self.layout.token_bytes, self.layout.kv_heads
        for address in self._ranges:
            for block in range(self.layout.rows * heads - 1, 0, -1):
                nbytes = lengths[block // heads] * token
                if nbytes:
                    self._device.move(
                        address + block * new * token,
                        address + block * old * token,
                        nbytes,
                    )
