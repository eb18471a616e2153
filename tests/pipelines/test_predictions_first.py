"""Predictions are drafted before a smaller model or a head drafts, whose caches follow what they did not draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.interfaces import PipelineTask, SamplingParams, TextGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.draft_model import ModelDrafter
from max.pipelines.generation.drafts.draft_rounds import DraftRounds
from max.pipelines.generation.drafts.prediction import PredictionDrafter
from max.pipelines.generation.engine import Engine
from tests.pipelines.test_draft_models import pipeline_of, released, smaller, texts
from tests.pipelines.test_drafts import LENGTH, TINY, generated, kinds_of_requests, requests
from tests.pipelines.test_predictions import predictions

__all__ = ["smaller"]

Tokens = list[int]


@pytest.fixture(scope="module")
def plain() -> Any:
    return pipeline_of(max_num_steps=1)


@pytest.fixture(scope="module")
def drafting(smaller: Any) -> Any:
    return pipeline_of(smaller, num_speculative_tokens=5, max_num_steps=8)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Tokens, Tokens]]]:
    """The texts and the drafts that each drafter has made."""
    found: dict[str, list[tuple[Tokens, Tokens]]] = {"prediction": [], "model": []}
    propose, propose_all = PredictionDrafter.propose, ModelDrafter.propose_all

    def predicted(self: Any, context: TextContext, most: int) -> Any:
        tokens = propose(self, context, most)
        if tokens:
            found["prediction"].append((context.all_tokens.tolist(), list(tokens)))
        return tokens

    def written(self: Any, contexts: Any, most: Any) -> Any:
        drafts = propose_all(self, contexts, most)
        for context, tokens in zip(contexts, drafts, strict=True):
            if tokens:
                found["model"].append((context.all_tokens.tolist(), list(tokens)))
        return drafts

    monkeypatch.setattr(PredictionDrafter, "propose", predicted)
    monkeypatch.setattr(ModelDrafter, "propose_all", written)
    return found


def greedy(pipeline: Any, text: str, new: int, prediction: Tokens | None = None) -> TextContext:
    tokens = pipeline.tokenizer.encode_now(text)
    return TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + new,
        sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        prediction=None if prediction is None else PredictedText(prediction),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["right", "edited", "of others", "one token", "huge"])
@pytest.mark.parametrize("kinds", ["texts", "options"])
def test_texts_do_not_depend_on_predictions(
    plain: Any, drafting: Any, drafted: Any, kind: str, kinds: str
) -> None:
    """Greedy and sampled, with penalties, grammars, log-probabilities and minimum lengths, and trees."""

    def made(pipeline: Any) -> list[TextContext]:
        if kinds == "texts":
            return requests(pipeline, 3)
        return kinds_of_requests(pipeline, np.random.default_rng(5))

    expected = generated(plain, made(plain))
    contexts = made(drafting)
    # every third request has none: its steps are those of others with one
    for number, (one, tokens) in enumerate(
        zip(contexts, predictions(kind, expected, 1), strict=True)
    ):
        one.prediction = None if number % 3 == 1 else PredictedText(tokens)
    assert texts(drafting, contexts) == expected
    released(drafting)
    assert drafted["prediction"] and drafted["model"]
    assert not drafting.replicas[0].drafts._drafter.parts[0][1]._alignments, "nothing is kept"


def test_a_prediction_comes_before_the_draft_model(
    plain: Any, drafting: Any, drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it has a continuation, the draft model drafts nothing."""
    text, steps = "Once upon a time there was a cat", list[int]()
    (answer,) = texts(plain, [greedy(plain, text, 91)])
    execute = drafting.replicas[0].execute
    monkeypatch.setattr(
        drafting.replicas[0], "execute", lambda *given: steps.append(1) or execute(*given)
    )
    one = greedy(drafting, text, 91, answer)
    assert texts(drafting, [one]) == [answer]
    assert drafted["prediction"] and not drafted["model"]
    # the prompt gives a token, and 90 others come by 6
    assert len(steps) <= 16 and one.prediction.take_counts() == (75, 0)  # type: ignore[union-attr]
    released(drafting)


