"""``/v1/chat/completions``: answers conversations."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.serve.chat.prompt import Conversation, prepare
from max.serve.chat.run import Answer, collect_answers
from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, answering_name, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.limits import LONG_LOGS, MAX_PREDICTED_PARTS
from max.serve.models.model import ServedModel
from max.serve.openai.fields import (
    FIRST_ERROR,
    Objects,
    SamplingFields,
    StrictBody,
    sampling_of,
)
from max.serve.openai.messages import ChatMessages, plain_messages
from max.serve.openai.peer_fields import refuse
from max.serve.openai.reasoning_fields import ReasoningFields
from max.serve.openai.stored_chats import PREFIX, check_metadata, stored_chat
from max.serve.openai.structure import GrammarFields, compiled_grammar
from max.serve.openai.tools import AllowedChoice, NamedChoice, ToolFields, choice_of, tools_of
from max.serve.openai.wire import (
    HOLE,
    Chunks,
    chat_logprobs,
    encode_in_steps,
    encode_json,
    error_event,
    new_id,
    prompt_logprobs,
    usage,
)
from max.serve.requests.generation import AnswerDelta, ChatJob, stream_answers
from max.serve.requests.parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
)
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import by_size, in_body_thread

router = APIRouter(route_class=BodyRoute)

_REFUSED = {
    "audio": "answers are text",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "web_search_options": "this server fetches nothing",
}


class PredictedPart(StrictBody):
    """A part of the text."""

    type: Literal["text"]
    text: str


PredictedParts = Annotated[
    list[PredictedPart], Field(min_length=1, max_length=MAX_PREDICTED_PARTS), FIRST_ERROR
]


class PredictionField(StrictBody):
    """The text that the answer may have: drafts come from it, and answers do not depend on it."""

    type: Literal["content"]
    content: str | PredictedParts

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingFields, GrammarFields, ReasoningFields):
    """The body of ``/v1/chat/completions``."""

    messages: ChatMessages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: ToolFields | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    # vLLM's: the answer goes on with the last message
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's and SGLang's: texts that the chat template shows to the model
    documents: Objects | None = None
    # vLLM's: the chat template has the special tokens
    add_special_tokens: Literal[False] | None = None
    # MAX's: the temperature of tokens of reasoning
    thinking_temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    # whether the completion is stored, and by what clients find it
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    # a text that the answer may have: drafts come from it
    prediction: PredictionField | None = None
    # accepted without effect: there is one tier of service
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    modalities: Annotated[list[str], Field(max_length=16), FIRST_ERROR] | None = None
    audio: dict[str, Any] | None = None
    functions: Objects | None = None
    function_call: Any = None
    web_search_options: dict[str, Any] | None = None


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a conversation.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    keep = _keeper(body, state) if body.store else None
    job = await _job(body, state)
    head = {
        "id": new_id(PREFIX),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": answering_name(job.model),
        "system_fingerprint": None,
    }
    if body.stream:
        return await event_stream(request, _stream(body, job, head, state, keep), error_event)
    timeout = state.settings.request_timeout_s
    answers = await unless_disconnected(request, collect_answers(job, state.metrics, timeout))
    whole = _whole(head, answers, body, job)
    if keep is not None:
        keep(whole)
    if body.prompt_logprobs is not None:
        # all answers have one prompt
        tokens, vocabulary = job.sequences[0].request.tokens, job.model.vocabulary
        logs = answers[0].prompt_logs
        whole["prompt_logprobs"] = await in_body_thread(
            prompt_logprobs, tokens, logs, body.prompt_logprobs, vocabulary
        )
        return (
            json_response(whole)
            if len(logs) <= LONG_LOGS
            else Response(
                await in_body_thread(encode_in_steps, whole), media_type="application/json"
            )
        )
    return json_response(whole)


def _whole(
    head: dict[str, Any], answers: Sequence[Answer], body: ChatCompletionRequest, job: ChatJob
) -> dict[str, Any]:
    """A completion with all of its answers."""
    choices = [_choice(i, answer, body, job) for i, answer in enumerate(answers)]
    generated = sum(answer.tokens for answer in answers)
    totals = usage(job.prompt_tokens, generated, body.prediction is not None)
    # the head of a stream that is stored names its chunks
    whole = {**head, "object": "chat.completion", "choices": choices, "usage": totals}
    if body.return_token_ids:
        whole["prompt_token_ids"] = job.sequences[0].request.tokens
    return whole


_SHOWN = {
    "frequency_penalty", "presence_penalty", "response_format", "seed", "temperature", "tool_choice", "tools", "top_p",
}  # fmt: skip
"""Fields of requests that stored completions have."""


def _keeper(body: ChatCompletionRequest, state: ServerState) -> Callable[[dict[str, Any]], None]:
    """A function that stores a completion.

    Raises:
        ApiError: It cannot be stored.
    """
    # each server process has a store of its own, and a connection may reach any of them
    if state.settings.routers > 1:
        raise ApiError(
            "store is true: a server with several --routers stores no chat completions; /v1/responses stores its own",
            param="store",
            code="unsupported_parameter",
        )
    marks, client = check_metadata(body.metadata), current_request().client
    messages = [dict(message) for message in body.messages]
    shown = body.model_dump(include=_SHOWN, exclude_none=True, by_alias=True)

    def keep(completion: dict[str, Any]) -> None:
        whole = {**completion, **shown, "metadata": marks, "input_user": body.user}
        state.chats.put(whole["id"], stored_chat(client, whole, messages))

    return keep


async def _job(body: ChatCompletionRequest, state: ServerState) -> ChatJob:
    current_request().priority = body.priority or 0
    model = await state.model(body.model)
    refuse(body, _REFUSED)
    _ = body.wants_usage  # checked before any work starts
    for number, message in enumerate(body.messages):
        role = message["role"]
        if message.get("content") is None and role in ("user", "system", "developer", "tool"):
            raise ApiError(
                f"messages.{number}.content is missing: a message of the role {short_text(role)} has a text",
                param=f"messages.{number}.content",
                code="missing_required_parameter",
            )
    if body.modalities not in (None, ["text"]):
        raise ApiError("modalities must be ['text']: answers are text", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    # `max_tokens` is the older name of the same field
    limit = body.max_completion_tokens or body.max_tokens
    params = await by_size(sampling_of, body, model, limit, body.n or 1)
    options = _template_options(body, model)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt are true; give one of them",
            param="continue_final_message",
        )
    return await prepare(
        model,
        Conversation(
            request_id=new_id("chat"),
            messages=plain_messages(body.messages),
            sampling=params,
            tools=tools_of(body.tools),
            tool_choice=choice_of(body.tool_choice, body.parallel_tool_calls, body.tools),
            grammar=await compiled_grammar(body),
            stops=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            count=body.n or 1,
            # the engine computes log-probabilities only for one likeliest token or more
            log_probabilities=max(body.top_logprobs or 0, body.prompt_logprobs or 0, 1)
            if body.logprobs or body.wants_prompt_logs
            else 0,
            prompt_logs=body.wants_prompt_logs,
            template_options=options,
            reasoning_tokens=body.reasoning_limit,
            thinking_temperature=body.thinking_temperature,
            continues=bool(body.continue_final_message),
            kept_tokens=body.truncate_prompt_tokens,
            with_tokens=bool(body.return_token_ids),
            prediction="" if body.prediction is None else body.prediction.text,
        ),
    )


_OF_TEMPLATES = frozenset(
    (
        "add_generation_prompt",
        "documents",
        "enable_thinking",
        "model",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "user",
    )
)
"""Fields of requests that are also variables of chat templates."""


def _template_options(body: ChatCompletionRequest, model: ServedModel) -> dict[str, Any]:
    """The variables of the chat template that the body sets.

    Raises:
        ApiError: One is a field of requests, which has no effect there.
    """
    options = dict(body.chat_template_kwargs or {})
    # of any names: a misplaced field must not be ignored
    for name in options:
        misplaced = name in type(body).model_fields and name not in _OF_TEMPLATES
        if (misplaced and name not in model.template) or name in _RENDERING:
            raise ApiError(
                f"chat_template_kwargs has {short_text(name)}, which is no variable of the chat template"
                + ("; give it as a field of the request" if misplaced else ""),
                param="chat_template_kwargs",
            )
    if body.documents:
        if "documents" not in model.template:
            raise ApiError("documents: the chat template shows none", param="documents")
        options.setdefault("documents", body.documents)
    return {**body.reasoning_options, **options}


_RENDERING = frozenset(
    ("padding", "truncation", "return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask",
     "continue_final_message", "add_special_tokens")
)  # fmt: skip
"""Arguments of transformers' method that are no variables of a template."""


def _choice(
    index: int, answer: Answer, body: ChatCompletionRequest, job: ChatJob
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        # null beside calls, as in OpenAI's API
        "content": answer.content if answer.content or not answer.tool_calls else None,
        "refusal": None,
    }
    if answer.reasoning and body.shows_reasoning:
        message |= _reasoning(answer.reasoning, job)
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.call_id, **_call(call.name, call.arguments, call.name in job.custom_tools)}
            for call in answer.tool_calls
        ]
    logs = (
        chat_logprobs(answer.logs, body.top_logprobs or 0, body.named_tokens(job.model.vocabulary))
        if body.logprobs
        else None
    )
    choice = {
        "index": index,
        "message": message,
        "logprobs": logs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop,
    }
    return {**choice, "token_ids": answer.token_ids} if body.return_token_ids else choice


def _reasoning(text: str, job: ChatJob) -> dict[str, Any]:
    """The fields with reasoning: DeepSeek's and that of MAX, as far as the server's options leave both."""
    wanted = job.model.answers.emit_reasoning_content
    # None: both fields, as clients of either server read one of them
    names = {True: ("reasoning_content",), False: ("reasoning",)}
    return dict.fromkeys(names.get(wanted, ("reasoning_content", "reasoning")), text)  # type: ignore[arg-type]


