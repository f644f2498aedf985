"""The greedy decode loop: prefill row by row in chunks, then one token a row and step, KV growing as it must."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from engine.counters import Window
from engine.decode.executor import Executor
from engine.kv.arena import Growth
from engine.machine.protocol import Compute
from engine.memory.ledger import WEIGHTS

if TYPE_CHECKING:
    from engine.engine import Engine

OnStep = Callable[[int, int, str], None]
"""Called with generation, tokens made so far, and the phase ("prefill" or "decode")."""


@dataclass
class Generation:
    """One generation: tokens and logits digests by row, and when things happened (seconds)."""

    index: int
    measured: bool
    tokens: list[list[int]]
    digests: list[list[str]]
    stopped: list[int | None]
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)

    @staticmethod
    def empty(index: int, measured: bool, rows: int) -> Generation:
        """A generation of ``rows`` rows before its first token."""
        return Generation(
            index,
            measured,
            [[] for _ in range(rows)],
            [[] for _ in range(rows)],
            [None] * rows,
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all rows per second of decode; None when decode took no step."""
        total = sum(self.itl_s)
        emitted = sum(len(row) - 1 for row in self.tokens)
        return emitted / total if total else None


@dataclass
class BucketTraffic:
    """What decode steps cost while one bucket was in force."""

    generation: int
    capacity_tokens: int
    budget_bytes: int
    steps: int = 0
    tokens: int = 0
    htod_bytes: int = 0


@dataclass(frozen=True)
class GrowthAt:
    """A growth, and the token that could not be made without it."""

    generation: int
    step: int
    growth: Growth


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """The prefill chunks of a prompt: (start, tokens)."""
    return [(start, min(size, length - start)) for start in range(0, length, size)]


