"""The engine: a model on a device under a memory policy, ready to generate.

>>> with Engine(config) as engine:                          # doctest: +SKIP
...     for generation in engine.run():
...         print(engine.machine.text(generation.tokens[0]))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.decode.executor import Executor
from engine.decode.loop import DecodeLoop, Generation
from engine.errors import CapacityUnavailable, InvalidRequest
from engine.faults import Faults
from engine.kv.arena import KvArena
from engine.machine.open import open_machine
from engine.memory.governor import Governor, Reclaimable
from engine.memory.ledger import KV, WEIGHTS, WORKSPACE, Ledger
from engine.memory.managing import Decision, decide
from engine.memory.pool import GranulePool
from engine.plan import MemoryPlan, Needs, check_lengths, plan_memory, stakes_of
from engine.weights.hotset import Hotset
from engine.weights.paged import Paged
from engine.weights.pager import Pager
from engine.weights.policies import DYNAMIC
from engine.weights.residency import Residency

OnPlan = Callable[["Engine"], None]


class Engine:
    """One loaded model. Use it as a context manager; :meth:`close` frees the device.

    Parameters
    ----------
    config
        What to run.
    faults
        A planted fault (tests only).
    on_plan
        Called once the plan stands and nothing has been allocated on the device.

    Raises
    ------
    EbbError
        A subclass that says what is wrong; nothing stays allocated.
    """

    def __init__(
        self,
        config: EngineConfig,
        faults: Faults | None = None,
        on_plan: OnPlan | None = None,
    ) -> None:
        self.config = config
        self.faults = faults or Faults()
        self._exit = ExitStack()
        started = time.perf_counter()
        self.machine = open_machine(config)
        self.device, self.store, self.units = self.machine.device, self.machine.store, self.machine.units
        self.spec, self.prompts = self.machine.spec, self.machine.prompts
        with self._exit:
            self._exit.callback(self.device.close)
            lengths = [len(prompt) for prompt in self.prompts]
            check_lengths(config, lengths)
            self.decision = self._decide(lengths)
            if not self.decision.managed:
                self.config = replace(config, policy=config.policy.unmanaged())
            self.pool = GranulePool(self.device)
            self.ledger = Ledger(0)
            self.residency = self._open_residency()
            self.plan = self._make_plan()
            self.governor = self._open_governor()
            if on_plan is not None:
                on_plan(self)
            self.machine.load()
            self._load()
            self.load_s = time.perf_counter() - started
            self._exit = self._exit.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything on the device."""
        self._exit.close()

    @property
    def weight_bytes(self) -> int:
        """Bytes a decode step reads: W."""
        return self.store.weight_bytes

    def run(self, on_step: Callable[[int, int, str], None] | None = None) -> Iterator[Generation]:
        """Generate ``warmup + measured`` times with the configured prompts; each starts from the same placement."""
        for index in range(self.config.warmup + self.config.measured):
            yield self.loop.generate(
                index,
                self.prompts,
                measured=index >= self.config.warmup,
                on_step=on_step,
            )

    def stream(self, row: int = 0) -> Iterator[str]:
        """One measured generation of the configured prompts, yielding the text of ``row`` as it grows."""
        shown, tokens = "", list[int]()
        for picked in self.loop.steps(self.prompts):
            token = picked[row]
            if token is None or (token in self.machine.end_ids and not self.config.workload.ignore_eos):
                continue
            tokens.append(token)
            text = self.machine.text(tokens)
            # A character may take several tokens; what is cut off ends in the replacement character.
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text

    def effective_policy(self) -> dict[str, Any]:
        """What took effect, as the policy gate compares it with what was asked."""
        policy, plan = self.config.policy, self.plan
        on_demand = self.ledger.holders[KV].committed == plan.kv_floor and plan.kv_open == 1
        return {
            "managed": policy.managed,
            "manage": policy.manage,
            "manage_reason": self.decision.reason,
            "commits_on_demand": on_demand,
            "lending": not plan.budget.reasons,
            "residency": self.residency.policy,
            "cold": "in_place" if self._reads_in_place() else "copy",
            "ring_slots": self.residency.slots,
            "capture": self.recordings.active,
            "budget_bytes": plan.budget.bytes,
            "bound_by": plan.budget.bound_by,
            "execution_provider": self.compute.provider,
            "decline_reasons": [*plan.budget.reasons, *self.recordings.reasons],
        }

    def capture_record(self) -> dict[str, Any]:
        """What became of every decode step since the load, as JSON types."""
        made = self.recordings
        return {
            "wanted": made.wanted,
            "captures": made.captures,
            "replays": made.replays,
            "fallbacks": made.fallbacks,
            "invalidations": made.invalidations,
            "reasons": list(made.reasons),
        }

    def _decide(self, lengths: list[int]) -> Decision:
        """Whether to manage; measures the device only where that is asked for."""
        config, machine = self.config, self.machine
        if config.policy.manage == "always" or not config.policy.managed or config.device.limit_bytes is None:
            return Decision(config.policy.managed, "as asked")
        stakes = stakes_of(self.spec, config, machine.workspace(), machine.itemsize, self.units, lengths)
        return decide(stakes, machine.speeds)

    def _reads_in_place(self) -> bool:
        return isinstance(self.residency, Paged) and self.residency.cold == "in_place"

    def _open_residency(self) -> Residency:
        policy = self.config.policy
        residency: Residency
        if policy.cold == "in_place" or policy.residency == "stable_resident":
            residency = Paged(self.device, self.store, self.ledger, self.pool, policy.cold, policy.pin)
        elif policy.residency in DYNAMIC:
            residency = Pager(self.device, self.store, self.ledger, self.pool, policy.residency, policy.pin)
        elif policy.pin:
            raise InvalidRequest("policy.pin keeps whole tensors; policy=hotset keeps parts of them")
        else:
            residency = Hotset(self.device, self.store, self.ledger, self.pool, policy.ring_slots)
        self._exit.callback(residency.close)
        return residency

    def _make_plan(self) -> MemoryPlan:
        residency, machine = self.residency, self.machine
        needs = Needs(residency.least_bytes, residency.full_bytes, machine.itemsize, machine.workspace())
        try:
            return plan_memory(self.spec, self.config, needs)
        except CapacityUnavailable as error:
            if not self.config.policy.pin:
                raise
            raise CapacityUnavailable(f"{error}; policy.pin={','.join(self.config.policy.pin)} is part of it") from None

    def _open_governor(self) -> Governor:
        plan = self.plan
        self.ledger.limit = plan.limit
        governor = Governor(self.ledger, plan.headroom, self.device.granularity)
        governor.register(WORKSPACE, plan.workspace_charge)
        governor.register(KV, plan.kv_floor if plan.kv_open == 1 else plan.kv_full)
        governor.register(
            WEIGHTS,
            plan.weights,
            Reclaimable(0, plan.weights_floor, self.residency.reclaim),
        )
        return governor

    def _load(self) -> None:
        plan = self.plan
        self.kv = KvArena(self.device, self.governor, self.pool, plan.kv_layout)
        self._exit.callback(self.kv.close)
        self.kv.open(plan.kv_open)
        base = self._open_workspace(plan.workspace_buffers)
        self.residency.load(plan.weights)
        self.compute = self.machine.compute(self.residency.address, self.kv, base)
        self._exit.callback(self.compute.close)
        recorder = self.machine.recorder if self.config.device.capture else None
        if recorder is not None:
            self._exit.callback(recorder.close)
        executor = Executor(self.device, self.residency, self.units, self.faults, recorder)
        self.recordings = executor.recordings
        self.loop = DecodeLoop(self, self.compute, executor)
        self.ledger.reconcile(self.device.counters.live_granules * self.device.granularity)

    def _open_workspace(self, nbytes: int) -> int:
        """Map the block that holds activations; its address."""
        base = self.device.reserve(nbytes)
        granules = self.device.create(nbytes // self.device.granularity)
        self.device.map(base, granules)
        self.ledger.commit(WORKSPACE, nbytes)

        def close() -> None:
            self.device.unmap(base, len(granules))
            self.device.release(granules)
            self.device.unreserve(base, nbytes)
            self.ledger.release(WORKSPACE, nbytes)

        self._exit.callback(close)
        return base
