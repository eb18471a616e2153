"""An engine in another process gives the same results as in this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import (
    GenerationStatus,
    ImageMetadata,
    LogProbabilities,
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationOutput,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core import InputError, ModelFilesError, TextAndVisionContext
from max.pipelines.core.exceptions import UserError
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.generation import Generation
from max.pipelines.generation.process import commands as command_messages
from max.pipelines.generation.process import events as event_messages
from max.pipelines.generation.process import service
from max.pipelines.generation.process.channel import ConnectionChannel
from max.pipelines.generation.process.remote import RemoteGeneration
from max.pipelines.generation.process.service import serve, serve_pipeline
from max.pipelines.kv_cache.page_tables import page_hash_of
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.structured import compile_threads
from tests.pipelines.counting_pipeline import CountingPipeline, context, expected

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
LIMITS = SchedulerLimits(max_batch_size=4, max_num_steps=3)
FULL, CANCELLED = GenerationStatus.MAXIMUM_LENGTH, GenerationStatus.CANCELLED

INT = st.integers(0, 2**31 - 1)
FLOAT = st.floats(allow_nan=False)
NAME = st.text(max_size=8)
SAMPLING = st.builds(
    command_messages.Sampling,
    top_k=st.integers(1, 2**31 - 1), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1),
    temperature=st.floats(0.01, 9), frequency_penalty=st.floats(-2, 2), presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 3), min_new_tokens=INT, ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(INT, st.floats(-100, 100), max_size=3).map(lambda d: tuple(d.items())),
)  # fmt: skip
REQUEST = st.builds(
    command_messages.GenerationRequest,
    request_id=NAME, tokens=st.lists(INT, min_size=1, max_size=9).map(tuple),
    max_length=st.integers(10, 2**40), eos_token_ids=st.sets(INT, max_size=3).map(sorted).map(tuple),
    eos_sequences=st.lists(st.lists(INT, max_size=3).map(tuple), max_size=3).map(tuple),
    log_probabilities=INT, log_probabilities_echo=st.booleans(), ignore_eos=st.booleans(),
    json_schema=st.none() | NAME, grammar=st.none() | NAME, model_name=NAME, sampling=SAMPLING,
    predicted_tokens=st.lists(INT, max_size=4).map(tuple),
)  # fmt: skip
LOGS = st.builds(
    event_messages.TokenLogProbabilities,
    st.lists(FLOAT, max_size=2).map(tuple),
    st.lists(st.lists(st.tuples(INT, FLOAT), max_size=3).map(tuple), max_size=2).map(tuple),
)
ERROR = st.builds(event_messages.ErrorInfo, NAME, NAME, NAME)
MESSAGE = st.one_of(
    REQUEST,
    st.builds(command_messages.CancelRequest, NAME),
    st.builds(command_messages.Shutdown, st.booleans()),
    st.builds(
        event_messages.TokensGenerated, NAME, st.lists(INT).map(tuple),
        st.sampled_from(GenerationStatus), st.none() | st.lists(LOGS, max_size=3).map(tuple),
    ),
    st.builds(event_messages.RequestFailed, NAME, ERROR),
    st.builds(event_messages.PredictionVerified, NAME, INT, INT),
    st.builds(event_messages.EngineReady, INT, INT, INT),
    st.builds(event_messages.EngineStopped, st.none() | ERROR),
)  # fmt: skip


@given(message=MESSAGE)
def test_messages_are_plain_data(message):
    """Requests are equal after pickle and after msgpack, without a hook for any type."""
    assert pickle.loads(pickle.dumps(message)) == message
    encoded = msgpack_numpy_encoder()(message)
    assert msgpack_numpy_decoder(type(message))(encoded) == message
    hash(message)
    with pytest.raises(AttributeError):
        message.request_id = "other"


@given(request=REQUEST)
def test_a_request_and_its_context(request):
    one = request.to_context()
    assert command_messages.GenerationRequest.of(one) == request
    params = one.sampling_params
    assert (params.seed, params.top_p) == (request.sampling.seed, request.sampling.top_p)
    assert one.all_tokens.tolist() == list(request.tokens)


def test_defaults_are_those_of_a_context():
    """A request with tokens only equals that of a context with tokens only."""
    params = SamplingParams(seed=0)  # the seed is random by default
    plain = TextContext(
        max_length=9, tokens=np.array([7, 8]), request_id=RequestID("a"), sampling_params=params
    )
    request = command_messages.GenerationRequest.of(plain)
    assert request == command_messages.GenerationRequest("a", (7, 8), 9)
    assert command_messages.Sampling() == command_messages.Sampling.of(params)
    assert command_messages.Sampling().to_params() == params
    assert request == replace(request, priority=0, client="")
    limited = request.with_grammar("root ::= [0-9]")
    assert limited == replace(request, grammar="root ::= [0-9]") != request
    assert limited.with_grammar(None) == request
    assert request.ending_with([8, 1]).ending_with([3]).eos_token_ids == (1, 3, 8)
    assert not command_messages.Shutdown().finish, "open requests are cancelled"


def test_the_load_of_an_engine_that_has_done_nothing():
    bounds = event_messages.STEP_BOUNDS_MS
    assert bounds == tuple(n * 10**e for e in range(-1, 4) for n in (1, 2, 5))[2:], "0.5 ms to 5 s"
    nothing = event_messages.StepTimes((0,) * (len(bounds) + 1), 0.0)
    assert event_messages.EngineStats() == event_messages.EngineStats(
        0, 0, 0, 0, 0, 0, nothing, nothing
    )
    one = event_messages.StepTimes((*range(len(bounds)), 5), 2.5)
    assert one + nothing == nothing + one == one
    assert one + one == event_messages.StepTimes(tuple(2 * n for n in one.counts), 5.0)


def test_contexts_that_cannot_be_sent():
    one = context([1], 3)
    one.update(5)
    with pytest.raises(ValueError, match="has 1 generated tokens"):
        command_messages.GenerationRequest.of(one)
    one = context([1], 3)
    one.sampling_params.logits_processors = [print]
    with pytest.raises(ValueError, match="logits processors cannot be sent"):
        command_messages.GenerationRequest.of(one)
    image = ImageMetadata(start_idx=0, end_idx=1, pixel_values=np.zeros(1))
    one = TextAndVisionContext(
        max_length=9, tokens=np.array([7]), vision_token_ids=[7], images=[image]
    )
    with pytest.raises(ValueError, match="has images"):
        command_messages.GenerationRequest.of(one)


def test_outputs_and_errors_as_data():
    logs = [LogProbabilities([-1.5, -2.0], [{4: -1.5, 3: float("-inf")}, {}])]
    output = TextGenerationOutput(RequestID("a"), [4, 9], FULL, logs)
    assert event_messages.TokensGenerated.of(output).to_output() == output
    output = TextGenerationOutput(RequestID("a"), [], CANCELLED)
    assert event_messages.TokensGenerated.of(output).to_output() == output
    for error in (InputError("too long", "make it short"), ModelFilesError("no file")):
        copy = event_messages.ErrorInfo.of(error).to_exception()
        assert type(copy) is type(error)
        assert (copy.problem, copy.remedy) == (error.problem, error.remedy)
    copy = event_messages.ErrorInfo.of(ZeroDivisionError("in the kernel")).to_exception()
    assert type(copy) is RuntimeError and str(copy) == "generation failed: in the kernel"
    assert event_messages.ErrorInfo.of(KeyError()) == event_messages.ErrorInfo(
        "KeyError", "KeyError"
    )


class Served:
    """An engine in a thread of this process, behind a pipe."""

    def __init__(
        self,
        pipeline: CountingPipeline,
        limits: SchedulerLimits = LIMITS,
        stats_interval: float | None = None,
    ) -> None:
        here, there = multiprocessing.Pipe()
        self.channel = ConnectionChannel(here)
        self.there = ConnectionChannel(there)
        self.thread = threading.Thread(
            target=serve, args=(pipeline, limits, self.there, stats_interval)
        )
        self.thread.start()

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def served():
    started: list[Served] = []

    def serve_in_thread(*args) -> Served:
        started.append(Served(*args))
        return started[-1]

    yield serve_in_thread
    for one in started:
        with contextlib.suppress(OSError):  # already closed
            one.channel.send(command_messages.Shutdown())
        one.join()
        one.channel.close()
        one.there.close()


def test_an_idle_engine_waits(served, monkeypatch):
    """A closed engine runs no steps, and its reader thread does not keep the process alive."""
    steps, step = [], Engine.step

    def counted(self):
        steps.append(self)
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    one = served(CountingPipeline())
    assert one.channel.receive() == event_messages.EngineReady(4, 2, 64)
    time.sleep(0.2)
    assert not steps
    readers = [t for t in threading.enumerate() if t.name == "engine commands"]
    assert readers and all(t.daemon for t in readers)


def test_the_load_is_reported_at_intervals_and_when_it_ends(served):
    """With a long interval, statistics come after the first step and with the step after which the engine is idle."""
    one = served(CountingPipeline(), LIMITS, 1000.0)
    assert one.channel.receive() == event_messages.EngineReady(4, 2, 64)
    one.channel.send(command_messages.GenerationRequest.of(context([1, 2], 30)))
    events, done = [], False
    while not (done and isinstance(events[-1], event_messages.EngineStats)):
        events.append(one.channel.receive())
        done = done or getattr(events[-1], "status", None) is FULL
    assert len(events) > 5
    reports = [i for i, event in enumerate(events) if isinstance(event, event_messages.EngineStats)]
    assert len(reports) == 2 and reports[0] < 3 and reports[1] == len(events) - 1


def test_threads_share_a_remote_engine(served):
    pipeline = CountingPipeline(seconds=0.0005)
    remote = RemoteGeneration(served(pipeline).channel)
    assert remote.ready == event_messages.EngineReady(4, 2, 64)
    readers = [t for t in threading.enumerate() if t.name == "engine events"]
    assert readers and all(t.daemon for t in readers), "no reader keeps the process alive"
    wrong: list[int] = []

    def user(n: int) -> None:
        for i in range(3):
            contexts = [context([n, i, j], 4 + j, seed=n) for j in range(3)]
            outputs = remote.run(contexts)
            if [o.tokens for o in outputs] != [expected([n, i, j], 4 + j, n) for j in range(3)]:
                wrong.append(n)
            if any(len(one.generated_tokens) for one in contexts):
                wrong.append(n)

    threads = [threading.Thread(target=user, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert max(pipeline.sizes) > 2, "requests of several threads run together"
    remote.close()
    assert pipeline.cache.free_pages == 64


class ScriptedChannel:
    """The client end of a channel; the test plays the engine."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.sent: list[command_messages.Command] = []
        self.closed = False
        self.events.put(event_messages.EngineReady(4, 2, 64))

    def send(self, message: command_messages.Command) -> None:
        self.sent.append(message)

    def receive(self) -> event_messages.Event:
        return self.events.get()

    def close(self) -> None:
        self.closed = True


