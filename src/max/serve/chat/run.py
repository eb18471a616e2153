"""Runs the answers to a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from max.pipelines.core.text import json_value
from max.pipelines.structured.schema_check import misfit
from max.pipelines.tokenization.text_stream import TokenLog
from max.serve.chat.parts import (
    AnswerParser,
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
)
from max.serve.metrics import ServerMetrics
from max.serve.models.model import ServedModel
from max.serve.requests.generation import TextSequence, generate_choices
from max.serve.requests.request_context import current_request


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
    """

    choice: int
    parts: tuple[AnswerPart, ...]
    logs: tuple[TokenLog, ...]
    tokens: int
    finish_reason: str | None = None
    stop: str | None = None
    prompt_logs: tuple[TokenLog, ...] = ()


@dataclass
class ToolCall:
    """A whole call of a tool.

    Args:
        call_id: Identifies the call.
        name: The tool.
        arguments: JSON text of an object.
    """

    call_id: str
    name: str
    arguments: str = ""

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments as an object; empty if the length limit cut them off."""
        try:
            value = json_value(self.arguments)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass
class Answer:
    """A whole answer.

    Args:
        content: The text for the user.
        reasoning: The text before it.
        tool_calls: The calls of tools.
        logs: The log-probabilities of its tokens.
        tokens: The number of tokens.
        finish_reason: Why it ended.
        stop: The stop text that ended it.
        prompt_logs: The log-probabilities of the prompt's tokens from the second.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logs: list[TokenLog] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str = "stop"
    stop: str | None = None
    prompt_logs: tuple[TokenLog, ...] = ()

    def add(self, delta: AnswerDelta) -> None:
        """Adds new parts.

        Args:
            delta: The parts.
        """
        for part in delta.parts:
            match part:
                case ContentPart(text):
                    self.content += text
                case ReasoningPart(text):
                    self.reasoning += text
                case ToolCallPart(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case ArgumentsPart(index, text):
                    self.tool_calls[index].arguments += text
        self.logs += delta.logs
        self.prompt_logs = delta.prompt_logs or self.prompt_logs
        self.tokens, self.stop = delta.tokens, delta.stop
        self.finish_reason = delta.finish_reason or self.finish_reason


class _TextInputs:
    """Makes the arguments of calls of custom tools their texts.

    Args:
        names: The custom tools.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: dict[int, str] = {}

    def texts(self, parts: Sequence[AnswerPart]) -> Sequence[AnswerPart]:
        """Parts in which the arguments of custom tools are texts.

        Args:
            parts: The parts of an answer.
        """
        if not self._names:
            return parts
        made: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, ToolCallPart) and part.name in self._names:
                self._open[part.index] = ""
            if not isinstance(part, ArgumentsPart) or part.index not in self._open:
                made.append(part)
                continue
            self._open[part.index] += part.text
            try:
                value = json_value(self._open[part.index])
            except ValueError:
                # the text is known when its JSON is whole
                continue
            text = value.get("input") if isinstance(value, dict) else None
            made.append(ArgumentsPart(part.index, text if isinstance(text, str) else ""))
        return made


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
    inputs = [_TextInputs(job.custom_tools) for _ in job.sequences]
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
                parts = inputs[number].texts(parts)
                for part in parts:
                    if isinstance(part, ToolCallPart):
                        called.add(number)
                if reason == "stop" and number in called:
                    reason = "tool_calls"
                if parts or piece.logs or piece.prompt_logs or reason is not None:
                    delta = AnswerDelta(
                        number,
                        tuple(parts),
                        piece.logs,
                        piece.tokens,
                        reason,
                        piece.stop,
                        piece.prompt_logs,
                    )
                    deltas.append(delta)
            if deltas:
                yield deltas


async def stream_events(
    job: ChatJob,
    timeout: float | None,
    metrics: ServerMetrics,
    begin: Callable[[], bytes],
    write: Callable[[AnswerPart], bytes],
    end: Callable[[AnswerDelta], bytes],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream of one answer.

    Args:
        job: The conversation.
        timeout: The longest time in seconds; None: no limit.
        metrics: Receives the times and the counts.
        begin: Makes the events before the answer; called with the first part of it, with which they are sent.
        write: Makes the events of a part.
        end: Makes the events of the end, of the last delta.
    """
    async with aclosing(stream_answers(job, timeout, metrics)) as stream:
        begun = False
        async for deltas in stream:
            # not before the first part, as an earlier error has a status instead of events
            data, begun = b"" if begun else begin(), True
            for delta in deltas:
                data += b"".join(map(write, delta.parts))
                if delta.finish_reason is not None:
                    data += end(delta)
            if data:
                yield data


async def collect_answers(
    job: ChatJob, metrics: ServerMetrics, timeout: float | None
) -> Sequence[Answer]:
    """Runs a conversation to the end of all answers.

    Args:
        job: The conversation.
        metrics: Receives the times and the counts.
        timeout: The longest time in seconds; None: no limit.
    """
    answers = [Answer() for _ in job.sequences]
    stream = stream_answers(job, timeout, metrics)
    async with aclosing(stream):
        async for deltas in stream:
            for delta in deltas:
                answers[delta.choice].add(delta)
    note_misfits(answers)
    return answers


def note_misfits(answers: Sequence[Answer]) -> None:
    """Notes for a header what of whole answers does not fit the running request's schemas.

    Args:
        answers: The answers.
    """
    context = current_request()
    if context.schemas:
        for answer in answers:
            context.misfits += _misfits(answer, context.schemas)


def _misfits(answer: Answer, schemas: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What does not fit the schemas of an answer, which its grammar did not hold as a whole."""
    texts = [(call.name, call.arguments) for call in answer.tool_calls]
    texts += [("", answer.content)] if "" in schemas and answer.content else []
    found: list[str] = []
    for name, text in texts:
        schema = schemas.get(name)
        try:
            value = json_value(text)
        except ValueError:
            continue  # cut off
        if schema is not None and (what := misfit(value, schema)) is not None:
            found.append(f"{name}: {what}" if name else what)
    return found
