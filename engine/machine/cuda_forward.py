"""The bindings of a forward pass whose activations, tokens and lengths stay on the device.

A decode step begins with the tokens that the last one chose: embedding, layers, final norm, the head's chunks, the
choice of tokens, lengths plus one. Nothing of it needs the host, so the whole of it can be recorded. The total length
that attention reads from host memory would be baked into a recording: decode gives it the bucket's capacity, and true
lengths lie on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.decode.forward import AddressOf, KvView, PassShape, rope_tables
from engine.machine.cuda_kernels import Bound, Placed, QuantizedKernels
from engine.model.shape import Shape
from engine.weights.layout import Slice, Unit

_ALIGNMENT = 256


class Memory(Protocol):
    """The two calls of a device that a pass makes itself, both on the compute stream."""

    def write(self, address: int, data: bytes) -> None: ...

    def move(self, target: int, source: int, nbytes: int) -> None: ...


class DeviceBuffers:
    """Activations and small inputs of a pass, carved out of one block at ``base``."""

    def __init__(self, shape: Shape, passes: PassShape, base: int) -> None:
        self._at: dict[str, Placed] = {}
        for name, (dimensions, dtype) in _buffer_shapes(shape, passes).items():
            self._at[name] = Placed(base, dimensions, dtype)
            base += _nbytes(dimensions, dtype)

    @staticmethod
    def nbytes(shape: Shape, passes: PassShape) -> int:
        """Bytes of the block."""
        return sum(_nbytes(*each) for each in _buffer_shapes(shape, passes).values())

    def tensor(self, name: str, dimensions: tuple[int, ...] | None = None, skip: int = 0) -> Placed:
        """A buffer, or part of it: ``dimensions`` from ``skip`` elements in."""
        whole = self._at[name]
        itemsize = np.dtype(whole.dtype).itemsize
        return Placed(whole.address + skip * itemsize, dimensions or whole.shape, whole.dtype)

    def address(self, name: str) -> int:
        """Where a buffer starts."""
        return self._at[name].address


class DeviceForward:
    """Runs units of a pass. ``rebinds`` counts bindings made after load."""

    def __init__(
        self, kernels: QuantizedKernels, shape: Shape, units: tuple[Unit, ...], address: AddressOf, table: int,
        buffers: DeviceBuffers, passes: PassShape, kv: KvView, memory: Memory,
    ) -> None:  # fmt: skip
        self._shape, self._spec, self._passes, self._kv, self._memory = shape, shape.spec, passes, kv, memory
        self._buffers, self._table = buffers, Placed(table, (shape.spec.vocab, shape.spec.hidden))
        self._layers = [unit for unit in units if unit.kind == "layer"]
        # Read by the host side of a kernel when it is enqueued, or recorded.
        self._decode_total, self._prefill_total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._write_tables()
        heads = [unit for unit in units if unit.kind == "head"]
        self._decode = [self._layer(kernels, unit, address, self._decode_total) for unit in self._layers]
        self._prefill = [self._layer(kernels, unit, address, self._prefill_total) for unit in self._layers]
        self._embed, self._embed_prompt = kernels.embed(), kernels.embed()
        last = f"x{len(self._layers) % 2}"
        self._norm = self._final_norm(kernels, address, last)
        self._prompt_norm = self._final_norm(kernels, address, "last")
        self._head = self._head_chunks(kernels, heads, address)
        self._pick = self._choice(kernels, heads)
        self._bind_decode()
        self._bound_capacity = 0
        self._lengths: list[int] | None = None
        self._at_load = self._binds()

    @property
    def rebinds(self) -> int:
        """Bindings made since load: KV shapes of a new bucket, and prefill chunks."""
        return self._binds() - self._at_load

    def begin_decode(self, lengths: Sequence[int]) -> None:
        """Set what a decode pass needs beside the tokens chosen last: lengths, unless the device has them already."""
        if self._lengths != list(lengths):
            self._write("lengths", np.array(lengths, np.int32))
        self._lengths = [length + 1 for length in lengths]
        if self._bound_capacity != self._kv.capacity:
            for layer, binding in enumerate(self._decode):
                self._bind_kv(binding, layer, self._passes.rows, 0)
            self._bound_capacity = self._kv.capacity
            self._decode_total[0] = self._kv.capacity

    def begin_prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        """Set the inputs of a prefill pass: a chunk of one row's tokens after ``past`` tokens."""
        count = len(tokens)
        self._lengths = None
        self._write("prompt", np.array(tokens, np.int32))
        self._write("prompt_length", np.array([past + count - 1], np.int32))
        self._prefill_total[0] = past + count
        shape = (1, count, self._spec.hidden)
        self._embed_prompt.inputs({"table": self._table, "tokens": self._buffers.tensor("prompt", (1, count))})
        self._embed_prompt.outputs({"x": self._buffers.tensor("x0", shape)})
        for layer, binding in enumerate(self._prefill):
            binding.inputs({"x": self._buffers.tensor(f"x{layer % 2}", shape)})
            binding.outputs({"out": self._buffers.tensor(f"x{(layer + 1) % 2}", shape)})
            self._bind_kv(binding, layer, 1, self._kv.row_offset(row))

    def run_decode(self, unit: Unit) -> None:
        """Enqueue one unit of a decode pass, with what comes before the first layer and after the last unit."""
        if unit.kind == "head":
            self._run_head(unit)
            return
        if unit.index == 0:
            self._embed.run()
        self._decode[unit.index].run()
        if unit.index == len(self._layers) - 1:
            self._norm.run()

    def run_prefill(self, unit: Unit, row: int, count: int, *, last_row: bool) -> None:
        """Enqueue one unit of a prefill pass over ``count`` tokens of ``row``.

        The last layer keeps the row's last hidden state; for the last row those of all rows go through the final norm,
        so that the head's chunks can follow, all rows at once.
        """
        if unit.kind == "head":
            self._run_head(unit)
            return
        if unit.index == 0:
            self._embed_prompt.run()
        self._prefill[unit.index].run()
        if unit.index < len(self._layers) - 1:
            return
        state = self._spec.hidden * 2
        out = self._buffers.address(f"x{len(self._layers) % 2}")
        self._memory.move(self._buffers.address("last") + row * state, out + (count - 1) * state, state)
        if last_row:
            self._prompt_norm.run()

    def _run_head(self, unit: Unit) -> None:
        number = unit.index - len(self._layers)
        self._head[number].run()
        if number == len(self._head) - 1:
            self._pick.run()

    def _binds(self) -> int:
        bindings = [*self._decode, *self._prefill, *self._head]
        bindings += [self._embed, self._embed_prompt, self._norm, self._prompt_norm, self._pick]
        return sum(binding.binds for binding in bindings)

    def _write(self, name: str, array: NDArray[np.generic]) -> None:
        self._memory.write(self._buffers.address(name), array.tobytes())

    def _write_tables(self) -> None:
        cosines, sines = rope_tables(self._spec, self._passes.max_context)
        self._write("cos", cosines.astype(np.float16))
        self._write("sin", sines.astype(np.float16))
        self._write("ids", np.arange(self._spec.vocab, dtype=np.int32))
        self._write("tokens", np.zeros((self._passes.rows, 1), np.int32))

    def _layer(self, kernels: QuantizedKernels, unit: Unit, address: AddressOf, total: NDArray[np.int32]) -> Bound:
        binding = kernels.layer()
        parts = [part for part in unit.slices if part.role != "output_norm"]
        binding.inputs({part.role: self._weight(unit, part, address) for part in parts})
        binding.inputs({name: self._buffers.tensor(name) for name in ("cos", "sin")})
        where = int(total.ctypes.data)
        binding.inputs({"total_sequence_length": Placed(where, (1,), np.int32, on_host=True)})
        return binding

    def _weight(self, unit: Unit, part: Slice, address: AddressOf) -> Placed:
        at = address(unit, part.role)
        if len(part.shape) == 1:
            return Placed(at, part.shape)
        rows, blocks = part.shape[0], part.shape[1] // self._shape.block
        if part.role.endswith(".scales"):
            return Placed(at, (rows, blocks))
        return Placed(at, (rows, blocks, self._shape.block * self._shape.bits // 8), np.uint8)

    def _final_norm(self, kernels: QuantizedKernels, address: AddressOf, x: str) -> Bound:
        binding, unit = kernels.final_norm(), self._layers[-1]
        shape = (self._passes.rows, 1, self._spec.hidden)
        binding.inputs({"output_norm": self._weight(unit, unit.slice("output_norm"), address)})
        binding.inputs({"x": self._buffers.tensor(x, shape)})
        binding.outputs({"normed": self._buffers.tensor("normed", shape)})
        return binding

    def _head_chunks(self, kernels: QuantizedKernels, heads: list[Unit], address: AddressOf) -> list[Bound]:
        chunks = []
        rows = self._passes.rows
        for unit, part in zip(heads, self._chunk_tensors(heads), strict=True):
            binding = kernels.head(part.shape[2])
            binding.inputs({each.role: self._weight(unit, each, address) for each in unit.slices})
            binding.inputs({"normed": self._buffers.tensor("normed", (rows, 1, self._spec.hidden))})
            binding.outputs({"logits": part})
            chunks.append(binding)
        return chunks

    def _choice(self, kernels: QuantizedKernels, heads: list[Unit]) -> Bound:
        binding = kernels.pick()
        binding.inputs({f"logits_{number}": part for number, part in enumerate(self._chunk_tensors(heads))})
        binding.inputs({name: self._buffers.tensor(name) for name in ("ids", "lengths")})
        binding.outputs({name: self._buffers.tensor(name) for name in ("logits", "tokens")})
        binding.outputs({"longer": self._buffers.tensor("lengths")})
        return binding

    def _chunk_tensors(self, heads: list[Unit]) -> list[Placed]:
        """Where each chunk's logits lie: [rows, 1, width], one chunk after the other."""
        tensors, at, rows = [], 0, self._passes.rows
        for unit in heads:
            width = unit.slice("head").shape[0]
            tensors.append(self._buffers.tensor("chunks", (rows, 1, width), skip=at))
            at += rows * width
        return tensors

    def _bind_decode(self) -> None:
        shape = (self._passes.rows, 1, self._spec.hidden)
        self._embed.inputs({"table": self._table, "tokens": self._buffers.tensor("tokens")})
        self._embed.outputs({"x": self._buffers.tensor("x0", shape)})
        for layer, (decode, prefill) in enumerate(zip(self._decode, self._prefill, strict=True)):
            decode.inputs({"x": self._buffers.tensor(f"x{layer % 2}", shape)})
            decode.inputs({"seqlens_k": self._buffers.tensor("lengths")})
            decode.outputs({"out": self._buffers.tensor(f"x{(layer + 1) % 2}", shape)})
            prefill.inputs({"seqlens_k": self._buffers.tensor("prompt_length")})

    def _bind_kv(self, binding: Bound, layer: int, rows: int, offset: int) -> None:
        shape = (rows, self._spec.kv_heads, self._kv.capacity, self._spec.head_dim)
        keys = Placed(self._kv.key_address(layer) + offset, shape)
        values = Placed(self._kv.value_address(layer) + offset, shape)
        binding.inputs({"past_key": keys, "past_value": values})
        binding.outputs({"present_key": keys, "present_value": values})


def _buffer_shapes(shape: Shape, passes: PassShape) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    spec, rows = shape.spec, passes.rows
    tokens = max(rows, passes.chunk)
    return {
        "x0": ((tokens, spec.hidden), np.float16),
        "x1": ((tokens, spec.hidden), np.float16),
        "last": ((rows, spec.hidden), np.float16),
        "normed": ((rows, spec.hidden), np.float16),
        "chunks": ((rows, spec.vocab), np.float16),
        "logits": ((rows, 1, spec.vocab), np.float16),
        "cos": ((passes.max_context, spec.head_dim // 2), np.float16),
        "sin": ((passes.max_context, spec.head_dim // 2), np.float16),
        "ids": ((spec.vocab,), np.int32),
        "tokens": ((rows, 1), np.int32),
        "lengths": ((rows,), np.int32),
        "prompt": ((passes.chunk,), np.int32),
        "prompt_length": ((1,), np.int32),
    }


def _nbytes(dimensions: tuple[int, ...], dtype: type[np.generic]) -> int:
    count = np.dtype(dtype).itemsize
    for dimension in dimensions:
        count *= dimension
    return -(-count // _ALIGNMENT) * _ALIGNMENT