def test_a_stream_that_is_closed_cancels_its_request():
    """A cancelled request's identifier stays in use until the engine reports its end."""
    channel = ScriptedChannel()
    remote = RemoteGeneration(channel)
    one = context([1], 9)
    name = one.request_id.value
    channel.events.put(event_messages.TokensGenerated(name, (5,), GenerationStatus.ACTIVE))
    stream = remote.stream([one])
    assert next(stream).tokens == [5]
    assert channel.sent == [command_messages.GenerationRequest.of(one)]
    stream.close()
    assert channel.sent[1:] == [command_messages.CancelRequest(name)]
    with pytest.raises(ValueError, match="is open already"):
        next(remote.stream([one]))
    channel.events.put(event_messages.TokensGenerated(name, (), CANCELLED))
    wait_for(lambda: not remote._calls)
    channel.events.put(event_messages.EngineStopped())


def test_a_failed_request_is_not_cancelled():
    channel = ScriptedChannel()
    remote = RemoteGeneration(channel)
    one = context([1], 9)
    stream = remote.stream([one])
    error = event_messages.ErrorInfo("InputError", "too long")
    threading.Timer(
        0.05, channel.events.put, [event_messages.RequestFailed(one.request_id.value, error)]
    ).start()
    with pytest.raises(InputError, match="too long"):
        next(stream)
    assert channel.sent == [command_messages.GenerationRequest.of(one)]
    channel.events.put(event_messages.EngineStopped())


