"""Runs the sequences of a request, and merges what they generate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from max.pipelines.generation.protocol import GenerationRequest, TokensGenerated
from max.serve.metrics import ServerMetrics
from max.serve.model import ServedModel
from max.serve.text import GeneratedText, TextPiece
from max.serve.worker.client import Repeated


@dataclass(frozen=True)
class TextSequence:
    """One sequence to generate.

    Args:
        request: What the engine gets.
        stops: Texts that end it.
        include_stop: Whether the stop text is part of the text.
        visible_tokens: Special tokens that are part of the text, such as the marks of tool calls.
    """

    request: GenerationRequest
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    visible_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RunOptions:
    """How the sequences of a request are run.

    Args:
        repeatable: Whether they may be run again after their first tokens, as the answer is sent whole.
        timeout: The longest time in seconds; None: no limit.
    """

    repeatable: bool = False
    timeout: float | None = None


def choices_of(sequence: TextSequence, count: int) -> list[TextSequence]:
    """A sequence and others that differ from it by their seeds.

    Args:
        sequence: The first.
        count: The number of all.
    """
    request = sequence.request
    first_seed = request.sampling.seed
    return [
        replace(
            sequence,
            request=replace(
                request,
                request_id=f"{request.request_id}-{i}",
                sampling=replace(request.sampling, seed=(first_seed + i) % 2**64),
            ),
        )
        for i in range(count)
    ]


async def generate_text(
    model: ServedModel, sequence: TextSequence, options: RunOptions, metrics: ServerMetrics
) -> AsyncGenerator[TextPiece | Repeated, None]:
    """Yields the text of one sequence as it is generated.

    Args:
        model: The model.
        sequence: The sequence.
        options: How it is run.
        metrics: Receives the times and the counts.

    Raises:
        UserError: The request can never run.
        RuntimeError: The engine failed.
    """
    request = sequence.request
    text = _new_text(model, sequence)
    begin = last = time.perf_counter()
    metrics.input_tokens.inc(len(request.tokens))
    tokens = 0
    stream = model.engine.stream(request, options.repeatable, options.timeout)
    async with aclosing(stream):
        async for event in stream:
            if isinstance(event, Repeated):
                text, tokens = _new_text(model, sequence), 0
                yield event
                continue
            if not isinstance(event, TokensGenerated):
                continue  # of encoders
            now = time.perf_counter()
            if tokens == 0:
                metrics.time_to_first_token.observe((now - begin) * 1e3)
            elif event.tokens:
                metrics.between_tokens.observe((now - last) * 1e3 / len(event.tokens))
            last, tokens = now, tokens + len(event.tokens)
            metrics.output_tokens.inc(len(event.tokens))
            piece = text.push(event)
            if piece.text or piece.logs or piece.prompt_logs or piece.finish_reason:
                yield piece
            if piece.finish_reason is not None:
                return


def _new_text(model: ServedModel, sequence: TextSequence) -> GeneratedText:
    decode = model.decoder(sequence.visible_tokens)
    return GeneratedText(
        decode,
        frozenset(sequence.request.eos_token_ids),
        sequence.stops,
        sequence.include_stop,
    )


async def generate_choices(
    model: ServedModel,
    sequences: Sequence[TextSequence],
    options: RunOptions,
    metrics: ServerMetrics,
) -> AsyncGenerator[tuple[int, TextPiece | Repeated], None]:
    """Yields the texts of several sequences with their numbers, as they are generated.

    Args:
        model: The model.
        sequences: The sequences.
        options: How they are run.
        metrics: Receives the times and the counts.

    Raises:
        ApiError: Too many requests wait.
        UserError: A request can never run.
        RuntimeError: The engine failed.
    """
    with model.admission.enter(len(sequences)), metrics.request():
        if len(sequences) == 1:
            stream = generate_text(model, sequences[0], options, metrics)
            async with aclosing(stream):
                async for piece in stream:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, TextPiece | Repeated | Exception | None]] = asyncio.Queue()

        async def read(number: int, sequence: TextSequence) -> None:
            try:
                stream = generate_text(model, sequence, options, metrics)
                async with aclosing(stream):
                    async for piece in stream:
                        queue.put_nowait((number, piece))
                queue.put_nowait((number, None))
            except Exception as error:
                queue.put_nowait((number, error))

        tasks = [asyncio.ensure_future(read(i, sequence)) for i, sequence in enumerate(sequences)]
        try:
            left = len(tasks)
            while left:
                number, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    left -= 1
                else:
                    yield number, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
