"""The reference: the same kernels in a plain loop, with neither governor, pager, ring nor KV arena.

Weights are read where the host store holds them and KV is one array for the whole context. Tokens and
logits digests of every other way of running are compared with this one.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.decode.forward import Buffers, Forward, PassShape
from engine.decode.kernels import Kernels, available_threads
from engine.decode.logits import digest, pick
from engine.decode.loop import Generation, OnStep, chunks
from engine.model.gguf_file import open_gguf
from engine.model.spec import ModelSpec, read_spec
from engine.model.tokenizer import read_tokenizer
from engine.plan import check_context, check_lengths
from engine.weights.layout import Unit, build_units
from engine.weights.store import ITEMSIZE, WeightStore


class PlainKv:
    """Keys and values as one array a layer, at full capacity: [2, rows, kv_heads, max_context, head_dim]."""

    def __init__(self, spec: ModelSpec, rows: int, max_context: int) -> None:
        self.capacity = max_context
        shape = (2, rows, spec.kv_heads, max_context, spec.head_dim)
        self._layers: list[NDArray[np.float32]] = [np.zeros(shape, np.float32) for _ in range(spec.layers)]

    def key_address(self, layer: int) -> int:
        """Address of a layer's keys."""
        return int(self._layers[layer][0].ctypes.data)

    def value_address(self, layer: int) -> int:
        """Address of a layer's values."""
        return int(self._layers[layer][1].ctypes.data)

    def row_offset(self, row: int) -> int:
        """Bytes from the start of keys (or values) to ``row``."""
        return row * int(self._layers[0][0].strides[0])


class PlainLoop:
    """A loaded model and the plain loop over it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        file = open_gguf(Path(config.model.path))
        self.spec = read_spec(file)
        self.tokenizer = read_tokenizer(file)
        texts = config.workload.prompts
        if config.workload.template == "model":
            texts = tuple(self.tokenizer.chat(text) for text in texts)
        self.prompts = [self.tokenizer.encode(text) for text in texts]
        check_context(self.spec, config)
        check_lengths(config, [len(prompt) for prompt in self.prompts])
        self.units = build_units(self.spec, ITEMSIZE)
        self.store = WeightStore(self.units, self.spec)
        threads = config.device.threads or available_threads()
        self.store.load(file, threads)
        shape = PassShape(len(self.prompts), config.prefill_chunk, config.max_context)
        self._block = np.empty(Buffers.nbytes(self.spec, shape) + 256, np.uint8)
        buffers = Buffers(self.spec, shape, self._block.ctypes.data)
        self._kv = PlainKv(self.spec, len(self.prompts), config.max_context)
        kernels = Kernels(self.spec, threads)
        self._forward = Forward(kernels, self.spec, self.units, self._address, buffers, shape, self._kv)

    def text(self, tokens: list[int]) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens)

    def close(self) -> None:
        """Nothing is held beside this process's own memory."""

    def generate(self, index: int = 0, measured: bool = True, on_step: OnStep | None = None) -> Generation:
        """One generation, as :meth:`engine.decode.loop.DecodeLoop.generate` makes it."""
        result = Generation.empty(index, measured, len(self.prompts))
        started = time.perf_counter()
        lengths = self._prefill()
        result.prefill_s = time.perf_counter() - started
        self._take(result, 0)
        result.ttft_s = time.perf_counter() - started
        for step in range(1, self.config.workload.tokens):
            if all(stop is not None for stop in result.stopped):
                break
            if on_step is not None:
                on_step(index, step, "decode")
            began = time.perf_counter()
            self._forward.begin_decode(self.store.embed([row[-1] for row in result.tokens]), lengths)
            for unit in self.units:
                self._forward.run_decode(unit)
            lengths = [length + (stop is None) for length, stop in zip(lengths, result.stopped, strict=True)]
            self._take(result, step)
            result.itl_s.append(time.perf_counter() - began)
        return result

    def _prefill(self) -> list[int]:
        for row, prompt in enumerate(self.prompts):
            for start, count in chunks(len(prompt), self.config.prefill_chunk):
                self._forward.begin_prefill(row, self.store.embed(prompt[start : start + count]), start)
                last = start + count == len(prompt) and row == len(self.prompts) - 1
                for unit in self.units:
                    if unit.kind == "layer" or last:
                        self._forward.run_prefill(unit, row, count, last_row=last)
        return [len(prompt) for prompt in self.prompts]

    def _take(self, result: Generation, step: int) -> None:
        logits = self._forward.logits()
        for row, (token, mark) in enumerate(zip(pick(logits, result.index, step), digest(logits), strict=True)):
            if result.stopped[row] is not None:
                continue
            result.tokens[row].append(token)
            result.digests[row].append(mark)
            if not self.config.workload.ignore_eos and token in self.tokenizer.eos_ids:
                result.stopped[row] = token

    def _address(self, unit: Unit, role: str) -> int:
        return self.store.address(unit) + unit.slice(role).offset