@pytest.mark.timeout(60)
def test_an_engine_that_stops_ends_its_requests():
    channel = ScriptedChannel()
    remote = RemoteGeneration(channel)
    threading.Timer(0.05, channel.events.put, [event_messages.EngineStopped()]).start()
    for _ in range(2):  # while the request runs, and after its end
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            next(remote.stream([context([1], 9)]))


@pytest.mark.parametrize("arguments", [(), (False,), (True,)])
def test_close_waits_until_the_engine_has_stopped(arguments):
    channel = ScriptedChannel()
    remote = RemoteGeneration(channel)
    stopped = event_messages.EngineStopped()
    threading.Timer(0.1, channel.events.put, [stopped]).start()
    remote.close(*arguments)
    assert channel.sent == [command_messages.Shutdown(*arguments)] and channel.closed
    assert remote._stopped is stopped


def wait_for(condition) -> None:
    for _ in range(24_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come")


def test_cancelled_requests_free_their_pages(served):
    pipeline = CountingPipeline(seconds=0.001)
    remote = RemoteGeneration(served(pipeline).channel)
    a, b = context([1], 100), context([2], 30)
    last: dict[RequestID, TextGenerationOutput] = {}
    tokens: list[int] = []
    for output in remote.stream([a, b]):
        last[output.request_id] = output
        if output.request_id == a.request_id and not output.is_done:
            remote.cancel(a.request_id)
        elif output.request_id == b.request_id:
            tokens += output.tokens
    assert last[a.request_id].final_status == CANCELLED
    assert tokens == expected([2], 30)
    stream = remote.stream([context([3], 100), context([4], 100)])
    next(stream)
    assert pipeline.cache.free_pages < 64
    stream.close()
    wait_for(lambda: pipeline.cache.free_pages == 64)
    remote.cancel(RequestID())
    remote.close()


def test_each_request_has_its_own_error(served):
    pipeline = CountingPipeline(pages=4)
    remote = RemoteGeneration(served(pipeline).channel)
    with pytest.raises(InputError, match="pages of the KV cache"):
        remote.run([context([1], 3), context([1, 2, 3], 40)])

    def fail(batch):
        if any(one.all_tokens[0] == 66 for one in batch):
            raise ZeroDivisionError("in the kernel")

    pipeline.before = fail
    with pytest.raises(RuntimeError, match="generation failed: in the kernel"):
        remote.run([context([66], 3)])
    twice = context([1], 3)
    with pytest.raises(ValueError, match="is given twice"):
        remote.run([twice, twice])
    first_steps = threading.Semaphore(1)
    pipeline.before = lambda batch: first_steps.acquire(timeout=60)
    stream = remote.stream([twice])
    next(stream)
    with pytest.raises(ValueError, match=f"request {twice.request_id} is open already"):
        remote.run([twice])
    first_steps.release(9)
    assert [token for output in stream for token in output.tokens] == expected([1], 3)[1:]
    assert remote.run([context([1], 3)])[0].tokens == expected([1], 3)
    remote.close()
    assert pipeline.cache.free_pages == 4


def messages_until_the_end(channel) -> list:
    messages = []
    while not messages or not isinstance(messages[-1], event_messages.EngineStopped):
        messages.append(channel.receive())
    return messages


@pytest.mark.parametrize("finish", [True, False])
def test_shutdown(served, finish):
    pipeline = CountingPipeline()
    steps = threading.Semaphore(1)

    def wait_for_the_shutdown(batch):
        steps.acquire(timeout=60)
        time.sleep(0.05)

    pipeline.before = wait_for_the_shutdown
    channel = served(pipeline).channel
    request = command_messages.GenerationRequest("a", (1, 2), 22)
    channel.send(request)
    channel.send(request)
    channel.send(command_messages.CancelRequest("b"))
    assert isinstance(channel.receive(), event_messages.EngineReady)
    messages = [channel.receive()]
    channel.send(command_messages.Shutdown(finish=True) if finish else command_messages.Shutdown())
    steps.release(99)
    if finish:
        channel.send(command_messages.GenerationRequest("late", (1,), 9))
    messages += messages_until_the_end(channel)
    assert messages.pop() == event_messages.EngineStopped()
    late = [m for m in messages if m.request_id == "late"]
    twice = [
        m for m in messages if m.request_id == "a" and isinstance(m, event_messages.RequestFailed)
    ]
    messages = [m for m in messages if m not in [*late, *twice]]
    assert [m.error.kind for m in twice] in (
        [],
        ["ValueError"],
    )  # no token: nothing is read before the end
    assert [m.status.is_done for m in messages] == [*[False] * (len(messages) - 1), True]
    assert messages[-1].status == (FULL if finish else CANCELLED)
    tokens = [token for message in messages for token in message.tokens]
    assert tokens == expected([1, 2], 20)[: len(tokens)]
    if finish:
        assert len(tokens) == 20
        # the cancellation was read before the last token came, or not at all
        assert all(
            m.error == event_messages.ErrorInfo("RuntimeError", "the engine is shutting down")
            for m in late
        )
    wait_for(lambda: pipeline.cache.free_pages == 64)


def test_requests_can_be_cancelled_during_a_shutdown(served):
    pipeline = CountingPipeline(seconds=0.02)
    channel = served(pipeline).channel
    channel.send(command_messages.GenerationRequest("a", (1, 2), 102))
    channel.send(command_messages.Shutdown(finish=True))
    channel.send(command_messages.CancelRequest("a"))
    *messages, last = messages_until_the_end(channel)
    assert last == event_messages.EngineStopped() and messages[-1].status == CANCELLED
    assert sum(len(message.tokens) for message in messages[1:]) < 100


@settings(max_examples=30)
@given(
    commands=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple), st.integers(1, 9))
        | st.integers(0, 12),
        max_size=16,
    ),
    finish=st.booleans(),
)
def test_every_request_of_a_conversation_ends_once(commands, finish):
    """Sends requests, and cancellations of requests by their number, as fast as the pipe takes them."""
    pipeline = CountingPipeline(pages=9, prefix=True)
    served = Served(pipeline)
    prompts: dict[str, tuple] = {}
    for command in commands:
        if isinstance(command, int):
            served.channel.send(command_messages.CancelRequest(str(command)))
        else:
            prompt, new = prompts[str(len(prompts))] = command
            name = str(len(prompts) - 1)
            served.channel.send(command_messages.GenerationRequest(name, prompt, len(prompt) + new))
    served.channel.send(command_messages.Shutdown(finish))
    first, *events, last = messages_until_the_end(served.channel)
    served.join()
    served.channel.close()
    assert isinstance(first, event_messages.EngineReady) and last == event_messages.EngineStopped()
    for name, (prompt, new) in prompts.items():
        own = [event for event in events if event.request_id == name]
        if not own:
            assert not finish, "not read before the end"
            continue
        assert [event.status.is_done for event in own] == [*[False] * (len(own) - 1), True]
        tokens = [token for event in own for token in event.tokens]
        assert tokens == expected(prompt, new)[: len(tokens)]
        assert own[-1].status == CANCELLED or len(tokens) == new
        if finish and not any(command == int(name) for command in commands):
            assert own[-1].status == FULL
    assert pipeline.cache.free_pages == 9


