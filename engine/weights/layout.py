"""How weights are cut into units, and where each tensor lies inside its unit. Pure; offsets and sizes in bytes.

A *unit* is what one run of a kernel session reads: a decoder layer, or a chunk of the head's vocabulary rows. The
head is cut into chunks about as large as a layer, so that it can be cold like any layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.model.spec import ModelSpec

ALIGNMENT = 256

UnitKind = Literal["layer", "head"]


@dataclass(frozen=True)
class Slice:
    """A tensor, or a run of its rows, inside a unit.

    ``role`` is the kernel's input name, ``tensor`` the name in the file, ``rows`` the run of rows (None: all of it).
    """

    role: str
    tensor: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    rows: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """Offset just past it."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Unit:
    """Tensors that one kernel run reads; ``nbytes`` spans them all."""

    index: int
    kind: UnitKind
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first slice to the end of the last."""
        return self.slices[-1].end

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, gaps left out."""
        return sum(part.nbytes for part in self.slices)

    def slice(self, role: str) -> Slice:
        """The slice with this role."""
        return next(part for part in self.slices if part.role == role)

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Maximal runs of weight bytes inside [start, stop), as (offset, nbytes)."""
        run_start = run_stop = -1
        for part in self.slices:
            low, high = max(part.offset, start), min(part.end, stop)
            if low >= high:
                continue
            if low == run_stop:
                run_stop = high
                continue
            if run_stop > run_start:
                yield run_start, run_stop - run_start
            run_start, run_stop = low, high
        if run_stop > run_start:
            yield run_start, run_stop - run_start

    def weight_bytes_in(self, start: int, stop: int) -> int:
        """Weight bytes inside [start, stop)."""
        return sum(nbytes for _, nbytes in self.extents(start, stop))


@dataclass(frozen=True)
class Part:
    """A slice before it has a place in its unit."""

    role: str
    tensor: str
    shape: tuple[int, ...]
    nbytes: int
    rows: tuple[int, int] | None = None


def units_of(layers: Sequence[Sequence[Part]], heads: Sequence[Sequence[Part]]) -> tuple[Unit, ...]:
    """Units in the order a step reads them: layers, then head chunks."""
    kinds: list[tuple[UnitKind, Sequence[Part]]] = [("layer", parts) for parts in layers]
    kinds += [("head", parts) for parts in heads]
    return tuple(Unit(index, kind, _lay_out(parts)) for index, (kind, parts) in enumerate(kinds))


def build_units(spec: ModelSpec, itemsize: int) -> tuple[Unit, ...]:
    """The units of a model whose tensors are stored plain, ``itemsize`` bytes a number.

    The final norm lies in the last layer's unit, since it runs right after that layer.
    """
    layers = [
        [
            Part(role, f"blk.{layer}.{role}.weight", shape, math.prod(shape) * itemsize)
            for role, shape in spec.layer_shapes().items()
        ]
        for layer in range(spec.layers)
    ]
    layers[-1].append(Part("output_norm", "output_norm.weight", (spec.hidden,), spec.hidden * itemsize))
    head, row_bytes = "token_embd.weight" if spec.tied else "output.weight", spec.hidden * itemsize
    chunks = vocabulary_chunks(spec.vocab, row_bytes, sum(part.nbytes for part in layers[0]))
    heads = [
        [Part("head", head, (last - first, spec.hidden), (last - first) * row_bytes, (first, last))]
        for first, last in chunks
    ]
    return units_of(layers, heads)


def vocabulary_chunks(vocab: int, row_bytes: int, layer_bytes: int) -> list[tuple[int, int]]:
    """Runs of vocabulary rows of about a layer's size each."""
    chunks = max(1, -(-vocab * row_bytes // layer_bytes))
    rows = -(-vocab // chunks)
    return [(first, min(first + rows, vocab)) for first in range(0, vocab, rows)]


def _lay_out(parts: Sequence[Part]) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    offset = 0
    for part in parts:
        slices.append(Slice(part.role, part.tensor, part.shape, offset, part.nbytes, part.rows))
        offset = -(-slices[-1].end // ALIGNMENT) * ALIGNMENT
    return tuple(slices)
