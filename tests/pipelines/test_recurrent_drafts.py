"""Models with recurrent states verify drafts: states go back after wrong tokens; texts are those without drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.dtype import DType
from max.interfaces import PipelineTask, RequestID
from max.nn.kv_cache import KVCacheParams, RecurrentState
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.lengths import DraftLengths
from max.pipelines.generation.engine import Engine
from max.pipelines.kv_cache.memory import spare_slots, state_bytes
from max.pipelines.kv_cache.state_slots import OutOfSlotsError, StateSlots
from tests.architectures.families import CASES, random_model
from tests.pipelines.test_drafting_heads import LENGTH, vocabulary
from tests.pipelines.test_drafts import (
    OracleDrafter,
    always,
    generated,
    kinds_of_requests,
    requests,
)
from tests.programs.architectures import random_checkpoint

STATE = RecurrentState("scan", 2, (10,), DType.float32)
FAMILIES = [
    "qwen3_5",
    pytest.param("falcon_h1", marks=pytest.mark.long),
    pytest.param("jamba", marks=pytest.mark.long),
    pytest.param("lfm2", marks=pytest.mark.long),
    pytest.param("mamba2", marks=pytest.mark.long),
]


@cache
def model_of(family: str) -> Any:
    spec = CASES[family]
    options = spec.options | {"max_position_embeddings": LENGTH}
    return random_model(replace(spec, options=options), 3, vocabulary())


def pipeline_of(folder: Path, drafts: int, **values: Any) -> Any:
    values |= dict(speculative_method="ngram" if drafts else "none")
    config = PipelineConfig(
        model_path=str(folder), quantization_encoding="float32", max_length=LENGTH,
        max_batch_size=10, num_speculative_tokens=drafts or 1, **values,
    )  # fmt: skip
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return always(pipeline) if drafts else pipeline


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    random_checkpoint(folder, model_of(family))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return pipeline_of(folder, 0)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Any:
    return pipeline_of(folder, 6)


def shorter(contexts: list[TextContext]) -> list[TextContext]:
    for one in contexts:
        one.max_length = min(one.max_length, LENGTH)
    return contexts


def oracle(drafting: Any, texts: list[list[int]], seed: int) -> None:
    known = {f"{number}": tokens for number, tokens in enumerate(texts)}
    drafting.replicas[0].drafts._drafter = OracleDrafter(known, seed)


def checked_slots(drafting: Any) -> StateSlots:
    slots = drafting.kv_managers[0].slots
    slots.check()
    assert slots.free_slots == slots.num_slots == 10 and not slots._behind
    assert len(slots._free_spares) == slots.spares == 8
    return slots


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_those_without_drafts(plain: Any, drafting: Any, seed: int) -> None:
    """Of right, partly right and wrong drafts; greedy and sampled."""
    expected = generated(plain, shorter(requests(plain, seed)))
    oracle(drafting, expected, seed)
    before = np.array(drafting.draft_counts)
    assert generated(drafting, shorter(requests(drafting, seed))) == expected
    drafted, accepted = np.array(drafting.draft_counts) - before
    assert 0.3 * drafted < accepted < drafted
    checked_slots(drafting)


def test_each_kind_of_request(plain: Any, drafting: Any) -> None:
    """Penalties, grammars and log-probabilities; ten requests, of which eight can be drafted at once."""
    expected = generated(plain, kinds_of_requests(plain, np.random.default_rng(1)))
    oracle(drafting, expected, 1)
    before = np.array(drafting.draft_counts)
    assert generated(drafting, kinds_of_requests(drafting, np.random.default_rng(1))) == expected
    drafted, accepted = np.array(drafting.draft_counts) - before
    assert 0 < accepted < drafted
    checked_slots(drafting)


def test_a_preempted_request_starts_anew(plain: Any, drafting: Any) -> None:
    """Also one whose state is behind its text."""
    expected = generated(plain, shorter(requests(plain, 5)))
    oracle(drafting, expected, 5)
    engine, contexts = Engine(drafting, limits_of(drafting)), shorter(requests(drafting, 5))
    for one in contexts:
        engine.submit(one)
    slots, count = drafting.kv_managers[0].slots, 0
    while not engine.idle:
        engine.step()
        behind = [one for one in contexts if slots.behind(one.request_id) and not one.is_done]
        if behind and count < 4:
            engine.scheduler._preempt(behind[0])  # pyright: ignore[reportAttributeAccessIssue]
            count += 1
    assert count == 4
    assert [one.generated_tokens.tolist() for one in contexts] == expected
    checked_slots(drafting)


def test_the_number_of_spare_slots() -> None:
    """As many as a fourth of the memory holds, and no more than requests, or eight."""
    params = KVCacheParams(DType.float32, 3, 4, page_size=5, states=(STATE,))
    assert state_bytes(params) == 80
    found = [spare_slots(params, 10, size) for size in (0, 319, 320, 960, 10**6, None)]
    assert found == [0, 0, 1, 3, 8, 8]
    assert spare_slots(params, 2, None) == 2
    assert spare_slots(replace(params, states=()), 2, None) == 0


def test_spare_slots() -> None:
    slots, a, b = StateSlots(2, 1), RequestID("a"), RequestID("b")
    own, other = slots.claim(a), slots.claim(b)
    assert slots.save(a) == (own, 2)
    with pytest.raises(OutOfSlotsError):
        slots.save(b)
    slots.keep(a)
    assert slots.slot(a) == own and slots.save(b) == (other, 2)
    slots.rewind(b, 3)
    assert (slots.slot(b), slots.behind(b), slots.behind(a)) == (2, 3, 0)
    # a step that failed leaves the state that was saved before it
    assert slots.save(b) == (2, other)
    assert slots.save(b) == (other, 2) and slots.behind(b) == 3
    slots.check()
    slots.keep(b)
    assert slots.behind(b) == 0
    slots.save(b), slots.release(b), slots.release(a)
    slots.check()
    assert slots.free_slots == 2


def test_lengths_know_that_tokens_are_read_again() -> None:
    """Where rows are dear, a draft that is often wrong in part does not pay, as the right part is read twice."""
    found = []
    for again in (False, True):
        lengths, key = DraftLengths(8, again), RequestID("a")
        for _ in range(3):
            lengths.step([key], 0, 0, 1.0)
        for count in range(1, 10):
            for _ in range(3):
                lengths.seconds.record(1, count, 1 + 0.45 * count)
        for _ in range(20):
            lengths.record_verification(key, 4, 2)
        found.append(lengths.length(key, 1, 0, 8))
    assert found[0] > 0 == found[1]