@pytest.mark.parametrize("chunk", [4, 64])
def test_the_draft_model_catches_up(
    plain: Any,
    drafting: Any,
    smaller: Any,
    drafted: Any,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By chunks, with requests that it drafts beside; drafts are those of a pipeline of its own."""
    monkeypatch.setattr(drafting._drafter, "_chunk", chunk)
    prompts = ["Once upon a time there was a cat", "The colors of the rainbow are", "x = [1, 2"]
    answers = texts(plain, [greedy(plain, text, 70) for text in prompts])
    wrong = [*answers[0][:20], 9, 9, 9, 9, *answers[0][20:34], *[8] * 5]
    contexts = [
        greedy(drafting, text, 70, prediction)
        for text, prediction in zip(prompts, [wrong, answers[1][:50], None], strict=True)
    ]
    assert texts(drafting, contexts) == answers
    released(drafting)
    config = PipelineConfig(
        model_path=smaller, quantization_encoding="float32", max_length=LENGTH, max_batch_size=8,
        max_num_steps=1,
    )  # fmt: skip
    own = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    alone = [
        TextContext(
            tokens=np.array(tokens), max_length=len(tokens) + len(draft),
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )
        for tokens, draft in drafted["model"]
    ]  # fmt: skip
    assert len(alone) > 12
    assert texts(own, alone) == [draft for _, draft in drafted["model"]]


def test_rounds_of_the_draft_model_after_a_prediction(
    plain: Any, drafting: Any, drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several run in a call, and begin with a draft of its own."""
    calls, run = list[tuple[int, int]](), DraftRounds.run

    def recorded(self: Any, batch: Any, plan: Any, *given: Any) -> Any:
        (one,) = batch
        assert list(one.draft_tokens) == drafted["model"][-1][1][: one.draft_length]
        found = run(self, batch, plan, *given)
        calls.append((len(one.generated_tokens), found.rounds))
        return found

    monkeypatch.setattr(DraftRounds, "run", recorded)
    lengths = drafting.replicas[0].drafts.lengths
    # runs of 16 tokens and more only
    monkeypatch.setattr(lengths, "prefers", lambda key, requests, room, kind, other: kind >= 5)
    text = "one two three four five six seven"
    (answer,) = texts(plain, [greedy(plain, text, 200)])
    for prediction in (answer[:60], [*answer[:40], 9, 9, *answer[44:60]]):
        calls.clear()
        one = greedy(drafting, text, 200, prediction)
        assert texts(drafting, [one]) == [answer]
        assert sum(rounds for _, rounds in calls) > len(calls) > 2
        assert one.prediction.take_counts()[0] > 9  # type: ignore[union-attr]
        released(drafting)


class AtOnce:
    """A reader that shows a watch some tokens before the first round."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.watches, self.ends = tokens, list[Any](), 0

    def begin(self, batch: Any, history: Any, counted_steps: Any = None, watch: Any = None) -> None:
        self.watches.append(watch)
        if watch is not None:
            watch([self.tokens])

    def end_watch(self) -> None:
        self.ends += 1


def test_rounds_end_where_a_prediction_is_preferred(
    plain: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that are read are looked up; of a request without a prediction nobody looks."""
    calls, run, replica = list[int](), DraftRounds.run, drafting.replicas[0]

    def recorded(self: Any, *given: Any) -> Any:
        found = run(self, *given)
        calls.append(found.rounds)
        return found

    monkeypatch.setattr(DraftRounds, "run", recorded)
    lengths = replica.drafts.lengths
    # runs of 8 tokens and more only
    monkeypatch.setattr(lengths, "prefers", lambda key, requests, room, kind, other: kind >= 4)
    text = "one two three four five six seven"
    (answer,) = texts(plain, [greedy(plain, text, 300)])
    odd = [4000 + n for n in range(40)]
    for prediction, shown, rounds in (
        (None, odd[:20], 8), (odd, odd[:3], 8), (odd, odd[:7], 8), (odd, odd[:8], 1), (odd, odd[:20], 1),
        (odd, [], 8), (odd, odd, 8),
    ):  # fmt: skip
        one = greedy(drafting, text, 300, prediction)
        while not one.draft_length:
            drafting.execute(TextGenerationInputs([{one.request_id: one}], 1))
        calls.clear()
        reader = AtOnce(shown)
        monkeypatch.setattr(replica, "reader", reader)
        drafting.execute(TextGenerationInputs([{one.request_id: one}], 8))
        assert calls == [rounds], (prediction, shown)
        assert reader.ends == (prediction is not None)
        assert [watch is None for watch in reader.watches] == [prediction is None]
        monkeypatch.setattr(replica, "reader", None)
        assert one.generated_tokens.tolist() == answer[: len(one.generated_tokens)]
        drafting.release(one.request_id)
        drafting.replicas[0].cache.close(one.request_id)
        released(drafting)


def test_a_draft_is_verified_by_one_step(
    plain: Any, drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a call of several steps is asked for, and some requests of the batch have a draft."""
    replica, steps = drafting.replicas[0], list[tuple[int, list[int]]]()
    reserve = replica.reserve

    def recorded(batch: Any, most: int) -> int:
        if not any(context.needs_ce for context in batch):
            steps.append((most, [draft_length(context) for context in batch]))
        return reserve(batch, most)

    monkeypatch.setattr(replica, "reserve", recorded)
    # as where nothing is drafted any more
    monkeypatch.setattr(replica.drafts.lengths, "plain_steps", lambda *given: None)
    expected = generated(plain, requests(plain, 3))
    contexts = requests(drafting, 3)
    for one, tokens in zip(contexts, expected, strict=True):
        one.prediction = PredictedText(tokens)
        one.sampling_params.frequency_penalty = 1e-9  # so that there are no rounds
    assert texts(drafting, contexts) == expected
    assert len(steps) > 4 and any(any(lengths) for _, lengths in steps)
    assert all(most == 1 for most, lengths in steps if any(lengths))
    released(drafting)


def test_a_prediction_that_equals_what_the_draft_model_wrote(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are in the draft model's text by chance: no rounds, whose tokens would count for the prediction."""
    pipeline: Any = pipeline_of(TINY, num_speculative_tokens=3, max_num_steps=8)
    text, plans = "one two three four five six seven", list[bool]()
    (answer,) = texts(plain, [greedy(plain, text, 60)])
    plan, drafter = DraftRounds.plan, pipeline._drafter

    def planned(self: Any, batch: Any, most: int, drafts: Any) -> Any:
        (one,) = batch
        if not one.draft_length:
            return None
        # as if it had read and written them
        (written,) = drafter.propose_all(batch, [one.draft_length])
        assert tuple(written) == one.draft_tokens
        assert drafter.written_text(one, one.draft_length) is not None
        found = plan(self, batch, most, drafts)
        plans.append(found is not None)
        return found

    monkeypatch.setattr(DraftRounds, "plan", planned)
    for prediction, in_rounds in ((answer, False), (None, True)):
        plans.clear()
        assert texts(pipeline, [greedy(pipeline, text, 60, prediction)]) == [answer]
        assert len(plans) > 1 and any(plans) == in_rounds
    released(pipeline)


def test_a_prediction_of_a_request_that_is_preempted(plain: Any, smaller: Any) -> None:
    pipeline: Any = pipeline_of(
        smaller, num_speculative_tokens=5, max_num_steps=8, kv_cache_page_size=16
    )
    for pool in pipeline.kv_managers[1].pages.pools:
        for _ in range(pool.num_pages - 12):
            pool._free.popitem()
        pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    expected = generated(plain, requests(plain, 7))
    engine = Engine(pipeline, limits_of(pipeline))
    contexts = requests(pipeline, 7)
    for one, tokens in zip(contexts, predictions("edited", expected, 2), strict=True):
        one.prediction = PredictedText(tokens)
        engine.submit(one)
    while not engine.idle:
        engine.step()
    assert [one.generated_tokens.tolist() for one in contexts] == expected
    assert engine.scheduler.preemptions > 0
