"""The bindings of a forward pass: decode (one token a row) and prefill (one row, a chunk of tokens).

Weights are bound once, by address. Inputs, outputs and scratch of a pass live at fixed addresses too; only the KV
shapes change, with the bucket, and the shapes of a prefill chunk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.decode.kernels import Binding, Kernels, Tensor
from engine.model.spec import ModelSpec
from engine.weights.layout import Unit

AddressOf = Callable[[Unit, str], int]
"""Where a unit's tensor with this role lies."""

_FLOAT_BYTES = 4


class KvView(Protocol):
    """Where keys and values lie, and how many tokens a row can hold."""

    capacity: int

    def key_address(self, layer: int) -> int: ...

    def value_address(self, layer: int) -> int: ...

    def row_offset(self, row: int) -> int: ...


@dataclass(frozen=True)
class PassShape:
    """What sizes a pass: rows of the batch, the longest prefill chunk, the declared context (tokens)."""

    rows: int
    chunk: int
    max_context: int


class Buffers:
    """Activations and small inputs of a pass, carved out of one block of memory.

    :meth:`nbytes` says how large the block must be; ``base`` is its address. The host writes inputs and reads outputs
    through ``array``, so the block must be host memory or mapped into it.
    """

    def __init__(self, spec: ModelSpec, shape: PassShape, base: int) -> None:
        self._spec, self._shape = spec, shape
        at = base
        self._at: dict[str, tuple[int, tuple[int, ...], type[np.generic]]] = {}
        for name, (dimensions, dtype) in _buffer_shapes(spec, shape).items():
            self._at[name] = (at, dimensions, dtype)
            at += _aligned(_count(dimensions) * 4)

    @staticmethod
    def nbytes(spec: ModelSpec, shape: PassShape) -> int:
        """Bytes of the block."""
        return sum(_aligned(_count(dimensions) * 4) for dimensions, _ in _buffer_shapes(spec, shape).values())

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, skip: int = 0) -> Tensor:
        """A buffer (or its first part) as a kernel's tensor, ``skip`` elements in."""
        address, dimensions, dtype = self._at[name]
        return Tensor(address + skip * 4, shape or dimensions, dtype)

    def array(self, name: str) -> NDArray[Any]:
        """A buffer as an array over its own memory."""
        address, dimensions, dtype = self._at[name]
        raw = (ctypes.c_char * (_count(dimensions) * 4)).from_address(address)
        flat: NDArray[Any] = np.frombuffer(raw, dtype)  # type: ignore[call-overload]  # ctypes arrays are buffers
        return flat.reshape(dimensions)