def test_bad_requests_are_errors_of_their_own(served):
    channel = served(CountingPipeline()).channel
    channel.send(command_messages.GenerationRequest("empty", (), 5))
    channel.send(command_messages.GenerationRequest("long", (1, 2, 3), 3))
    channel.send(
        command_messages.GenerationRequest(
            "params", (1,), 3, sampling=command_messages.Sampling(top_p=2)
        )
    )
    channel.send(command_messages.GenerationRequest("good", (1,), 2))
    channel.send(command_messages.Shutdown(finish=True))
    _, *messages, _ = messages_until_the_end(channel)
    kinds = {
        m.request_id: m.error.kind for m in messages if isinstance(m, event_messages.RequestFailed)
    }
    assert kinds == {"empty": "InputError", "long": "InputError", "params": "ValueError"}
    assert messages[-1] == event_messages.TokensGenerated("good", tuple(expected([1], 1)), FULL)


class PreparingPipeline(CountingPipeline):
    """Prepares requests with a grammar slowly, and raises for the grammar "bad"."""

    def __init__(self) -> None:
        super().__init__(seconds=0.002)
        self.waiting, self.go = threading.Event(), threading.Event()

    def prepare(self, one: TextContext) -> None:
        if one.grammar == "bad":
            raise InputError("the grammar is invalid")
        if one.grammar is not None:
            self.waiting.set()
            assert self.go.wait(60)


