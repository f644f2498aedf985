"""Models as tensor tables: everything about a model but its numbers, as data, for planning at any scale.

A shape file (``engine/model/shapes/NAME.json``) gives the sizes of a decoder and how its weights are stored; the
tensor table follows from it. ``source`` says where the sizes come from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.model.shape_name import shape_file
from engine.model.spec import ModelSpec
from engine.weights.layout import Part, Unit, units_of, vocabulary_chunks

_FP16 = 2


@dataclass(frozen=True)
class Shape:
    """A model's sizes and storage: ``spec`` in elements; ``bits`` and ``block`` of the weight quantization."""

    spec: ModelSpec
    source: str
    bits: int
    block: int
    biases: tuple[str, ...]
    experts: int

    def matrix_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        """Packed weights and scales of a matrix, in bytes; scales are float16, one a block, no zero points."""
        return rows * columns * self.bits // 8, rows * (columns // self.block) * _FP16


def read_shape(model: str) -> Shape:
    """The shape ``shape:NAME``.

    Raises
    ------
    ModelError
        When there is none.
    """
    path = shape_file(model)
    data: dict[str, Any] = json.loads(path.read_text())
    spec = ModelSpec(
        name=path.stem,
        architecture="shape",
        layers=data["layers"],
        hidden=data["hidden"],
        inner=data["inner"],
        heads=data["heads"],
        kv_heads=data["kv_heads"],
        head_dim=data["head_dim"],
        vocab=data["vocab"],
        context=data["context"],
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=False,
    )
    return Shape(spec, data["source"], data["bits"], data["block"], tuple(data["biases"]), data.get("experts", 1))


def shape_units(shape: Shape) -> tuple[Unit, ...]:
    """The units of a shape: layers, then head chunks; the tensor table is their slices."""
    layers = [_layer_parts(shape, layer) for layer in range(shape.spec.layers)]
    layers[-1].append(Part("output_norm", "output_norm", (shape.spec.hidden,), shape.spec.hidden * _FP16))
    layer_bytes = sum(part.nbytes for part in layers[0])
    return units_of(layers, _head_parts(shape, layer_bytes))


def tensor_table(shape: Shape) -> dict[str, int]:
    """Tensors as the model's files hold them: name -> bytes."""
    table: dict[str, int] = {}
    for unit in shape_units(shape):
        for part in unit.slices:
            table[part.tensor] = table.get(part.tensor, 0) + part.nbytes
    return table


def _layer_parts(shape: Shape, layer: int) -> list[Part]:
    parts: list[Part] = []
    for kind, dimensions in shape.spec.layer_shapes().items():
        name = f"blk.{layer}.{kind}"
        if len(dimensions) == 1:
            parts.append(Part(kind, f"{name}.weight", dimensions, dimensions[0] * _FP16))
            continue
        copies = shape.experts if kind.startswith("ffn") else 1
        for copy in range(copies):
            mark = f".{copy}" if copies > 1 else ""
            packed, scales = shape.matrix_bytes(*dimensions)
            parts.append(Part(f"{kind}{mark}", f"{name}{mark}.weight", dimensions, packed))
            parts.append(Part(f"{kind}{mark}.scales", f"{name}{mark}.scales", dimensions, scales))
        if kind in shape.biases:
            parts.append(Part(f"{kind}.bias", f"{name}.bias", (dimensions[0],), dimensions[0] * _FP16))
    return parts


def _head_parts(shape: Shape, layer_bytes: int) -> list[list[Part]]:
    vocab, hidden = shape.spec.vocab, shape.spec.hidden
    heads: list[list[Part]] = []
    for first, last in vocabulary_chunks(vocab, sum(shape.matrix_bytes(1, hidden)), layer_bytes):
        packed, scales = shape.matrix_bytes(last - first, hidden)
        run = (first, last)
        heads.append(
            [
                Part("head", "lm_head.weight", (last - first, hidden), packed, run),
                Part("head.scales", "lm_head.scales", (last - first, hidden), scales, run),
            ]
        )
    return heads
