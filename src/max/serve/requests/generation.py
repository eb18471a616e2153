"""Runs the sequences of a request: merges what they generate, and finds the parts of answers in their texts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from max._dataclass import replace_fields
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import (
    PredictionVerified,
    PromptStarted,
    TokensGenerated,
)
from max.pipelines.tokenization.text_stream import GeneratedText, TextPiece, TokenLog
from max.serve.errors import ApiError
from max.serve.limits import LONG_LOGS, MAX_SEQUENCE_TOKENS
from max.serve.metrics import ServerMetrics
from max.serve.models.model import ServedModel
from max.serve.requests.parts import (
    AnswerParser,
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ToolCallPart,
)
from max.serve.requests.request_context import current_request
from max.serve.requests.text_inputs import TextInputs
from max.serve.requests.threads import in_body_thread

logger = logging.getLogger("max.serve")


@dataclass(frozen=True)
class TextSequence:
    """One sequence to generate.

    Args:
        request: The request for the engine.
        stops: Texts that end it.
        include_stop: Whether the stop text is part of the text.
        visible_tokens: Special tokens that are part of the text, such as the marks of tool calls.
        with_tokens: Whether its tokens are wanted, those without a text too.
    """

    request: GenerationRequest
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    visible_tokens: frozenset[int] = frozenset()
    with_tokens: bool = False


def choices_of(sequence: TextSequence, count: int) -> list[TextSequence]:
    """A sequence, and copies of it with other seeds.

    Args:
        sequence: The first.
        count: The number of sequences, the first included.
    """
    request = sequence.request
    # one seed repeats all choices, each of which has its own
    first = request.sampling
    return [
        replace_fields(
            sequence,
            request=replace_fields(
                request,
                request_id=f"{request.request_id}-{i}",
                sampling=replace_fields(first, seed=(first.seed + i) % 2**64) if i else first,
            ),
        )
        for i in range(count)
    ]


def _is_long(event: TokensGenerated) -> bool:
    """Whether it has log-probabilities of a long prompt."""
    logs = event.log_probabilities
    return logs is not None and any(len(entry.tokens) > LONG_LOGS for entry in logs)


class _Sequence:
    """One sequence while it is generated: its text, and the times of its tokens."""

    def __init__(self, model: ServedModel, sequence: TextSequence, metrics: ServerMetrics) -> None:
        self._sequence, self._metrics = sequence, metrics
        self._text = GeneratedText(
            model.decoder(sequence.visible_tokens),
            frozenset(sequence.request.eos_token_ids),
            sequence.stops,
            sequence.include_stop,
        )
        self._last = time.perf_counter()
        self._context = current_request()
        self._begin, self._trace = self._context.arrival_time, self._context.trace
        self._arrived = time.time()
        self._started = self._first = 0.0
        metrics.input_tokens.inc(len(sequence.request.tokens))

    def start(self, event: PromptStarted) -> None:
        """Notes when its prompt began to be read, its tokens that were cached, and why no more were."""
        request = self._sequence.request
        self._context.cached_by_request[request.request_id] = (
            id(request.tokens),
            event.cached_tokens,
        )
        # a request that goes on with another worker starts more than once
        if not self._started:
            self._started = max(event.at, self._arrived)
            if event.miss_reason:
                missed = len(request.tokens) - 1 - event.cached_tokens
                self._metrics.prefix_misses.labels(event.miss_reason).inc()
                self._metrics.missed_tokens.labels(event.miss_reason).inc(missed)
                logger.debug(
                    "%d of %d tokens of the prompt were cached; those from token %d on were not: %s",
                    event.cached_tokens,
                    len(request.tokens),
                    event.cached_tokens,
                    event.miss_reason,
                )
            self._metrics.queue_time.observe((self._started - self._arrived) * 1e3)

    def end(self) -> None:
        """Records its phases if the request is traced; phases that have begun end now."""
        if self._trace is None:
            return
        now, request = time.time(), self._sequence.request
        name = {"gen_ai.response.id": request.request_id}
        self._trace.phase("queue", self._arrived, self._started or now, name)
        if self._started:
            prompt = {**name, "gen_ai.usage.input_tokens": len(request.tokens)}
            self._trace.phase("prefill", self._started, self._first or now, prompt)
        if self._first:
            answer = {**name, "gen_ai.usage.output_tokens": self._text.tokens}
            self._trace.phase("decode", self._first, now, answer)

    def push(self, event: TokensGenerated) -> TextPiece:
        """Adds tokens, and returns their text."""
        now, metrics, count = time.perf_counter(), self._metrics, len(event.tokens)
        if self._text.tokens == 0:
            metrics.time_to_first_token.observe((now - self._begin) * 1e3)
            self._first = self._first or time.time()
        elif count:
            between = (now - self._last) * 1e3 / count
            # the histogram counts tokens, of which an event may have several
            for _ in range(count):
                metrics.between_tokens.observe(between)
        self._last = now
        metrics.output_tokens.inc(count)
        return self._text.push(event.tokens, event.status, event.log_probabilities)


NumberedPieces: TypeAlias = list[tuple[int, TextPiece]]


async def generate_choices(
    model: ServedModel,
    sequences: Sequence[TextSequence],
    timeout: float | None,
    metrics: ServerMetrics,
) -> AsyncGenerator[NumberedPieces, None]:
    """Yields the texts of several sequences with their numbers, as they are generated.

    Each item has all that has arrived, at most one piece per sequence.

    Args:
        model: The model.
        sequences: The sequences.
        timeout: The longest time in seconds; None: no limit.
        metrics: Receives the times and the counts.

    Raises:
        ApiError: Too many requests wait, or the prompts are too long in all.
        UserError: A request can never run.
        RuntimeError: A step failed, or the engine was lost.
        TimeoutError: It took too long.
    """
    requests = [sequence.request for sequence in sequences]
    total = sum(len(request.tokens) for request in requests)
    if total > MAX_SEQUENCE_TOKENS:
        raise ApiError(
            f"the prompts of {len(requests)} sequences have {total} tokens; at most {MAX_SEQUENCE_TOKENS} in all are "
            "run by one request",
            param="n",
        )
    with (
        model.admission.enter(len(sequences)),
        metrics.request(),
        model.engine.open(requests, timeout) as subscription,
    ):
        running = {i: _Sequence(model, each, metrics) for i, each in enumerate(sequences)}
        try:
            while running:
                pieces: NumberedPieces = []
                for number, event in await subscription.next_events():
                    sequence = running.get(number)
                    if sequence is None:
                        continue  # a stop text ended it; tokens were under way
                    if isinstance(event, PromptStarted):
                        sequence.start(event)
                    elif isinstance(event, PredictionVerified):
                        current_request().note_prediction(
                            event.accepted_tokens, event.rejected_tokens
                        )
                    elif isinstance(event, TokensGenerated):
                        if _is_long(event):
                            piece = await in_body_thread(sequence.push, event)
                        else:
                            piece = sequence.push(event)
                        if (
                            piece.text
                            or piece.logs
                            or piece.prompt_logs
                            or piece.finish_reason
                            or (piece.token_ids and sequences[number].with_tokens)
                        ):
                            pieces.append((number, piece))
                        if piece.finish_reason is not None:
                            del running[number]
                            sequence.end()
                            subscription.cancel(number)
                if pieces:
                    yield pieces
        finally:
            # those whose client has disconnected, or that an error ended
            for sequence in running.values():
                sequence.end()


class PlainParser:
    """Takes all text as content."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """The text as content.

        Args:
            text: The new text.
        """
        return [ContentPart(text)] if text else []

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """Nothing: no text is held back.

        Args:
            cut: Whether the answer was cut off.
        """
        return []


@dataclass(frozen=True)
class ChatJob:
    """A conversation that is ready to run.

    Args:
        model: The model.
        sequences: The sequences, one an answer.
        new_parser: Makes the parser of one answer.
        custom_tools: The tools that take a text; the arguments of their calls are this text.
    """

    model: ServedModel
    sequences: tuple[TextSequence, ...]
    new_parser: Callable[[], AnswerParser]
    custom_tools: frozenset[str] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.sequences[0].request.tokens)


@dataclass(frozen=True)
class AnswerDelta:
    """New parts of an answer.

    Args:
        choice: The number of the answer.
        parts: The parts.
        logs: The log-probabilities of its tokens.
        tokens: The number of tokens generated for it so far.
        finish_reason: ``"stop"``, ``"length"``, ``"tool_calls"`` or ``"cancelled"`` for the last one.
        stop: The stop text that ended it.
        prompt_logs: The log-probabilities of the prompt's tokens from the second.
        token_ids: The new tokens, where the sequence is ``with_tokens``.
    """

    choice: int
    parts: tuple[AnswerPart, ...]
    logs: tuple[TokenLog, ...]
    tokens: int
    finish_reason: str | None = None
    stop: str | None = None
    prompt_logs: tuple[TokenLog, ...] = ()
    token_ids: tuple[int, ...] = ()


async def stream_answers(
    job: ChatJob, timeout: float | None, metrics: ServerMetrics
) -> AsyncGenerator[list[AnswerDelta], None]:
    """Yields the parts of all answers as they are generated.

    Args:
        job: The conversation.
        timeout: The longest time in seconds; None: no limit.
        metrics: Receives the times and the counts.

    Returns:
        The new parts.
    """
    parsers = [job.new_parser() for _ in job.sequences]
    # none without custom tools: each chunk of a stream would pass through them
    inputs = [TextInputs(job.custom_tools) for _ in job.sequences if job.custom_tools]
    # of answers that a stop text may end, the arguments of the last call
    arguments: dict[int, list[str]] = {}
    called: set[int] = set()
    stream = generate_choices(job.model, job.sequences, timeout, metrics)
    async with aclosing(stream):
        async for pieces in stream:
            deltas: list[AnswerDelta] = []
            for number, piece in pieces:
                parts = parsers[number].push(piece.text)
                reason = piece.finish_reason
                if reason is not None:
                    # nothing completes a mark that is held back
                    cut = reason != "stop" or piece.stop is not None
                    parts = [*parts, *parsers[number].finish(cut)]
                if job.sequences[number].stops:
                    _note_arguments(arguments, number, parts)
                if inputs:
                    parts = inputs[number].texts(parts)
                    if reason is not None:
                        parts = [*parts, *inputs[number].finish()]
                for part in parts:
                    if isinstance(part, ToolCallPart):
                        called.add(number)
                if reason == "stop" and number in called:
                    # a stop text within a call leaves nothing that a client can run
                    whole = piece.stop is None or _is_json("".join(arguments.get(number, ())))
                    reason = "tool_calls" if whole else "stop"
                tokens = piece.token_ids if job.sequences[number].with_tokens else ()
                if parts or tokens or piece.logs or piece.prompt_logs or reason is not None:
                    delta = AnswerDelta(
                        number,
                        tuple(parts),
                        piece.logs,
                        piece.tokens,
                        reason,
                        piece.stop,
                        piece.prompt_logs,
                        tokens,
                    )
                    deltas.append(delta)
            if deltas:
                yield deltas


def _note_arguments(
    arguments: dict[int, list[str]], choice: int, parts: Sequence[AnswerPart]
) -> None:
    """Keeps the arguments of the last call of an answer."""
    for part in parts:
        if isinstance(part, ToolCallPart):
            arguments[choice] = []
        elif isinstance(part, ArgumentsPart):
            # joined at the end: to add to a text would copy it for each token
            arguments[choice].append(part.text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