def test_running_requests_do_not_wait_for_a_grammar(served):
    pipeline = PreparingPipeline()
    channel = served(pipeline, LIMITS).channel
    assert isinstance(channel.receive(), event_messages.EngineReady)
    running = command_messages.GenerationRequest.of(context([1], 100))
    channel.send(running)
    channel.receive()
    slow = command_messages.GenerationRequest.of(context([2], 3)).with_grammar("slow")
    channel.send(slow)
    assert pipeline.waiting.wait(60)
    tokens, ended = 0, False
    while not ended:  # the other request is still being prepared
        event = channel.receive()
        assert event.request_id == running.request_id
        tokens, ended = tokens + len(event.tokens), event.status.is_done
    # nor do those that come after it
    later = command_messages.GenerationRequest.of(context([4], 3))
    channel.send(later)
    event = channel.receive()
    assert event.request_id == later.request_id
    while not event.status.is_done:
        event = channel.receive()
    # others of the kind wait; one that is cancelled meanwhile never runs
    cancelled = command_messages.GenerationRequest.of(context([5], 3)).with_grammar("bad")
    channel.send(cancelled)
    channel.send(command_messages.CancelRequest(cancelled.request_id))
    channel.send(command_messages.GenerationRequest("mark", (1,), 2))
    assert channel.receive().request_id == "mark"  # the engine has obeyed what came before it
    pipeline.go.set()
    ends = {}
    while len(ends) < 2:
        event = channel.receive()
        if event.status.is_done:
            ends[event.request_id] = event
    assert ends[slow.request_id].status == FULL
    expected_end = event_messages.TokensGenerated(cancelled.request_id, (), CANCELLED)
    assert ends[cancelled.request_id] == expected_end
    bad = command_messages.GenerationRequest.of(context([3], 3)).with_grammar("bad")
    channel.send(bad)
    event = channel.receive()
    assert isinstance(event, event_messages.RequestFailed) and event.error.kind == "InputError"
    channel.send(command_messages.Shutdown())


