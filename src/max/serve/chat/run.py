"""Runs the answers to a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from max.pipelines.core.text import finite_json_value, json_value
from max.pipelines.structured.schemas.check import misfit
from max.pipelines.tokenization.text_stream import TokenLog
from max.serve.metrics import ServerMetrics
from max.serve.requests.generation import AnswerDelta, ChatJob, stream_answers
from max.serve.requests.parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    GrowingText,
    ReasoningPart,
    ToolCallPart,
)
from max.serve.requests.request_context import current_request


class ToolCall:
    """A whole call of a tool.

    Args:
        call_id: Identifies the call.
        name: The tool.
        arguments: JSON text of an object.
    """

    def __init__(self, call_id: str, name: str, arguments: str = "") -> None:
        self.call_id, self.name = call_id, name
        self._arguments = GrowingText(arguments)

    @property
    def arguments(self) -> str:
        """JSON text of an object."""
        return self._arguments.text

    def add(self, text: str) -> None:
        """Adds to the arguments.

        Args:
            text: JSON text.
        """
        self._arguments.add(text)

    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments as an object; empty if the length limit cut them off."""
        try:
            value = finite_json_value(self.arguments)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class TextLogs:
    """Finds the log-probabilities of the text of an answer among those of all its tokens.

    A token belongs to the next part that is certain: the parsers hold text back that may begin a mark.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLog] = []

    def next_logs(self, delta: AnswerDelta) -> list[TokenLog]:
        """The log-probabilities that come with the text of new parts.

        Args:
            delta: The parts.
        """
        # parsers hold text back, so tokens may come before the part that has their text
        self._waiting += delta.logs
        if not delta.parts:
            return []
        found, self._waiting = self._waiting, []
        return found if isinstance(delta.parts[-1], ContentPart) else []


class Answer:
    """A whole answer.

    Args:
        content: The text for the user.
        reasoning: The text before it.
        tool_calls: The calls of tools.
        logs: The log-probabilities of its tokens.

    Attributes:
        tokens: The number of tokens.
        finish_reason: Why it ended.
        stop: The stop text that ended it.
        prompt_logs: The log-probabilities of the prompt's tokens from the second.
        text_logs: The log-probabilities of the tokens of the content.
        token_ids: Its tokens, if they are wanted.
    """

    def __init__(
        self,
        content: str = "",
        reasoning: str = "",
        tool_calls: Sequence[ToolCall] = (),
        logs: Sequence[TokenLog] = (),
    ) -> None:
        self._content, self._reasoning = GrowingText(content), GrowingText(reasoning)
        self.tool_calls, self.logs = list(tool_calls), list(logs)
        self.tokens, self.finish_reason = 0, "stop"
        self.stop: str | None = None
        self.prompt_logs: tuple[TokenLog, ...] = ()
        self.text_logs: list[TokenLog] = []
        self.token_ids: list[int] = []
        self._finder = TextLogs()

    @property
    def content(self) -> str:
        """The text for the user."""
        return self._content.text

    @property
    def reasoning(self) -> str:
        """The text before it."""
        return self._reasoning.text

    def add(self, delta: AnswerDelta) -> None:
        """Adds new parts.

        Args:
            delta: The parts.
        """
        for part in delta.parts:
            match part:
                case ContentPart(text):
                    self._content.add(text)
                case ReasoningPart(text):
                    self._reasoning.add(text)
                case ToolCallPart(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case ArgumentsPart(index, text):
                    self.tool_calls[index].add(text)
        self.logs += delta.logs
        self.text_logs += self._finder.next_logs(delta)
        self.prompt_logs = delta.prompt_logs or self.prompt_logs
        self.token_ids += delta.token_ids
        self.tokens, self.stop = delta.tokens, delta.stop
        self.finish_reason = delta.finish_reason or self.finish_reason


async def stream_events(
    job: ChatJob,
    timeout: float | None,
    metrics: ServerMetrics,
    begin: Callable[[], bytes],
    write: Callable[[AnswerPart], bytes],
    end: Callable[[AnswerDelta], bytes],
    note: Callable[[AnswerDelta], None] | None = None,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream of one answer.

    Args:
        job: The conversation.
        timeout: The longest time in seconds; None: no limit.
        metrics: Receives the times and the counts.
        begin: Makes the events before the answer; called with the first part of it, with which they are sent.
        write: Makes the events of a part.
        end: Makes the events of the end, of the last delta.
        note: Called with each delta before its parts are written.
    """
    async with aclosing(stream_answers(job, timeout, metrics)) as stream:
        begun = False
        async for deltas in stream:
            # not before the first part, as an earlier error has a status instead of events
            data, begun = b"" if begun else begin(), True
            for delta in deltas:
                if note is not None:
                    note(delta)
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
