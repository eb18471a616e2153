"""The loop of an encoder's worker: batches, failures, cancellations and shutdowns, without a process or a model."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from max.pipelines.core.exceptions import InputError, NotFiniteError
from max.pipelines.generation.process.commands import CancelRequest, Shutdown
from max.pipelines.generation.process.encoder_messages import (
    EncoderCommand,
    EncodeRequest,
    EncoderEvent,
    RankRequest,
    TextsEncoded,
)
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStopped,
    ErrorInfo,
    RequestFailed,
)
from max.serve.http.error_responses import as_api_error
from max.serve.worker.encoder_service import serve_encoder


class FakeEncoder:
    """Vectors and scores are lengths of texts; the first call waits until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.batches: list[list[Any]] = []

    def _run(self, texts: Sequence[Any]) -> None:
        self.batches.append(list(texts))
        self.begun.set()
        assert self.released.wait(60)
        if "bad" in texts:
            raise InputError("text is bad", "Give another one.")

    def encode(self, texts: Sequence[Any], prompt_name: str | None = None) -> np.ndarray:
        self._run(texts)
        shift = 0 if prompt_name is None else 100
        return np.array([[len(text) + shift, 1] for text in texts], np.float32)

    def rank(self, query: str, texts: Sequence[str]) -> np.ndarray:
        self._run([query, *texts])
        return np.array([len(query) + len(text) for text in texts], np.float32)


class ServiceChannel:
    """The service's end of a channel in memory, which tells when the service waits for the next command."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[EncoderCommand | None] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[EncoderEvent] = queue.SimpleQueue()
        self.receives = threading.Semaphore(0)

    def send(self, message: EncoderEvent) -> None:
        self.events.put(message)

    def send_all(self, messages: Sequence[EncoderEvent]) -> None:
        for message in messages:
            self.send(message)

    def receive(self) -> EncoderCommand:
        self.receives.release()
        command = self.commands.get()
        if command is None:
            raise EOFError
        return command

    def receive_all(self) -> Sequence[EncoderCommand]:
        return [self.receive()]

    def close(self) -> None:
        self.commands.put(None)


class Users:
    """The users' end of the channel to a running service."""

    def __init__(self) -> None:
        self.encoder, self.channel = FakeEncoder(), ServiceChannel()
        earlier = set(threading.enumerate())
        self.thread = threading.Thread(
            target=serve_encoder, args=(lambda: self.encoder, 8, self.channel), daemon=True
        )
        self.thread.start()
        assert self.channel.events.get(timeout=60) == EngineReady(8, 0, 0)
        assert self.channel.receives.acquire(timeout=60)
        named = (one for one in threading.enumerate() if one.name == "engine commands")
        self.reader = next(one for one in named if one not in earlier)

    def hold(self) -> None:
        """Occupies the encoder with a first request, so that later commands are queued together."""
        self.send(EncodeRequest("first", ("x",)))
        assert self.encoder.begun.wait(60)

    def send(self, *commands: EncoderCommand) -> None:
        """Sends commands, and waits until the service has queued them; nothing is read after the last shutdown."""
        for command in commands:
            self.channel.commands.put(command)
            if command != Shutdown(finish=False):
                assert self.channel.receives.acquire(timeout=60)
            else:
                self.reader.join(60)
                return

    def events(self) -> dict[str, Any]:
        """All events until the service has stopped, by request: values, or the text of the error."""
        results: dict[str, Any] = {}
        while True:
            event = self.channel.events.get(timeout=60)
            match event:
                case TextsEncoded(request_id, values):
                    assert request_id not in results
                    results[request_id] = values.tolist()
                case RequestFailed(request_id, error):
                    assert request_id not in results
                    results[request_id] = error.problem
                case EngineStopped(error):
                    assert error is None
                    return results
                case _:
                    pytest.fail(f"unexpected {event}")


@pytest.fixture
def users() -> Iterator[Users]:
    users = Users()
    yield users
    users.encoder.released.set()
    users.channel.close()
    users.thread.join(60)
    assert not users.thread.is_alive()


def test_a_shutdown_that_finishes_runs_the_requests_before_it(users: Users) -> None:
    users.hold()
    users.send(
        EncodeRequest("a", ("one", "three")),
        EncodeRequest("b", ("seven",), "query"),
        RankRequest("c", "qq", ("one", "")),
        EncodeRequest("d", ((1, 2, 3, 4),)),
        Shutdown(finish=True),
        EncodeRequest("late", ("x",)),
        RankRequest("later", "q", ("x",)),
    )
    users.encoder.released.set()
    assert users.events() == {
        "first": [[1, 1]],
        "a": [[3, 1], [5, 1]],
        "b": [[105, 1]],
        "c": [5, 2],
        "d": [[4, 1]],
        "late": "the encoder is shutting down",
        "later": "the encoder is shutting down",
    }


def test_a_shutdown_that_does_not_finish_fails_the_queued_requests(users: Users) -> None:
    users.hold()
    users.send(EncodeRequest("a", ("one",)), RankRequest("b", "q", ("x",)), Shutdown(finish=False))
    users.encoder.released.set()
    assert users.events() == {
        "first": [[1, 1]],
        "a": "the encoder is shutting down",
        "b": "the encoder is shutting down",
    }
    assert users.encoder.batches == [["x"]]


@pytest.mark.parametrize("shutdowns", [(True, False), (False, True)])
def test_the_stricter_of_two_shutdowns_holds(users: Users, shutdowns: tuple[bool, bool]) -> None:
    users.hold()
    users.send(EncodeRequest("a", ("one",)), *map(Shutdown, shutdowns))
    users.encoder.released.set()
    assert users.events() == {"first": [[1, 1]], "a": "the encoder is shutting down"}


def test_a_bad_request_fails_alone_and_a_cancelled_one_does_not_run(users: Users) -> None:
    users.hold()
    users.send(
        EncodeRequest("a", ("one",)),
        EncodeRequest("b", ("bad",)),
        EncodeRequest("c", ("gone",)),
        EncodeRequest("d", ("four",)),
        CancelRequest("c"),
        Shutdown(finish=True),
    )
    users.encoder.released.set()
    assert users.events() == {
        "first": [[1, 1]],
        "a": [[3, 1]],
        "b": "text is bad",
        "d": [[4, 1]],
    }
    assert not any("gone" in batch for batch in users.encoder.batches)


def test_an_encoder_that_cannot_be_loaded_is_an_error() -> None:
    channel = ServiceChannel()

    def load() -> FakeEncoder:
        raise InputError("no such model", "Give another one.")

    serve_encoder(load, 1, channel)
    event = channel.events.get(timeout=60)
    assert isinstance(event, EngineStopped) and event.error is not None
    assert event.error.problem == "no such model"


@pytest.mark.parametrize("held", [False, True])
def test_a_closed_channel_ends_the_service(users: Users, held: bool) -> None:
    if held:
        users.hold()
    users.channel.close()
    users.encoder.released.set()
    users.thread.join(60)
    assert not users.thread.is_alive()


def test_values_that_are_not_finite_are_an_error_of_the_server() -> None:
    info = ErrorInfo.of(NotFiniteError("the logits are all NaN"))
    error = as_api_error(info.to_exception())
    assert error.status == 500 and error.code == "not_finite"
    assert "the logits are all NaN. Copy or download" in error.message
