"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.interfaces import SamplingParamsInput
from max.serve.anthropic.blocks import Message
from max.serve.anthropic.context_edits import check_edits, edit_messages
from max.serve.anthropic.schemas import (
    CountBody,
    MessagesBody,
    choice_of,
    messages_of,
    tools_of,
)
from max.serve.chat.conversation_text import prompt_tokens
from max.serve.chat.prompt import Conversation, prepare
from max.serve.chat.reasoning import thinking_options
from max.serve.chat.run import Answer, collect_answers, stream_events
from max.serve.chat.tools.definitions import ChoiceKind
from max.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, short_text
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, answering_name, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.models.model import ServedModel
from max.serve.openai.peer_fields import refuse
from max.serve.openai.structure import (
    GrammarFields,
    ResponseFormat,
    SchemaField,
    compiled_grammar,
)
from max.serve.openai.wire import encode_json, new_id
from max.serve.requests.generation import AnswerDelta, ChatJob
from max.serve.requests.parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
)
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import by_size

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=BodyRoute)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_Body = TypeVar("_Body", bound=CountBody)
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "cancelled": "refusal"}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error with Anthropic's body."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    # clients that read these words shorten the conversation
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode_json({"type": name, **data}) + b"\n\n"


def _ping() -> bytes:
    return _event("ping")


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + encode_json(error_body(error)) + b"\n\n"


@router.post("")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answers a conversation.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    check_edits(body.context_management)
    body, report = await _edit_body(body, model)
    job = await _job(body, model)
    name = answering_name(job.model)
    head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": name}
    if body.stream:
        # clients count the time since the last event; a comment would be none
        stream = _stream(job, head, state, _shows_thoughts(body), report)
        return await event_stream(request, stream, _error_event, waiting=_ping)
    timeout = state.settings.request_timeout_s
    answers = await unless_disconnected(request, collect_answers(job, state.metrics, timeout))
    (answer,) = answers
    return json_response(
        {
            **head,
            "content": _blocks(answer, _shows_thoughts(body)),
            "stop_reason": _reason(answer.finish_reason, answer.stop),
            "stop_sequence": answer.stop,
            "usage": {**_input_usage(job), "output_tokens": answer.tokens},
            **report,
        }
    )


