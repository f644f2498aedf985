"""Tokens and logits on their way from the device to the host, while the next step runs."""

from __future__ import annotations

import mmap
from collections import deque
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.device.pinning import Pinning
from engine.device.protocol import Event, Stream
from engine.errors import InvalidLogits

SLOTS = 2
"""Steps whose results may be under way at once."""


class Returning(Protocol):
    """What a device offers for results."""

    def pin(self, address: int, nbytes: int) -> Pinning: ...

    def event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def read_later(self, target: int, address: int, nbytes: int) -> None: ...

    def wait_for(self, event: Event) -> None: ...


class Results:
    """Results of the last steps, oldest first. ``tokens`` and ``logits`` are device addresses: int32 [rows], float16
    [rows, vocab]. All logits come, every step: they are a few millionths of what a step reads, and the host looks at
    them while the next step runs."""

    def __init__(self, device: Returning, rows: int, vocab: int, tokens: int, logits: int) -> None:
        self._device, self._tokens, self._logits = device, tokens, logits
        self._token_slots = _pinned(device, (SLOTS, rows), np.int32)
        self._logit_slots = _pinned(device, (SLOTS, rows, vocab), np.float16)
        self._arrived = [device.event() for _ in range(SLOTS)]
        self._free = deque(range(SLOTS))
        self._sent = deque[int]()

    def send(self) -> None:
        """Let the results of what has been enqueued come back."""
        slot = self._free.popleft()
        for address, slots in ((self._tokens, self._token_slots), (self._logits, self._logit_slots)):
            self._device.read_later(int(slots[slot].ctypes.data), address, slots[slot].nbytes)
        self._device.record(self._arrived[slot], Stream.COMPUTE)
        self._sent.append(slot)

    def take(self, generation: int, step: int) -> tuple[list[int], list[str]]:
        """Tokens and digests of the oldest step sent.

        Raises
        ------
        InvalidLogits
            When a row's logits are not all finite.
        """
        slot = self._sent.popleft()
        self._device.wait_for(self._arrived[slot])
        logits, tokens = self._logit_slots[slot], self._token_slots[slot].tolist()
        self._free.append(slot)
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            raise InvalidLogits(int(np.argmin(finite)), step, generation)
        return tokens, [xxhash.xxh3_64_hexdigest(row.data) for row in logits]


def _pinned(device: Returning, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    array: NDArray[np.generic] = np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)
    array[...] = 0
    device.pin(int(array.ctypes.data), len(memory))  # where it cannot be, the copy waits for the step
    return array
