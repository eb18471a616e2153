"""Several steps with drafts of known texts in one call: texts are those of plain steps, and Python does not run in
between."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max._backends.cpu.runtime.executor import Executor
from max.driver import Tensor
from max.engine import InferenceSession
from max.graph import DeviceRef
from max.interfaces import GenerationStatus, PipelineTask, SamplingParams, TextGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.text_rounds import TextPlan, TextRounds, text_round_graph
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.sampling.inputs import step_seed
from tests.pipelines.test_draft_models import pipeline_of as pipeline_of_models
from tests.pipelines.test_draft_models import released as released_models
from tests.pipelines.test_draft_models import smaller, texts
from tests.pipelines.test_draft_rounds import expected_round
from tests.pipelines.test_drafts import (
    LENGTH,
    TINY,
    always,
    generated,
    kinds_of_requests,
    pipeline_of,
    requests,
)
from tests.pipelines.test_predictions import predictions

__all__ = ["smaller"]

Tokens = list[int]


@pytest.fixture(scope="module")
def plain() -> Any:
    return pipeline_of(0)


@pytest.fixture(scope="module")
def drafting() -> Any:
    return pipeline_of(5, max_num_steps=8)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TextPlan, Any]]:
    """What was planned, and what came of it."""
    calls, run = list[tuple[TextPlan, Any]](), TextRounds.run

    def recorded(self: TextRounds, batch: Any, plan: TextPlan, *rest: Any) -> Any:
        found = run(self, batch, plan, *rest)
        calls.append((plan, found))
        return found

    monkeypatch.setattr(TextRounds, "run", recorded)
    return calls


def rounds_of(ran: list[tuple[TextPlan, Any]]) -> list[int]:
    return [found.rounds for _, found in ran]


def released(pipeline: Any) -> None:
    (cache,) = pipeline.kv_managers
    cache.pages.check()
    assert cache.used_pages == 0


def read(pipeline: Any, contexts: list[TextContext]) -> list[Tokens]:
    """The tokens of requests, of which a reader delivers what it can while calls run."""
    tokens: dict[Any, Tokens] = {one.request_id: [] for one in contexts}

    def deliver(outputs: Any) -> None:
        for output in outputs:
            tokens[output.request_id] += output.tokens

    reader = StepReader(deliver)
    engine = Engine(pipeline, limits_of(pipeline, True), reader)
    for one in contexts:
        engine.submit(one)
    while not engine.idle:
        for outcome in engine.step():
            assert not isinstance(outcome, Failure), outcome
            tokens[outcome.request_id] += outcome.tokens
    reader.close()
    pipeline.read_steps(None)
    for one in contexts:
        assert one.is_done and tokens[one.request_id] == one.generated_tokens.tolist()
    return [*tokens.values()]


def greedy(pipeline: Any, text: str, new: int, answer: Tokens = (), **values: Any) -> TextContext:  # pyright: ignore
    tokens = pipeline.tokenizer.encode_now(text)
    prediction = PredictedText(answer) if len(answer) else None
    return TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + new, prediction=prediction,
        sampling_params=SamplingParams(top_k=1, ignore_eos=True), **values,
    )  # fmt: skip


def run(pipeline: Any, steps: int, *contexts: TextContext) -> Any:
    return pipeline.execute(TextGenerationInputs([{c.request_id: c for c in contexts}], steps))


def drafted(pipeline: Any, one: TextContext) -> TextContext:
    """A request that has run until it has a draft."""
    while not one.draft_length:
        run(pipeline, 1, one)
    return one


TEXT = "What is the capital of Norway?"


@pytest.fixture(scope="module")
def answer(plain: Any) -> Tokens:
    (tokens,) = generated(plain, [greedy(plain, TEXT, 400)])
    return tokens


@pytest.mark.parametrize("kind", ["right", "edited", "of others"])
def test_texts_are_those_of_plain_steps(
    plain: Any, drafting: Any, ran: list[Any], kind: str
) -> None:
    """Greedy and sampled, of requests with a prediction and without one, which end at other places."""
    for seed in range(4):
        expected = generated(plain, requests(plain, seed))
        contexts, draw = requests(drafting, seed), random.Random(seed)
        for one, tokens in zip(contexts, predictions(kind, expected, seed), strict=True):
            if draw.random() < 0.6:
                one.prediction = PredictedText(tokens)
        before = drafting.draft_counts
        assert read(drafting, contexts) == expected
        released(drafting)
        # those of requests with a prediction are some of all
        counts = [one.prediction.take_counts() for one in contexts if one.prediction]
        accepted, rejected = np.sum(counts, axis=0)
        both = np.array(drafting.draft_counts) - before
        assert accepted <= both[1] and accepted + rejected <= both[0]
    plans = [plan for plan, _ in ran]
    assert any(0 in plan.lengths and len(plan.lengths) > 2 for plan in plans)
    assert len({plan.rounds for plan in plans}) > 1
    # others end where a draft of a request without one pays
    if kind == "right":
        assert max(rounds_of(ran)) > 1


def test_requests_that_are_not_read(
    plain: Any, drafting: Any, ran: list[Any], answer: Tokens
) -> None:
    """Of those a call has several steps only if each request has a text: nobody sees where a draft would pay."""
    expected = generated(plain, requests(plain, 4))
    contexts = requests(drafting, 4)
    for one, tokens in zip(contexts, expected, strict=True):
        one.prediction = PredictedText(tokens)
    assert generated(drafting, contexts) == expected
    assert all(all(plan.lengths) for plan, _ in ran)
    assert any(len(plan.lengths) > 1 for plan, _ in ran) and max(rounds_of(ran)) > 2
    one, other = drafted(drafting, greedy(drafting, TEXT, 99, answer)), greedy(drafting, TEXT, 99)
    run(drafting, 1, other)
    other.set_draft(())
    rounds, drafts = drafting.replicas[0].text_rounds, drafting.replicas[0].drafts
    assert rounds.plan([one, other], 8, drafts, False) is None
    plan = rounds.plan([one, other], 8, drafts, True)
    assert (plan.rounds, plan.lengths, plan.texts[1]) == (8, [5, 0], ())
    for each in (one, other):
        drafting.release(each.request_id)
    released(drafting)


def test_a_text_that_is_right_to_its_end(
    plain: Any, drafting: Any, ran: list[Any], answer: Tokens
) -> None:
    """Each call has all its steps, as far as the text and the room go."""
    for new, most in ((1, 0), (7, 0), (20, 3), (60, 8), (400, 8)):
        ran.clear()
        one = greedy(drafting, TEXT, new, answer[:new])
        assert generated(drafting, [one]) == [answer[:new]]
        assert max(rounds_of(ran), default=0) in (most, most - 1), (new, rounds_of(ran))
        assert all(plan.rounds == found.rounds for plan, found in ran)
        assert all((found.num_accepted == 5).all() for _, found in ran)
    # six tokens a step: 400 of them, the plain ones between aside
    assert len(ran) <= 400 // 48 + 3
    # a longer text: the last step has room for all of its tokens
    for new in (13, 20, 47):
        one = drafted(drafting, greedy(drafting, TEXT, new, answer))
        left = one.max_length - one.end_idx
        ran.clear()
        run(drafting, 8, one)
        assert [plan.rounds for plan, _ in ran] == [left // 6] * (left >= 12)
        drafting.release(one.request_id)
    ran.clear()
    # a text of 21 tokens, from the place on where it is drafted first
    one = drafted(drafting, greedy(drafting, TEXT, 200, answer[:21]))
    left = 21 - len(one.generated_tokens)
    while not one.is_done:
        run(drafting, 8, one)
    drafting.release(one.request_id)
    assert ran[0][0].rounds == (left + 1) // 6
    assert one.generated_tokens.tolist() == answer[:200]
    released(drafting)


def test_a_call_ends_where_a_text_does_not_go_on(
    drafting: Any, ran: list[Any], answer: Tokens
) -> None:
    """At any place of a step, also after all drafted tokens; the steps after that one do not run."""
    for place in range(20, 33):
        ran.clear()
        changed = [*answer[:place], (answer[place] + 1) % 4096, *answer[place + 1 :]]
        one = drafted(drafting, greedy(drafting, TEXT, 120, changed))
        begin = len(one.generated_tokens)
        run(drafting, 8, one)
        drafting.release(one.request_id)
        steps, right = divmod(place - begin, 6)
        assert rounds_of(ran) == [steps + 1] and ran[0][0].rounds == 8
        assert ran[0][1].num_accepted.ravel().tolist() == [5] * steps + [right]
        assert one.generated_tokens.tolist() == answer[: place + 1]
    released(drafting)


def test_batches_in_turn(plain: Any, drafting: Any, ran: list[Any], answer: Tokens) -> None:
    """Each has the parameters of its own requests: one is greedy, one sampled."""
    params = SamplingParams(temperature=1.5, top_k=40, seed=5, ignore_eos=True)

    def sampled(pipeline: Any, text: Tokens) -> TextContext:
        one = greedy(pipeline, TEXT, 120, text)
        one.sampling_params = params
        return one

    (other,) = generated(plain, [sampled(plain, [])])
    assert other != answer[:120]
    one, two = greedy(drafting, TEXT, 120, answer), sampled(drafting, other)
    for each in (one, two):
        drafted(drafting, each)
    while not (one.is_done and two.is_done):
        for each in (one, two):
            if not each.is_done:
                run(drafting, 3, each)
    for each, text in ((one, answer), (two, other)):
        assert each.generated_tokens.tolist() == text[:120]
        drafting.release(each.request_id)
    assert rounds_of(ran).count(3) > 6 and (ran[0][1].num_accepted == 5).all()
    released(drafting)


def test_a_text_that_repeats_itself(plain: Any, drafting: Any, ran: list[Any]) -> None:
    """A look-up near the end of a text goes on with what was looked up."""
    text = "one two three four five six seven " * 8
    ((whole,),) = [generated(plain, [greedy(plain, text, 200)])]
    assert generated(drafting, [greedy(drafting, text, 200)]) == [whole]
    assert max(rounds_of(ran)) > 2
    (drafter,) = (each for _, each in drafting.replicas[0].drafts._drafter.parts[2:])
    one = TextContext(tokens=np.array([9, 1, 2, 3, 1, 2, 3, 1, 2]), max_length=99)
    assert list(drafter.propose(one, 5)) == [3, 1, 2]
    assert drafter.text(one, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert [drafter.kind(one, more) for more in (0, 1, 9)] == [5, 6, 6]
    drafter.forget(one.request_id)
    assert drafter.text(one, 8) == () and not drafter._found


def test_the_answer_of_another_request(drafting: Any, ran: list[Any], answer: Tokens) -> None:
    """What an ended request got is the text of the next one, up to its end."""
    drafting.replicas[0].drafts.forget_answers()
    for _ in range(2):
        ran.clear()
        assert generated(drafting, [greedy(drafting, TEXT, 90)]) == [answer[:90]]
    assert max(rounds_of(ran)) > 3
    drafting.replicas[0].drafts.forget_answers()
    released(drafting)


def test_tokens_that_end_a_sequence_end_the_call(
    plain: Any, drafting: Any, ran: list[Any], answer: Tokens
) -> None:
    """At any place of a step; the other sequence goes on with the next call."""
    (other,) = generated(plain, [greedy(plain, "x = [1, 2", 60)])
    draw = random.Random(1)
    for _ in range(10):
        end = answer[draw.randrange(4, 60)]
        first = greedy(drafting, TEXT, 70, answer, eos_token_ids={end})
        first.sampling_params = SamplingParams(top_k=1)
        second = greedy(drafting, "x = [1, 2", 60, other)
        found = generated(drafting, [first, second])
        assert found == [answer[: answer.index(end) + 1], other]
        assert first.status is GenerationStatus.END_OF_SEQUENCE
    several = greedy(drafting, TEXT, 70, answer, eos_sequences=[answer[30:32]])
    several.sampling_params = SamplingParams(top_k=1)
    expected = next(n for n in range(2, 70) if answer[n - 2 : n] == answer[30:32])
    assert generated(drafting, [several]) == [answer[:expected]]
    assert max(rounds_of(ran)) > 2
    released(drafting)


def test_what_runs_one_step_a_call(plain: Any, drafting: Any, ran: list[Any]) -> None:
    """Requests with penalties, biases, a least length, log-probabilities, grammars, or logits processors."""
    expected = generated(plain, kinds_of_requests(plain, np.random.default_rng(5)))
    contexts = kinds_of_requests(drafting, np.random.default_rng(5))
    for index, (one, tokens) in enumerate(zip(contexts, expected, strict=True)):
        ran.clear()
        one.prediction = PredictedText(tokens)
        assert generated(drafting, [one]) == [tokens]
        # those that end by several tokens, or not at all, are no others
        if index not in (7, 9):
            # after its least length a request is as others
            assert all(plan.lengths for plan, _ in ran) if index == 4 else not ran
    # while the model is profiled
    ran.clear()
    one = greedy(drafting, TEXT, 30, generated(plain, [greedy(plain, TEXT, 30)])[0])
    with drafting.replicas[0].model.model.profile():
        generated(drafting, [one])
    assert not ran
    released(drafting)


def test_a_longer_draft_is_made_first(drafting: Any, answer: Tokens) -> None:
    """Where the next kind of draft would be longer, a step returns, so that it is."""
    rounds, drafts = drafting.replicas[0].text_rounds, drafting.replicas[0].drafts
    one = drafted(drafting, greedy(drafting, TEXT, 120, answer))
    tokens = one.draft_tokens
    one.set_draft(tokens[:2])
    kind = drafts._drafter.kind(one)
    assert drafts._drafter.kind(one, 3) > kind
    try:
        for later, planned in ((2, True), (1, True), (4, False)):
            drafts.lengths.length = lambda *given, n=later: n if given[-1] > kind else 2
            assert (rounds.plan([one], 8, drafts, False) is not None) == planned
        drafts.lengths.length = lambda *given: 2
        assert rounds.plan([one], 1, drafts, False) is None
        # the draft of another text, and one of a tree
        assert drafts.text(one, 9) == answer[len(one.generated_tokens) :][:9]
        one.set_draft([tokens[0], (tokens[1] + 1) % 99])
        assert drafts.text(one, 9) == () and rounds.plan([one], 8, drafts, False) is None
        one.set_draft(tokens[:2], [-1, -1])
        assert rounds.plan([one], 8, drafts, False) is None
        one.set_draft(tokens[:2])
        assert rounds.plan([one], 8, drafts, False).rounds == 8
    finally:
        del drafts.lengths.length
    # few steps are left before a plain one is measured
    one.set_draft(tokens)
    before = drafts.lengths._run
    drafts.lengths._run = 61
    assert rounds.plan([one], 8, drafts, False).rounds == 3
    drafts.lengths._run = before
    drafting.release(one.request_id)
    released(drafting)


def test_what_is_recorded_of_a_call(
    drafting: Any, monkeypatch: pytest.MonkeyPatch, answer: Tokens
) -> None:
    """Each step with the kind of draft that it was, and its time without any drafting."""
    drafts = drafting.replicas[0].drafts
    one = drafted(drafting, greedy(drafting, TEXT, 200, [*answer[:30], 7, 7, *answer[32:]]))
    begin, kinds, steps = len(one.generated_tokens), list[Any](), list[Any]()
    monkeypatch.setattr(drafts.lengths, "record_verification", lambda *given: kinds.append(given))
    monkeypatch.setattr(drafts.lengths, "step", lambda *given: steps.append(given))
    run(drafting, 8, one)
    full, right = divmod(30 - begin, 6)
    runs = [min(begin + 6 * number, 32).bit_length() for number in range(full + 1)]
    assert kinds == [
        (one.request_id, 5, 5 if number < full else right, kind) for number, kind in enumerate(runs)
    ]
    ((ids, count, accepted, seconds, number, inside),) = steps
    assert (ids, count, accepted, number) == ([one.request_id], 5, 5 * full + right, full + 1)
    assert seconds > 0 and inside is None
    drafting.release(one.request_id)
    released(drafting)


def test_an_interrupt_ends_a_call_after_its_step(
    drafting: Any, ran: list[Any], answer: Tokens
) -> None:
    one = drafted(drafting, greedy(drafting, TEXT, 400, answer))
    drafting.interrupt()
    run(drafting, 8, one)
    run(drafting, 8, one)
    assert rounds_of(ran) == [1, 8]
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(1e-4):
            drafting.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        ran.clear()
        for _ in range(3):
            run(drafting, 8, one)
    finally:
        ended.set()
        thread.join()
    assert min(rounds_of(ran)) < 8
    run(drafting, 1, one)
    assert one.generated_tokens.tolist() == answer[: len(one.generated_tokens)]
    drafting.release(one.request_id)
    released(drafting)


def test_cancelled_requests(plain: Any, drafting: Any, ran: list[Any]) -> None:
    """Others of their batch get the same tokens."""
    draw, count = random.Random(3), 0
    for seed in range(5, 8):
        expected = generated(plain, requests(plain, seed))
        contexts, tokens, gone = requests(drafting, seed), dict[Any, Tokens](), set[Any]()
        engine = Engine(drafting, limits_of(drafting))
        for one, text in zip(contexts, expected, strict=True):
            one.prediction = PredictedText(text)
            engine.submit(one)
        while not engine.idle:
            for outcome in engine.step():
                assert not isinstance(outcome, Failure), outcome
                tokens.setdefault(outcome.request_id, []).extend(outcome.tokens)
            running = [one for one in contexts if not one.is_done and one.request_id not in gone]
            if running and draw.random() < 0.5:
                one = draw.choice(running)
                engine.cancel(one.request_id)
                gone.add(one.request_id)
        for one, text in zip(contexts, expected, strict=True):
            own = tokens.get(one.request_id, [])
            assert own == (text[: len(own)] if one.request_id in gone else text)
        count += len(gone)
        released(drafting)
    assert count > 5 and max(rounds_of(ran)) > 1


def test_a_draft_of_another_request_ends_a_call(
    drafting: Any, ran: list[Any], answer: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads the steps looks up the tokens of requests without drafts."""
    watched = list[Any]()
    drafts = drafting.replicas[0].drafts
    watch = drafts.watch

    def of(batch: Any) -> Any:
        made = watch(batch)
        watched.append((made, [one.draft_length for one in batch]))
        return made

    monkeypatch.setattr(drafts, "watch", of)
    first = greedy(drafting, TEXT, 200, answer)
    second = greedy(drafting, "x = [1, 2", 200)
    read(drafting, [first, second])
    assert first.generated_tokens.tolist() == answer[:200]
    mixed = [made for made, lengths in watched if lengths[0] and not lengths[1:2]]
    assert all(made is None or made._requests[0] is None for made in mixed)
    assert any(0 in plan.lengths for plan, _ in ran)
    released(drafting)


