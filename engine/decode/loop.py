"""The greedy decode loop: prefill row by row in chunks, then one token a row and step, KV growing as it must."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from engine.counters import Window
from engine.decode.executor import Executor
from engine.decode.recordings import Step
from engine.kv.arena import Growth
from engine.machine.protocol import Compute
from engine.memory.ledger import KV, WEIGHTS, WORKSPACE

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
class MemoryAt:
    """Committed bytes by holder, and what the device really held, once a step's tokens were taken."""

    generation: int
    step: int
    tokens: int
    weights: int
    kv: int
    workspace: int
    resident: int


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
        self.memory: list[MemoryAt] = []
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
        """Make a generation step by step; yields the number of each step once its tokens are taken.

        Where results come back late (``Compute.lag``), passes are sent ahead of the tokens that are taken.
        """
        engine, index = self._engine, generation.index
        window = self.window if generation.measured else Window()
        rebinds = self._compute.rebinds
        self._return_kv(window)
        started = time.perf_counter()
        lengths = self._prefill(index, prompts, window, on_step)
        generation.prefill_s = time.perf_counter() - started
        self._take(generation, 0)
        generation.ttft_s = time.perf_counter() - started
        self._note_memory(generation, 0, max(lengths))
        yield 0
        sent, under_way = 0, deque[BucketTraffic]()
        began = time.perf_counter()
        while True:
            if sent + 1 < engine.config.workload.tokens and None in generation.stopped:
                sent += 1
                if on_step is not None:
                    on_step(index, sent, "decode")
                self._grow(index, sent, max(lengths) + 1, lengths, window)
                self._strike(index, sent)
                under_way.append(self._decode(generation, lengths, window))
                if len(under_way) <= self._compute.lag:
                    continue
            elif not under_way:
                break
            taken = sent + 1 - len(under_way)
            emitted = self._take(generation, taken)
            window.emitted_tokens += emitted
            under_way.popleft().tokens += emitted
            if not emitted:  # sent before it was known that every row had ended
                continue
            generation.itl_s.append(time.perf_counter() - began)
            self._note_memory(generation, taken, max(lengths))
            yield taken
            began = time.perf_counter()
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
        self._compute.sent()
        window.device_prefill_htod += device.counters.htod_bytes - before
        return lengths

    def _decode(self, generation: Generation, lengths: list[int], window: Window) -> BucketTraffic:
        """Send a decode pass; what it costs is counted under the bucket returned."""
        engine, device = self._engine, self._engine.device
        before, counted = device.counters.htod_bytes, window.decode.htod_bytes
        evicted = engine.residency.evictions
        self._compute.begin_decode([row[-1] for row in generation.tokens], lengths)
        step_kind = self._executor.step(self._compute.run_decode, window.decode, engine.kv.capacity)
        self._compute.sent()
        window.captures += step_kind is Step.RECORDED
        window.replays += step_kind is Step.REPLAYED
        window.fallbacks += step_kind is Step.FELL_BACK
        window.device_decode_htod += device.counters.htod_bytes - before
        window.evictions += engine.residency.evictions - evicted
        for row in range(len(lengths)):
            if generation.stopped[row] is None:
                lengths[row] += 1
        allowance = engine.governor.allowance(WEIGHTS)
        window.decode_steps += 1
        window.floor_bytes += max(0, engine.weight_bytes - allowance)
        bucket = self._bucket(generation, allowance)
        bucket.steps += 1
        bucket.htod_bytes += window.decode.htod_bytes - counted
        return bucket

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
        evicted = engine.residency.evictions
        growth = engine.kv.ensure(tokens, lengths)
        if growth is None:
            return
        window.growth_events += 1
        self._executor.recordings.grown()
        window.invalidations += self._executor.recordings.wanted
        if growth.reclaimed_from_weights:
            window.reclaim_events += 1
            window.evictions += engine.residency.evictions - evicted
            self._executor.invalidate()
        event = GrowthAt(index, step, growth)
        self.growths.append(event)
        if self.on_growth is not None:
            self.on_growth(event)

    def _return_kv(self, window: Window) -> None:
        """Between generations: KV gives its growth back, and weights come back to where they started."""
        engine = self._engine
        returned = engine.kv.reset(engine.plan.kv_open)
        before = engine.device.counters.htod_bytes
        if returned and engine.governor.lend(WEIGHTS, engine.plan.weights):
            window.relends += 1
            self._executor.invalidate()
        # Under a replacement policy pages have moved even where no memory did.
        engine.residency.promote(engine.governor.allowance(WEIGHTS))
        window.promote_htod_bytes += engine.device.counters.htod_bytes - before
        engine.pool.trim()

    def _note_memory(self, generation: Generation, step: int, tokens: int) -> None:
        if not generation.measured:
            return
        weights, kv, workspace = (self._engine.ledger.holders[name].committed for name in (WEIGHTS, KV, WORKSPACE))
        resident = self._engine.device.resident_bytes()
        self.memory.append(MemoryAt(generation.index, step, tokens, weights, kv, workspace, resident))

    def _bucket(self, generation: Generation, allowance: int) -> BucketTraffic:
        index = generation.index
        capacity = self._engine.kv.capacity
        last = self.buckets[-1] if self.buckets else None
        if last is None or (last.generation, last.capacity_tokens) != (index, capacity):
            last = BucketTraffic(index, capacity, allowance)
            if generation.measured:
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
