"""Several copies of a model: requests are assigned to them, and get the tokens that they get from one copy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.interfaces import (
    BatchType,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.kv_cache.several_caches import CachesOfModels, caches_of_models
from max.pipelines.scheduler import ReplicaScheduler, SchedulerLimits, scheduler_of

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
WORDS = ["one", "two", "the sea", "def f(x):", "x = ", "Norway", "count to ten", "Hello"]


def pipeline_of(copies: int, **values: Any) -> Any:
    config = PipelineConfig(
        model_path=str(TINY), data_parallel_degree=copies, enable_prefix_caching=True,
        **{
            "max_length": 160, "max_batch_size": 4, "kv_cache_page_size": 16,
            # copies have smaller batches, whose sums some processors round otherwise
            "batch_invariant": True,
            **values,
        },
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config)[1]


@pytest.fixture(scope="module")
def one() -> Any:
    return pipeline_of(1)


@pytest.fixture(scope="module")
def two() -> Any:
    return pipeline_of(2)


def drawn_requests(pipeline: Any, seed: int, count: int) -> list[TextContext]:
    draw = random.Random(seed)
    contexts: list[TextContext] = []
    for index in range(count):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 25)))
        tokens = np.array(pipeline.tokenizer.encode_now(prompt)[:120])
        params = SamplingParams(
            temperature=draw.choice([0, 0.9]), top_k=draw.choice([1, 20]), seed=draw.getrandbits(32),
            max_new_tokens=draw.randint(1, 30), ignore_eos=draw.random() < 0.5,
        )  # fmt: skip
        contexts.append(
            TextContext(
                request_id=RequestID(f"r{index}"), tokens=tokens, sampling_params=params,
                max_length=len(tokens) + (params.max_new_tokens or 1), ignore_eos=params.ignore_eos,
                eos_token_ids=set(pipeline.tokenizer.eos_token_ids),
            )
        )  # fmt: skip
    return contexts


def generated(
    pipeline: Any, contexts: list[TextContext], seed: int = 0, reader: StepReader | None = None
) -> dict[RequestID, list[int]]:
    """The tokens of requests that arrive between steps; some are cancelled."""
    draw, waiting = random.Random(seed), list(contexts)
    engine = Engine(pipeline, limits_of(pipeline), reader)
    tokens: dict[RequestID, list[int]] = {each.request_id: [] for each in contexts}
    while waiting or not engine.idle:
        for _ in range(draw.randint(0, 3)):
            if waiting:
                engine.submit(waiting.pop(0))
        for outcome in engine.step():
            assert isinstance(outcome, TextGenerationOutput), outcome
            tokens[outcome.request_id] += outcome.tokens
    return tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_two_copies_generate_what_one_does(one: Any, two: Any, seed: int) -> None:
    expected = generated(one, drawn_requests(one, seed, 12), seed)
    contexts = drawn_requests(two, seed, 12)
    assert generated(two, contexts, seed) == expected
    assert all(each.is_done for each in contexts)
    first, second = (replica.cache for replica in two.replicas)
    assert first.device.id == 0 and second.device.id == 1
    for cache in (first, second):
        assert cache.used_pages == 0 and cache.opened_tokens > 0
        cache.pages.check()


def test_tokens_that_are_delivered_during_a_call_come_once(one: Any, two: Any) -> None:
    expected = generated(one, drawn_requests(one, 3, 8), 3)
    tokens: dict[RequestID, list[int]] = {}

    def deliver(outputs: list[TextGenerationOutput]) -> None:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)

    reader = StepReader(deliver)
    try:
        contexts = drawn_requests(two, 3, 8)
        engine = Engine(two, limits_of(two), reader)
        for each in contexts:
            engine.submit(each)
        while not engine.idle:
            for outcome in engine.step():
                assert isinstance(outcome, TextGenerationOutput)
                tokens.setdefault(outcome.request_id, []).extend(outcome.tokens)
    finally:
        reader.close()
        two.read_steps(None)
    assert tokens == expected


def test_an_interrupt_in_the_second_copy_keeps_the_tokens_of_the_first(
    one: Any, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generated(one, drawn_requests(one, 4, 6), 4)
    contexts = drawn_requests(two, 4, 6)
    engine = Engine(two, limits_of(two))
    tokens: dict[RequestID, list[int]] = {each.request_id: [] for each in contexts}
    for each in contexts:
        engine.submit(each)
    execute, calls = two.replicas[1].execute, 0

    def interrupted(*values: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise KeyboardInterrupt
        return execute(*values)

    monkeypatch.setattr(two.replicas[1], "execute", interrupted)
    stops = 0
    while not engine.idle:
        try:
            outcomes = engine.step()
        except KeyboardInterrupt:
            stops += 1
            continue
        for outcome in outcomes:
            assert isinstance(outcome, TextGenerationOutput)
            tokens[outcome.request_id] += outcome.tokens
    assert stops and tokens == expected


def test_pages_claimed_by_hand(two: Any) -> None:
    """`kv_manager.claim(context, replica_idx)`, and a batch with a dictionary for each copy."""
    caches, mine = two.kv_manager, drawn_requests(two, 5, 3)
    assert [caches] == two.kv_managers and len(caches.replicas) == 2
    for index, each in zip((1, 0, 1), mine, strict=True):
        caches.claim(each, replica_idx=index)
        caches.alloc(each)
        assert caches.cache_of(each) is two.replicas[index].cache
        with pytest.raises(ValueError, match="already"):
            caches.claim(each, 1 - index)
    with pytest.raises(ValueError, match="the replica is 2; there are 2"):
        caches.claim(drawn_requests(two, 6, 1)[0], 2)
    with pytest.raises(ValueError, match="requests of 2 copies"):
        caches.get_runtime_inputs(mine)
    assert caches.get_runtime_inputs(mine[::2]).cache_lengths.device.id == 1
    batches = [{mine[1].request_id: mine[1]}, {each.request_id: each for each in mine[::2]}]
    result = two.execute(TextGenerationInputs(batches, 1))
    assert set(result) == {each.request_id for each in mine}
    with pytest.raises(ValueError, match="requests of 2 copies"):
        two.prepare_batch(batches, 1)
    with pytest.raises(ValueError, match="a batch for 3 copies of the model; there are 2"):
        two.execute(TextGenerationInputs([*batches, {}], 1))
    caches.step(mine)
    assert caches.used_pages == sum(replica.cache.used_pages for replica in two.replicas) > 0
    for each in mine:
        caches.release(each)
        assert not caches.contains(each.request_id)
    with pytest.raises(KeyError, match="no copy of the model has a page table"):
        caches.release(mine[0])
    assert caches.used_pages == 0


def long_request(name: str, tokens: Any) -> TextContext:
    return TextContext(request_id=RequestID(name), tokens=np.array(tokens), max_length=150)


def test_a_request_goes_where_few_others_or_its_first_tokens_are(two: Any) -> None:
    two.forget_prefixes()
    scheduler = scheduler_of(caches_of_models(two.kv_managers), limits_of(two))
    assert isinstance(scheduler, ReplicaScheduler)

    def places(*contexts: TextContext) -> list[int]:
        for each in contexts:
            scheduler.add(each)
        return [scheduler.schedulers.index(scheduler._scheduler_of[c.request_id]) for c in contexts]

    common = list(range(40, 100))
    assert places(*(long_request(f"a{i}", [i, *common]) for i in range(4))) == [0, 1, 0, 1]
    inputs = scheduler.schedule()
    assert inputs is not None and [len(batch) for batch in inputs.batches] == [2, 2]
    assert inputs.batch_type is BatchType.CE and scheduler.counts()["waiting"] == 4
    two.execute(inputs)
    assert scheduler.update(inputs.batch.values()) == []
    assert scheduler.counts()["running"] == 4
    for index in (1, 0, 2, 3):
        scheduler.remove(RequestID(f"a{index}"))
    assert len(scheduler) == 0 and RequestID("a1") not in scheduler
    # each copy is idle: the one that has read the same tokens
    assert places(long_request("b", [1, *common, 5])) == [1]
    with pytest.raises(ValueError, match="is scheduled already"):
        scheduler.add(long_request("b", [1]))
    assert places(long_request("c", [1, *common, 6])) == [0], "the other one has no request"
    for name in "bc":
        scheduler.remove(RequestID(name))
    scheduler.remove(RequestID("unknown"))


def test_caches_of_two_models_with_copies(two: Any) -> None:
    joined = caches_of_models([two.kv_manager, two.kv_manager])
    assert isinstance(joined, CachesOfModels) and len(joined.replicas) == 2
    assert all(isinstance(each, CachesOfModels) for each in joined.replicas)


def test_prefixes_of_both_copies_are_stored(tmp_path: Path) -> None:
    values = {"kv_cache_folder": str(tmp_path)}
    before = pipeline_of(2, **values)
    mine = [long_request(f"p{i}", list(range(i, 70 + i))) for i in range(2)]
    batches = [{each.request_id: each} for each in mine]
    before.execute(TextGenerationInputs(batches, 1))
    for each in mine:
        before.release(each.request_id)
    before.save_prefixes()
    after = pipeline_of(2, **values)
    after.load_prefixes()
    for index, replica in enumerate(after.replicas):
        found = [
            replica.cache.cached_length(long_request(f"q{i}", mine[i].all_tokens)) for i in range(2)
        ]
        assert found == [64 if i == index else 0 for i in range(2)]
    after.forget_prefixes()
    assert not list(tmp_path.glob("*.prefixes"))
    assert after.replicas[1].cache.cached_length(long_request("r", mine[1].all_tokens)) == 0


def test_few_pages_preempt_within_a_copy() -> None:
    one, pipeline = (pipeline_of(copies) for copies in (1, 2))
    for replica in pipeline.replicas:
        (pool,) = replica.cache.pages.pools
        # of each copy 10 pages are left, which one request of full length needs
        for _ in range(pool.num_pages - 10):
            page, _ = pool._free.popitem()
            pool._users[page] = 1

    def long_requests() -> list[TextContext]:
        return [
            TextContext(
                request_id=RequestID(f"l{index}"), tokens=np.arange(50 + index), max_length=130,
                sampling_params=SamplingParams(top_k=1, ignore_eos=True), ignore_eos=True,
            )
            for index in range(5)
        ]  # fmt: skip

    expected, contexts = generated(one, long_requests()), long_requests()
    engine = Engine(pipeline, limits_of(pipeline))
    for each in contexts:
        engine.submit(each)
    while not engine.idle:
        engine.step()
    assert {c.request_id: c.generated_tokens.tolist() for c in contexts} == expected
    assert engine.scheduler.preemptions > 0


def test_numbers_of_devices_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="degree is 2, and the number of devices is 1") as error:
        pipeline_of(2, device_specs="cpu")
    assert "cpu:0,1" in error.value.remedy
    with pytest.raises(ConfigError, match="degree is 2, and the number of devices is 3"):
        pipeline_of(2, device_specs="cpu:0,1,2")


def test_memory_is_divided_among_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineConfig, "free_memory", lambda self: 1 << 30)
    configs = [
        PipelineConfig(model_path=str(TINY), data_parallel_degree=n, max_length=64) for n in (1, 2)
    ]
    weights = configs[0].model_config.weights_size()
    assert configs[1].model_config.weights_size() == 2 * weights
    left = configs[0].available_cache_memory() + weights
    assert configs[1].available_cache_memory() == (left - 2 * weights) // 2


def test_limits_are_of_each_copy(two: Any) -> None:
    limits = limits_of(two)
    assert isinstance(limits, SchedulerLimits) and limits.max_batch_size == 4
    engine = Engine(two, limits)
    contexts = drawn_requests(two, 8, 8)
    for each in contexts:
        engine.submit(each)
    engine.apply_changes()
    inputs = engine.scheduler.schedule()
    assert inputs is not None and [len(batch) for batch in inputs.batches] == [4, 4]
    for each in contexts:
        engine.scheduler.remove(each.request_id)
