"""The engine: requests arrive and are cancelled, and steps fail or are interrupted, at any time."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from max.interfaces import GenerationStatus, RequestID, TextGenerationOutput
from max.pipelines.core import InputError, TextContext
from max.pipelines.generation.batch_pipeline import StepResult, batch_pipeline, limits_of
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.generation.generation import Generation
from max.pipelines.scheduler import SchedulerLimits, TextScheduler
from tests.pipelines.counting_pipeline import (
    PAGE_SIZE,
    CountingPipeline,
    context,
    expected,
    next_token,
)

FULL, CANCELLED = GenerationStatus.MAXIMUM_LENGTH, GenerationStatus.CANCELLED


def engine_of(pipeline: CountingPipeline, **limits) -> Engine:
    return Engine(pipeline, SchedulerLimits(**{"max_batch_size": 4, **limits}))


def outcomes_of(engine: Engine) -> dict[RequestID, list]:
    """Returns all outcomes until the engine is idle."""
    outcomes: dict[RequestID, list] = {}
    while not engine.idle:
        for outcome in engine.step():
            outcomes.setdefault(outcome.request_id, []).append(outcome)
    return outcomes


def test_a_step_brings_the_tokens_of_its_batch():
    pipeline = CountingPipeline()
    engine = engine_of(pipeline, prefill_chunk_size=4)
    a, b = context([1, 2], 2), context([3, 4, 5], 1)
    assert engine.idle and engine.step() == []
    engine.submit(a)
    engine.submit(b)
    assert not engine.idle
    assert engine.step() == [
        TextGenerationOutput(a.request_id, expected([1, 2], 1), GenerationStatus.ACTIVE)
    ]
    assert engine.step() == [TextGenerationOutput(b.request_id, expected([3, 4, 5], 1), FULL)]
    assert engine.step() == [TextGenerationOutput(a.request_id, expected([1, 2], 2)[1:], FULL)]
    assert engine.idle and pipeline.cache.free_pages == 64


def test_changes_are_applied_in_their_order():
    engine = engine_of(pipeline := CountingPipeline())
    key = RequestID("a")
    engine.cancel(key)
    engine.submit(context([1], 3, request_id=key))
    engine.cancel(key)
    engine.cancel(key)
    engine.submit(context([2], 2, request_id=key))
    outcomes = outcomes_of(engine)[key]
    assert outcomes[0] == TextGenerationOutput(key, [], CANCELLED)
    assert [token for outcome in outcomes for token in outcome.tokens] == expected([2], 2)
    assert outcomes[-1].final_status == FULL and pipeline.steps == 2


def test_errors_end_their_requests_only():
    engine = engine_of(pipeline := CountingPipeline(pages=3), max_batch_size=1)
    long, good = context([1], 9), context([1, 2], 2)
    bad = context([5], 2)
    error = ZeroDivisionError("in the kernel")

    def fail(batch):
        if bad in batch:
            raise error

    pipeline.before = fail
    for one in (long, bad, good):
        engine.submit(one)
    outcomes = outcomes_of(engine)
    (refused,) = outcomes[long.request_id]
    assert isinstance(refused.error, InputError) and "5 pages" in str(refused.error)
    assert outcomes[bad.request_id] == [Failure(bad.request_id, error)]
    assert [t for o in outcomes[good.request_id] for t in o.tokens] == expected([1, 2], 2)
    assert pipeline.cache.free_pages == 3


def test_pages_that_another_engine_holds_are_an_error_until_they_are_free():
    pipeline = CountingPipeline(pages=4)
    engine, other = engine_of(pipeline), engine_of(pipeline)
    held, later = context([1] * (3 * PAGE_SIZE + 1), 2), context([2] * (2 * PAGE_SIZE), 2)
    other.submit(held)
    other.step()
    assert pipeline.cache.free_pages == 0
    engine.submit(later)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="4 pages of the KV cache are used by requests of an"
        ):
            engine.step()
    generation = Generation(pipeline, SchedulerLimits(max_batch_size=4))
    with pytest.raises(RuntimeError, match="no request can run"):
        list(generation.stream([context([3] * (2 * PAGE_SIZE), 2)]))
    assert not len(generation.scheduler)
    assert [t for o in outcomes_of(other)[held.request_id] for t in o.tokens] == (
        expected([1] * (3 * PAGE_SIZE + 1), 2)[1:]
    )
    assert [t for o in outcomes_of(engine)[later.request_id] for t in o.tokens] == expected(
        [2] * (2 * PAGE_SIZE), 2
    )
    assert pipeline.cache.free_pages == 4


def test_an_interrupt_returns_what_came_before_with_the_next_step():
    engine = engine_of(pipeline := CountingPipeline(pages=4))
    ends, goes, refused = context([1], 1), context([2], 3), context([3], 40)

    def interrupt(batch):
        pipeline.after = lambda batch: None
        raise KeyboardInterrupt

    pipeline.after = interrupt
    for one in (refused, ends, goes):
        engine.submit(one)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outcomes = outcomes_of(engine)
    assert isinstance(outcomes[refused.request_id][0], Failure)
    assert outcomes[ends.request_id] == [TextGenerationOutput(ends.request_id, expected([1], 1), FULL)]  # fmt: skip
    assert [t for o in outcomes[goes.request_id] for t in o.tokens] == expected([2], 3)
    assert engine.scheduler.preemptions == 1 and pipeline.cache.free_pages == 4


def test_an_engine_with_outcomes_of_an_interrupted_step_is_not_idle():
    engine = engine_of(pipeline := CountingPipeline())

    def interrupt(batch):
        raise KeyboardInterrupt

    pipeline.after = interrupt
    engine.submit(context([1], 1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(engine.scheduler) == 0 and not engine.idle
    assert [outcome.tokens for outcome in engine.step()] == [expected([1], 1)]
    assert engine.idle


@pytest.mark.parametrize("change", ["submit", "cancel"])
def test_the_pipeline_is_interrupted_while_it_runs(change):
    engine = engine_of(pipeline := CountingPipeline())
    argument = context([1], 1) if change == "submit" else RequestID()
    pipeline.before = lambda batch: getattr(engine, change)(argument)
    engine.submit(context([1], 1))
    engine.interrupt()
    assert pipeline.interrupts == 0
    engine.step()
    assert pipeline.interrupts == 1
    engine.submit(context([1], 1))
    assert pipeline.interrupts == 1


def test_the_time_of_decoding_batches_is_recorded(monkeypatch):
    engine = engine_of(pipeline := CountingPipeline(seconds=0.02), max_num_steps=3)
    records: list[tuple[float, int]] = []
    monkeypatch.setattr(engine.scheduler, "record_step", lambda *args: records.append(args))
    engine.submit(context([1, 2], 9))
    engine.submit(context([3], 4))
    engine.step()
    assert records == [], "prompts take longer"
    pipeline.after = lambda batch: batch[0].update(9)
    engine.step()
    ((seconds, steps),) = records
    assert 0.02 <= seconds < 20 and steps == 4, "the most tokens of a request"
    pipeline.execute = lambda inputs: {}
    engine.step()
    assert records[1][1] == 0


def test_a_request_that_ends_without_a_token():
    engine = engine_of(pipeline := CountingPipeline())
    one, other = context([1], 3), context([2], 1)

    def cancel(batch):
        one.status = CANCELLED

    pipeline.before = cancel
    engine.submit(one)
    engine.submit(other)
    assert {outcome.request_id: outcome for outcome in engine.step()} == {
        one.request_id: TextGenerationOutput(one.request_id, [], CANCELLED),
        other.request_id: TextGenerationOutput(other.request_id, expected([2], 1), FULL),
    }
    assert engine.idle


def test_an_engine_does_not_keep_its_pipeline_alive():
    pipeline = CountingPipeline()
    engine = engine_of(pipeline)
    watch = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert watch() is None
    engine.submit(context([1], 1))
    with pytest.raises(RuntimeError, match="the pipeline of this engine was deleted"):
        engine.step()


def configuration(**values) -> SimpleNamespace:
    """The fields of a configuration that limit batches."""
    config = dict(
        max_batch_size=6, max_queue_size_tg=None, max_ce_batch_size=192, prefill_chunk_size=64,
        enable_chunked_prefill=True, enable_in_flight_batching=False, max_num_steps=8,
        finds_num_steps=False, max_batch_context_length=None,
    )  # fmt: skip
    return SimpleNamespace(**{**config, **values})


def configured(repeats_steps: bool = True, **values) -> SchedulerLimits:
    """Returns the limits of a pipeline with a configuration."""
    pipeline = CountingPipeline()
    pipeline.pipeline_config = configuration(**values)
    pipeline.repeats_steps = repeats_steps
    return limits_of(pipeline)


def test_the_limits_of_a_configuration():
    plain = dict(max_batch_size=6, max_ce_batch_size=6, prefill_chunk_size=64, mixed_step_ratio=1.8)
    assert configured() == SchedulerLimits(**plain, max_num_steps=8)
    assert configured(max_num_steps=1) == SchedulerLimits(**plain, max_num_steps=1)
    assert configured(max_num_steps=-1) == SchedulerLimits(**plain, max_num_steps=1)
    # a requested number of steps is used even where it saves nothing
    assert configured(False) == SchedulerLimits(**plain, max_num_steps=8)
    found = SchedulerLimits(**plain, max_num_steps=8, max_seconds=0.04)
    assert configured(finds_num_steps=True) == found
    assert configured(False, finds_num_steps=True) == replace(found, max_num_steps=1)
    assert configured(max_batch_size=None).max_batch_size == 1
    assert configured(max_queue_size_tg=4).max_batch_size == 4
    assert configured(max_queue_size_tg=9).max_batch_size == 6
    assert configured(max_ce_batch_size=2).max_ce_batch_size == 2
    other = configured(
        enable_chunked_prefill=False, enable_in_flight_batching=True, max_batch_context_length=70
    )
    assert (other.enable_chunked_prefill, other.enable_in_flight_batching) == (False, True)
    assert other.max_batch_context_length == 70


class Serving(RuleBasedStateMachine):
    """Requests that share a small cache. Each ends once, with the tokens that it gets alone."""

    @initialize(
        prefix=st.booleans(),
        batch=st.integers(1, 4),
        chunk=st.integers(1, 9),
        in_flight=st.booleans(),
        steps=st.integers(1, 4),
    )
    def begin(self, prefix, batch, chunk, in_flight, steps):
        self.pipeline = CountingPipeline(8, prefix)
        self.pipeline.before, self.pipeline.after = self.check_writes, self.disturb
        self.steps = steps
        self.disturbance: BaseException | None = None
        self.engine = engine_of(
            self.pipeline, max_batch_size=batch, prefill_chunk_size=chunk,
            enable_in_flight_batching=in_flight, max_num_steps=steps,
        )  # fmt: skip
        self.open: dict[RequestID, tuple[TextContext, list[int], list[int]]] = {}
        self.ended: set[RequestID] = set()

    def check_writes(self, batch: list[TextContext]) -> None:
        """Checks that a page that a request writes is in no other table."""
        pages = self.pipeline.cache.pages
        tables = [pages.pages(key) for key in pages.requests]
        for one in batch:
            table = pages.pages(one.request_id)
            assert len(table) * PAGE_SIZE >= one.active_idx
            for page in table[one.start_idx // PAGE_SIZE :]:
                assert sum(t.count(page) for t in tables) == 1, "two sequences write one page"

    def disturb(self, batch: list[TextContext]) -> None:
        error, self.disturbance = self.disturbance, None
        if error is not None:
            self.failing = {one.request_id for one in batch}
            raise error

    # few distinct prefixes, so that requests share pages
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), new=st.integers(1, 6))
    def submit(self, prompt, new):
        one = context(prompt, new)
        self.engine.submit(one)
        self.open[one.request_id] = (one, expected(prompt, new), [])

    @rule(data=st.data())
    def cancel(self, data):
        if self.open:
            self.engine.cancel(data.draw(st.sampled_from(list(self.open))))

    @rule()
    def cancel_what_has_ended(self):
        for key in (*sorted(self.ended, key=str)[:2], RequestID()):
            self.engine.cancel(key)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())

    @rule(error=st.sampled_from([ValueError("broken"), KeyboardInterrupt()]))
    def disturbed_step(self, error):
        self.disturbance, self.failing = error, set()
        try:
            outcomes = self.engine.step()
        except KeyboardInterrupt:
            return
        finally:
            self.disturbance = None
        failed = {outcome.request_id for outcome in outcomes if isinstance(outcome, Failure)}
        assert failed == self.failing, "the batch and nothing else"
        self.take(outcomes)

    def take(self, outcomes) -> None:
        for outcome in outcomes:
            key = outcome.request_id
            assert key in self.open, "an outcome after the last one"
            _, wanted, tokens = self.open[key]
            if isinstance(outcome, Failure):
                self.end(key)
                continue
            tokens += outcome.tokens
            assert tokens == wanted[: len(tokens)]
            if outcome.is_done:
                assert outcome.final_status == CANCELLED or tokens == wanted
                self.end(key)

    def end(self, key: RequestID) -> None:
        del self.open[key]
        self.ended.add(key)
        assert not self.pipeline.cache.contains(key), "pages of a request that has ended"

    @invariant()
    def pages_are_neither_lost_nor_doubled(self):
        if hasattr(self, "engine"):
            self.pipeline.cache.pages.check()
            assert set(self.pipeline.cache.pages.requests) <= self.open.keys()

    def teardown(self):
        if hasattr(self, "engine"):
            for _ in range(1000):
                if self.engine.idle:
                    break
                self.take(self.engine.step())
            assert not self.open, "a request did not end"
            assert self.pipeline.cache.free_pages == 8


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class EagerPipeline(CountingPipeline):
    """Computes all tokens of an execution in one step."""

    def execute(self, inputs):
        return StepResult(super().execute(inputs), 1)


def test_the_duration_of_a_step_does_not_depend_on_its_tokens(monkeypatch):
    """A step that gives four tokens takes as long as it takes, not a quarter."""
    recorded = []
    monkeypatch.setattr(
        TextScheduler, "record_step", lambda self, seconds, steps: recorded.append(steps)
    )
    engine = engine_of(pipeline := EagerPipeline(), max_num_steps=4)
    one = context([1, 2], 9)
    engine.submit(one)
    tokens = [token for outcome in outcomes_of(engine)[one.request_id] for token in outcome.tokens]
    assert tokens == expected([1, 2], 9)
    assert recorded == [1, 1] and sum(engine.decode_steps.times.counts) == 2
    assert pipeline.steps == 3


class DraftingPipeline(CountingPipeline):
    """Drafts tokens for each request, of which the first ones are right, and verifies them in one step.

    Args:
        draw: Returns how many drafted tokens are right, and how many wrong, by the length of a sequence.
    """

    def __init__(self, draw, **values) -> None:
        super().__init__(**values)
        self.draw, self.accepted, self.most = draw, 0, 0

    def execute(self, inputs):
        batch = list(inputs.batch.values())
        self.most = max([self.most, *(one.draft_length for one in batch)])
        outputs = StepResult(super().execute(inputs), 1)
        for one in batch:
            if one.active_length == 1 and not one.is_done:
                right, wrong = self.draw(one.end_idx)
                text = one.all_tokens.tolist()
                guess = expected(text, right, one.sampling_params.seed) + [-7] * wrong
                one.set_draft(guess[: one.max_length - one.end_idx - 1])
        return outputs

    def _run(self, one: TextContext, steps: int) -> None:
        draft = list(one.draft_tokens)
        if not draft:
            super()._run(one, steps)
            return
        assert steps == 1
        rows, sequence = one.next_tokens.tolist(), one.all_tokens[: one.start_idx].tolist()
        table = self.cache.pages.pages(one.request_id)
        chosen: list[int] = []
        for at, token in enumerate(rows, one.start_idx):
            self.memory[table[at // PAGE_SIZE], at % PAGE_SIZE] = token
            sequence.append(token)
            chosen.append(next_token(sequence, one.sampling_params.seed))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == chosen[accepted]:
            accepted += 1
        self.accepted += accepted
        for token in chosen[: accepted + 1]:
            if not one.is_done:
                one.update(token)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("pages", "prefix"), [(64, False), (64, True), (13, False), (13, True)])
def test_a_step_verifies_drafted_tokens(pages, prefix, steps):
    """Each request gets the tokens that it would get alone, however many of its drafted tokens are right."""
    counts = random.Random(pages + 2 * prefix + steps)
    pipeline = DraftingPipeline(
        lambda _: (counts.randrange(4), counts.randrange(3)), pages=pages, prefix=prefix
    )
    engine = engine_of(pipeline, enable_in_flight_batching=prefix, max_num_steps=steps)
    requests = [context([1, 2, 3, n // 2], 14 + n, seed=n) for n in range(6)]
    for one in requests:
        engine.submit(one)
    outcomes = outcomes_of(engine)
    for n, one in enumerate(requests):
        tokens = [token for outcome in outcomes[one.request_id] for token in outcome.tokens]
        assert tokens == expected([1, 2, 3, n // 2], 14 + n, n)
    assert pipeline.accepted > 20 and pipeline.most >= 4
    assert pipeline.cache.free_pages == pages
    assert (engine.scheduler.preemptions > 0) == (pages == 13)
    pipeline.cache.pages.check()


class WrittenForMax:
    """A pipeline that derives from no class of ours."""

    def __init__(self, pipeline: CountingPipeline) -> None:
        self.inner, self.pipeline_config = pipeline, configuration()

    @property
    def kv_managers(self):
        return self.inner.kv_managers

    def execute(self, inputs):
        return self.inner.execute(inputs)

    def release(self, request_id):
        self.inner.release(request_id)


@pytest.mark.parametrize("written_for_max", [False, True])
def test_each_request_that_ends_is_released_once(written_for_max, monkeypatch):
    """Ended by itself, cancelled before its first step and after one, and failed."""
    pipeline, released = CountingPipeline(), []
    real = pipeline.release
    monkeypatch.setattr(pipeline, "release", lambda key: released.append(key.value) or real(key))
    given = WrittenForMax(pipeline) if written_for_max else pipeline
    held = batch_pipeline(given)
    engine = engine_of(held)
    ended, running, waiting = context([1, 2], 1), context([4], 9), context([7], 9)
    for one in (ended, running):
        engine.submit(one)
    engine.step()
    engine.submit(waiting)
    for one in (running, waiting, running):
        engine.cancel(one.request_id)
    engine.step()
    failed = context([9], 5)
    engine.submit(failed)
    monkeypatch.setattr(pipeline, "execute", lambda inputs: 1 / 0)
    engine.step()
    assert engine.idle and pipeline.cache.used_pages == 0
    assert released == [one.request_id.value for one in (ended, running, waiting, failed)]


def test_pipelines_that_were_written_for_max():
    pipeline = WrittenForMax(CountingPipeline())
    generation = Generation.of(pipeline)
    assert Generation.of(pipeline) is generation
    one, other = context([1, 2], 5), context([4], 3)
    assert [output.tokens for output in generation.run([one, other])] == [
        expected([1, 2], 5), expected([4], 3),
    ]  # fmt: skip
    wrapped = batch_pipeline(pipeline)
    assert batch_pipeline(wrapped) is wrapped and wrapped.new_prefixes() is None
    wrapped.load_prefixes()
    wrapped.save_prefixes()
    wrapped.forget_prefixes()
    watch = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert watch() is None
    with pytest.raises(RuntimeError, match="the pipeline of this engine was deleted"):
        wrapped.execute(None)
    for lacking in (object(), SimpleNamespace(execute=None, kv_managers=[])):
        with pytest.raises(TypeError, match="does not generate text: it lacks"):
            batch_pipeline(lacking)
