"""How weights are cut into units, and where each tensor lies inside its unit. Pure; offsets and sizes in bytes.

A *unit* is what one run of a kernel session reads: a decoder layer, or a chunk of the head's vocabulary rows. The
head is cut into chunks about as large as a layer, so that it can be cold like any layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.model.spec import ModelSpec

ALIGNMENT = 256

UnitKind = Literal["layer", "head"]
_Part = tuple[str, str, tuple[int, ...], tuple[int, int] | None]
"""Role, tensor, shape, rows: a slice before it has a place."""


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


def build_units(spec: ModelSpec, itemsize: int) -> tuple[Unit, ...]:
    """The units of a model in the order a step reads them: layers, then head chunks.

    The final norm lies in the last layer's unit, since it runs right after that layer.
    """
    units: list[Unit] = []
    for layer in range(spec.layers):
        parts: list[_Part] = [
            (role, f"blk.{layer}.{role}.weight", shape, None) for role, shape in spec.layer_shapes().items()
        ]
        if layer == spec.layers - 1:
            parts.append(("output_norm", "output_norm.weight", (spec.hidden,), None))
        units.append(Unit(layer, "layer", _lay_out(parts, itemsize)))
    head = "token_embd.weight" if spec.tied else "output.weight"
    for first, last in _vocabulary_chunks(spec, units[0].nbytes, itemsize):
        chunk: list[_Part] = [("head", head, (last - first, spec.hidden), (first, last))]
        units.append(Unit(len(units), "head", _lay_out(chunk, itemsize)))
    return tuple(units)


def _lay_out(parts: Sequence[_Part], itemsize: int) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    offset = 0
    for role, tensor, shape, rows in parts:
        nbytes = itemsize
        for dimension in shape:
            nbytes *= dimension
        slices.append(Slice(role, tensor, shape, offset, nbytes, rows))
        offset = -(-slices[-1].end // ALIGNMENT) * ALIGNMENT
    return tuple(slices)


def _vocabulary_chunks(spec: ModelSpec, layer_bytes: int, itemsize: int) -> Iterator[tuple[int, int]]:
    row_bytes = spec.hidden * itemsize
    chunks = max(1, -(-spec.vocab * row_bytes // layer_bytes))
    rows = -(-spec.vocab // chunks)
    for first in range(0, spec.vocab, rows):
        yield first, min(first + rows, spec.vocab)