@pytest.mark.parametrize(
    "values",
    [
        dict(enable_in_flight_batching=True, prefill_chunk_size=16),
        dict(kv_cache_page_size=16, few=12),
        dict(kv_cache_format="q8_0", kv_cache_page_size=32),
        dict(
            kv_cache_page_size=16, few=12, enable_kvcache_swapping_to_host=True,
            host_kvcache_swap_space_gb=0.01,
        ),
    ],
    ids=["chunks", "few pages", "8 bits", "swapped pages"],
)  # fmt: skip
def test_texts_in_other_configurations(plain: Any, ran: list[Any], values: dict[str, Any]) -> None:
    """With chunks of prompts beside them, after requests have lost their pages, and with reused prefixes."""
    few = values.pop("few", None)
    form = {key: value for key, value in values.items() if key == "kv_cache_format"}
    used = pipeline_of(0, **form) if form else plain
    pipeline: Any = pipeline_of(6, max_num_steps=8, **values)
    for pool in pipeline.kv_managers[0].pages.pools if few else ():
        for _ in range(pool.num_pages - few):
            pool._free.popitem()
        pool._users = [1 if page not in pool._free else 0 for page in range(pool.num_pages)]
    preemptions = 0
    for seed in (7, 7, 8):
        expected = generated(used, requests(used, seed))
        contexts = requests(pipeline, seed)
        for one, tokens in zip(contexts, predictions("edited", expected, 2), strict=True):
            one.prediction = PredictedText(tokens)
        engine = Engine(pipeline, limits_of(pipeline))
        for one in contexts:
            engine.submit(one)
        while not engine.idle:
            engine.step()
        preemptions += engine.scheduler.preemptions
        assert [one.generated_tokens.tolist() for one in contexts] == expected
    assert max(rounds_of(ran)) > 1
    if few:
        assert preemptions > 0
    else:
        released(pipeline)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers see 40 tokens, of the weights of another one."""
    folder = tmp_path_factory.mktemp("windows") / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40,
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_with_windows(windows: Path, ran: list[Any]) -> None:
    """Pages behind the window go back."""

    def made(**values: Any) -> Any:
        config = PipelineConfig(
            model_path=windows, quantization_encoding="float32", max_length=LENGTH,
            max_batch_size=8, kv_cache_page_size=16, **values,
        )  # fmt: skip
        return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]

    plain = made()
    drafting = always(made(speculative_method="ngram", num_speculative_tokens=6, max_num_steps=8))
    expected = generated(plain, requests(plain, 2))
    contexts = requests(drafting, 2)
    for one, tokens in zip(contexts, expected, strict=True):
        one.prediction = PredictedText(tokens)
    assert generated(drafting, contexts) == expected
    (long,) = generated(plain, [greedy(plain, TEXT, 300)])
    assert generated(drafting, [greedy(drafting, TEXT, 300, long)]) == [long]
    assert max(rounds_of(ran)) == 8
    released(drafting)


def test_predictions_beside_a_draft_model(
    smaller: Path, plain: Any, ran: list[Any], answer: Tokens
) -> None:
    """The draft model reads what the calls have given before it drafts again."""
    pipeline: Any = pipeline_of_models(smaller, num_speculative_tokens=4, max_num_steps=8)
    changed = [*answer[:70], *answer[90:150], 7, *answer[151:]]
    for prediction in (answer, changed):
        ran.clear()
        found = texts(pipeline, [greedy(pipeline, TEXT, 300, prediction)])
        assert found == [answer[:300]] and max(rounds_of(ran)) > 4
    expected = generated(plain, requests(plain, 9))
    contexts = requests(pipeline, 9)
    for one, tokens in zip(contexts, predictions("edited", expected, 1), strict=True):
        one.prediction = PredictedText(tokens)
    assert texts(pipeline, contexts) == expected
    released_models(pipeline)


def test_python_does_not_run_between_steps(
    drafting: Any, ran: list[Any], answer: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of functions from the start of the native code on: as many for eight steps as for two."""
    counts, run_at = dict[int, set[int]](), Executor.run_at
    own = drafting.replicas[0].text_rounds._steps
    steps = 0

    def profiled(self: Executor, *arguments: Any) -> Any:
        calls = 0

        def count(frame: Any, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        if self is not own._joined.executor:
            return run_at(self, *arguments)
        sys.setprofile(count)
        try:
            return run_at(self, *arguments)
        finally:
            sys.setprofile(None)
            counts.setdefault(steps, set()).add(calls)

    monkeypatch.setattr(Executor, "run_at", profiled)
    one = drafted(drafting, greedy(drafting, TEXT, 400, answer))
    for steps in (2, 8, 2, 8):
        run(drafting, steps, one)
    drafting.release(one.request_id)
    assert rounds_of(ran) == [2, 8, 2, 8]
    # what the garbage collector calls meanwhile is not counted
    assert min(counts[2]) == min(counts[8]) < 60
    released(drafting)


@pytest.mark.parametrize("seed", range(8))
def test_the_graph_between_two_steps(seed: int) -> None:
    """Against a sequence at a time in plain Python."""
    draw = np.random.default_rng(seed)
    batch, rounds, vocab = int(draw.integers(1, 4)), 6, 5
    widths = draw.integers(1, 5, batch).tolist()
    width, total = max(widths), sum(widths)
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.uint32)
    model = InferenceSession().load(text_round_graph(DeviceRef.CPU()))
    first = draw.integers(0, 2**64, batch, np.uint64)
    ends = draw.integers(-1, 20, (batch, int(draw.integers(0, 4))))
    texts = draw.integers(0, vocab, (batch, rounds * width - 1))
    texts[draw.random(batch) < 0.3] = -1
    lengths = draw.integers(1, 99, batch, np.uint32)
    rows, seeds = draw.integers(0, vocab, total), np.zeros(batch * width, np.uint64)
    most = np.array([[width, 0]], np.uint32)
    history, done = np.full((rounds, batch * width), -1), np.zeros(1, np.int64)
    again, interrupted = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    count = batch * width
    greedily = (np.zeros(count, np.float32), np.ones(count, np.int64), np.ones(count, np.float32))
    given_inputs = list[Any]()
    for number in range(rounds):
        logits = draw.normal(size=(count, vocab)).astype(np.float32)
        for row, own in enumerate(widths):
            end = (row + 1) * width
            begin, bonus = int(offsets[row]), texts[row, (number + 1) * own - 1 :][:1]
            for place, wanted in enumerate([*rows[begin + 1 : begin + own], *bonus]):
                if wanted >= 0 and draw.random() < 0.8:
                    logits[end - own + place, wanted] = 9  # so that it is right
        if draw.random() < 0.05:
            logits[width - 1] = np.nan
        interrupted[0] = draw.random() < 0.2
        chosen = np.where(np.isnan(logits[:, 0]), -1, np.nan_to_num(logits).argmax(1))
        before, given = lengths.copy(), rows.copy()
        changed = [rows, lengths, most, seeds, history, done, again]
        read = [*greedily, np.zeros(count, np.float32), first, ends, offsets, texts, interrupted]
        given_inputs = [Tensor.from_numpy(array) for array in (logits, *read, *changed)]
        model.execute(*given_inputs)
        ended = bool(interrupted[0])
        for row, own in enumerate(widths):
            place, end = int(offsets[row]), (row + 1) * width
            drafts = given[place : place + own].tolist()
            new, _, stops = expected_round(
                drafts, chosen[end - own : end].tolist(), ends[row].tolist(), vocab
            )
            stored = history[number, row * width : end].tolist()
            assert stored == [*new, *[-2] * (width - len(new))]
            assert lengths[row] == int(before[row]) + len(new)
            after = texts[row, number * own :].tolist()
            last = number + 1 == rounds
            ended |= stops or len(new) < own or (not last and after[own - 1] not in (-1, new[-1]))
            assert rows[place] == new[-1]
            if not last:
                assert rows[place + 1 : place + own].tolist() == after[own : 2 * own - 1]
            positions = [step_seed(int(first[row]), int(lengths[row]) + 1 + n) for n in range(own)]
            assert seeds[end - own : end].tolist() == positions
        assert most.tolist() == [[width, int(lengths.max())]] and done[0] == number + 1
        assert again[0] == (not ended and number + 1 < rounds)
        rows[rows < 0] = 0
    with pytest.raises(IndexError, match=f"round {rounds} of {rounds}"):
        model.execute(*given_inputs)
