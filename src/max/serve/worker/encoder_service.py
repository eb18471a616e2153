"""Runs an encoder for the requests of another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from max.pipelines.generation.process.channel import Channel
from max.pipelines.generation.process.commands import CancelRequest
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
from max.pipelines.generation.process.worker_loop import StepSigns, Work, WorkerLoop

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
        # the server waits for a first event, which says why there is no other
        channel.send(EngineStopped(ErrorInfo.of(error)))
        return
    WorkerLoop(EncoderWork(encoder, max_batch_size), channel, steps).run()


class EncoderWork(Work[EncoderCommand, EncoderEvent]):
    """The work of a process that computes vectors and scores: a step runs one batch.

    Args:
        encoder: The encoder.
        max_batch_size: The most texts of one execution, for ``EngineReady``.
    """

    def __init__(self, encoder: Encoder, max_batch_size: int) -> None:
        self._encoder, self._max_batch_size = encoder, max_batch_size
        self._waiting: dict[str, EncodeRequest | RankRequest] = {}

    @property
    def idle(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def begin(self) -> EngineReady:
        """Returns the first event; an encoder has no pages."""
        return EngineReady(self._max_batch_size, 0, 0)

    def obey(self, command: EncoderCommand, late: bool) -> Sequence[EncoderEvent]:
        """Adds a request, or removes a cancelled one.

        Args:
            command: The command.
            late: Whether a shutdown came before it.

        Returns:
            The failure of a late request.
        """
        match command:
            case CancelRequest(request_id):
                # commands are obeyed between batches: one that has run is gone already
                self._waiting.pop(request_id, None)
            case EncodeRequest() | RankRequest():
                if late:
                    return [_refusal(command.request_id)]
                self._waiting[command.request_id] = command
            case _:
                raise TypeError(f"{type(command).__name__} is no command of an encoder")
        return []

    def step(self) -> Sequence[EncoderEvent]:
        """Runs the first waiting request; with a request for vectors all others with the same prompt name.

        Returns:
            Their results, and why requests failed.
        """
        first = next(iter(self._waiting.values()), None)
        if first is None:
            return []
        if isinstance(first, RankRequest):
            # its texts are a batch of their own, as each is read together with the query
            del self._waiting[first.request_id]
            return [_result(first, lambda: self._encoder.rank(first.query, first.texts))]
        batch = [
            request
            for request in self._waiting.values()
            if isinstance(request, EncodeRequest) and request.prompt_name == first.prompt_name
        ]
        # before it runs: a batch that fails must not be tried again by the next step
        for request in batch:
            del self._waiting[request.request_id]
        return self._encode(batch)

    def end(self, error: BaseException | None) -> Sequence[EncoderEvent]:
        """Refuses the waiting requests.

        Args:
            error: The error that has ended the loop; None: a shutdown.
        """
        return [_refusal(request_id) for request_id in self._waiting]

    def _encode(self, requests: Sequence[EncodeRequest]) -> Sequence[EncoderEvent]:
        """Runs requests as one batch. If it fails, each runs by itself, so that only the invalid request fails."""
        encode, prompt_name = self._encoder.encode, requests[0].prompt_name
        if len(requests) > 1:
            texts = [text for request in requests for text in request.texts]
            try:
                rows = encode(texts, prompt_name)  # [texts of all requests, size]
            except Exception:
                return [event for request in requests for event in self._encode([request])]
            begin, events = 0, list[EncoderEvent]()
            for request in requests:
                part = np.asarray(
                    rows[begin : begin + len(request.texts)], np.float32
                )  # [texts of one, size]
                events.append(TextsEncoded(request.request_id, part))
                begin += len(request.texts)
            return events
        (request,) = requests
        return [_result(request, lambda: encode(request.texts, prompt_name))]


def _result(
    request: EncodeRequest | RankRequest, run: Callable[[], Floats | list[Floats]]
) -> EncoderEvent:
    """The result of a request, or why it failed."""
    try:
        return TextsEncoded(request.request_id, np.asarray(run(), np.float32))
    except Exception as error:
        return RequestFailed(request.request_id, ErrorInfo.of(error))


def _refusal(request_id: str) -> RequestFailed:
    problem = ErrorInfo("RuntimeError", "the encoder is shutting down")
    return RequestFailed(request_id, problem)
