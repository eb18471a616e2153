"""Drafts by look-up: a step verifies several tokens, and texts are those without drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.driver import CPU, Tensor
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
from max.pipelines.generation.drafts.drafted_rows import DraftedRows
from max.pipelines.generation.drafts.drafter import Drafter
from max.pipelines.generation.drafts.lengths import LENGTHS, DraftLengths, _Share
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.generation.process.service import TextWork
from max.pipelines.kv_cache.state_slots import StateSlots
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.structured.grammar import of_json_schema
from tests.pipelines.counting_pipeline import CountingPipeline

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
LENGTH = 512


def context(tokens, **values) -> TextContext:
    return TextContext(tokens=np.array(tokens), max_length=LENGTH, **values)


def looked_up(tokens: list[int], most: int) -> list[int]:
    """The tokens after the longest of earlier runs, of 6 to 1 tokens, that are equal to the last ones: of several the
    one with the most of its last 16 tokens among the last 16, of equal ones the latest.
    """
    for n in (6, 5, 4, 3, 2, 1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if ends:
            known = {*tokens[-16:]}
            likeness = [
                sum(token in known for token in tokens[max(end - 16, 0) : end]) for end in ends
            ]
            _, end = max(zip(likeness, ends, strict=True))
            return tokens[end : end + most]
    return []


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=40), most=st.integers(1, 9))
def test_the_look_up(tokens, most) -> None:
    drafter = LookupDrafter()
    assert list(drafter.propose(context(tokens), most)) == looked_up(tokens, most)


def test_a_look_up_knows_the_key_of_a_record() -> None:
    """After a value that was never seen, of another length: one token is equal at three places."""
    name, city, count, comma = [*range(50, 56)], [*range(60, 66)], [*range(70, 76)], 9
    tokens, value = list[int](), iter(range(100, 200))
    for length in (2, 1, 3):
        for key in (name, city, count):
            tokens += [*key, *(next(value) for _ in range(length)), comma]
    tokens += [*name, next(value), comma]
    assert list(LookupDrafter().propose(context(tokens), 6)) == city
    tokens += [*city, next(value), next(value), comma]
    assert list(LookupDrafter().propose(context(tokens), 6)) == count


def test_a_look_up_compares_up_to_six_tokens() -> None:
    drafter = LookupDrafter()
    longer = [0, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 8, 0, 1, 2, 3, 4, 5, 6]
    one = context(longer)
    assert drafter.kind(one) == 0
    assert drafter.propose(one, 1) == [8], "a run of seven is one of six"
    assert drafter.kind(one) == 6
    two = context([1, 2, 3, 4, 7, 5, 2, 3, 4, 8, 1, 2, 3, 4])
    assert drafter.propose(two, 1) == [7], "before the later run of three"
    assert drafter.kind(two) == 4
    three = context([5, 5])
    assert list(drafter.propose(three, 1)) == [5]
    assert drafter.kind(three) == 1
    assert list(drafter.propose(context([5, 6]), 1)) == []
    for each in (one, two, three):
        drafter.forget(each.request_id)
    assert not drafter._lengths


class EveryLength(DraftLengths):
    """Drafts always, and as much as fits: tests do not depend on the times of steps."""

    def may_draft(self, requests):
        return True

    def length(self, request_id, requests, drafted, room, kind=0):
        return min(self.most, room)

    def prefers(self, *arguments):
        return True

    def kept_of_tree(self, request_id, requests, *arguments):
        known = self.seconds.plain(requests) is not None
        return super().kept_of_tree(request_id, requests, *arguments) if known else []


def always(pipeline):
    """Lets a pipeline draft in each step."""
    for replica in pipeline.replicas:
        replica.drafts.lengths = EveryLength(replica.drafts.most)
    return pipeline


def pipeline_of(drafts: int, **values):
    if drafts:
        values |= dict(speculative_method="ngram", num_speculative_tokens=drafts)
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=LENGTH, max_batch_size=8,
        **values,
    )  # fmt: skip
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return always(pipeline) if drafts else pipeline


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
    assert drafted > accepted > before and not drafting.replicas[0].drafts.lengths._shares


def test_calls_have_several_steps_while_nothing_is_drafted(plain, monkeypatch) -> None:
    """Without credit a pipeline with drafts runs as one without: several steps in one call."""
    pipeline = pipeline_of(4, max_num_steps=8)
    lengths = DraftLengths(4)
    lengths._credit = 0.0
    monkeypatch.setattr(pipeline.replicas[0].drafts, "lengths", lengths)
    monkeypatch.setattr("max.pipelines.generation.drafts.lengths.ALLOWANCE", 0.0)
    params = SamplingParams(top_k=1, ignore_eos=True)
    tokens = plain.tokenizer.encode_now("What is the capital of Norway?")
    one, other = (
        TextContext(
            tokens=tokens, max_length=len(tokens) + 64, ignore_eos=True, sampling_params=params
        )
        for _ in range(2)
    )
    engine = Engine(pipeline, limits_of(pipeline))
    engine.submit(one)
    calls = 0
    while not engine.idle:
        engine.step()
        calls += 1
    assert [one.generated_tokens.tolist()] == generated(plain, [other])
    # the prompt, then eight steps in a call
    assert calls == 1 + -(-63 // 8) and pipeline.draft_counts == (0, 0)


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


class OracleDrafter(LookupDrafter):
    """Drafts what is known to follow, with wrong tokens at random places."""

    def __init__(self, texts: dict[str, list[int]], seed: int) -> None:
        super().__init__()
        self.texts, self.draw = texts, np.random.default_rng(seed)

    def propose(self, context, most):
        known = self.texts[context.request_id.value]
        tokens = known[len(context.generated_tokens) :][:most]
        wrong = self.draw.random(len(tokens)) < 0.15
        return [(token + 1) % 4096 if w else token for token, w in zip(tokens, wrong, strict=True)]


def kinds_of_requests(pipeline, draw: np.random.Generator) -> list[TextContext]:
    """Penalties, log-probabilities, grammars, minimum lengths, biases and filters, greedy and sampled."""
    schema = of_json_schema('{"type": "array", "items": {"enum": ["one two", "three"]}}')
    open_schema = of_json_schema('{"type": "object", "additionalProperties": {"type": "string"}}')
    kinds = [
        dict(params=dict(repetition_penalty=1.3, frequency_penalty=0.2)),
        dict(params=dict(presence_penalty=0.7), log_probabilities=2),
        dict(grammar=schema),
        dict(grammar=open_schema, log_probabilities=1, params=dict(repetition_penalty=1.1)),
        dict(params=dict(min_new_tokens=9)),
        dict(log_probabilities=1, log_probabilities_echo=True),
        dict(params=dict(logit_bias={5: 3.0, 17: -2.5})),
        dict(eos_sequences=[[int(draw.integers(4096))], [300, 301]]),
        dict(log_probabilities=3, logged_tokens=(5, 9)),
        dict(params=dict(ignore_eos=True)),
    ]
    tokens = pipeline.tokenizer.encode_now("one two three four one two three four one two")
    contexts = []
    for number, kind in enumerate(kinds):
        values = dict(kind)
        sampled = draw.random() < 0.6
        filters = (
            dict(
                temperature=float(draw.uniform(0.5, 1.5)),
                top_k=int(draw.choice([-1, 2, 40])),
                top_p=float(draw.choice([1, 0.9])),
                min_p=float(draw.choice([0, 0.05])),
            )
            if sampled
            else dict(top_k=1)
        )
        params = SamplingParams(seed=number, **filters, **values.pop("params", {}))
        contexts.append(
            TextContext(
                request_id=RequestID(f"{number}"), tokens=np.array(tokens), sampling_params=params,
                max_length=len(tokens) + 24, eos_token_ids=set(pipeline.tokenizer.eos_token_ids),
                ignore_eos=params.ignore_eos, **values,
            )
        )  # fmt: skip
    return contexts


@pytest.mark.parametrize("seed", range(3))
def test_each_kind_of_request_gets_the_tokens_without_drafts(plain, drafting, seed, monkeypatch):
    """Drafts with random errors change neither tokens nor log-probabilities."""
    logged: dict[str, list] = {}
    outputs = TextContext.to_generation_output

    def recorded(self):
        output = outputs(self)
        logged.setdefault(self.request_id.value, []).extend(output.log_probabilities or ())
        return output

    monkeypatch.setattr(TextContext, "to_generation_output", recorded)
    expected = generated(plain, kinds_of_requests(plain, np.random.default_rng(seed)))
    expected_logs, logged = logged, {}
    drafts = drafting.replicas[0].drafts
    texts = {f"{number}": tokens for number, tokens in enumerate(expected)}
    monkeypatch.setattr(drafts, "_drafter", OracleDrafter(texts, seed))
    before = np.array(drafting.draft_counts)
    assert generated(drafting, kinds_of_requests(drafting, np.random.default_rng(seed))) == expected
    drafted, accepted = np.array(drafting.draft_counts) - before
    assert 0.3 * drafted < accepted < drafted
    assert logged.keys() == expected_logs.keys() and sum(map(len, logged.values())) > 60
    for name, entries in logged.items():
        assert len(entries) == len(expected_logs[name])
        for one, other in zip(entries, expected_logs[name], strict=True):
            np.testing.assert_allclose(
                one.token_log_probabilities, other.token_log_probabilities, atol=2e-4
            )
            assert [{*top} for top in one.top_log_probabilities] == [
                {*top} for top in other.top_log_probabilities
            ]


@pytest.mark.parametrize(
    "values",
    [
        dict(), dict(temperature=0.6, top_k=4), dict(top_p=0.7), dict(min_p=0.15),
        dict(frequency_penalty=0.8, presence_penalty=0.5), dict(repetition_penalty=1.5, top_p=0.9),
        dict(logit_bias={2: 1.5, 4: -1.0}, temperature=1.3),
    ],
    ids=str,
)  # fmt: skip
def test_sampled_tokens_have_the_distribution_of_the_model(drafting, values) -> None:
    """Chi-square over a vocabulary of six: the first token, and the second after a right and a wrong draft."""
    draw, vocab, count = np.random.default_rng(3), 6, 4000
    logits = draw.normal(0, 1.2, (3, vocab)).astype(np.float32)
    contexts = []
    for _ in range(count):
        one = TextContext(
            tokens=np.array([1, 3]), max_length=9,
            sampling_params=SamplingParams(seed=int(draw.integers(2**62)), **values),
        )  # fmt: skip
        one.update(0)
        one.set_draft((2, 4))
        contexts.append(one)
    rows = DraftedRows(contexts, None)
    outputs = ModelOutputs(
        Tensor.from_numpy(np.tile(logits, (count, 1))),
        logit_offsets=Tensor.from_numpy((3 * np.arange(count + 1)).astype(np.uint32)),
    )
    chosen = np.array(rows.choose(outputs, drafting.replicas[0]._sampler, CPU()))
    assert chosen.shape == (count, 3)
    for row, before in enumerate(([0], [0, 2], [0, 2, 4])):
        expected = count * distribution(logits[row], before, SamplingParams(seed=0, **values))
        seen = np.bincount(chosen[:, row], minlength=vocab)
        assert not seen[expected == 0].any()
        likely = expected > 5
        statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
        freedom = max(likely.sum() - 1, 1)
        assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 1e-9
    # the rows are independent: a wrong draft says nothing about the token of its row
    pairs = np.histogram2d(chosen[:, 0], chosen[:, 1], bins=vocab, range=[[0, vocab]] * 2)[0]
    expected = np.outer(pairs.sum(1), pairs.sum(0)) / count
    likely = expected > 5
    statistic = ((pairs - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < likely.sum() + 4 * np.sqrt(2 * likely.sum())


def distribution(logits, before, params) -> np.ndarray:
    """The probabilities of the next token, in float64."""
    scores = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in range(len(scores)):
        times = before.count(token)
        if times:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
            scores[token] -= params.presence_penalty + params.frequency_penalty * times
    shares = np.exp((scores - scores.max()) / params.temperature)
    order = np.argsort(-shares, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    totals = np.cumsum(shares[order])
    order = order[: np.count_nonzero(totals < params.top_p * totals[-1]) + 1]
    kept = np.zeros(len(scores))
    kept[order] = np.where(shares[order] >= params.min_p, shares[order], 0)
    return kept / kept.sum()


def processed_request(pipeline) -> TextContext:
    """Functions of the caller see each token."""
    tokens = pipeline.tokenizer.encode_now("one two three four five six seven " * 6)
    return TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + 40, ignore_eos=True,
        sampling_params=SamplingParams(
            top_k=1, ignore_eos=True, logits_processors=[lambda inputs: None]
        ),
    )  # fmt: skip


def test_a_step_mixes_drafts_and_single_tokens(plain, drafting, monkeypatch) -> None:
    """In one execution a request gets several tokens, and one with a logits processor its own."""
    mixed, verified = [], DraftSteps.verified_tokens

    def watched(self, *arguments):
        tokens = verified(self, *arguments)
        mixed.append([len(own) for own in tokens])
        return tokens

    monkeypatch.setattr(DraftSteps, "verified_tokens", watched)
    results = []
    for pipeline in (plain, drafting):
        contexts = [processed_request(pipeline), processed_request(pipeline)]
        contexts[0].sampling_params = SamplingParams(top_k=1, ignore_eos=True)
        results.append(generated(pipeline, contexts))
    assert results[0] == results[1]
    assert any(len(own) == 2 and own[0] > 1 and own[1] == 0 for own in mixed)


def share_of(lengths: DraftLengths, key: RequestID) -> list[int]:
    return [lengths.length(key, 1, 0, room) for room in (1, 4, 16)]


def test_lengths_follow_the_times_of_steps() -> None:
    """The length that gives the most tokens in a time, of all lengths."""
    draw = np.random.default_rng(0)
    for _ in range(30):
        lengths, key = DraftLengths(16), RequestID("a")
        plain, row, share = 1.0, float(draw.uniform(0, 0.6)), float(draw.uniform(0.1, 0.95))
        for _ in range(2):
            lengths.step([key], 0, 0, plain)
        for count in range(1, 17):
            for _ in range(3):
                lengths.seconds.record(1, count, plain + row * count)
        lengths._credit = 4.0
        lengths._shares[key] = {0: _Share(share * 1e6, 1e6)}

        def rate(count, share=share, row=row):
            right = sum(share**n for n in range(1, count + 1))
            return (1 + right) / (1 + row * count)

        best = max((0, *(n for n in LENGTHS if n < 16), 16), key=rate)
        expected = rate(best) if rate(best) > 1.03 else 1
        assert abs(rate(lengths.length(key, 1, 0, 99)) - expected) < 1e-6


def test_each_kind_of_draft_has_its_share() -> None:
    """Long runs that are found again may be right where short ones are wrong."""
    lengths, key = DraftLengths(8), RequestID("a")
    for _ in range(3):
        lengths.step([key], 0, 0, 1.0)
    for _ in range(20):
        lengths.record_verification(key, 8, 8, kind=6)
        lengths.record_verification(key, 8, 0, kind=2)
    assert lengths.length(key, 1, 0, 8, kind=6) == 8
    assert lengths.length(key, 1, 0, 8, kind=2) == 0
    assert lengths.share(RequestID("b"), 6) > 0.9 > 0.3 > lengths.share(RequestID("b"), 2)
    assert lengths.share(RequestID("b"), 4) == pytest.approx(0.7)


def test_what_drafts_lose_is_bounded() -> None:
    """Wrong drafts cost at most the first credit and a share of the time of plain steps."""
    lengths, key = DraftLengths(8), RequestID("a")
    total = plain_total = 0.0
    for step in range(2000):
        length = lengths.length(key, 1, 0, 8) if step > 2 else 0
        seconds = 1 + 0.15 * length
        if length:
            lengths.record_verification(key, length, 0)
        lengths.step([key], length, 0, seconds)
        total, plain_total = total + seconds, plain_total + 1
    assert total < 1.03 * plain_total
    # from now on drafts are right: they are soon as long as they may be
    seen = []
    for _ in range(200):
        length = lengths.length(key, 1, 0, 8)
        if length:
            lengths.record_verification(key, length, length)
        lengths.step([key], length, length, 1 + 0.15 * length)
        seen.append(length)
    assert seen[-100:].count(8) > 90


def test_large_batches_are_not_drafted() -> None:
    """Where a row costs as much as a request, drafts save nothing."""
    lengths, keys = DraftLengths(8), [RequestID(f"{n}") for n in range(16)]
    for requests in (1, 16):
        for _ in range(3):
            lengths.step(keys[:requests], 0, 0, 1.0 + (requests > 1))
        for count in range(1, 9):
            for _ in range(3):
                lengths.seconds.record(
                    requests, count, 1.05 if requests == 1 else 2 + 0.125 * count
                )
    for key in keys:
        lengths._shares[key] = {0: _Share(8.0, 10.0)}
    assert lengths.length(keys[0], 1, 0, 8) == 8
    assert lengths.length(keys[0], 16, 0, 8) == 0


def test_a_length_between_two_measured_ones_is_tried() -> None:
    """Few rows may cost as little as one where many cost more."""
    lengths, key, seen = DraftLengths(7), RequestID("a"), []
    for _ in range(3):
        lengths.step([key], 0, 0, 1.0)
    for _ in range(60):
        length = lengths.length(key, 1, 0, 7)
        accepted = min(length, 4)
        if length:
            lengths.record_verification(key, length, accepted)
        lengths.step([key], length, accepted, 1.1 if length < 4 else 1 + 0.25 * length)
        seen.append(length)
    assert seen[0] > 3 and seen[-20:].count(3) > 15


def test_times_of_first_runs_count_less() -> None:
    """A graph may be compiled in them: a draft is tried three times before it is given up."""
    lengths, key = DraftLengths(4), RequestID("a")
    for _ in range(3):
        lengths.step([key], 0, 0, 1.0)
    tried = 0
    for _ in range(20):
        length = lengths.length(key, 1, 0, 4)
        tried += bool(length)
        if length:
            lengths.record_verification(key, length, length)
        lengths.step([key], length, length, 9.0 if length else 1.0)
    assert 3 <= tried <= 12
    # after a while they are tried again, as the machine may be less busy now
    lengths._credit = 8.0
    for _ in range(30):
        lengths.step([key], 0, 0, 1.0, 10)
    assert lengths.length(key, 1, 0, 4)


def test_the_execution_after_drafts_is_a_cost_of_theirs() -> None:
    lengths, key = DraftLengths(4), RequestID("a")
    for _ in range(3):
        lengths.step([key], 0, 0, 1.0, 4)
    assert lengths.length(key, 1, 0, 4)
    credit = lengths._credit
    lengths.step([key], 4, 4, 1.2)
    lengths.step([key], 0, 0, 3.0, 4)
    assert lengths.seconds.plain(1) == 1.0
    assert lengths._credit < credit + 4 - 8 + 1e-9
    assert lengths.length(key, 1, 0, 4) == 0


def test_no_draft_before_a_plain_step_is_measured() -> None:
    lengths, key = DraftLengths(8), RequestID("a")
    assert lengths.length(key, 1, 0, 8) == 0
    for _ in range(2):
        lengths.step([key], 0, 0, 0.5)
    assert share_of(lengths, key) == [
        1,
        *[min(16, 8, lengths.length(key, 1, 0, n)) for n in (4, 16)],
    ]
    assert lengths.length(key, 2, 0, 8) == 0, "of two requests none was measured"
    lengths.record_verification(key, 3, 2)
    lengths.forget(key)
    assert not lengths._shares
    # a plain step is measured again after many drafts
    lengths = DraftLengths(8)
    for _ in range(2):
        lengths.step([key], 0, 0, 0.5)
    counts = []
    for _ in range(200):
        counts.append(lengths.length(key, 1, 0, 4))
        lengths.record_verification(key, counts[-1] or 1, counts[-1])
        lengths.step([key], counts[-1], counts[-1], 0.51)
    assert 1 < counts.count(0) < 10


class RecordedDrafter(Drafter):
    """Proposes what its script says, and records what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def propose(self, context, most):
        self.told.append(("propose", len(context.all_tokens), most))
        return context.all_tokens[:most].tolist()

    def observe(self, context, right_tokens, more=0):
        self.told.append(("observe", list(right_tokens), more))

    def rewind(self, context):
        self.told.append(("rewind", len(context.all_tokens)))

    def forget(self, request_id):
        self.told.append(("forget", request_id.value))