class LoadingPipeline(CountingPipeline):
    """Loads the graph with the logits of prompts when it is told to go on; the first time it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.waiting, self.go = 0, threading.Event(), threading.Event()

    def load_prompt_logits(self) -> None:
        self.waiting.set()
        assert self.go.wait(60)
        self.loads += 1
        if self.loads == 1:
            raise UserError("no memory is left", "Start again.")


def echoing(name: str, **values) -> command_messages.GenerationRequest:
    return command_messages.GenerationRequest(
        name, (1,), 3, log_probabilities=1, log_probabilities_echo=True, **values
    )


def test_running_requests_do_not_wait_for_the_logits_of_prompts(served):
    pipeline = LoadingPipeline()
    channel = served(pipeline).channel
    assert isinstance(channel.receive(), event_messages.EngineReady)
    for name in ("failed", "good", "cancelled"):
        channel.send(echoing(name))
    assert pipeline.waiting.wait(60)
    channel.send(command_messages.GenerationRequest("plain", (1,), 3, log_probabilities_echo=True))
    while not (event := channel.receive()).status.is_done:
        assert event.request_id == "plain", "the others wait for the graph"
    channel.send(command_messages.CancelRequest("cancelled"))
    channel.send(command_messages.GenerationRequest("mark", (1,), 2))
    assert channel.receive().request_id == "mark"
    pipeline.go.set()
    ends = {}
    while len(ends) < 3:
        event = channel.receive()
        if isinstance(event, event_messages.RequestFailed) or event.status.is_done:
            ends[event.request_id] = event
    assert ends["failed"].error.problem == "no memory is left"
    assert ends["good"].status == FULL and ends["cancelled"].status == CANCELLED
    channel.send(command_messages.Shutdown())


@pytest.mark.parametrize("finish", [True, False])
def test_a_shutdown_while_a_graph_is_loaded(served, finish):
    pipeline = LoadingPipeline()
    pipeline.loads = 1
    channel = served(pipeline).channel
    for name in ("a", "b"):
        channel.send(echoing(name))
    assert pipeline.waiting.wait(60)
    channel.send(command_messages.Shutdown(finish))
    if finish:
        pipeline.go.set()
    _, *events, last = messages_until_the_end(channel)
    pipeline.go.set()
    assert last == event_messages.EngineStopped()
    ends = {event.request_id: event.status for event in events if event.status.is_done}
    assert ends == dict.fromkeys("ab", FULL if finish else CANCELLED)


class WarmingPipeline(CountingPipeline):
    """Warms up until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.warms, self.go = threading.Event(), threading.Event()

    def warm_up(self) -> None:
        self.warms.set()
        assert self.go.wait(60)


