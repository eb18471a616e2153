"""Tokens that a grammar forces are appended without a step, in the tokenizer's own form."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from max.interfaces import RequestID, SamplingParams
from max.pipelines import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.structured import step_masks
from max.pipelines.structured.constraint import Constraints
from max.pipelines.structured.grammar import of_json_schema
from max.pipelines.structured.step_masks import MaskThread
from tests.pipelines.test_drafts import OracleDrafter, pipeline_of

NAMES = ("first_name_of_the_customer", "number_of_ordered_articles", "is_delivered_to_the_door")
SCHEMA = {
    "type": "object",
    "properties": {
        NAMES[0]: {"type": "string", "maxLength": 4},
        NAMES[1]: {"type": "integer", "minimum": 0, "maximum": 99},
        NAMES[2]: {"type": "boolean"},
    },
    "required": [*NAMES],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pipeline():
    return pipeline_of(0)


@pytest.fixture(scope="module")
def drafting():
    return pipeline_of(6)


def requests(pipeline, **values) -> list[TextContext]:
    encode = pipeline.tokenizer.encode_now
    return [
        TextContext(
            request_id=RequestID(f"{seed}"), tokens=np.array(encode("Write the order: " * (seed + 1))),
            max_length=200, grammar=of_json_schema(json.dumps(SCHEMA)),
            eos_token_ids=set(pipeline.tokenizer.eos_token_ids),
            sampling_params=SamplingParams(seed=seed, top_k=1 if seed % 2 else -1), **values,
        )
        for seed in range(4)
    ]  # fmt: skip


def run(pipeline, contexts) -> tuple[list[list[int]], int]:
    """The answers, and the number of steps."""
    engine = Engine(pipeline, limits_of(pipeline))
    for one in contexts:
        engine.submit(one)
    steps, streamed = 0, {one.request_id: [] for one in contexts}
    while not engine.idle:
        for outcome in engine.step():
            streamed[outcome.request_id] += outcome.tokens
        steps += 1
    assert all(one.failure is None and one.is_done for one in contexts)
    answers = [one.generated_tokens.tolist() for one in contexts]
    assert [*streamed.values()] == answers
    (cache,) = pipeline.kv_managers
    cache.pages.check()
    return answers, steps


def test_forced_tokens_cost_no_step(pipeline) -> None:
    contexts = requests(pipeline)
    answers, steps = run(pipeline, contexts)
    longest = max(map(len, answers))
    assert 2 * steps < longest
    for answer in answers:
        text = pipeline.tokenizer.decode_now(answer, skip_special_tokens=True)
        assert [*json.loads(text)] == [*NAMES]
        # the keys are the tokens that the tokenizer makes of them
        encode = pipeline.tokenizer.encode_now
        first = list(encode("{" + f'"{NAMES[0]}":', add_special_tokens=False))
        assert answer[: len(first) - 1] == first[:-1]


def test_what_sees_each_token_gets_one_a_step(pipeline) -> None:
    answers, steps = run(pipeline, requests(pipeline, log_probabilities=1))
    assert steps >= max(map(len, answers))


@pytest.mark.parametrize("seed", range(3))
def test_drafts_change_nothing(pipeline, drafting, seed: int, monkeypatch) -> None:
    expected, steps = run(pipeline, requests(pipeline))
    texts = {f"{number}": tokens for number, tokens in enumerate(expected)}
    drafts = drafting.replicas[0].drafts
    monkeypatch.setattr(drafts, "_drafter", OracleDrafter(texts, seed))
    before = drafting.draft_counts[1]
    answers, fewer = run(drafting, requests(drafting))
    assert answers == expected
    assert drafting.draft_counts[1] > before and fewer < steps


def test_no_matcher_moves_while_its_mask_is_computed(pipeline, drafting, monkeypatch) -> None:
    expected, _ = run(pipeline, requests(pipeline))
    texts = {f"{number}": tokens for number, tokens in enumerate(expected)}
    monkeypatch.setattr(drafting.replicas[0].drafts, "_drafter", OracleDrafter(texts, 0))
    works: list[tuple[Any, list[Any]]] = []
    submit, advance, fill = MaskThread.submit, Constraints.advance, step_masks.fill

    def slow_fill(matcher: Any, line: Any) -> None:
        time.sleep(0.001)
        fill(matcher, line)

    def noted_submit(self: MaskThread, work: Any) -> None:
        works.append((work, [matcher for matcher, _ in work.rows]))
        submit(self, work)

    def checked_advance(self: Constraints, context: Any, token: int) -> None:
        works[:] = [each for each in works if not each[0].finished.is_set()]
        assert not any(m is context.matcher for _, matchers in works for m in matchers)
        advance(self, context, token)

    monkeypatch.setattr(step_masks, "fill", slow_fill)
    monkeypatch.setattr(MaskThread, "submit", noted_submit)
    monkeypatch.setattr(Constraints, "advance", checked_advance)
    assert run(drafting, requests(drafting))[0] == expected


def test_forced_tokens_after_preemption_and_with_chunks(pipeline) -> None:
    expected, _ = run(pipeline, requests(pipeline))
    small = pipeline_of(
        0, enable_in_flight_batching=True, prefill_chunk_size=8, kv_cache_page_size=16
    )
    for pool in small.kv_managers[0].pages.pools:
        for _ in range(pool.num_pages - 13):
            pool._free.popitem()
        pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    engine = Engine(small, limits_of(small))
    contexts = requests(small)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    assert engine.scheduler.preemptions > 0
    assert [one.generated_tokens.tolist() for one in contexts] == expected
