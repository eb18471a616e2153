"""``/v1/responses``: answers an input, or an input that goes on with an earlier response."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from max.interfaces import SamplingParamsInput
from max.serve.chat.parts import AnswerPart, ArgumentsPart, ContentPart, ReasoningPart, ToolCallPart
from max.serve.chat.prompt import Conversation, prepare, prompt_tokens
from max.serve.chat.run import Answer, AnswerDelta, ChatJob, collect_answers, stream_events
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.limits import MAX_MESSAGES, MAX_TOOLS
from max.serve.openai.fields import FIRST_ERROR, CacheSalt, Name, StrictBody, refuse
from max.serve.openai.response_input import items_of, messages_of
from max.serve.openai.response_tools import ResponseTool, tools_of
from max.serve.openai.stored_responses import history_of, keeper
from max.serve.openai.structure import GrammarFields, ResponseFormat, SchemaField, compiled_grammar
from max.serve.openai.tools import AllowedChoice, allowed_choice
from max.serve.openai.wire import encode_json, new_id
from max.serve.requests.generation import RunOptions
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import by_size

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

_REFUSED = {
    "conversation": "give previous_response_id, or send the earlier items in input",
    "prompt": "prompts are not stored; send the text in input",
    "background": "answers are not made without a connection; stream them",
}


class NamedTool(StrictBody):
    """The choice of one tool."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(StrictBody):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    model_config = ConfigDict(**{**StrictBody.model_config, "populate_by_name": True})


class TextField(StrictBody):
    """The format of the text, and its verbosity."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(StrictBody):
    """The body of ``/v1/responses``."""

    model: Name | None = None
    input: (
        str
        | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
    )
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextField | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    # accepted without effect
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    include: Annotated[list[str], Field(max_length=64), FIRST_ERROR] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: CacheSalt | None = None
    safety_identifier: str | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: dict[str, Any] | None = None
    background: Literal[True] | None = None


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesBody, request: Request) -> Response:
    """Counts the tokens of an input.

    Args:
        body: The request whose prompt is counted.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    refuse(body, _REFUSED)
    tools = () if body.tool_choice == "none" else _tools(body)
    messages = await by_size(_messages, body, history_of(body.previous_response_id, state))
    count = await prompt_tokens(model, messages, tools)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answers an input.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    history = history_of(body.previous_response_id, state)
    job = await _job(body, state, history)
    keep: Callable[[dict[str, Any]], None] | None = None
    if body.store is not False:
        keep = keeper(state, history, body.input)
    writer = await by_size(_ResponseWriter, body, job, keep)
    if body.stream:
        return await event_stream(request, _stream(writer, job, state), _error_event)
    timeout = state.settings.request_timeout_s
    answers = await unless_disconnected(request, collect_answers(job, state.metrics, timeout))
    return json_response(writer.whole(answers[0]))


async def _job(
    body: ResponsesBody, state: ServerState, history: Sequence[dict[str, Any]]
) -> ChatJob:
    model = await state.model(body.model)
    refuse(body, _REFUSED)
    sampling = SamplingParamsInput(
        temperature=body.temperature, top_p=body.top_p, max_new_tokens=body.max_output_tokens
    )
    tools = _tools(body)
    several = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedTool):
        choice = ToolChoice(ChoiceKind.NAMED, body.tool_choice.name, several)
    elif isinstance(body.tool_choice, AllowedChoice):
        choice = allowed_choice(body.tool_choice, several)
    else:
        kind = body.tool_choice or ("auto" if tools else "none")
        choice = ToolChoice(ChoiceKind(kind), "", several)
    return await prepare(
        model,
        Conversation(
            request_id=new_id("resp"),
            messages=await by_size(_messages, body, history),
            sampling=model.sampling_params(sampling),
            tools=tools,
            tool_choice=choice,
            grammar=await compiled_grammar(_grammar_fields(body)),
        ),
    )


