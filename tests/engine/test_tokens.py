"""The main promise: the same tokens, and the same logits to the bit, at every budget, policy and bucket."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.engine import Engine
from engine.errors import CapacityUnavailable, InvalidRequest
from engine.faults import Faults
from engine.reference import PlainLoop
from engine.weights.policies import DYNAMIC
from tests.tiny_model import Tiny, judge

PROMPTS = ("Hello", "ab", "What(is)this?")
GRANULE = 4096
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny().write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def configure(model: Path, limit: int | None, **changes: object) -> EngineConfig:
    policy = changes.pop("policy", PolicyConfig(lending=True))
    prompts = changes.pop("prompts", PROMPTS)
    tokens = changes.pop("tokens", 12)
    ignore_eos = changes.pop("ignore_eos", True)
    defaults: dict[str, object] = {"max_context": 1024, "warmup": 1, "measured": 1, "prefill_chunk": 4}
    return EngineConfig(
        model=ModelConfig(str(model)),
        workload=WorkloadConfig(tuple(prompts), tokens=tokens, ignore_eos=ignore_eos),
        device=DeviceConfig(limit_bytes=limit, granule_bytes=GRANULE, threads=2),
        policy=policy,
        **{**defaults, **changes},
    )


@pytest.fixture(scope="module")
def reference(model: Path) -> PlainLoop:
    return PlainLoop(configure(model, None))


def test_the_reference_agrees_with_a_forward_pass_outside_the_engine(reference: PlainLoop) -> None:
    made = reference.generate()
    assert made.tokens == [judge(Tiny(), prompt, 12) for prompt in reference.prompts]


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    import numpy as np

    tiny = Tiny(tensors={"output.weight": np.random.default_rng(5).standard_normal((96, 64)).astype(np.float32)})
    config = configure(tiny.write(tmp_path / "untied.gguf"), 4 * MIB, prompts=("Hello",))
    with Engine(config) as engine:
        assert [g.tokens[0] for g in engine.run()] == [judge(tiny, engine.prompts[0], 12)] * 2


# KV of three rows takes 3 MiB at the full context; weights are 0.6 MB: the smaller limits stream.
LIMITS = [None, 9 * MIB, 5_900_000, 5_850_000, 5_800_000]
POLICIES = {
    "static": PolicyConfig(),
    "elastic": PolicyConfig(lending=True),
    "elastic, headroom": PolicyConfig(lending=True, headroom_bytes=MIB),
    "one ring slot": PolicyConfig(ring_slots=1),
    "three ring slots": PolicyConfig(ring_slots=3),
    "stable_resident": PolicyConfig(residency="stable_resident"),
    **{name: PolicyConfig(residency=name) for name in DYNAMIC},
    "unmanaged": PolicyConfig(managed=False, commits_on_demand=False, cold="in_place"),
    "full KV at load": PolicyConfig(commits_on_demand=False),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_tokens_and_logits_do_not_depend_on_the_policy(
    model: Path, reference: PlainLoop, policy: PolicyConfig, limit: int | None
) -> None:
    expected = reference.generate()
    with Engine(configure(model, limit, policy=policy)) as engine:
        for made in engine.run():
            assert made.tokens == expected.tokens
            assert made.digests == expected.digests
        assert engine.ledger.clean()
        assert engine.loop.window.accounting(engine.weight_bytes)["ok"]
        assert engine.device.resident_bytes() == engine.ledger.committed


def test_budgets_below_the_weights_stream_and_the_smallest_limits_above_do(model: Path) -> None:
    with Engine(configure(model, 5_800_000, policy=PolicyConfig())) as engine:
        list(engine.run())
        assert engine.loop.window.decode.htod_bytes > 0
        assert engine.plan.weights < engine.weight_bytes


def test_a_row_does_not_depend_on_its_neighbours(model: Path) -> None:
    together = PlainLoop(configure(model, None)).generate().tokens
    for row, prompt in enumerate(PROMPTS):
        alone = PlainLoop(configure(model, None, prompts=(prompt,))).generate().tokens[0]
        pair = PlainLoop(configure(model, None, prompts=(prompt, prompt))).generate().tokens
        assert alone == together[row] == pair[0] == pair[1]


def test_prefill_chunks_of_any_size_give_the_same_tokens(model: Path) -> None:
    made = [PlainLoop(configure(model, None, prefill_chunk=size)).generate().tokens for size in (1, 3, 4, 64)]
    assert made[1:] == made[:1] * 3


def test_rows_stop_on_their_own_end_token_and_others_go_on(model: Path) -> None:
    free = PlainLoop(configure(model, None, tokens=30)).generate().tokens
    # End on a token that one row emits early and another late or never.
    end = free[0][3]
    tiny = Tiny(metadata={"tokenizer.ggml.eos_token_id": end})
    path = tiny.write(model.parent / "ends.gguf")
    config = configure(path, 5_800_000, tokens=30, ignore_eos=False)
    with Engine(config) as engine:
        made = list(engine.run())[-1]
    for row, tokens in enumerate(free):
        wanted = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert made.tokens[row] == wanted
        assert made.stopped[row] == (end if end in tokens else None)
    assert made.tokens == PlainLoop(config).generate().tokens


def growing(model: Path, limit: int, **changes: object) -> EngineConfig:
    """Three buckets (256, 512, 1024) under a limit that a full KV and all weights do not fit."""
    return configure(model, limit, tokens=560, prompts=("Hello", "ab"), warmup=1, measured=1, **changes)


GROWING_LIMIT = 4_750_000


@pytest.fixture(scope="module")
def long_reference(model: Path) -> PlainLoop:
    return PlainLoop(growing(model, GROWING_LIMIT))


@pytest.mark.parametrize("residency", ["hotset", "stable_resident", *DYNAMIC])
def test_growth_takes_memory_back_from_weights_and_changes_no_token(
    model: Path, long_reference: PlainLoop, residency: str
) -> None:
    expected = long_reference.generate()
    policy = PolicyConfig(lending=True, residency=residency)
    with Engine(growing(model, GROWING_LIMIT, policy=policy)) as engine:
        at_load = engine.residency.mapped_physical
        for made in engine.run():
            assert made.tokens == expected.tokens
            assert made.digests == expected.digests
            assert engine.ledger.clean()
            assert engine.device.resident_bytes() == engine.ledger.committed
            assert engine.residency.mapped_physical < at_load
        growths = [event.growth for event in engine.loop.growths if event.generation == 1]
        assert [g.to_tokens for g in growths] == [512, 1024]
        assert any(g.reclaimed_from_weights for g in growths)
        for growth in growths:
            assert growth.reclaimed_from_weights == growth.need_bytes - growth.from_own - growth.from_unassigned
            assert growth.budget_before - growth.budget_after == growth.reclaimed_from_weights
        assert engine.loop.window.relends == 1
        assert engine.loop.window.accounting(engine.weight_bytes)["ok"]


def test_bucketed_growth_equals_full_preallocation(model: Path, long_reference: PlainLoop) -> None:
    policy = PolicyConfig(commits_on_demand=False)
    with Engine(growing(model, 9 * MIB, policy=policy)) as engine:
        assert [g.digests for g in engine.run()] == [long_reference.generate().digests] * 2
        assert engine.loop.window.growth_events == 0


@pytest.mark.parametrize("policy", [PolicyConfig(), PolicyConfig(ring_slots=1), PolicyConfig(ring_slots=3)])
def test_poisoned_ring_slots_change_nothing(model: Path, reference: PlainLoop, policy: PolicyConfig) -> None:
    with Engine(configure(model, 5_800_000, policy=policy), Faults(kind="poison_ring")) as engine:
        assert [g.digests for g in engine.run()] == [reference.generate().digests] * 2
        assert engine.loop.window.decode.htod_bytes > 0


def test_without_the_copies_the_tokens_are_wrong(model: Path, reference: PlainLoop) -> None:
    with Engine(configure(model, 5_800_000, policy=PolicyConfig()), Faults(kind="skip_copy")) as engine:
        assert [g.tokens for g in engine.run()][1] != reference.generate().tokens
        assert not engine.loop.window.accounting(engine.weight_bytes)["ok"]


def test_nothing_stays_allocated_after_close(model: Path) -> None:
    engine = Engine(configure(model, 5_800_000, policy=PolicyConfig()))
    list(engine.run())
    engine.close()
    assert engine.ledger.committed == 0
    assert engine.device.counters.live_granules == 0


def test_weights_read_in_place_cannot_be_called_back(model: Path) -> None:
    policy = PolicyConfig(lending=True, cold="in_place", residency="stable_resident")
    with pytest.raises(InvalidRequest, match="cold=in_place with lending"):
        Engine(growing(model, GROWING_LIMIT, policy=policy))


def test_a_refused_limit_names_one_that_works(model: Path) -> None:
    config = configure(model, 1 * MIB, policy=PolicyConfig(ring_slots=3))
    with pytest.raises(CapacityUnavailable, match="would do") as caught:
        Engine(config)
    named = re.search(r"device.limit=([0-9,]+)B would do", str(caught.value))
    assert named is not None
    limit = int(named[1].replace(",", ""))
    Engine(dataclasses.replace(config, device=dataclasses.replace(config.device, limit_bytes=limit))).close()
    with pytest.raises(CapacityUnavailable):
        Engine(dataclasses.replace(config, device=dataclasses.replace(config.device, limit_bytes=limit - GRANULE)))


def test_a_context_beyond_the_models_is_refused_by_engine_and_reference(model: Path) -> None:
    config = configure(model, 9 * MIB, max_context=5000)
    for opened in (Engine, PlainLoop):
        with pytest.raises(InvalidRequest, match="beyond the model's context of 4,096"):
            opened(config)


def test_scratch_is_what_kernels_keep_and_not_what_the_run_records(model: Path) -> None:
    config = configure(model, 9 * MIB, prompts=("Hello",), tokens=200, warmup=0, measured=20)
    with Engine(config) as engine:
        list(engine.run())
        assert engine.compute.scratch_bytes <= engine.machine.workspace().scratch
