"""The plain loop on a GPU: the same kernels over plainly allocated memory, every weight resident, step by step.

Neither governor, pager, ring, KV arena nor recording has a part in it. Keys and values are held in buckets as the
engine holds them, since attention adds up in another order at another capacity; a larger bucket is a new allocation.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from engine.config import EngineConfig
from engine.decode.loop import Generation, OnStep, chunks
from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import check
from engine.errors import DeviceError
from engine.machine.cuda import CudaMachine
from engine.machine.cuda_forward import DeviceForward
from engine.machine.cuda_results import Results
from engine.memory.budget import bucket_tokens
from engine.model.spec import ModelSpec
from engine.plan import check_lengths
from engine.weights.layout import Unit

_HALF_BYTES = 2


class PlainMemory:
    """Plain allocations on a device, freed on close."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._held = device, set[int]()

    def take(self, nbytes: int) -> int:
        """Memory of its own, zeroed."""
        address = int(check(self._device.driver.cuMemAlloc, nbytes))
        self._held.add(address)
        self._device.fill(address, nbytes, 0)
        return address

    def give(self, address: int) -> None:
        """Free what :meth:`take` gave, after all work."""
        self._device.synchronize()
        check(self._device.driver.cuMemFree, address)
        self._held.remove(address)

    def close(self) -> None:
        """Free everything."""
        for address in list(self._held):
            self.give(address)


class PlainBuckets:
    """Keys and values as one allocation a layer: [2, rows, kv_heads, capacity, head_dim] float16."""

    def __init__(self, device: CudaDevice, memory: PlainMemory, spec: ModelSpec, rows: int, max_context: int) -> None:
        self._device, self._memory, self._spec, self._rows = device, memory, spec, rows
        self._max_context = max_context
        self.capacity = bucket_tokens(1, max_context)
        self._layers = [memory.take(self._layer_bytes()) for _ in range(spec.layers)]

    def key_address(self, layer: int) -> int:
        """Address of a layer's keys."""
        return self._layers[layer]

    def value_address(self, layer: int) -> int:
        """Address of a layer's values."""
        return self._layers[layer] + self._layer_bytes() // 2

    def row_offset(self, row: int) -> int:
        """Bytes from the start of keys (or values) to ``row``."""
        return row * self._spec.kv_heads * self._block_bytes()

    def hold(self, tokens: int) -> None:
        """Move to a bucket that holds ``tokens``, block by block into new memory."""
        if tokens <= self.capacity:
            return
        old = self._block_bytes()
        self.capacity = bucket_tokens(tokens, self._max_context)
        for layer, address in enumerate(self._layers):
            target = self._memory.take(self._layer_bytes())
            for block in range(2 * self._rows * self._spec.kv_heads):
                self._device.move(target + block * self._block_bytes(), address + block * old, old)
            self._memory.give(address)
            self._layers[layer] = target

    def _block_bytes(self) -> int:
        return self.capacity * self._spec.head_dim * _HALF_BYTES

    def _layer_bytes(self) -> int:
        return 2 * self._rows * self._spec.kv_heads * self._block_bytes()


class CudaPlainLoop:
    """A loaded model and the plain loop over it; :meth:`close` frees the GPU."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        with ExitStack() as undo:
            self.machine = CudaMachine(config)
            self._device = self.machine.device
            undo.callback(self._device.close)
            check_lengths(config, [len(prompt) for prompt in self.machine.prompts])
            self.machine.load()
            memory = PlainMemory(self._device)
            undo.callback(memory.close)
            self._weights = [self._upload(memory, unit) for unit in self.machine.units]
            rows = len(self.machine.prompts)
            self._kv = PlainBuckets(self._device, memory, self.machine.spec, rows, config.max_context)
            block = self.machine.buffers(memory.take(self._buffer_bytes()))
            self._forward: DeviceForward | None = self.machine.forward(self._address, self._kv, block)
            undo.callback(self._let_go)
            tokens, logits = block.address("tokens"), block.address("logits")
            self._results = Results(self._device, rows, self.machine.spec.vocab, tokens, logits)
            self._exit = undo.pop_all()

    def generate(self, index: int = 0, measured: bool = True, on_step: OnStep | None = None) -> Generation:
        """One generation, as :meth:`engine.decode.loop.DecodeLoop.generate` makes it."""
        prompts, forward = self.machine.prompts, self._running()
        result = Generation.empty(index, measured, len(prompts))
        started = time.perf_counter()
        for row, prompt in enumerate(prompts):
            for start, count in chunks(len(prompt), self.config.prefill_chunk):
                self._kv.hold(start + count)
                forward.begin_prefill(row, prompt[start : start + count], start)
                last = start + count == len(prompt) and row == len(prompts) - 1
                for unit in self.machine.units:
                    if unit.kind == "layer" or last:
                        forward.run_prefill(unit, row, count, last_row=last)
        result.prefill_s = time.perf_counter() - started
        self._take(result, 0)
        result.ttft_s = time.perf_counter() - started
        lengths = np.array([len(prompt) for prompt in prompts])
        for step in range(1, self.config.workload.tokens):
            if on_step is not None:
                on_step(index, step, "decode")
            began = time.perf_counter()
            self._kv.hold(int(lengths.max()) + 1)
            forward.begin_decode(lengths.tolist())
            for unit in self.machine.units:
                forward.run_decode(unit)
            lengths += 1
            self._take(result, step)
            result.itl_s.append(time.perf_counter() - began)
        return result

    def text(self, tokens: list[int]) -> str:
        """Text of token ids."""
        return self.machine.text(tokens)

    def close(self) -> None:
        """Free the GPU."""
        self._exit.close()

    def _take(self, result: Generation, step: int) -> None:
        self._results.send()
        tokens, digests = self._results.take(result.index, step)
        for row, (token, mark) in enumerate(zip(tokens, digests, strict=True)):
            result.tokens[row].append(token)
            result.digests[row].append(mark)

    def _upload(self, memory: PlainMemory, unit: Unit) -> int:
        address = memory.take(unit.nbytes)
        self._device.synchronize()  # zeroed before it is filled, on the other stream
        self._device.copy_in(address, self.machine.store.address(unit), unit.nbytes)
        self._device.synchronize()
        return address

    def _address(self, unit: Unit, role: str) -> int:
        return self._weights[unit.index] + unit.slice(role).offset

    def _buffer_bytes(self) -> int:
        return self.machine.workspace().buffers

    def _let_go(self) -> None:
        self._forward = None

    def _running(self) -> DeviceForward:
        if self._forward is None:
            raise DeviceError("the plain loop is closed")
        return self._forward