class DecodeLoop:
    """Generations of one engine. ``window`` sums up the measured ones."""

    def __init__(self, engine: Engine, compute: Compute, executor: Executor) -> None:
        self._engine, self._compute, self._executor = engine, compute, executor
        self.window = Window()
        self.growths: list[GrowthAt] = []
        self.buckets: list[BucketTraffic] = []
        self.on_growth: Callable[[GrowthAt], None] | None = None

    def generate(
        self,
        index: int,
        prompts: Sequence[list[int]],
        measured: bool = True,
        on_step: OnStep | None = None,
    ) -> Generation:
        """One generation of ``workload.tokens`` tokens a row.

        Raises
        ------
        InvalidLogits
            When a pass gives logits that are not finite; no token is taken from them.
        CapacityUnavailable, DeviceError
            When KV cannot grow.
        """
        generation = Generation.empty(index, measured, len(prompts))
        for _ in self._advance(generation, prompts, on_step):
            pass
        return generation

    def steps(self, prompts: Sequence[list[int]]) -> Iterator[list[int | None]]:
        """One measured generation as it is made: the token of each row at each step, None for a row that has ended."""
        generation = Generation.empty(0, True, len(prompts))
        for step in self._advance(generation, prompts, None):
            yield [row[step] if len(row) > step else None for row in generation.tokens]

    def _advance(
        self,
        generation: Generation,
        prompts: Sequence[list[int]],
        on_step: OnStep | None,
    ) -> Iterator[int]:
        """Make a generation step by step; yields the number of each step once its tokens are taken."""
        engine, index = self._engine, generation.index
        window = self.window if generation.measured else Window()
        rebinds = self._compute.rebinds
        self._return_kv(window)
        started = time.perf_counter()
        lengths = self._prefill(index, prompts, window, on_step)
        generation.prefill_s = time.perf_counter() - started
        self._take(generation, 0)
        generation.ttft_s = time.perf_counter() - started
        yield 0
        for step in range(1, engine.config.workload.tokens):
            if all(stop is not None for stop in generation.stopped):
                break
            if on_step is not None:
                on_step(index, step, "decode")
            began = time.perf_counter()
            self._grow(index, step, max(lengths) + 1, lengths, window)
            self._strike(index, step)
            self._decode(generation, step, lengths, window)
            generation.itl_s.append(time.perf_counter() - began)
            yield step
        if on_step is not None:
            on_step(index, max(map(len, generation.tokens)), "decode")
        window.rebinds += self._compute.rebinds - rebinds
        engine.ledger.reconcile(engine.device.counters.live_granules * engine.device.granularity)

    def _prefill(
        self,
        index: int,
        prompts: Sequence[list[int]],
        window: Window,
        on_step: OnStep | None,
    ) -> list[int]:
        engine, device = self._engine, self._engine.device
        lengths = [0] * len(prompts)
        before = device.counters.htod_bytes
        for row, prompt in enumerate(prompts):
            for start, count in chunks(len(prompt), engine.config.prefill_chunk):
                if on_step is not None:
                    on_step(index, 0, "prefill")
                self._grow(index, 0, start + count, lengths, window)
                self._compute.begin_prefill(row, prompt[start : start + count], start)
                last = start + count == len(prompt) and row == len(prompts) - 1
                run_unit = partial(self._compute.run_prefill, row=row, count=count, last_row=last)
                self._executor.run(with_head=last, run_unit=run_unit, tally=window.prefill)
                lengths[row] += count
        window.device_prefill_htod += device.counters.htod_bytes - before
        return lengths

    def _decode(self, generation: Generation, step: int, lengths: list[int], window: Window) -> None:
        engine, device = self._engine, self._engine.device
        before, counted = device.counters.htod_bytes, window.decode.htod_bytes
        self._compute.begin_decode([row[-1] for row in generation.tokens], lengths)
        self._executor.run(with_head=True, run_unit=self._compute.run_decode, tally=window.decode)
        window.device_decode_htod += device.counters.htod_bytes - before
        for row in range(len(lengths)):
            if generation.stopped[row] is None:
                lengths[row] += 1
        emitted = self._take(generation, step)
        allowance = engine.governor.allowance(WEIGHTS)
        window.decode_steps += 1
        window.emitted_tokens += emitted
        window.floor_bytes += max(0, engine.weight_bytes - allowance)
        if generation.measured:
            bucket = self._bucket(generation.index, allowance)
            bucket.steps += 1
            bucket.tokens += emitted
            bucket.htod_bytes += window.decode.htod_bytes - counted

    def _take(self, generation: Generation, step: int) -> int:
        """Take one token for each row that goes on; return how many rows did."""
        picked, digests = self._compute.results(generation.index, step)
        workload, emitted = self._engine.config.workload, 0
        for row, token in enumerate(picked):
            if generation.stopped[row] is not None:
                continue
            generation.tokens[row].append(token)
            generation.digests[row].append(digests[row])
            emitted += 1
            if not workload.ignore_eos and token in self._engine.machine.end_ids:
                generation.stopped[row] = token
        return emitted

    def _grow(self, index: int, step: int, tokens: int, lengths: list[int], window: Window) -> None:
        engine = self._engine
        growth = engine.kv.ensure(tokens, lengths)
        if growth is None:
            return
        window.growth_events += 1
        if growth.reclaimed_from_weights:
            window.reclaim_events += 1
            window.evictions += growth.reclaimed_from_weights // engine.device.granularity
            self._executor.invalidate()
        event = GrowthAt(index, step, growth)
        self.growths.append(event)
        if self.on_growth is not None:
            self.on_growth(event)

    def _return_kv(self, window: Window) -> None:
        """Between generations: KV gives its growth back, and weights come back to where they started."""
        engine = self._engine
        if not engine.kv.reset(engine.plan.kv_open):
            return
        before = engine.device.counters.htod_bytes
        if engine.governor.lend(WEIGHTS, engine.plan.weights):
            engine.residency.promote(engine.governor.allowance(WEIGHTS))
            window.relends += 1
            self._executor.invalidate()
        window.promote_htod_bytes += engine.device.counters.htod_bytes - before
        engine.pool.trim()

    def _bucket(self, index: int, allowance: int) -> BucketTraffic:
        capacity = self._engine.kv.capacity
        last = self.buckets[-1] if self.buckets else None
        if last is None or (last.generation, last.capacity_tokens) != (index, capacity):
            last = BucketTraffic(index, capacity, allowance)
            self.buckets.append(last)
        return last

    def _strike(self, index: int, step: int) -> None:
        engine, faults = self._engine, self._engine.faults
        if not faults.due(index, step):
            return
        skip = faults.granule * engine.device.granularity
        if faults.kv_range is not None:
            layer, values = divmod(faults.kv_range, 2)
            address = engine.kv.value_address(layer) if values else engine.kv.key_address(layer)
        else:
            unit = engine.units[faults.unit or 0]
            address = engine.residency.address(unit, unit.slices[0].role)
        faults.strike(engine.device, address + skip)