def test_an_engine_ends_after_its_warm_up(served, monkeypatch):
    """Native code of the warm-up must not run while the interpreter ends: that crashed the process."""
    monkeypatch.setattr(service, "WARM_UP_DELAY_S", 0.01)
    pipeline = WarmingPipeline()
    one = served(pipeline)
    assert pipeline.warms.wait(60)
    one.channel.send(command_messages.Shutdown())
    one.thread.join(0.1)
    assert one.thread.is_alive()
    pipeline.go.set()
    assert messages_until_the_end(one.channel)[-1] == event_messages.EngineStopped()
    # an engine that ends before begins none
    monkeypatch.setattr(service, "WARM_UP_DELAY_S", 30.0)
    pipeline = WarmingPipeline()
    one = served(pipeline)
    one.channel.send(command_messages.Shutdown())
    assert messages_until_the_end(one.channel)[-1] == event_messages.EngineStopped()
    assert not pipeline.warms.is_set()


@pytest.mark.parametrize("finish", [True, False])
def test_a_shutdown_while_a_grammar_is_compiled(served, monkeypatch, finish):
    if not finish:
        # the end waits as long for the grammar
        monkeypatch.setattr(compile_threads, "COMPILE_S", 3.0)
    pipeline = PreparingPipeline()
    channel = served(pipeline).channel
    for name in ("a", "b"):
        channel.send(command_messages.GenerationRequest(name, (1,), 3).with_grammar("slow"))
    assert pipeline.waiting.wait(60)
    channel.send(command_messages.Shutdown(finish))
    if finish:
        pipeline.go.set()
    _, *events, last = messages_until_the_end(channel)
    pipeline.go.set()
    assert last == event_messages.EngineStopped()
    ends = {event.request_id: event.status for event in events if event.status.is_done}
    assert ends == dict.fromkeys("ab", FULL if finish else CANCELLED)


def test_an_engine_ends_with_its_users(served):
    pipeline = CountingPipeline(seconds=0.001)
    one = served(pipeline)
    one.channel.send(command_messages.GenerationRequest("a", (1, 2), 400))
    assert isinstance(one.channel.receive(), event_messages.EngineReady)
    one.channel.receive()
    one.channel.close()
    one.join()
    assert pipeline.cache.free_pages == 64


def test_loading_that_fails_is_the_last_event():
    def load():
        raise ModelFilesError("no weights", "download them")

    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    serve_pipeline(load, there)
    with pytest.raises(ModelFilesError, match="no weights") as error:
        RemoteGeneration(here)
    assert error.value.remedy == "download them"
    serve_pipeline(object, there)
    with pytest.raises(RuntimeError, match="object does not generate text"):
        RemoteGeneration(here)
    there.close()
    with pytest.raises(RuntimeError, match="the process of the engine has ended"):
        RemoteGeneration(here)


def load_counting():
    """Runs in the engine's process."""
    pipeline = CountingPipeline(pages=24, prefix=True, seconds=0.001)
    names = (
        "max_queue_size_tg", "enable_in_flight_batching", "finds_num_steps", "max_batch_context_length",
    )  # fmt: skip
    pipeline.pipeline_config = SimpleNamespace(
        **dict.fromkeys(names), max_batch_size=4, max_ce_batch_size=192, prefill_chunk_size=5,
        enable_chunked_prefill=True, max_num_steps=3,
    )  # fmt: skip
    return pipeline


def load_tiny():
    """Runs in the engine's process, or in this one."""
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=256, max_batch_size=4
    )
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def engine_process(load, connection) -> None:
    serve_pipeline(load, ConnectionChannel(connection))


class Process:
    """An engine in a process of its own."""

    def __init__(self, load) -> None:
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        self.process = spawn.Process(target=engine_process, args=(load, there), daemon=True)
        self.process.start()
        there.close()
        self.remote = RemoteGeneration(ConnectionChannel(here))


