"""The host machine: a GGUF model in float32, host memory as the device, ONNX Runtime's CPU kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.decode.forward import AddressOf, Buffers, Forward, KvView, PassShape
from engine.decode.kernels import Kernels, available_threads
from engine.decode.logits import digest, pick
from engine.device.host import HostDevice
from engine.device.link import Link, pace
from engine.machine.host_speeds import MOST_BYTES, measure_speeds
from engine.machine.protocol import Workspace
from engine.memory.managing import Speeds
from engine.model.gguf_file import open_gguf
from engine.model.spec import read_spec
from engine.model.tokenizer import read_tokenizer
from engine.weights.layout import Unit, build_units
from engine.weights.store import ITEMSIZE, WeightStore

_PAGE = os.sysconf("SC_PAGESIZE")

SCRATCH_FIXED = 2 << 20
"""Kernel scratch that does not depend on shapes: attention tiles, packing panels, allocator rounding."""

# A managed run holds at most its limit; what is over leaves room for rounding to granules.
_CAPACITY_SLACK = 64 << 20


class HostMachine:
    """A :class:`engine.machine.protocol.Machine` on host memory."""

    kind = "host"
    predicted = False
    scratch_in_process = True
    recorder = None
    itemsize = ITEMSIZE

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.file = open_gguf(Path(config.model.path))
        self.spec = read_spec(self.file)
        self.tokenizer = read_tokenizer(self.file)
        self.end_ids = self.tokenizer.eos_ids
        chat = config.workload.template == "model"
        texts = [self.tokenizer.chat(prompt) if chat else prompt for prompt in config.workload.prompts]
        self.prompts = [self.tokenizer.encode(text) for text in texts]
        self.units = build_units(self.spec, ITEMSIZE)
        self.threads = config.device.threads or available_threads()
        self.store = WeightStore(self.units, self.spec)
        self._link = Link(config.device.copy_rate, config.device.in_place_rate)
        self.device = HostDevice(config.device.granule_bytes, self._capacity(), self._link)
        self._shape = PassShape(len(self.prompts), config.prefill_chunk, config.max_context)

    def workspace(self) -> Workspace:
        spec, tokens = self.spec, max(self._shape.rows, self._shape.chunk)
        widths = 6 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 5 * spec.inner
        scratch = tokens * widths * ITEMSIZE + SCRATCH_FIXED
        return Workspace(Buffers.nbytes(spec, self._shape), scratch)

    def speeds(self) -> Speeds:
        limit = self._config.device.limit_bytes
        return measure_speeds(self.device, self._link, MOST_BYTES if limit is None else min(MOST_BYTES, limit))

    def load(self) -> None:
        self.store.load(self.file, self.threads)

    def compute(self, address: AddressOf, kv: KvView, buffers: int) -> HostCompute:
        kernels = Kernels(self.spec, self.threads)
        block = Buffers(self.spec, self._shape, buffers)
        forward = Forward(kernels, self.spec, self.units, address, block, self._shape, kv)
        near = tuple(self._near_bytes(unit, address) for unit in self.units)
        return HostCompute(forward, self.store, kernels.provider, self._link, near)

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def record(self) -> dict[str, Any]:
        return {"digest": self.file.header_digest, "file_bytes": self.file.file_bytes}

    def _near_bytes(self, unit: Unit, address: AddressOf) -> int:
        """Weight bytes of a unit that its kernel reads in the store."""
        here = self.store.address(unit)
        return sum(part.nbytes for part in unit.slices if address(unit, part.role) == here + part.offset)

    def _capacity(self) -> int:
        limit = self._config.device.limit_bytes
        if limit is None:
            kv = self.spec.kv_bytes_per_token(ITEMSIZE) * len(self.prompts) * self._config.max_context
            limit = self.store.weight_bytes + kv
        return limit + _CAPACITY_SLACK


class HostCompute:
    """A :class:`engine.machine.protocol.Compute`: embeddings and logits pass through host memory.

    ``near`` are the bytes of each unit that its kernel reads in place; a link holds those reads to its rate.
    """

    lag = 0

    def __init__(
        self, forward: Forward, store: WeightStore, provider: str, link: Link, near: tuple[int, ...]
    ) -> None:  # fmt: skip
        self._forward, self._store, self.provider = forward, store, provider
        self._link, self._near = link, near
        held = link.in_place is not None and any(near)
        self.run_prefill = self._run_prefill if held else forward.run_prefill
        self.run_decode = self._run_decode if held else forward.run_decode
        self.scratch_bytes = 0
        self._before: int | None = None

    @property
    def rebinds(self) -> int:
        return self._forward.rebinds

    def begin_prefill(self, row: int, tokens: Sequence[int], past: int) -> None:
        self._watch_scratch()
        self._forward.begin_prefill(row, self._store.embed(list(tokens)), past)

    def begin_decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        self._watch_scratch()
        self._forward.begin_decode(self._store.embed(list(tokens)), list(lengths))

    def sent(self) -> None:
        """The pass is over by now. What it left allocated is kernel scratch; what is kept of it comes later."""
        if self._before is not None:
            self.scratch_bytes += max(0, private_bytes() - self._before)
            self._before = None

    def _watch_scratch(self) -> None:
        if self._before is None:
            self._before = private_bytes()

    def close(self) -> None:
        """Kernels hold nothing of the device."""

    def _run_prefill(self, unit: Unit, row: int, count: int, *, last_row: bool) -> None:
        began = time.perf_counter()
        self._forward.run_prefill(unit, row, count, last_row=last_row)
        self._hold(unit, began)

    def _run_decode(self, unit: Unit) -> None:
        began = time.perf_counter()
        self._forward.run_decode(unit)
        self._hold(unit, began)

    def _hold(self, unit: Unit, began: float) -> None:
        """Let the reads in place take as long as over the link; the kernel's time for that share counts towards it."""
        near, now = self._near[unit.index], time.perf_counter()
        pace(near, self._link.in_place, now - (now - began) * near / unit.weight_bytes)

    def results(self, generation: int, step: int) -> tuple[list[int], list[str]]:
        logits = self._forward.logits()
        return pick(logits, generation, step), digest(logits)


def private_bytes() -> int:
    """Resident memory of this process that is its own: neither files nor the device's shared memory."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE
