"""Messages of workers as msgpack: equal and in order after a round trip, one frame a step."""

from __future__ import annotations

import multiprocessing
import threading
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max.interfaces import GenerationStatus
from max.pipelines.generation.process import commands, events
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import GenerationRequest, Shutdown
from max.pipelines.generation.process.encoder_messages import (
    EncodeRequest,
    RankRequest,
    TextsEncoded,
)
from max.pipelines.generation.process.events import TokensGenerated
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from tests.pipelines.counting_pipeline import CountingPipeline, context, expected
from tests.pipelines.test_engine_process import MESSAGE

NAME = st.text(max_size=5)
TEXT = NAME | st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
ENCODE = st.builds(EncodeRequest, NAME, st.lists(TEXT, max_size=4).map(tuple), st.none() | NAME)
RANK = st.builds(RankRequest, NAME, NAME, st.lists(NAME, max_size=4).map(tuple))


@given(messages=st.lists(MESSAGE | ENCODE | RANK, max_size=12))
def test_messages_come_back_equal_and_in_their_order(messages) -> None:
    codec = MessageCodec()
    decoded = codec.decode(codec.encode(messages))
    assert decoded == messages
    assert [type(each) for each in decoded] == [type(each) for each in messages]


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 5), (0, 4)])
def test_values(shape) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    codec = MessageCodec()
    sent = [TextsEncoded("a", values), TextsEncoded("b", values[::-1])]
    first, second = codec.decode(codec.encode(sent))
    assert (first.request_id, second.request_id) == ("a", "b")
    np.testing.assert_array_equal(first.values, values, strict=True)
    np.testing.assert_array_equal(second.values, values[::-1])


def test_numbers_of_numpy_are_plain_and_other_types_are_errors() -> None:
    codec = MessageCodec()
    event = TokensGenerated("a", (np.int64(7),), GenerationStatus.ACTIVE)  # pyright: ignore
    assert codec.decode(codec.encode([event])) == [event]
    with pytest.raises(TypeError, match="dict is no message"):
        codec.encode([{}])
    with pytest.raises(TypeError, match="a message has a complex, which msgpack cannot hold"):
        codec.encode([EncodeRequest("a", ({1j},), None)])  # pyright: ignore
    with pytest.raises(msgspec.MsgspecError):
        codec.decode(b"\xc1")


def test_every_message_of_the_protocol_has_a_form() -> None:
    times = events.StepTimes(tuple(range(14)), 7.5)
    messages = [
        commands.CancelRequest("a"), commands.ForgetPrefixes(3), Shutdown(True),
        events.EngineReady(1, 2, 3), events.PromptStarted("a", 1.5), events.PredictionVerified("a", 2, 3),
        events.RequestFailed("a", events.ErrorInfo("E", "p", "r")),
        events.PrefixesForgotten(4), events.EngineStats(1, 2, 3, 4, 5, 6, times, times + times),
        events.EngineStopped(), GenerationRequest("a", (1, 2), 9),
        TokensGenerated("a", (3,), GenerationStatus.ACTIVE),
        commands.KeepPrefixes(5, "save", "a"), events.PrefixesKept(5, 6, 7, events.ErrorInfo("E", "p")),
        commands.LoadAdapter(1, "a", "b"), commands.UnloadAdapter(2, "a"), events.AdapterChanged(2),
            events.PagesChanged(b"\0" * 32, bytes(range(16)), True, b"key"),
    ]  # fmt: skip
    kinds = {*get_args(commands.Command), *get_args(events.Event)}
    assert {type(message) for message in messages} == kinds
    codec = MessageCodec()
    assert codec.decode(codec.encode(messages)) == messages
    assert (times + times).counts == tuple(range(0, 28, 2))


def test_a_channel_without_a_codec_pickles() -> None:
    here, there = map(ConnectionChannel, multiprocessing.Pipe())
    here.send_all(["text", {"a": {1, 2}}])
    here.send(3)
    assert [there.receive(), there.receive_all(), there.receive()] == ["text", [{"a": {1, 2}}], 3]
    here.close()
    there.close()


def test_a_channel_sends_the_frames_of_its_codec() -> None:
    here, there = multiprocessing.Pipe()
    channel, codec = ConnectionChannel(here, MessageCodec()), MessageCodec()
    channel.send(Shutdown(True))
    channel.send_all([])
    channel.send_all([Shutdown(), Shutdown(True)])
    assert codec.decode(there.recv_bytes()) == [Shutdown(True)]
    assert codec.decode(there.recv_bytes()) == [Shutdown(), Shutdown(True)]
    assert not there.poll(), "no messages are no frame"
    there.send_bytes(codec.encode([Shutdown(), Shutdown(True), Shutdown()]))
    assert channel.receive() == Shutdown()
    assert channel.receive_all() == [Shutdown(True), Shutdown()]
    there.send_bytes(codec.encode([Shutdown()]))
    assert channel.receive_all() == [Shutdown()]
    channel.close()
    with pytest.raises(EOFError):
        there.recv_bytes()
    there.close()


@pytest.mark.parametrize(
    ("error", "closed", "raised", "message"),
    [
        (ConnectionResetError("reset by peer"), False, EOFError, "reset by peer"),
        (TypeError("no handle"), True, EOFError, "the channel was closed"),
        (TypeError("no bytes"), False, TypeError, "no bytes"),
    ],
)
def test_how_a_channel_ends(error, closed, raised, message) -> None:
    """A connection that is reset, or that another thread closes, has ended; other errors are the reader's."""

    class Broken:
        def __init__(self) -> None:
            self.closed = closed

        def recv_bytes(self) -> bytes:
            raise error

    for receive in ("receive", "receive_all"):
        with pytest.raises(raised, match=message):
            getattr(ConnectionChannel(Broken()), receive)()


def test_a_step_is_one_frame() -> None:
    """Each frame has one token of every running sequence."""
    here, there = multiprocessing.Pipe()
    users = ConnectionChannel(here, MessageCodec())
    engine = ConnectionChannel(there, MessageCodec())
    prompts = [[1, n] for n in range(5)]
    requests = [GenerationRequest.of(context(prompt, 6)) for prompt in prompts]
    users.send_all(requests)
    limits = SchedulerLimits(max_batch_size=8)
    thread = threading.Thread(target=serve, args=(CountingPipeline(), limits, engine))
    thread.start()
    users.receive()  # the limits
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    frames = 0
    while sum(map(len, tokens.values())) < 30:
        events = users.receive_all()
        frames += 1
        for event in events:
            tokens[event.request_id] += event.tokens
    users.send(Shutdown())
    thread.join(60)
    users.close()
    engine.close()
    assert list(tokens.values()) == [expected(prompt, 6) for prompt in prompts]
    # the commands may arrive in two parts at most
    assert frames <= 12