def _call(name: str, arguments: str, custom: bool) -> dict[str, Any]:
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _delta(part: AnswerPart, job: ChatJob, custom: bool = False) -> dict[str, Any]:
    """The delta of a part; of arguments it matters whether they are those of a custom tool."""
    match part:
        case ContentPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return _reasoning(text, job)
        case ToolCallPart(index, call_id, name):
            # the first delta of a call has its name, those of arguments only its index
            call = _call(name, "", name in job.custom_tools)
            return {"tool_calls": [{"index": index, "id": call_id, **call}]}
        case ArgumentsPart(index, text):
            call = {"custom": {"input": text}} if custom else {"function": {"arguments": text}}
            return {"tool_calls": [{"index": index, **call}]}


async def _stream(
    body: ChatCompletionRequest,
    job: ChatJob,
    head: dict[str, Any],
    state: ServerState,
    keep: Callable[[dict[str, Any]], None] | None,
) -> AsyncGenerator[bytes, None]:
    # only a completion that is stored is held as a whole
    answers = [Answer() for _ in job.sequences] if keep is not None else []
    writer = _AnswerEvents(body, job, head)
    stream = stream_answers(job, state.settings.request_timeout_s, state.metrics)
    async with aclosing(stream):
        async for deltas in stream:
            for delta in deltas if keep is not None else ():
                answers[delta.choice].add(delta)
            yield b"".join(map(writer.events, deltas))
    # before the last event, after which clients may ask for it
    if keep is not None:
        keep(_whole(head, answers, body, job))
    yield writer.end()


