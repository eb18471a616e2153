"""Drafts by look-up: a step verifies several tokens, and texts are those without drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import (
    GenerationStatus,
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationInputs,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.draft_steps import DraftSteps
from max.pipelines.generation.drafts.drafter import Drafter
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.generation.process.service import TextWork
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.structured.grammar import of_json_schema
from tests.pipelines.counting_pipeline import CountingPipeline

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
LENGTH = 512


def context(tokens, **values) -> TextContext:
    return TextContext(tokens=np.array(tokens), max_length=LENGTH, **values)


def looked_up(tokens: list[int], most: int) -> list[int]:
    """The tokens after the latest of the longest earlier runs, of 4 to 2 tokens, that are equal to the last ones."""
    for n in (4, 3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + most]
    return []


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), most=st.integers(1, 9))
def test_the_look_up(tokens, most) -> None:
    drafter = LookupDrafter(64)
    assert list(drafter.propose(context(tokens), most)) == looked_up(tokens, most)


def test_a_look_up_compares_up_to_four_tokens() -> None:
    drafter = LookupDrafter(2)
    longer = [0, 1, 2, 3, 4, 7, 5, 1, 2, 3, 4, 8, 0, 1, 2, 3, 4]
    assert drafter.propose(context(longer), 1) == [8], "a run of five is one of four"
    four = [1, 2, 3, 4, 7, 5, 2, 3, 4, 8, 1, 2, 3, 4]
    assert drafter.propose(context(four), 1) == [7], "before the later run of three"
    assert list(drafter.propose(context([5, 5]), 1)) == []


@pytest.mark.parametrize(("most", "first"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_the_first_draft_is_half_as_long(most: int, first: int) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    drafter, one = LookupDrafter(most), context(tokens)
    assert drafter.propose(one, 9) == [3, 4][:first]
    drafter.observe(one, 1, 0)
    assert drafter.propose(one, 9) == [3], "one wrong draft may be followed by another"
    drafter.observe(one, 1, 0)
    assert drafter.propose(one, 9) == ()


def test_drafts_get_longer_while_they_are_right_and_pause_while_they_are_wrong() -> None:
    drafter, one = LookupDrafter(8), context([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    lengths = []
    for accepted in (4, 8, 5, 3, 0, 0):
        draft = drafter.propose(one, 99)
        lengths.append(len(draft))
        drafter.observe(one, len(draft), min(accepted, len(draft)))
    assert lengths == [4, 8, 8, 5, 3, 1]
    pauses = 0
    while not drafter.propose(one, 99):
        pauses += 1
    assert pauses == 4
    for _ in range(6):
        drafter.observe(one, 1, 0)
    assert [bool(drafter.propose(one, 9)) for _ in range(33)] == [False] * 32 + [True]
    drafter.observe(one, 1, 1)
    assert len(drafter.propose(one, 9)) == 2
    drafter.forget(one.request_id)
    drafter.forget(one.request_id)
    drafter.observe(one, 1, 0)
    assert len(drafter.propose(one, 9)) == 4


def pipeline_of(drafts: int, **values):
    if drafts:
        values |= dict(speculative_method="ngram", num_speculative_tokens=drafts)
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=LENGTH, max_batch_size=8,
        **values,
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


@pytest.fixture(scope="module")
def plain():
    return pipeline_of(0)


@pytest.fixture(scope="module")
def drafting():
    return pipeline_of(6)


def requests(pipeline, seed: int, **values) -> list[TextContext]:
    """Requests whose texts repeat themselves, and others, greedy and sampled."""
    draw = np.random.default_rng(seed)
    encode = pipeline.tokenizer.encode_now
    texts = [
        "def walk(path):\n    for name in names:\n        yield name\n" * 3,
        "one two three four five six seven " * 6,
        "What is the capital of Norway?",
        "x = [1, 2, 3]\ny = [1, 2, 3]\n",
    ]
    made = []
    for number in range(7):
        tokens = encode(texts[number % 4])
        tokens = tokens[: draw.integers(2, len(tokens) + 1)]
        params = SamplingParams(
            temperature=0.8 if number % 3 == 2 else 0,
            top_k=-1 if number % 3 == 2 else 1,
            seed=number,
        )
        made.append(
            TextContext(
                request_id=RequestID(f"{number}"), tokens=np.array(tokens),
                max_length=len(tokens) + int(draw.integers(1, 90)), sampling_params=params,
                eos_token_ids=set(pipeline.tokenizer.eos_token_ids), **values,
            )
        )  # fmt: skip
    return made


def generated(pipeline, contexts: list[TextContext]) -> list[list[int]]:
    engine = Engine(pipeline, limits_of(pipeline))
    for one in contexts:
        engine.submit(one)
    tokens: dict[RequestID, list[int]] = {one.request_id: [] for one in contexts}
    while not engine.idle:
        for outcome in engine.step():
            assert not isinstance(outcome, Failure), outcome
            tokens[outcome.request_id] += outcome.tokens
    (cache,) = pipeline.kv_managers
    cache.pages.check()
    assert cache.used_pages == 0
    for one in contexts:
        assert tokens[one.request_id] == one.generated_tokens.tolist() and one.is_done
    return list(tokens.values())


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_those_without_drafts(plain, drafting, seed: int) -> None:
    before = drafting.draft_counts[1]
    expected = generated(plain, requests(plain, seed))
    assert generated(drafting, requests(drafting, seed)) == expected
    assert plain.draft_counts == (0, 0)
    drafted, accepted = drafting.draft_counts
    assert drafted > accepted > before and not drafting.replicas[0].drafts._drafter._records


def test_fewer_steps(plain, drafting, monkeypatch) -> None:
    counts = []
    for pipeline in (plain, drafting):
        model, ran = pipeline.replicas[0].model, []
        execute = model.execute
        monkeypatch.setattr(
            model, "execute", lambda given, e=execute, r=ran: r.append(1) or e(given)
        )
        monkeypatch.setattr(pipeline.replicas[0], "loop", None)
        tokens = pipeline.tokenizer.encode_now("one two three four five six seven " * 6)
        one = TextContext(
            tokens=np.array(tokens), max_length=len(tokens) + 60, ignore_eos=True,
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )  # fmt: skip
        texts = generated(pipeline, [one])
        counts.append((len(ran), texts))
    assert counts[0][1] == counts[1][1]
    assert counts[1][0] < 0.8 * counts[0][0], "some steps give several tokens"


@pytest.mark.parametrize(
    "values",
    [
        dict(enable_in_flight_batching=True, prefill_chunk_size=32),
        dict(kv_cache_page_size=16, device_memory_utilization=1e-9),
        dict(enable_echo=True, max_num_steps=1),
    ],
    ids=["chunks", "few pages", "echo"],
)
def test_texts_in_other_configurations(plain, values) -> None:
    """With chunks beside them, with preemptions, and with the logits of all tokens."""
    few = values.pop("device_memory_utilization", None)
    pipeline = pipeline_of(5, **values)
    if few:
        for pool in pipeline.kv_managers[0].pages.pools:
            for _ in range(pool.num_pages - 12):
                pool._free.popitem()
            pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    engine = Engine(pipeline, limits_of(pipeline))
    contexts = requests(pipeline, 7)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    assert [one.generated_tokens.tolist() for one in contexts] == generated(
        plain, requests(plain, 7)
    )
    assert pipeline.draft_counts[1] > 0
    if few:
        assert engine.scheduler.preemptions > 0


def single_token_requests(pipeline) -> list[TextContext]:
    """Penalties, log-probabilities, grammars and minimum lengths depend on each token."""
    schema = of_json_schema('{"type": "array", "items": {"enum": ["one two", "three"]}}')
    kinds = [
        dict(sampling_params=SamplingParams(top_k=1, repetition_penalty=1.3)),
        dict(log_probabilities=2, sampling_params=SamplingParams(top_k=1)),
        dict(grammar=schema, sampling_params=SamplingParams(top_k=1)),
        dict(sampling_params=SamplingParams(top_k=1, min_new_tokens=9)),
        dict(
            log_probabilities=1,
            log_probabilities_echo=True,
            sampling_params=SamplingParams(top_k=1),
        ),
        dict(sampling_params=SamplingParams(top_k=1, logit_bias={5: 3.0})),
    ]
    tokens = pipeline.tokenizer.encode_now("one two three four one two three four one two")
    return [
        TextContext(
            tokens=np.array(tokens), max_length=len(tokens) + 20,
            eos_token_ids=set(pipeline.tokenizer.eos_token_ids), **kind,
        )
        for kind in kinds
    ]  # fmt: skip


def test_requests_that_need_single_tokens_beside_drafted_ones(plain, drafting) -> None:
    """They have no drafts, and the others of the batch keep theirs."""
    results, counts, logs = [], [], []
    for pipeline in (plain, drafting):
        before = pipeline.draft_counts[1]
        contexts = requests(pipeline, 3)[:2] + single_token_requests(pipeline)
        results.append(generated(pipeline, contexts))
        counts.append(pipeline.draft_counts[1] - before)
        logs.append([c._log_probabilities_data for c in contexts])
    assert results[0] == results[1]
    assert counts[1] > 0
    for one, other in zip(*logs, strict=True):
        assert one.keys() == other.keys()


def test_a_step_mixes_drafts_and_single_tokens(plain, drafting, monkeypatch) -> None:
    """In one execution a request gets several tokens, and one with a penalty its own."""
    mixed, verified = [], DraftSteps.verified_tokens

    def watched(self, outputs, batch, device):
        tokens = verified(self, outputs, batch, device)
        mixed.append([len(own) for own in tokens])
        return tokens

    monkeypatch.setattr(DraftSteps, "verified_tokens", watched)
    results = []
    for pipeline in (plain, drafting):
        tokens = pipeline.tokenizer.encode_now("one two three four five six seven " * 6)
        contexts = [
            TextContext(
                tokens=np.array(tokens), max_length=len(tokens) + 40, ignore_eos=True,
                sampling_params=SamplingParams(top_k=1, ignore_eos=True, repetition_penalty=p),
            )
            for p in (1.0, 1.2)
        ]  # fmt: skip
        results.append(generated(pipeline, contexts))
    assert results[0] == results[1]
    assert any(first > 1 and second == 0 for first, second in mixed)


class RecordedDrafter(Drafter):
    """Proposes what its script says, and records what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def propose(self, context, most):
        self.told.append(("propose", len(context.all_tokens), most))
        return context.all_tokens[:most].tolist()

    def observe(self, context, drafted, accepted):
        self.told.append(("observe", drafted, accepted))

    def rewind(self, context):
        self.told.append(("rewind", len(context.all_tokens)))

    def forget(self, request_id):
        self.told.append(("forget", request_id.value))