def test_a_process_gives_what_this_process_gives():
    process = Process(load_counting)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 3, rng.integers(1, 12)).tolist() for _ in range(12)]

    def contexts():
        return [context(p, 3 + i, seed=i, log_probabilities=i % 2) for i, p in enumerate(prompts)]

    outputs = process.remote.run(contexts())
    here = Generation(pipeline := load_counting(), LIMITS).run(contexts())
    assert pipeline.steps > 10
    for there_output, here_output in zip(outputs, here, strict=True):
        assert there_output.tokens == here_output.tokens
        assert there_output.final_status == here_output.final_status
        assert there_output.log_probabilities == here_output.log_probabilities
    assert outputs[0].tokens == expected(prompts[0], 3)
    process.remote.close(finish=True)
    process.process.join(120)
    assert process.process.exitcode == 0
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        process.remote.run([context([1], 1)])


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_process_that_dies_fails_its_requests():
    process = Process(load_counting)
    stream = process.remote.stream([context([1], 40)])
    next(stream)
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process of the engine has ended"):
        list(stream)
    with pytest.raises(RuntimeError, match="the process of the engine has ended"):
        process.remote.run([context([1], 1)])
    process.remote.close()
    process.process.join(120)


def test_a_model_in_a_process():
    process = Process(load_tiny)
    pipeline = load_tiny()
    texts = ["Hello", "def f(x):", "The capital of", "x = "]

    def contexts() -> list[TextContext]:
        return [
            TextContext(
                request_id=RequestID(text), tokens=pipeline.tokenizer.encode_now(text), max_length=40 + i,
                eos_token_ids={2}, log_probabilities=2 * (i % 2),
                sampling_params=SamplingParams(temperature=1.2 * (i > 1), top_k=40, seed=2**63 + i),
            )
            for i, text in enumerate(texts)
        ]  # fmt: skip

    there, here = process.remote.run(contexts()), Generation.of(pipeline).run(contexts())
    for there_output, here_output in zip(there, here, strict=True):
        assert (there_output.tokens, there_output.final_status) == (
            here_output.tokens,
            here_output.final_status,
        )
        assert (there_output.log_probabilities is None) == (here_output.log_probabilities is None)
    assert sum(len(output.tokens) for output in there) > 20
    logs_there, logs_here = there[1].log_probabilities, here[1].log_probabilities
    assert logs_there is not None and len(logs_there) == len(there[1].tokens) == len(logs_here)
    for one, other in zip(logs_there, logs_here, strict=True):
        # arrival times decide which requests share a batch, and so the last bits of the results
        assert one.token_log_probabilities == pytest.approx(other.token_log_probabilities, abs=1e-4)
    process.remote.close()
    process.process.join(120)


def test_the_pages_of_the_cache_are_reported(served):
    """All that was there at first, what was read with the load, what was forgotten; their hashes are chained."""
    pipeline = CountingPipeline(prefix=True)
    pages = pipeline.cache.pages
    stored = page_hash_of(b"", np.array([7, 8]), 0, 2)

    def load_prefixes() -> None:
        pages.pools[0].fill(stored)

    pipeline.load_prefixes = load_prefixes
    one = served(pipeline, LIMITS, 1000.0)
    assert one.channel.receive() == event_messages.EngineReady(4, 2, 64)
    assert one.channel.receive() == event_messages.PagesChanged(stored)
    request = command_messages.GenerationRequest.of(context([1, 2, 3, 4], 3))
    held, done = {stored}, False
    first = page_hash_of(b"", np.array([1, 2, 3, 4]), 0, 2)
    second = page_hash_of(first, np.array([1, 2, 3, 4]), 1, 2)
    one.channel.send(request)
    while not (done and {first, second} <= held):
        event = one.channel.receive()
        done = done or getattr(event, "status", None) is FULL
        if isinstance(event, event_messages.PagesChanged):
            held |= {*event.hashes(event.new_pages)}
            assert not event.is_anew and not event.lost_pages and not event.salt_key
    one.channel.send(replace(request, request_id="salted", cache_salt="a"))
    while not isinstance(event, event_messages.PagesChanged) or not event.salt_key:
        event = one.channel.receive()
    assert event.salt_key == pipeline.cache.salt_key
    one.channel.send(command_messages.ForgetPrefixes(3))
    while not isinstance(event, event_messages.PagesChanged) or not event.is_anew:
        event = one.channel.receive()
    assert not event.lost_pages
    assert one.channel.receive() == event_messages.PrefixesForgotten(3)
