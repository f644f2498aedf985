"""The host weight store: every weight once, in host memory, laid out unit by unit as kernels read it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from engine.model.dequantize import dequantize_into
from engine.model.gguf_file import GgufFile
from engine.model.spec import ModelSpec
from engine.weights.layout import ALIGNMENT, Unit

ITEMSIZE = 4
"""Bytes of a weight in the store (float32)."""


class WeightStore:
    """Weights of one model in host memory, and its embedding matrix.

    A tied model's embedding matrix is its head, so its bytes are held once.
    """

    def __init__(self, units: tuple[Unit, ...], spec: ModelSpec) -> None:
        self.units = units
        self._spec = spec
        self._offsets: list[int] = []
        total = 0
        for unit in units:
            self._offsets.append(total)
            total += -(-unit.nbytes // ALIGNMENT) * ALIGNMENT
        raw = np.empty(total + ALIGNMENT, np.uint8)
        self._bytes = raw[-raw.ctypes.data % ALIGNMENT :][:total]
        self._base = self._bytes.ctypes.data
        self._embedding = None if spec.tied else np.empty((spec.vocab, spec.hidden), np.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes every decode step reads: W."""
        return sum(unit.weight_bytes for unit in self.units)

    def address(self, unit: Unit) -> int:
        """Host address of a unit's first byte."""
        return self._base + self._offsets[unit.index]

    def array(self, unit: Unit, role: str) -> NDArray[np.float32]:
        """One tensor of a unit as an array over the store's own memory."""
        part = unit.slice(role)
        start = self._offsets[unit.index] + part.offset
        return self._bytes[start : start + part.nbytes].view(np.float32).reshape(part.shape)

    def load(self, file: GgufFile, threads: int) -> None:
        """Read and dequantize every tensor of ``file``."""
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(self._load_unit, file, unit) for unit in self.units if unit.kind == "layer"]:
                done.result()
        heads = [unit for unit in self.units if unit.kind == "head"]
        self._load_head(file, heads, threads)
        if self._embedding is not None:
            info = file.tensors["token_embd.weight"]
            dequantize_into(self._embedding, file.read(info), info.type_name)

    def embed(self, ids: list[int]) -> NDArray[np.float32]:
        """Embedding rows of ``ids``: [len(ids), hidden]."""
        if self._embedding is not None:
            return self._embedding[ids]
        heads = [unit for unit in self.units if unit.kind == "head"]
        chunk = heads[0].slices[0].shape[0]
        return np.stack([self.array(heads[i // chunk], "head")[i % chunk] for i in ids])

    def _load_unit(self, file: GgufFile, unit: Unit) -> None:
        for part in unit.slices:
            info = file.tensors[part.tensor]
            dequantize_into(self.array(unit, part.role), file.read(info), info.type_name)

    def _load_head(self, file: GgufFile, heads: list[Unit], threads: int) -> None:
        info = file.tensors[heads[0].slices[0].tensor]
        raw = file.read(info)
        row_bytes = info.nbytes // info.shape[0]

        def fill(unit: Unit) -> None:
            first, last = unit.slices[0].rows or (0, 0)
            chunk = raw[first * row_bytes : last * row_bytes]
            dequantize_into(self.array(unit, "head"), chunk, info.type_name)

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(fill, unit) for unit in heads]:
                done.result()