def test_a_drafter_is_told_that_tokens_were_removed() -> None:
    drafter = RecordedDrafter()
    steps = DraftSteps(drafter, 3, None)
    one = TextContext(tokens=np.arange(4), max_length=12, request_id=RequestID("a"))
    one.update(7)
    steps.propose([one])
    assert one.draft_tokens == (0, 1, 2)
    for token in (0, 1, 5):
        one.update(token)
    one.truncate(6)
    one.truncate(6)  # nothing is removed
    one.update(9)
    steps.propose([one])
    one.set_draft(())
    steps.propose([one])
    assert drafter.told == [
        ("propose", 5, 3), ("rewind", 7), ("propose", 7, 3), ("propose", 7, 3),
    ]  # fmt: skip
    one.truncate(5)
    one.status = GenerationStatus.CANCELLED
    steps.propose([one])
    assert drafter.told[4:] == [("forget", "a")] and not steps._truncations
    steps.forget(one.request_id)
    assert drafter.told[5:] == [("forget", "a")]


def test_options_that_change_after_a_draft_drop_it() -> None:
    steps = DraftSteps(RecordedDrafter(), 3, None)
    contexts = [TextContext(tokens=np.arange(4), max_length=12) for _ in range(2)]
    for one in contexts:
        one.update(7)
    steps.propose(contexts)
    contexts[0].log_probabilities = 1
    steps.drop(contexts)
    assert [c.draft_length for c in contexts] == [0, 3]
    steps.propose(contexts)
    assert [c.draft_length for c in contexts] == [0, 3]


