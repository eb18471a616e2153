"""Runs an encoder for the requests of another process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from max.pipelines.generation.channel import Channel
from max.pipelines.generation.protocol import (
    CancelRequest,
    EngineReady,
    EngineStopped,
    ErrorInfo,
    RequestFailed,
    Shutdown,
)
from max.pipelines.generation.service import StepSigns
from max.serve.worker.encoder_messages import (
    EncoderCommand,
    EncodeRequest,
    EncoderEvent,
    RankRequest,
    TextsEncoded,
)

Floats = npt.NDArray[np.float32]


class Encoder(Protocol):
    """The part of an encoder that a worker uses; ``TextEncoder`` implements it."""

    def encode(
        self, texts: Sequence[str | Sequence[int]], prompt_name: str | None = None
    ) -> Floats | list[Floats]:
        """Returns the vectors of texts, ``[texts, size]``."""
        ...

    def rank(self, query: str, texts: Sequence[str]) -> Floats:
        """Returns the scores of texts for a query, ``[texts]``."""
        ...


def serve_encoder(
    load: Callable[[], Encoder],
    max_batch_size: int,
    channel: Channel[EncoderCommand, EncoderEvent],
    steps: StepSigns | None = None,
) -> None:
    """Loads an encoder and runs it for the requests of a channel.

    It returns after a :class:`Shutdown`, or when the other end of the channel is closed. All waiting requests for
    vectors with the same prompt name form one batch.

    Args:
        load: Loads the encoder.
        max_batch_size: The most texts of one execution, for ``EngineReady``.
        channel: The worker's end of the channel.
        steps: Is told when a batch begins and ends.
    """
    try:
        encoder = load()
    except Exception as error:
        channel.send(EngineStopped(ErrorInfo.of(error)))
        return
    commands: queue.SimpleQueue[EncoderCommand] = queue.SimpleQueue()
    threading.Thread(
        target=_read, args=(channel, commands), name="encoder commands", daemon=True
    ).start()
    try:
        channel.send(EngineReady(max_batch_size, 0, 0))
        goes_on = True
        while goes_on:
            first = commands.get()
            if steps is not None:
                steps.step_begins()
            goes_on = _run_waiting(encoder, channel, commands, first)
            if steps is not None:
                steps.step_ends()
        channel.send(EngineStopped())
    except OSError:
        pass  # the channel is closed


def _read(
    channel: Channel[EncoderCommand, EncoderEvent], commands: queue.SimpleQueue[EncoderCommand]
) -> None:
    """Queues the commands; the end of the channel counts as a :class:`Shutdown`."""
    while True:
        try:
            commands.put(channel.receive())
        except EOFError:
            commands.put(Shutdown())
            return


def _run_waiting(
    encoder: Encoder,
    channel: Channel[EncoderCommand, EncoderEvent],
    commands: queue.SimpleQueue[EncoderCommand],
    first: EncoderCommand,
) -> bool:
    """Runs a command, and all queued requests with it.

    A :class:`Shutdown` that finishes runs the requests before it; one that does not fails them. Both fail the requests
    after it.

    Returns:
        Whether the worker goes on: False after a shutdown.
    """
    waiting = [first]
    while not commands.empty():
        waiting.append(commands.get())
    cancelled = {each.request_id for each in waiting if isinstance(each, CancelRequest)}
    requests: list[EncodeRequest | RankRequest] = []
    refused: list[EncodeRequest | RankRequest] = []
    goes_on = True
    for command in waiting:
        if isinstance(command, Shutdown):
            goes_on = False
            if not command.finish:
                refused, requests = [*requests, *refused], []
        elif not isinstance(command, CancelRequest) and command.request_id not in cancelled:
            (requests if goes_on else refused).append(command)
    problem = ErrorInfo("RuntimeError", "the encoder is shutting down")
    channel.send_all([RequestFailed(request.request_id, problem) for request in refused])
    batches: dict[str | None, list[EncodeRequest]] = {}
    for request in requests:
        if isinstance(request, EncodeRequest):
            batches.setdefault(request.prompt_name, []).append(request)
        else:
            _answer(channel, request, lambda one=request: encoder.rank(one.query, one.texts))
    for batch in batches.values():
        _encode(encoder, channel, batch)
    return goes_on


def _encode(
    encoder: Encoder,
    channel: Channel[EncoderCommand, EncoderEvent],
    requests: list[EncodeRequest],
) -> None:
    """Runs requests as one batch. If it fails, each runs by itself, so that only the invalid request fails."""
    texts = [text for request in requests for text in request.texts]
    if len(requests) > 1:
        try:
            rows = encoder.encode(texts, requests[0].prompt_name)
        except Exception:
            for request in requests:
                _encode(encoder, channel, [request])
            return
        begin, events = 0, list[TextsEncoded]()
        for request in requests:
            end = begin + len(request.texts)
            events.append(TextsEncoded(request.request_id, np.asarray(rows[begin:end], np.float32)))
            begin = end
        channel.send_all(events)
        return
    (request,) = requests
    _answer(channel, request, lambda: encoder.encode(texts, request.prompt_name))


def _answer(
    channel: Channel[EncoderCommand, EncoderEvent],
    request: EncodeRequest | RankRequest,
    run: Callable[[], Floats | list[Floats]],
) -> None:
    """Sends the result of a request, or why it failed."""
    try:
        values = np.asarray(run(), np.float32)
    except Exception as error:
        channel.send(RequestFailed(request.request_id, ErrorInfo.of(error)))
        return
    channel.send(TextsEncoded(request.request_id, values))
