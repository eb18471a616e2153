"""Tokens of an execution of several steps are delivered while it runs."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation import replica
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.process.channel import ConnectionChannel
from max.pipelines.generation.process.commands import GenerationRequest, Shutdown
from max.pipelines.generation.process.events import TokensGenerated
from max.pipelines.generation.process.service import serve
from max.pipelines.generation.steps import step_reader
from max.pipelines.generation.steps.step_reader import (
    NO_TOKEN,
    StepReader,
    _Run,  # pyright: ignore[reportPrivateUsage]
)
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.structured import grammar
from tests.pipelines.counting_pipeline import CountingPipeline, context, expected

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
WAIT_S = 30.0


class Deliveries:
    """Takes what a reader delivers, and lets a test wait for it."""

    def __init__(self) -> None:
        self.tokens: dict[RequestID, list[int]] = {}
        self.calls = 0
        self._changed = threading.Condition()

    def __call__(self, outputs) -> None:
        with self._changed:
            self.calls += 1
            for output in outputs:
                assert output.tokens and not output.is_done
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            self._changed.notify_all()

    def wait(self, request_id: RequestID, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.tokens.get(request_id, [])) >= count, WAIT_S
            )


def test_a_row_is_delivered_before_the_next_one_is_written() -> None:
    deliveries = Deliveries()
    reader = StepReader(deliveries)
    batch = [context([1, 2], 9), context([3], 9)]
    rows = np.random.default_rng(0).integers(0, 1000, (6, 2))
    for _ in range(2):  # a second execution is read by the same thread
        deliveries.tokens.clear()
        history = np.full((6, 2), NO_TOKEN, np.int64)
        reader.begin(batch, history)
        for step, row in enumerate(rows[:-1]):
            history[step, 0] = row[0]
            history[step, 1] = row[1]
            for column, one in enumerate(batch):
                deliveries.wait(one.request_id, step + 1)
                assert deliveries.tokens[one.request_id] == rows[: step + 1, column].tolist()
        history[-1] = rows[-1]
        # the last row is of the execution's own outputs
        assert reader.end(6) == {
            one.request_id: rows[:-1, column].tolist() for column, one in enumerate(batch)
        }
        assert [len(tokens) for tokens in deliveries.tokens.values()] == [5, 5]
    assert reader.end(0) == {}
    reader.close()


def test_a_row_is_read_when_all_of_it_is_written() -> None:
    deliveries = Deliveries()
    reader = StepReader(deliveries)
    batch = [context([1, 2], 9), context([3], 9)]
    history = np.full((3, 2), NO_TOKEN, np.int64)
    reader.begin(batch, history)
    history[0, 1] = 7
    threading.Event().wait(0.05)
    assert not deliveries.calls
    history[0, 0] = 0  # a token like others
    deliveries.wait(batch[0].request_id, 1)
    assert deliveries.tokens == {batch[0].request_id: [0], batch[1].request_id: [7]}
    reader.end(1)
    history[1] = 5
    threading.Event().wait(0.05)
    assert deliveries.calls == 1, "nothing is delivered after the end"
    reader.close()


def test_the_last_row_is_left_to_the_result() -> None:
    """Also where all rows are written before the first poll."""
    deliveries = Deliveries()
    history = np.arange(5)[:, None, None]
    run = _Run([context([1], 9)], [frozenset()], history, 0.0)
    assert StepReader(deliveries)._read(run) and run.last
    assert list(deliveries.tokens.values()) == [[0, 1, 2, 3]]
    alone = _Run([context([1], 9)], [frozenset()], history[:1], 0.0)
    assert not StepReader(deliveries)._read(alone) and alone.last


def test_rows_of_steps_that_give_several_tokens() -> None:
    """A place without a token is no token; a row is read when all its places are written."""
    deliveries = Deliveries()
    reader = StepReader(deliveries)
    first, second = context([1], 9, eos_token_ids={4}), context([2], 9, eos_sequences=[[8, 8]])
    history = np.full((4, 2, 3), NO_TOKEN, np.int64)
    history[0] = [[5, 6, -2], [7, -2, -2]]
    history[1, 0] = [0, 1, 2]
    history[1, 1, :2] = 3
    reader.begin([first, second], history)
    deliveries.wait(first.request_id, 2)
    threading.Event().wait(0.05)
    assert deliveries.tokens == {first.request_id: [5, 6]}
    history[1, 1, 2] = 3
    deliveries.wait(first.request_id, 5)
    # the second place ends the sequence
    history[2] = [[3, 4, -2], [1, 1, 1]]
    threading.Event().wait(0.05)
    assert deliveries.tokens == {first.request_id: [5, 6, 0, 1, 2]}
    assert list(reader.end(3).values()) == [[5, 6, 0, 1, 2], []]
    reader.close()


def test_a_row_that_ends_a_sequence_is_not_delivered() -> None:
    deliveries = Deliveries()
    reader = StepReader(deliveries)
    ended = context([1], 9, eos_token_ids={4})
    ignoring = context([2], 9, eos_token_ids={8}, ignore_eos=True)
    by_run = context([3], 9, eos_sequences=[[8, 8]])
    history = np.full((5, 3), NO_TOKEN, np.int64)
    history[:3] = [[1, 8, 8], [2, 8, 8], [4, 3, 3]]
    reader.begin([ended, ignoring, by_run], history)
    deliveries.wait(ended.request_id, 2)
    history[3:] = 6
    threading.Event().wait(0.05)
    assert deliveries.tokens == {ended.request_id: [1, 2], ignoring.request_id: [8, 8]}
    assert list(reader.end(3).values()) == [[1, 2], [8, 8], []]
    reader.close()


@pytest.mark.parametrize(("step_s", "first", "later"), [(0.04, 0.036, 0.01), (1e-4, 2e-3, 5e-4)])
def test_when_the_history_is_read(monkeypatch, step_s: float, first: float, later: float) -> None:
    """Late in the first step, as nothing is there before, then four times in a step; not too often."""
    waits, enough, now = list[float](), threading.Event(), [0.0]
    others = set(threading.enumerate())  # those of earlier tests may still end

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if waits.count(later) == 3:
            enough.set()
        time.sleep(min(seconds, 0.002))

    clock = SimpleNamespace(sleep=sleep, perf_counter=lambda: now[0])
    monkeypatch.setattr(step_reader, "time", clock)
    reader = StepReader(Deliveries())
    batch, history = [context([1], 9)], np.full((5, 1), NO_TOKEN, np.int64)
    reader.begin(batch, history)
    now[0] = step_s * 4
    reader.end(4)
    reader.begin(batch, history)
    assert enough.wait(WAIT_S)
    (thread,) = set(threading.enumerate()) - others
    assert thread.daemon, "a process may end without an end of its reader"
    reader.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    known = [wait for wait in waits if wait != 4e-3]
    np.testing.assert_allclose(known[:4], [first, later, later, later])
    reader.begin(batch, history)
    assert reader.end(1) == {}, "a reader that was closed reads nothing"


class SteppingPipeline(CountingPipeline):
    """Writes a history as the loop does, and waits until the reader has delivered each row."""

    def __init__(self, deliveries: Deliveries | None) -> None:
        super().__init__()
        self.reader: StepReader | None = None
        self.received = deliveries

    def read_steps(self, reader: StepReader | None) -> None:
        self.reader = reader

    def execute(self, inputs):
        steps, batch = inputs.num_steps, list(inputs.batch.values())
        if steps > 1 and self.reader is not None and self.received is not None:
            rows = np.array(
                [
                    expected(one.all_tokens.tolist(), steps, one.sampling_params.seed)
                    for one in batch
                ]
            ).T
            history = np.full(rows.shape, NO_TOKEN, np.int64)
            before = [len(one.generated_tokens) for one in batch]
            self.reader.begin(batch, history)
            for step, row in enumerate(rows):
                history[step] = row
                for one, count in zip(batch, before, strict=True):
                    if step + 1 < steps:
                        self.received.wait(one.request_id, count + step + 1)
        return super().execute(inputs)


def test_a_service_sends_tokens_of_a_call_that_runs_on() -> None:
    """The pipeline's next step waits until the client has the token of the last one."""
    here, there = (ConnectionChannel(end) for end in multiprocessing.get_context("spawn").Pipe())
    received = Deliveries()
    pipeline = SteppingPipeline(received)
    limits = SchedulerLimits(max_batch_size=4, max_num_steps=6)
    engine = threading.Thread(target=serve, args=(pipeline, limits, there))
    engine.start()
    requests = {
        name: GenerationRequest.of(context(prompt, new, seed=3, request_id=RequestID(name)))
        for name, prompt, new in [("a", [5, 6], 20), ("b", [9], 13)]
    }
    for request in requests.values():
        here.send(request)
    open_requests, events = set(requests), 0
    while open_requests:
        event = here.receive()
        if isinstance(event, TokensGenerated):
            events += 1
            key = RequestID(event.request_id)
            with received._changed:
                received.tokens.setdefault(key, []).extend(event.tokens)
                received._changed.notify_all()
            assert event.tokens
            if event.status.is_done:
                open_requests.remove(event.request_id)
    here.send(Shutdown())
    engine.join(WAIT_S)
    assert received.tokens[RequestID("a")] == expected([5, 6], 20, 3)
    assert received.tokens[RequestID("b")] == expected([9], 13, 3)
    assert pipeline.steps < 15 and events > 25