def test_batches_without_a_scheduler(plain, drafting) -> None:
    texts = []
    for pipeline in (plain, drafting):
        contexts = requests(pipeline, 5)
        while batch := {one.request_id: one for one in contexts if not one.is_done}:
            pipeline.execute(TextGenerationInputs(batches=[batch], num_steps=3))
        for one in contexts:
            pipeline.release(one.request_id)
        texts.append([one.generated_tokens.tolist() for one in contexts])
    assert texts[0] == texts[1]


class Counting(CountingPipeline):
    draft_counts = 7, 4


@pytest.mark.parametrize(("kind", "counts"), [(CountingPipeline, (0, 0)), (Counting, (7, 4))])
def test_the_counts_of_drafts_are_reported(kind, counts) -> None:
    work = TextWork(kind(), SchedulerLimits(), None, 0.0)
    (stats,) = work.step()
    assert (stats.drafted_tokens, stats.accepted_tokens) == counts
    work.end(None)


def test_what_cannot_draft() -> None:
    config = type(
        "Config",
        (),
        {"speculative_method": None, "num_speculative_tokens": 4, "drafts_tokens": True},
    )()
    model = type("Model", (), {"verifies_drafts": False})()
    assert DraftSteps.of(config, model, None, None) is None
    config.speculative_method = type("Method", (), {"value": "ngram"})()
    with pytest.raises(ConfigError, match="'ngram', and the model gives one token a step"):
        DraftSteps.of(config, model, None, None)
    model.verifies_drafts = True
    with pytest.raises(ConfigError, match="recurrent states, which cannot go back"):
        DraftSteps.of(config, model, None, object())
    assert DraftSteps.of(config, model, None, None).most == 4
    for values in (dict(speculative_method="eagle"), dict(num_speculative_tokens=0)):
        with pytest.raises(ConfigError, match=next(iter(values))):
            PipelineConfig(model_path=TINY, **values)
