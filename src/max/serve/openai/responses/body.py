"""The body of ``/v1/responses``, and the conversation that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from max.interfaces import SamplingParamsInput
from max.serve.chat.prompt import Conversation, prepare
from max.serve.chat.reasoning import Effort, thinking_options
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.http.state import ServerState
from max.serve.limits import MAX_MESSAGES, MAX_TOOLS
from max.serve.openai.fields import FIRST_ERROR, CacheSalt, Name, StrictBody
from max.serve.openai.peer_fields import refuse
from max.serve.openai.responses.input import items_of, messages_of
from max.serve.openai.responses.tools import ResponseTool, tools_of
from max.serve.openai.structure import GrammarFields, ResponseFormat, SchemaField, compiled_grammar
from max.serve.openai.tools import AllowedChoice, allowed_choice
from max.serve.openai.wire import new_id
from max.serve.requests.generation import ChatJob
from max.serve.requests.threads import by_size

REFUSED = {
    "conversation": "give previous_response_id, or send the earlier items in input",
    "prompt": "prompts are not stored; send the text in input",
}


_LOGS = "message.output_text.logprobs"
Included: TypeAlias = Literal[
    "message.output_text.logprobs",
    # the content of reasoning is never encrypted, and the others are of tools that this server does not run
    "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
]  # fmt: skip
"""What answers may have besides."""


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
    """The format of the text."""

    format: TextFormat | None = None


class Reasoning(StrictBody):
    """How much an answer is thought about, and what is shown of it."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


Input = (
    str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
)


class CompactBody(StrictBody):
    """The body of ``/v1/responses/compact``."""

    model: Name | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    # accepted without effect
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    cache_salt: CacheSalt | None = None


class ResponsesBody(StrictBody):
    """The body of ``/v1/responses``."""

    model: Name | None = None
    input: Input
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # beyond OpenAI's, as in chat completions
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: int | None = None
    text: TextField | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    # accepted without effect
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    include: Annotated[list[Included], Field(max_length=64), FIRST_ERROR] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning: Reasoning | None = None
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
    background: bool | None = None

    @property
    def wants_logs(self) -> bool:
        """Whether texts have log-probabilities."""
        return _LOGS in (self.include or ()) or bool(self.top_logprobs)


async def job_of(
    body: ResponsesBody, state: ServerState, history: Sequence[dict[str, Any]]
) -> ChatJob:
    """The conversation of a request, ready to run.

    Args:
        body: The request.
        state: The server.
        history: The items before its input.

    Raises:
        ApiError: It does not fit the model.
    """
    model = await state.model(body.model)
    refuse(body, REFUSED)
    sampling = SamplingParamsInput(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=None if body.seed is None else body.seed % 2**64,
        max_new_tokens=body.max_output_tokens,
    )
    tools = own_tools(body)
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
            messages=await by_size(messages_with, body, history),
            sampling=model.sampling_params(sampling),
            tools=tools,
            tool_choice=choice,
            grammar=await compiled_grammar(_grammar_fields(body)),
            # the engine computes log-probabilities only for one likeliest token or more
            log_probabilities=max(body.top_logprobs or 0, 1) if body.wants_logs else 0,
            template_options=template_options(body),
            field="input",
        ),
    )


def messages_with(
    body: ResponsesBody | CompactBody, history: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages of a request.

    Args:
        body: The request.
        history: The items before its input.

    Raises:
        ApiError: An item is of an unknown kind, or lacks a field.
    """
    given: str | list[dict[str, Any]] = body.input or []
    messages = messages_of([*history, *items_of(given)] if history else given)
    if body.instructions:
        # instructions are those of this request: the history has none of earlier ones
        messages.insert(0, {"role": "system", "content": body.instructions})
    return messages


def own_tools(body: ResponsesBody) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        body: The request.

    Raises:
        ApiError: One is of another kind, or has no name.
    """
    return tools_of(body.tools, body.tool_choice in (None, "auto", "none"))[0]


def template_options(body: ResponsesBody) -> dict[str, Any]:
    """The variables of the chat template that the body sets, as in chat completions.

    Args:
        body: The request.
    """
    effort = None if body.reasoning is None else body.reasoning.effort
    return thinking_options(None, effort)


def _grammar_fields(body: ResponsesBody) -> GrammarFields:
    text = body.text.format if body.text is not None else None
    if text is None:
        return GrammarFields()
    schema = SchemaField(name=text.name, schema_=text.schema_, strict=text.strict)
    inner = schema if text.type == "json_schema" else None
    return GrammarFields(response_format=ResponseFormat(type=text.type, json_schema=inner))
