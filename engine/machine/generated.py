"""Weights made up from a seed: a shape's tensors in host memory in seconds, so that any scale runs with no download.

Packed weights are random bits; scales have random signs and a size that keeps what a matrix puts out about as large as
what goes in, so that tokens vary. The same seed gives the same bytes whatever the number of threads.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.model.shape import Shape
from engine.weights.layout import ALIGNMENT, Slice, Unit

SEED = 20261201
BYTES_PER_TOKEN = 4
_HALF_BYTES = 2
_PIECE = 1 << 20
"""Numbers made at once: small enough to stay in the cache."""
# Packed numbers run from -8 to 7: this is their standard deviation, and that of scales around their size.
_PACKED_DEVIATION, _SCALE_SPREAD = 4.61, 1.04
_HEAD_GAIN = 4.0


class GeneratedStore:
    """A :class:`engine.machine.protocol.WeightSource` of made-up weights, and an embedding table beside them.

    Nothing is held until :meth:`load`; addresses are known before.
    """

    def __init__(self, shape: Shape, units: tuple[Unit, ...], seed: int = SEED) -> None:
        self.units = units
        self._shape, self._seed = shape, seed
        self._offsets: list[int] = []
        at = 0
        for unit in units:
            self._offsets.append(at)
            at += -(-unit.nbytes // ALIGNMENT) * ALIGNMENT
        self._table = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        self.nbytes = self._table + shape.spec.vocab * shape.spec.hidden * _HALF_BYTES
        self._memory = mmap.mmap(-1, self.nbytes)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def weight_bytes(self) -> int:
        return sum(unit.weight_bytes for unit in self.units)

    @property
    def table_address(self) -> int:
        """Host address of the embedding table: [vocab, hidden] float16."""
        return self.base + self._table

    def address(self, unit: Unit) -> int:
        return self.base + self._offsets[unit.index]

    def load(self, threads: int) -> None:
        """Make every tensor."""
        rows = self._shape.spec.vocab * self._shape.spec.hidden
        table = self._bytes[self._table :].view(np.float16)
        share = -(-rows // (4 * threads))
        with ThreadPoolExecutor(threads) as pool:
            made = [pool.submit(self._make_unit, unit) for unit in self.units]
            made += [
                pool.submit(_draw, table[at : at + share], _normal(1.0), (self._seed, 1, number))
                for number, at in enumerate(range(0, rows, share))
            ]
            for each in made:
                each.result()

    def _make_unit(self, unit: Unit) -> None:
        for number, part in enumerate(unit.slices):
            start = self._offsets[unit.index] + part.offset
            self._make(self._bytes[start : start + part.nbytes], part, (self._seed, 0, unit.index, number))

    def _make(self, out: NDArray[np.uint8], part: Slice, key: tuple[int, ...]) -> None:
        if len(part.shape) == 2 and not part.role.endswith(".scales"):
            for piece, bits in _pieces(out, key):
                piece[:] = bits.random_raw(-(-len(piece) // 8)).view(np.uint8)[: len(piece)]
            return
        numbers = out.view(np.float16)
        if part.role.endswith(".scales"):
            gain = _HEAD_GAIN if part.role.startswith("head") else 1.0
            size = gain / (_PACKED_DEVIATION * _SCALE_SPREAD * part.shape[1] ** 0.5)
            _draw(numbers, _signed(size), key)
        elif part.role.endswith(".bias"):
            _draw(numbers, _normal(0.2), key)
        else:
            _draw(numbers, _normal(0.1, around=1.0), key)


def made_up_prompt(text: str, vocab: int) -> list[int]:
    """Token ids for a text where there is no tokenizer: one for every four bytes, at least one."""
    data = text.encode()
    count = max(1, len(data) // BYTES_PER_TOKEN)
    ends = [data[at * BYTES_PER_TOKEN : (at + 1) * BYTES_PER_TOKEN] for at in range(count)]
    return [int.from_bytes(piece, "little") * 2654435761 % (1 << 32) % vocab for piece in ends]


def _draw(out: NDArray[np.float16], choices: NDArray[np.float16], key: tuple[int, ...]) -> None:
    """Fill ``out`` with random ones of 65,536 choices."""
    for piece, bits in _pieces(out, key):
        which = bits.random_raw(-(-len(piece) // 4)).view(np.uint16)[: len(piece)]
        np.take(choices, which, out=piece, mode="wrap")


def _pieces(out: NDArray[np.generic], key: tuple[int, ...]) -> Iterator[tuple[NDArray[np.generic], np.random.SFC64]]:
    bits = np.random.SFC64(np.random.SeedSequence(key))
    for start in range(0, len(out), _PIECE):
        yield out[start : start + _PIECE], bits


def _normal(deviation: float, around: float = 0.0) -> NDArray[np.float16]:
    numbers = np.random.default_rng(0).standard_normal(1 << 16)
    choices: NDArray[np.float16] = (around + deviation * numbers).astype(np.float16)
    return choices


def _signed(size: float) -> NDArray[np.float16]:
    """Sizes from half to one and a half of ``size``, half of them negative."""
    rng = np.random.default_rng(1)
    sizes = size * rng.uniform(0.5, 1.5, 1 << 16)
    choices: NDArray[np.float16] = (sizes * rng.choice([-1.0, 1.0], 1 << 16)).astype(np.float16)
    return choices