def test_a_drafter_is_told_that_tokens_were_removed() -> None:
    drafter = RecordedDrafter()
    steps = DraftSteps(drafter, 3, None)
    steps.lengths = EveryLength(3)
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
    # the engine releases it
    assert drafter.told[4:] == [] and steps._truncations
    steps.forget(one.request_id)
    assert drafter.told[4:] == [("forget", "a")] and not steps._truncations


def test_an_ended_request_is_forgotten_once(drafting, monkeypatch) -> None:
    """When it is released, and not before: a step that has ended it may be followed by others."""
    drafter, drafts = RecordedDrafter(), drafting.replicas[0].drafts
    monkeypatch.setattr(drafts, "_drafter", drafter)
    released = list[RequestID]()
    release = drafting.release

    def counted(request_id: RequestID) -> None:
        told = len(drafter.told)
        release(request_id)
        assert drafter.told[told:] == [("forget", request_id.value)]
        released.append(request_id)

    monkeypatch.setattr(drafting, "release", counted)
    contexts = requests(drafting, 2)
    generated(drafting, contexts)
    forgotten = [told for told in drafter.told if told[0] == "forget"]
    assert forgotten == [("forget", key.value) for key in released]
    assert {one.request_id for one in contexts} == {*released} and len(released) == len(contexts)


