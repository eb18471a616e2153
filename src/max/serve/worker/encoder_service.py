"""Runs an encoder for the requests of another process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from max.pipelines.encoders.text_encoder import TextEncoder
from max.pipelines.generation.channel import Channel
from max.pipelines.generation.protocol import (
    CancelRequest,
    EngineReady,
    EngineStopped,
    ErrorInfo,
    RequestFailed,
    Shutdown,
)
from max.serve.worker.encoder_messages import EncodeRequest, RankRequest, TextsEncoded


def serve_encoder(
    load: Callable[[], TextEncoder], max_batch_size: int, channel: Channel[Any, Any]
) -> None:
    """Loads an encoder and runs it for the requests of a channel, until that is closed.

    All requests for vectors that wait are one batch.

    Args:
        load: Loads the encoder.
        max_batch_size: Texts of one execution.
        channel: The worker's end of the channel.
    """
    try:
        encoder = load()
    except Exception as error:
        channel.send(EngineStopped(ErrorInfo.of(error)))
        return
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, commands), daemon=True).start()
    try:
        channel.send(EngineReady(max_batch_size, 0, 0))
        while _run_waiting(encoder, channel, commands):
            pass
        channel.send(EngineStopped())
    except OSError:
        pass  # nobody receives any more


def _read(channel: Channel[Any, Any], commands: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            commands.put(channel.receive())
        except EOFError:
            commands.put(Shutdown())
            return


def _run_waiting(
    encoder: TextEncoder, channel: Channel[Any, Any], commands: queue.SimpleQueue[Any]
) -> bool:
    """Waits for requests, and runs all that wait; whether there may be more."""
    waiting = [commands.get()]
    while not commands.empty():
        waiting.append(commands.get())
    cancelled = {each.request_id for each in waiting if isinstance(each, CancelRequest)}
    batches: dict[str | None, list[EncodeRequest]] = {}
    for command in waiting:
        if isinstance(command, Shutdown):
            return False
        if isinstance(command, CancelRequest) or command.request_id in cancelled:
            continue
        if isinstance(command, EncodeRequest):
            batches.setdefault(command.prompt_name, []).append(command)
        else:
            _answer(channel, command, lambda one=command: encoder.rank(one.query, one.texts))
    for requests in batches.values():
        _encode(encoder, channel, requests)
    return True


def _encode(
    encoder: TextEncoder, channel: Channel[Any, Any], requests: list[EncodeRequest]
) -> None:
    """Runs requests as one batch; where it fails, each by itself, so that one fails alone."""
    texts = [text for request in requests for text in request.texts]
    if len(requests) > 1:
        try:
            rows = encoder.encode(texts, requests[0].prompt_name)
        except Exception:
            for request in requests:
                _encode(encoder, channel, [request])
            return
        at, events = 0, list[TextsEncoded]()
        for request in requests:
            part = np.asarray(rows[at : at + len(request.texts)], np.float32)
            at += len(request.texts)
            events.append(TextsEncoded(request.request_id, part))
        channel.send_all(events)
        return
    (request,) = requests
    _answer(channel, request, lambda: encoder.encode(texts, request.prompt_name))


def _answer(
    channel: Channel[Any, Any], request: EncodeRequest | RankRequest, run: Callable[[], Any]
) -> None:
    try:
        values = np.asarray(run(), np.float32)
    except Exception as error:
        channel.send(RequestFailed(request.request_id, ErrorInfo.of(error)))
        return
    channel.send(TextsEncoded(request.request_id, values))