def _messages(body: ResponsesBody, history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = messages_of([*history, *items_of(body.input)] if history else body.input)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return messages


def _tools(body: ResponsesBody) -> tuple[Tool, ...]:
    return tools_of(body.tools, body.tool_choice in (None, "auto", "none"))[0]


def _grammar_fields(body: ResponsesBody) -> GrammarFields:
    text = body.text.format if body.text is not None else None
    if text is None:
        return GrammarFields()
    schema = SchemaField(name=text.name, schema_=text.schema_, strict=text.strict)
    inner = schema if text.type == "json_schema" else None
    return GrammarFields(response_format=ResponseFormat(type=text.type, json_schema=inner))


def _error_event(error: ApiError) -> bytes:
    data = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + encode_json({**data, "sequence_number": 0}) + b"\n\n"


class _ResponseWriter:
    """Makes the object and the events of one response."""

    def __init__(
        self,
        body: ResponsesBody,
        job: ChatJob,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._body, self._job, self._keep = body, job, keep
        self._created = int(time.time())
        self._id = new_id("resp")
        self._sequence = -1
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._kind = ""
        tools = [{"strict": None, **(_plain(tool) or {})} for tool in body.tools or ()]
        namespaced = [tool for tool in body.tools or () if tool.type == "namespace"]
        self._namespaces = tools_of(namespaced, is_auto=True)[1]
        self._tools = msgspec.Raw(encode_json(tools))
        """Each object of the response has them."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The object of a whole answer."""
        for part in _parts_of(answer):
            self.write(part)
        self.end_item(answer.finish_reason)
        return self.response(answer.finish_reason, answer.tokens)

    def response(self, finish_reason: str | None, tokens: int = 0) -> dict[str, Any]:
        """The response as it is now.

        Args:
            finish_reason: Why it ended; None while it goes on.
            tokens: The number of generated tokens.
        """
        body = self._body
        cut = finish_reason in ("length", "cancelled")
        status = "in_progress" if finish_reason is None else "incomplete" if cut else "completed"
        choice = body.tool_choice
        usage = {
            "input_tokens": self._job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": current_request().cached_tokens},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._job.prompt_tokens + tokens,
        }
        response: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._job.model.name,
            "output": [] if finish_reason is None else self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": self._keep is not None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": _plain(body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": _plain(choice) if isinstance(choice, StrictBody) else choice or "auto",
            "tools": self._tools,
            "truncation": "disabled",
            "usage": None if finish_reason is None else usage,
            "metadata": body.metadata or {},
        }
        if finish_reason is not None and self._keep is not None:
            self._keep(response)
        return response

    def event(self, kind: str, **data: object) -> bytes:
        """An event with the next number."""
        self._sequence += 1
        full = {"type": kind, "sequence_number": self._sequence, **data}
        return f"event: {kind}\ndata: ".encode() + encode_json(full) + b"\n\n"

    def write(self, part: AnswerPart) -> bytes:
        """Adds a part to the items, and makes its events."""
        match part:
            case ContentPart(text):
                begin = self._begin("message")
                item = self._item()
                item["content"][0]["text"] += text
                place = self._place(content_index=0)
                return begin + self.event(
                    "response.output_text.delta", **place, delta=text, logprobs=[]
                )
            case ReasoningPart(text):
                begin = self._begin("reasoning")
                self._item()["content"][0]["text"] += text
                place = self._place(content_index=0)
                return begin + self.event("response.reasoning_text.delta", **place, delta=text)
            case ToolCallPart(index, call_id, name):
                return self._begin(f"call {index}", call_id, name)
            case ArgumentsPart(_, text):
                custom = self._item()["type"] == "custom_tool_call"
                self._item()["input" if custom else "arguments"] += text
                kind = "custom_tool_call_input" if custom else "function_call_arguments"
                return self.event(f"response.{kind}.delta", **self._place(), delta=text)

    def end_item(self, finish_reason: str | None = None) -> bytes:
        """The events that end the open item."""
        item = self._open
        if item is None:
            return b""
        cut = finish_reason in ("length", "cancelled")
        item["status"] = "incomplete" if cut else "completed"
        place = self._place()
        if item["type"] == "function_call":
            data = self.event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        elif item["type"] == "custom_tool_call":
            data = self.event("response.custom_tool_call_input.done", **place, input=item["input"])
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            extra = {"logprobs": []} if item["type"] == "message" else {}
            data = self.event(f"response.{part['type']}.done", **place, text=part["text"], **extra)
            data += self.event("response.content_part.done", **place, part=part)
        data += self.event(
            "response.output_item.done", output_index=len(self._items) - 1, item=item
        )
        self._open, self._kind = None, ""
        return data

    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _named(self, name: str) -> dict[str, str]:
        """The name of a called tool, with its namespace if it has one."""
        if name not in self._namespaces:
            return {"name": name}
        namespace, own = self._namespaces[name]
        return {"name": own, "namespace": namespace}

    def _place(self, **more: int) -> dict[str, Any]:
        return {"item_id": self._item()["id"], "output_index": len(self._items) - 1, **more}

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> bytes:
        if self._kind == kind:
            return b""
        ended = self.end_item()
        self._kind = kind
        part: dict[str, Any] | None = None
        item: dict[str, Any]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": new_id("msg"), "role": "assistant"}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": new_id("rs"), "summary": []}
        elif name in self._job.custom_tools:
            item = {"type": "custom_tool_call", "id": new_id("ctc"), "call_id": call_id}
            item |= {**self._named(name), "input": ""}
        else:
            item = {"type": "function_call", "id": new_id("fc"), "call_id": call_id}
            item |= {**self._named(name), "arguments": ""}
        item["status"] = "in_progress"
        shown = {**item, "content": []} if part is not None else {**item}
        if part is not None:
            item["content"] = [part]
        self._open = item
        self._items.append(item)
        data = ended + self.event(
            "response.output_item.added", output_index=len(self._items) - 1, item=shown
        )
        if part is not None:
            data += self.event(
                "response.content_part.added", **self._place(content_index=0), part={**part}
            )
        return data


def _parts_of(answer: Answer) -> list[AnswerPart]:
    parts: list[AnswerPart] = []
    if answer.reasoning:
        parts.append(ReasoningPart(answer.reasoning))
    if answer.content or not answer.tool_calls:
        parts.append(ContentPart(answer.content))
    for index, call in enumerate(answer.tool_calls):
        parts += [
            ToolCallPart(index, call.call_id, call.name),
            ArgumentsPart(index, call.arguments),
        ]
    return parts


def _plain(field: StrictBody | None) -> dict[str, Any] | None:
    return None if field is None else field.model_dump(by_alias=True, exclude_none=True)


def _stream(
    writer: _ResponseWriter, job: ChatJob, state: ServerState
) -> AsyncGenerator[bytes, None]:
    begin = writer.event("response.created", response=writer.response(None))
    begin += writer.event("response.in_progress", response=writer.response(None))

    def end(last: AnswerDelta) -> bytes:
        data = writer.end_item(last.finish_reason)
        response = writer.response(last.finish_reason, last.tokens)
        return data + writer.event(f"response.{response['status']}", response=response)

    options = RunOptions(timeout=state.settings.request_timeout_s)
    return stream_events(job, options, state.metrics, lambda: begin, writer.write, end)