def test_options_that_change_after_a_draft_drop_it() -> None:
    steps = DraftSteps(RecordedDrafter(), 3, None)
    steps.lengths = EveryLength(3)
    contexts = [TextContext(tokens=np.arange(4), max_length=12) for _ in range(2)]
    for one in contexts:
        one.update(7)
    steps.propose(contexts)
    contexts[0].sampling_params = SamplingParams(logits_processors=[print])
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
    model = type("Model", (), {"verifies_drafts": False, "load_drafting_head": lambda self: None})()
    params = type("Params", (), {"verifies_trees": False})()

    def cache_of(slots: StateSlots | None) -> object:
        return type("Cache", (), {"slots": slots, "params": params})()

    cache = cache_of(None)
    assert DraftSteps.of(config, model, None, cache, None) is None
    config.speculative_method = type("Method", (), {"value": "ngram"})()
    with pytest.raises(ConfigError, match="'ngram', and the model gives one token a step"):
        DraftSteps.of(config, model, None, cache, None)
    model.verifies_drafts = True
    with pytest.raises(ConfigError, match="recurrent states, and no memory is left to save one"):
        DraftSteps.of(config, model, None, cache_of(StateSlots(2)), None)
    assert DraftSteps.of(config, model, None, cache_of(StateSlots(2, 1)), None)
    assert DraftSteps.of(config, model, None, cache, None).most == 4
    for values in (dict(speculative_method="medusa"), dict(num_speculative_tokens=0)):
        with pytest.raises(ConfigError, match=next(iter(values))):
            PipelineConfig(model_path=TINY, **values)