class _AnswerEvents:
    """The events of all answers of a request."""

    def __init__(self, body: ChatCompletionRequest, job: ChatJob, head: dict[str, Any]) -> None:
        self._body, self._job = body, job
        self._counts_each = body.wants_each_usage
        self._hides_reasoning = not body.shows_reasoning
        self._names = body.named_tokens(job.model.vocabulary)
        self._chunks = Chunks(head, body.wants_usage)
        self._around: dict[tuple[int, type[AnswerPart]], list[bytes]] = {}
        self._custom: set[tuple[int, int]] = set()
        """Answers, and the numbers of their calls of custom tools."""
        self._tokens: dict[int, int] = {}
        """The generated tokens of each answer that has begun."""

    def events(self, delta: AnswerDelta) -> bytes:
        """The events of new parts; only the first has the role, only the last the reason of the end."""
        choice, body = delta.choice, self._body
        begin = b""
        # hidden reasoning still counts in the usage
        given = delta.parts
        if self._hides_reasoning:
            given = [part for part in given if not isinstance(part, ReasoningPart)]
        # clients take the role from the first chunk of a choice only
        if choice not in self._tokens:
            self._tokens[choice] = 0
            begin = self._begin(choice)
        self._tokens[choice] = delta.tokens
        more: dict[str, Any] = {}
        if body.logprobs and delta.logs:
            more["logprobs"] = chat_logprobs(delta.logs, body.top_logprobs or 0, self._names)
        if delta.token_ids:
            more["token_ids"] = delta.token_ids
        if more:
            # tokens without text have log-probabilities too
            deltas = [self._delta(choice, part) for part in given] or [{}]
            parts = [self._event(choice, each) for each in deltas[:-1]]
            parts.append(self._event(choice, deltas[-1], **more))
        else:
            parts = [self._part(choice, part) for part in given]
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop}
            # the last chunk of a choice has an empty delta
            parts.append(self._event(choice, {}, **end))
        return begin + b"".join(parts)

    def end(self) -> bytes:
        """The last events."""
        return self._chunks.end(self._totals())

    def _begin(self, choice: int) -> bytes:
        """The first event of an answer."""
        delta = {"role": "assistant", "content": ""}
        if not self._body.return_token_ids:
            return self._event(choice, delta)
        prompt = {"prompt_token_ids": self._job.sequences[choice].request.tokens}
        return self._event(choice, delta, prompt)

    def _part(self, choice: int, part: AnswerPart) -> bytes:
        """The event of a part; of texts, nearly all parts, only the text is encoded."""
        is_text = isinstance(part, (ContentPart, ReasoningPart))
        # calls differ in more than a text, and counts differ in each chunk
        if not is_text or self._counts_each or self._body.return_token_ids:
            return self._event(choice, self._delta(choice, part))
        kind = type(part)
        around = self._around.get((choice, kind))
        if around is None:
            around = self._chunks.around_hole(_choice_of(choice, _delta(kind(HOLE), self._job)))
            self._around[choice, kind] = around
        return encode_json(part.text).join(around)

    def _delta(self, choice: int, part: AnswerPart) -> dict[str, Any]:
        # parts of arguments have no name, so the kind of their tool is noted
        if isinstance(part, ToolCallPart) and part.name in self._job.custom_tools:
            self._custom.add((choice, part.index))
        custom = isinstance(part, ArgumentsPart) and (choice, part.index) in self._custom
        return _delta(part, self._job, custom)

    def _event(
        self,
        choice: int,
        delta: dict[str, Any],
        beside: Mapping[str, Any] = MappingProxyType({}),
        **more: Any,
    ) -> bytes:
        totals = self._totals() if self._counts_each else None
        if self._body.return_token_ids:
            more = {"token_ids": (), **more}
        return self._chunks.event(_choice_of(choice, delta, **more), totals, more=beside)

    def _totals(self) -> dict[str, Any]:
        generated = sum(self._tokens.values())
        return usage(self._job.prompt_tokens, generated, self._body.prediction is not None)


def _choice_of(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The fields of a choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