def _input_usage(job: ChatJob) -> dict[str, int]:
    """The tokens of the prompt: those that were read, and those that were in the prefix cache."""
    # Anthropic's `input_tokens` leave out those that were cached
    cached = current_request().cached_tokens
    return {
        "input_tokens": job.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


@router.post("/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> Response:
    """Counts the tokens of a conversation.

    Args:
        body: The conversation.
        request: The connection.
    """
    model = await state_of(request, body).model(body.model)
    check_edits(body.context_management)
    changed, report = await _edit_body(body, model)
    answer: dict[str, Any] = {"input_tokens": await _prompt_tokens(changed, model)}
    if report:
        original = await _prompt_tokens(body, model)
        answer["context_management"] = {"original_input_tokens": original}
    return json_response(answer)


async def _prompt_tokens(body: CountBody, model: ServedModel) -> int:
    """The tokens of the prompt of a request."""
    # the prompt shows tools only where they may be called, as in `prepare`
    none = choice_of(body).kind is ChoiceKind.NONE
    tools = () if none else tools_of(body)
    plain = await by_size(messages_of, body)
    return await prompt_tokens(model, plain, tools, template_options(body), body.continues)


async def _edit_body(body: _Body, model: ServedModel) -> tuple[_Body, dict[str, Any]]:
    """A request without what its edits take out, and the field of the answer that says what they took."""
    if body.context_management is None:
        return body, {}

    def with_messages(messages: Sequence[Message]) -> _Body:
        return body.model_copy(update={"messages": messages})

    async def count(messages: Sequence[Message]) -> int:
        return await _prompt_tokens(with_messages(messages), model)

    messages, applied = await edit_messages(body.messages, body.context_management, count)
    return with_messages(messages), {"context_management": {"applied_edits": applied}}


def template_options(body: CountBody) -> dict[str, Any]:
    """The variables of the chat template that the body sets.

    Args:
        body: The request.
    """
    thinking = body.thinking
    thinks = None if thinking is None else thinking.type != "disabled"
    return thinking_options(thinks, body.output_config.effort if body.output_config else None)


@router.api_route("/batches", methods=["GET", "POST"], include_in_schema=False)
@router.api_route(
    "/batches/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
)
async def batches(request: Request) -> Response:
    """Refuses batches.

    Args:
        request: The connection.

    Raises:
        ApiError: Status 501: always.
    """
    raise ApiError(
        "batches of messages are not supported: nothing is stored; send the messages one by one, or "
        "answer a file with max run-batch",
        status=501,
    )


async def _job(body: MessagesBody, model: ServedModel) -> ChatJob:
    refuse(body, {})
    sampling = SamplingParamsInput(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_new_tokens=body.max_tokens,
    )
    stops = tuple(body.stop_sequences or ())
    if any(not stop for stop in stops):
        raise ApiError("a stop sequence is empty", param="stop_sequences")
    form = body.output_config.format if body.output_config else None
    # the older field with the same meaning
    form = form or body.output_format
    grammar = None
    if form is not None:
        field = SchemaField(name="output", schema_=form.schema_)
        wanted = ResponseFormat(type="json_schema", json_schema=field)
        grammar = await compiled_grammar(GrammarFields(response_format=wanted))
    return await prepare(
        model,
        Conversation(
            request_id=new_id("msg"),
            messages=await by_size(messages_of, body),
            sampling=model.sampling_params(sampling),
            tools=tools_of(body),
            tool_choice=choice_of(body),
            stops=stops,
            grammar=grammar,
            template_options=template_options(body),
            continues=body.continues,
            reasoning_tokens=_reasoning_tokens(body, model),
        ),
    )


def _reasoning_tokens(body: MessagesBody, model: ServedModel) -> int | None:
    """The maximum number of tokens of reasoning; None: no limit, as for models that do not mark their reasoning."""
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled" or thinking.budget_tokens is None:
        return None
    limit = thinking.budget_tokens
    # reasoning is part of max_tokens, and an answer has to follow it
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < body.max_tokens:
        raise ApiError(
            f"thinking.budget_tokens is {short_text(limit)}; it must be a number of tokens from 1 to less than "
            f"max_tokens, which is {body.max_tokens}",
            param="thinking.budget_tokens",
        )
    return limit if model.marks_reasoning else None


def _reason(finish_reason: str | None, stop: str | None) -> str:
    if stop is not None:
        return "stop_sequence"
    return _REASONS.get(finish_reason or "", "end_turn")


def _shows_thoughts(body: MessagesBody) -> bool:
    return body.thinking is None or body.thinking.display != "omitted"


def _blocks(answer: Answer, shows_thoughts: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        # clients send the signature back, which this server has no use for
        thought = answer.reasoning if shows_thoughts else ""
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        value = call.parsed_arguments()
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": value})
    return blocks


class _BlockWriter:
    """Writes the events of one answer's blocks, each with a start and an end.

    Args:
        shows_thoughts: Whether blocks of reasoning have its text.
    """

    def __init__(self, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._index = -1
        self._kind: str | None = None

    def write(self, part: AnswerPart) -> bytes:
        """The events of a part."""
        match part:
            case ContentPart(text):
                begin = self._begin("text", {"type": "text", "text": ""})
                delta = {"type": "text_delta", "text": text}
            case ReasoningPart(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                begin = self._begin("thinking", block)
                if not self._shows_thoughts:
                    return begin
                delta = {"type": "thinking_delta", "thinking": text}
            case ToolCallPart(index, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._begin(f"tool {index}", block)
            case ArgumentsPart(_, text):
                # a part of the call that is open
                begin = b""
                delta = {"type": "input_json_delta", "partial_json": text}
        return begin + _event("content_block_delta", index=self._index, delta=delta)

    def end(self) -> bytes:
        """The event that ends the open block."""
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", index=self._index)

    def _begin(self, block_type: str, block: dict[str, Any]) -> bytes:
        if self._kind == block_type:
            return b""
        ended = self.end()
        self._kind = block_type
        self._index += 1
        return ended + _event("content_block_start", index=self._index, content_block=block)


def _stream(
    job: ChatJob,
    head: dict[str, Any],
    state: ServerState,
    shows_thoughts: bool,
    report: dict[str, Any],
) -> AsyncGenerator[bytes, None]:
    writer = _BlockWriter(shows_thoughts)

    def begin() -> bytes:
        usage = {**_input_usage(job), "output_tokens": 0}
        message = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
        # clients take the model, the prompt's tokens and the begin of their clock from it
        return _event("message_start", message={**message, "usage": usage}) + _ping()

    def end(last: AnswerDelta) -> bytes:
        reason = _reason(last.finish_reason, last.stop)
        delta = {"stop_reason": reason, "stop_sequence": last.stop}
        counts = {**_input_usage(job), "output_tokens": last.tokens}
        return (
            writer.end()
            + _event("message_delta", delta=delta, usage=counts, **report)
            + _event("message_stop")
        )

    timeout = state.settings.request_timeout_s
    return stream_events(job, timeout, state.metrics, begin, writer.write, end)