def test_batch_invariant_texts_in_bfloat16() -> None:
    """The same graph gives the same bits for rows of a draft as for single ones, alone and beside others."""
    config = PipelineConfig(
        model_path=TINY, max_length=LENGTH, max_batch_size=8, batch_invariant=True,
        speculative_method="ngram", num_speculative_tokens=6,
    )  # fmt: skip
    pipeline = always(PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1])
    drafts = pipeline.replicas[0].drafts
    drafts.enabled = False
    expected = generated(pipeline, requests(pipeline, 1))
    assert pipeline.draft_counts == (0, 0)
    drafts.enabled = True
    texts = {f"{number}": tokens for number, tokens in enumerate(expected)}
    drafts._drafter = OracleDrafter(texts, 1)
    assert generated(pipeline, requests(pipeline, 1)) == expected
    alone = [generated(pipeline, [one])[0] for one in requests(pipeline, 1)]
    assert alone == expected and pipeline.draft_counts[1] > 100


def test_a_step_verifies_drafts_beside_requests_without(
    drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a draft of two tokens, one of which is right, and one without."""
    (replica,) = drafting.replicas
    measured: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        replica.drafts, "measure", lambda batch, n, right, begin, steps: measured.append((n, right, steps))
    )  # fmt: skip
    monkeypatch.setattr(replica.drafts, "propose", lambda batch: None)

    def greedy(length: int) -> TextContext:
        return context(
            np.arange(length) * 7 + 20, ignore_eos=True, log_probabilities=2,
            sampling_params=SamplingParams(top_k=1),
        )  # fmt: skip

    def step(*contexts: TextContext) -> list[list[tuple[int, float]]]:
        """The new tokens of requests, with their log-probabilities."""
        outputs = drafting.execute(TextGenerationInputs([{c.request_id: c for c in contexts}], 1))
        found = [outputs[c.request_id] for c in contexts]
        return [
            [(t, log.token_log_probabilities[0]) for t, log in zip(o.tokens, o.log_probabilities, strict=True)]
            for o in found
        ]  # fmt: skip

    alone = []
    for length in (6, 9):
        one = greedy(length)
        alone.append([pair for _ in range(6) for pair in step(one)[0]])
        drafting.release(one.request_id)
    measured.clear()
    replica.cache.forget_prefixes()
    first, second = greedy(6), greedy(9)
    found = step(first, second)
    assert not measured, "a step that reads prompts"
    first.set_draft([alone[0][1][0], (alone[0][2][0] + 1) % 4000])
    found = [own + more for own, more in zip(found, step(first, second), strict=True)]
    for own, wanted, count in zip(found, alone, (3, 2), strict=True):
        assert [token for token, _ in own] == [token for token, _ in wanted[:count]]
        logs = [log for _, log in wanted[:count]]
        assert [log for _, log in own] == pytest.approx(logs, abs=1e-4)
    assert measured == [(2, 1, 1)], "one of two drafted tokens was right"
    # after a draft of which nothing is right the next step has inputs of its own
    for one, wanted in ((first, alone[0][3]), (second, alone[1][2])):
        one.set_draft([(wanted[0] + 1) % 4000])
    for place in (3, 4):
        tokens = [[token for token, _ in pairs] for pairs in step(first, second)]
        assert tokens == [[alone[0][place][0]], [alone[1][place - 1][0]]]
    assert measured[1:] == [(2, 0, 1), (0, 0, 1)]
    measured.clear()
    late = greedy(7)
    replica.cache.forget_prefixes()
    step(first, second, late)
    assert not measured, "a prompt beside requests that decode"
    for one in (first, second, late):
        drafting.release(one.request_id)