@pytest.mark.parametrize("updated", [False, True], ids=["in the call", "after it"])
def test_an_interrupted_call_goes_on_after_what_was_delivered(updated: bool) -> None:
    """With other random numbers the repeated tokens would differ from those that the client has."""
    received = Deliveries()
    pipeline = SteppingPipeline(received)
    engine = Engine(
        pipeline, SchedulerLimits(max_batch_size=4, max_num_steps=6), reader := StepReader(received)
    )
    prompts = {RequestID("a"): ([5, 6], 20), RequestID("b"): ([9], 13)}
    for name, (prompt, new) in prompts.items():
        engine.submit(context(prompt, new, seed=3, request_id=name))
    outcomes = engine.step()
    for outcome in outcomes:
        received.tokens[outcome.request_id] = outcome.tokens

    def interrupt(batch) -> None:
        pipeline.before = pipeline.after = lambda batch: None
        raise KeyboardInterrupt

    # before the contexts have the tokens, or when they have them and one more
    setattr(pipeline, "after" if updated else "before", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [len(received.tokens[name]) for name in prompts] == [6, 6]
    while not engine.idle:
        for outcome in engine.step():
            received.tokens[outcome.request_id] += outcome.tokens
    reader.close()
    assert received.tokens == {
        name: expected(prompt, new, 3) for name, (prompt, new) in prompts.items()
    }
    pipeline.cache.pages.check()


@pytest.fixture(scope="module")
def tiny():
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=512, max_batch_size=4
    )
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def generated(tiny, prompts: list[list[int]], steps: int) -> list[list[int]]:
    batch = [
        TextContext(
            max_length=512, tokens=np.array(prompt),
            sampling_params=SamplingParams(temperature=0, ignore_eos=True), ignore_eos=True,
        )
        for prompt in prompts
    ]  # fmt: skip
    tokens: list[list[int]] = [[] for _ in batch]
    for count in itertools.chain([1], [steps] * (300 // steps)):
        outputs = tiny.execute(TextGenerationInputs([{c.request_id: c for c in batch}], count))
        for mine, one in zip(tokens, batch, strict=True):
            mine += outputs[one.request_id].tokens
    for one in batch:
        tiny.release(one.request_id)
    return tokens


@pytest.mark.parametrize("batch", [1, 3])
def test_the_tokens_of_a_model(tiny, batch: int) -> None:
    """What is read while native code runs are the tokens that the call returns."""
    prompts = [[7, 8, 9], [30], [100, 200, 30, 4]][:batch]
    single = generated(tiny, prompts, 1)
    deliveries = Deliveries()
    reader = StepReader(deliveries)
    tiny.read_steps(reader)
    try:
        assert generated(tiny, prompts, 300) == single
        counts = [len(own) for own in reader.end(300).values()]
    finally:
        tiny.read_steps(None)
        reader.close()
    assert deliveries.calls >= 3 and len(set(counts)) == 1
    for mine, tokens in zip(deliveries.tokens.values(), single, strict=True):
        assert mine == tokens[1 : 1 + counts[0]]


def sampled(
    tiny, interrupted_at: int | None, own: str | None = None
) -> tuple[list[int], list[int]]:
    """The tokens of a sampled request, perhaps with a grammar, and those that were delivered before an interrupt."""
    deliveries = Deliveries()
    engine = Engine(tiny, limits_of(tiny), reader := StepReader(deliveries))
    request = TextContext(
        request_id=RequestID("sampled"), max_length=512, tokens=np.array([7, 8, 9]),
        sampling_params=SamplingParams(
            temperature=1.1, top_k=-1, seed=11, ignore_eos=own is None
        ),
        ignore_eos=own is None, grammar=own, eos_token_ids=set(tiny.tokenizer.eos_token_ids),
    )  # fmt: skip
    engine.submit(request)
    tokens = deliveries.tokens.setdefault(request.request_id, [])
    tokens += engine.step()[0].tokens
    early: list[int] = []
    if interrupted_at is not None:
        finish = replica.append_tokens

        def interrupt(*values):
            if len(tokens) >= interrupted_at:
                raise KeyboardInterrupt
            return finish(*values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replica, "append_tokens", interrupt)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    for outcome in engine.step():
                        tokens += outcome.tokens
        early = list(tokens)
    while not engine.idle:
        for outcome in engine.step():
            tokens += outcome.tokens
    tiny.read_steps(None)
    reader.close()
    return tokens, early


def test_a_sampled_request_goes_on_with_the_same_random_numbers(tiny) -> None:
    whole, _ = sampled(tiny, None)
    tokens, early = sampled(tiny, 5)
    assert len(set(whole)) > 50 and len(whole) == 509
    assert whole[: len(early)] == early and len(early) >= 5
    assert tokens == whole


def test_a_grammar_has_followed_what_was_delivered_before_an_interrupt(tiny) -> None:
    own = grammar.of_json_schema('{"type": "string", "minLength": 300}')
    whole, _ = sampled(tiny, None, own)
    tokens, early = sampled(tiny, 9, own)
    assert len(early) >= 9 and whole[: len(early)] == early
    assert tokens == whole
    json.loads(tiny.tokenizer.decode_now(tokens[:-1]))


def test_calls_are_longer_where_their_tokens_are_read() -> None:
    config = PipelineConfig(model_path=TINY, quantization_encoding="float32", max_length=64)
    assert config.finds_num_steps
    pipeline = SimpleNamespace(pipeline_config=config, repeats_steps=True, repeats_drafts=False)
    alone, read = limits_of(pipeline), limits_of(pipeline, are_steps_read=True)  # type: ignore[arg-type]
    assert (alone.max_seconds, read.max_seconds) == (0.04, 0.2)
    config.model_config.data_parallel_degree = 2
    assert limits_of(pipeline, are_steps_read=True).max_seconds == 0.04, "copies take turns"  # type: ignore[arg-type]


def test_steps_that_nobody_reads_are_single_ones() -> None:
    """Log-probabilities come with the result of a call, so that a call of several steps would hold them back."""
    config = PipelineConfig(model_path=TINY, quantization_encoding="float32", max_length=64)
    pipeline: Any = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    # steps take long on a busy machine
    limits = replace(limits_of(pipeline), max_seconds=None)
    for reader in (None, StepReader(Deliveries())):
        engine = Engine(pipeline, limits, reader)
        one = context([7, 8], 40, ignore_eos=True, log_probabilities=1)
        engine.submit(one)
        counts = list[int]()
        while not engine.idle:
            counts += [len(outcome.tokens) for outcome in engine.step()]
        assert (max(counts) == 1) == (reader is not None) and sum(counts) == 40
    reader.close()