def rope_tables(spec: ModelSpec, max_context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of every position: two arrays [max_context, head_dim / 2]."""
    frequencies = 1 / (spec.rope_base ** (np.arange(0, spec.head_dim, 2) / spec.head_dim))
    angles = np.arange(max_context)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Forward:
    """Runs units of a pass. ``rebinds`` counts bindings made after load."""

    def __init__(
        self, kernels: Kernels, spec: ModelSpec, units: tuple[Unit, ...], address: AddressOf, buffers: Buffers,
        shape: PassShape, kv: KvView,
    ) -> None:  # fmt: skip
        self._spec, self._buffers, self._shape, self._kv = spec, buffers, shape, kv
        self._layers = [unit for unit in units if unit.kind == "layer"]
        self._heads = [unit for unit in units if unit.kind == "head"]
        cosines, sines = rope_tables(spec, shape.max_context)
        buffers.array("cos")[:], buffers.array("sin")[:] = cosines, sines
        self._decode = [self._layer(kernels, unit, address) for unit in self._layers]
        self._prefill = [self._layer(kernels, unit, address) for unit in self._layers]
        self._final_norm = self._norm(kernels, self._layers[-1], address)
        self._head = self._head_chunks(kernels, address)
        self._bind_decode()
        self._bound_capacity = 0
        self._at_load = self._binds()

    @property
    def rebinds(self) -> int:
        """Bindings made since load: KV shapes of a new bucket, and prefill chunks."""
        return self._binds() - self._at_load

    def begin_decode(self, embeddings: NDArray[np.float32], lengths: list[int]) -> None:
        """Set the inputs of a decode pass: one embedding a row, and the tokens each row already holds."""
        rows = self._shape.rows
        self._buffers.array("x0")[:rows] = embeddings
        self._buffers.array("seqlens_k")[:] = lengths
        self._buffers.array("total")[0] = max(lengths) + 1
        if self._bound_capacity != self._kv.capacity:
            for layer, binding in enumerate(self._decode):
                self._bind_kv(binding, layer, rows, 0)
            self._bound_capacity = self._kv.capacity

    def begin_prefill(self, row: int, embeddings: NDArray[np.float32], past: int) -> None:
        """Set the inputs of a prefill pass: a chunk of one row's tokens after ``past`` tokens."""
        count = len(embeddings)
        self._buffers.array("x0")[:count] = embeddings
        self._buffers.array("prefill_seqlen")[0] = past + count - 1
        self._buffers.array("total")[0] = past + count
        shape = (1, count, self._spec.hidden)
        for layer, binding in enumerate(self._prefill):
            binding.inputs({"x": self._buffers.tensor(f"x{layer % 2}", shape)})
            binding.outputs({"out": self._buffers.tensor(f"x{(layer + 1) % 2}", shape)})
            self._bind_kv(binding, layer, 1, self._kv.row_offset(row))

    def run_decode(self, unit: Unit) -> None:
        """Run one unit of a decode pass; the last layer runs the final norm too."""
        if unit.kind == "head":
            self._head[unit.index - len(self._layers)].run()
            return
        self._decode[unit.index].run()
        if unit.index == len(self._layers) - 1:
            self._final_norm.run()

    def run_prefill(self, unit: Unit, row: int, count: int, *, last_row: bool) -> None:
        """Run one unit of a prefill pass over ``count`` tokens of ``row``.

        The last layer keeps the row's last hidden state; for the last row it puts those of all rows through
        the final norm, so that the head's chunks can follow, all rows at once.
        """
        if unit.kind == "head":
            self._head[unit.index - len(self._layers)].run()
            return
        self._prefill[unit.index].run()
        if unit.index < len(self._layers) - 1:
            return
        out = self._buffers.array(f"x{len(self._layers) % 2}")
        self._buffers.array("last")[row] = out[count - 1]
        if last_row:
            out[: self._shape.rows] = self._buffers.array("last")
            self._final_norm.run()

    def logits(self) -> NDArray[np.float32]:
        """Logits of the last pass: [rows, vocab]; a copy for several rows, since the head's chunks lie apart."""
        rows, logits = self._shape.rows, self._buffers.array("logits").reshape(-1)
        if rows == 1:
            return logits.reshape(1, -1)
        parts = []
        at = 0
        for unit in self._heads:
            width = unit.slice("head").shape[0]
            parts.append(logits[at : at + rows * width].reshape(rows, width))
            at += rows * width
        joined: NDArray[np.float32] = np.concatenate(parts, axis=1)
        return joined

    def _binds(self) -> int:
        bindings = [*self._decode, *self._prefill, self._final_norm, *self._head]
        return sum(binding.binds for binding in bindings)

    def _layer(self, kernels: Kernels, unit: Unit, address: AddressOf) -> Binding:
        binding = kernels.layer()
        binding.inputs({p.role: Tensor(address(unit, p.role), p.shape) for p in unit.slices if p.role != "output_norm"})
        binding.inputs({name: self._buffers.tensor(name) for name in ("cos", "sin")})
        binding.inputs({"total_sequence_length": self._buffers.tensor("total")})
        return binding

    def _norm(self, kernels: Kernels, unit: Unit, address: AddressOf) -> Binding:
        binding = kernels.final_norm()
        shape = (self._shape.rows, 1, self._spec.hidden)
        part = unit.slice("output_norm")
        binding.inputs({"output_norm": Tensor(address(unit, part.role), part.shape)})
        binding.inputs({"x": self._buffers.tensor(f"x{len(self._layers) % 2}", shape)})
        binding.outputs({"normed": self._buffers.tensor("normed", shape)})
        return binding

    def _head_chunks(self, kernels: Kernels, address: AddressOf) -> list[Binding]:
        chunks = []
        at = 0
        for unit in self._heads:
            part = unit.slice("head")
            binding = kernels.head()
            binding.inputs({"head": Tensor(address(unit, "head"), part.shape)})
            binding.inputs({"normed": self._buffers.tensor("normed", (self._shape.rows, 1, self._spec.hidden))})
            shape = (self._shape.rows, 1, part.shape[0])
            binding.outputs({"logits": self._buffers.tensor("logits", shape, skip=at)})
            at += self._shape.rows * part.shape[0]
            chunks.append(binding)
        return chunks

    def _bind_decode(self) -> None:
        shape = (self._shape.rows, 1, self._spec.hidden)
        for layer, (decode, prefill) in enumerate(zip(self._decode, self._prefill, strict=True)):
            decode.inputs({"x": self._buffers.tensor(f"x{layer % 2}", shape)})
            decode.inputs({"seqlens_k": self._buffers.tensor("seqlens_k")})
            decode.outputs({"out": self._buffers.tensor(f"x{(layer + 1) % 2}", shape)})
            prefill.inputs({"seqlens_k": self._buffers.tensor("prefill_seqlen")})

    def _bind_kv(self, binding: Binding, layer: int, rows: int, offset: int) -> None:
        shape = (rows, self._spec.kv_heads, self._kv.capacity, self._spec.head_dim)
        keys = Tensor(self._kv.key_address(layer) + offset, shape)
        values = Tensor(self._kv.value_address(layer) + offset, shape)
        binding.inputs({"past_key": keys, "past_value": values})
        binding.outputs({"present_key": keys, "present_value": values})


def _buffer_shapes(spec: ModelSpec, shape: PassShape) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    tokens = max(shape.rows, shape.chunk)
    return {
        "x0": ((tokens, spec.hidden), np.float32),
        "x1": ((tokens, spec.hidden), np.float32),
        "last": ((shape.rows, spec.hidden), np.float32),
        "normed": ((shape.rows, spec.hidden), np.float32),
        "logits": ((shape.rows, spec.vocab), np.float32),
        "cos": ((shape.max_context, spec.head_dim // 2), np.float32),
        "sin": ((shape.max_context, spec.head_dim // 2), np.float32),
        "seqlens_k": ((shape.rows,), np.int32),
        "prefill_seqlen": ((1,), np.int32),
        "total": ((1,), np.int32),
    }


def _count(dimensions: tuple[int, ...]) -> int:
    count = 1
    for dimension in dimensions:
        count *= dimension
    return count


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
