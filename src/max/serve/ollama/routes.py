"""The routes of Ollama's API. Streams are lines of JSON."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from max._version import __version__
from max.interfaces import RequestID, TextGenerationRequest
from max.pipelines.core.exceptions import ModelFilesError, UserError
from max.pipelines.store.created import Recipe, recipe_of
from max.pipelines.store.local import StoredModel
from max.pipelines.structured.grammar import of_any_object
from max.serve.chat.prompt import Conversation, prepare
from max.serve.chat.reasoning import thinking_options
from max.serve.chat.run import Answer, note_misfits
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.errors import ApiError, of_user_error, short_text
from max.serve.http.bodies.body import read_body
from max.serve.http.state import ServerState, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.models.model import ServedModel
from max.serve.ollama.schemas import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    OllamaOptions,
)
from max.serve.openai.embeddings import inputs_of, json_rows, shorten
from max.serve.openai.peer_fields import refuse
from max.serve.openai.structure import AnswerGrammar, note_relaxed, schema_grammar
from max.serve.openai.wire import chat_logprobs, encode_json, new_id
from max.serve.requests.encoding import encode_texts, token_counts
from max.serve.requests.generation import ChatJob, PlainParser, TextSequence, stream_answers
from max.serve.requests.infill import infill_of, prompt_tokens
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import in_grammar_thread

router = APIRouter(prefix="/api", tags=["Ollama"])
_REASONS = {"tool_calls": "stop", "cancelled": "stop"}


def json_line(data: dict[str, Any]) -> bytes:
    """A line of a stream.

    Args:
        data: Its data, encoded as JSON.
    """
    return encode_json(data) + b"\n"


def _error_line(error: ApiError) -> bytes:
    return json_line({"error": error.message})


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 100 * 365.25 * 24 * 3600
_DURATION = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")


def keep_alive_seconds(value: float | str | None) -> float | None:
    """The seconds of Ollama's ``keep_alive``: a number, or a text such as ``5m``; negative: no limit.

    Args:
        value: The field; None: it is not set.

    Raises:
        ApiError: It is not a duration.
    """
    if value is None:
        return None
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        value = float(match[1]) * _UNITS[match[2] or "s"]
    if isinstance(value, str) or math.isnan(value):
        raise ApiError(
            f"keep_alive is {short_text(value)}; give seconds, or a text such as '30s', '5m' or '1h'",
            param="keep_alive",
        )
    return min(value, _LONGEST_S)  # the time of its end must fit a date


@router.get("/version")
async def version() -> Response:
    """The version of this package."""
    return json_response({"version": __version__})


def details(model: ServedModel) -> dict[str, Any]:
    """The field ``details`` of a model that is loaded.

    Args:
        model: The model.
    """
    config = model.config.model_config
    encoding = config.quantization_encoding
    return {
        "parent_model": model.recipe.parent,
        "format": "gguf" if str(config.model_path).endswith(".gguf") else "safetensors",
        "family": config.huggingface_config.model_type,
        "families": [config.huggingface_config.model_type],
        "parameter_size": "",
        "quantization_level": "" if encoding is None else encoding.value,
    }


def time_text(seconds: float) -> str:
    """A time as texts of Ollama have it.

    Args:
        seconds: Seconds since 1970.
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _entry(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": time_text(model.created),
        "size": model.size,
        "digest": "",
        "details": details(model),
    }


def _stored_entry(stored_model: StoredModel) -> dict[str, Any]:
    """The entry of a model that is not loaded."""
    family, recipe = str(stored_model.config().get("model_type", "")), _recipe(stored_model)
    return {
        "name": stored_model.name,
        "model": stored_model.name,
        "modified_at": time_text(stored_model.modified_at),
        "size": stored_model.size,
        "digest": "",
        "details": {
            "parent_model": recipe.parent,
            "format": stored_model.format,
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _recipe(model: StoredModel) -> Recipe:
    """The recipe of a stored model; empty where it has none, or a damaged one."""
    with contextlib.suppress(ModelFilesError):
        return recipe_of(model.path) or Recipe()
    return Recipe()


@router.get("/tags")
async def tags(request: Request) -> Response:
    """Lists the models.

    Args:
        request: The connection.
    """
    listed: list[dict[str, Any]] = []
    for entry in await state_of(request).pool.entries():
        if entry.model is not None:
            listed.append(_entry(entry.model))
        elif entry.stored_model is not None:
            listed.append(_stored_entry(entry.stored_model))
    return json_response({"models": listed})


@router.get("/ps")
async def ps(request: Request) -> Response:
    """Lists the models that are loaded.

    Args:
        request: The connection.
    """
    pool = state_of(request).pool
    loaded: list[dict[str, Any]] = []
    for entry in await pool.entries():
        if entry.model is None:
            continue
        seconds = pool.expires_in(entry)
        # Ollama's clients read a date in any case
        expires = "9999-12-31T00:00:00Z"
        if seconds is not None:
            expires = time_text(time.time() + seconds)
        loaded.append({**_entry(entry.model), "size_vram": 0, "expires_at": expires})
    return json_response({"models": loaded})


@router.post("/chat")
async def chat(request: Request) -> Response:
    """Answers a conversation.

    Args:
        request: The connection.
    """
    body = await read_body(request, ChatBody)
    state, model = await _model_of(request, body)
    head = {"model": body.model}
    refuse(body, {})
    if not body.messages:
        return _load_response(head, body.keep_alive, _chat_part)
    options = body.options or OllamaOptions()
    refuse(options, {}, "options.")
    options.note_unread()
    tools = tuple(_tool(each, i) for i, each in enumerate(body.tools or ()))
    conversation = Conversation(
        request_id=new_id("ollama"),
        messages=[_message(dict(message), number) for number, message in enumerate(body.messages)],
        sampling=model.sampling_params(options.sampling_input()),
        tools=tools,
        tool_choice=ToolChoice(ChoiceKind.AUTO if tools else ChoiceKind.NONE),
        grammar=await _compile_format(body.format),
        stops=options.stops,
        template_options=_template_options(body.think, model),
        log_probabilities=_log_count(body),
    )
    job = await prepare(model, conversation)
    return await _respond(request, state, job, head, body, _chat_part)


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Answers a prompt.

    Args:
        request: The connection.
    """
    body = await read_body(request, GenerateBody)
    state, model = await _model_of(request, body)
    infill = infill_of(model.infill, model.name, "suffix") if body.suffix else None
    if body.images:
        raise ApiError("images are not supported: the model takes text", param="images")
    refuse(body, {"context": "answers have none; send the conversation to /api/chat"})
    head = {"model": body.model}
    text = body.prompt or ""
    if not text and infill is None:
        return _load_response(head, body.keep_alive, _generate_part)
    options = body.options or OllamaOptions()
    refuse(options, {}, "options.")
    params = model.sampling_params(options.sampling_input())
    options.note_unread()
    grammar = await _compile_format(body.format)
    # such a prompt has no turns, so its answer has no calls and no reasoning
    if body.raw or infill is not None or not model.template:
        if body.system or body.think:
            raise ApiError(
                "system and think need the chat template, which is not applied to this prompt",
                param="system" if body.system else "think",
            )
        generation = await model.engine_request(
            TextGenerationRequest(
                request_id=RequestID(new_id("ollama")),
                model_name=model.name,
                prompt=await prompt_tokens(infill, text, body.suffix or "") if infill else text,
                logprobs=_log_count(body),
                stop=list(options.stops or model.recipe.stops),
                sampling_params=params,
            ),
            param="prompt",
        )
        generation = generation.with_grammar(grammar)
        if infill is not None:
            generation = generation.ending_with(infill.end_tokens)
        job = ChatJob(
            model, (TextSequence(generation, options.stops or model.recipe.stops),), PlainParser
        )
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        job = await prepare(
            model,
            Conversation(
                request_id=new_id("ollama"),
                messages=[*system, {"role": "user", "content": text}],
                sampling=params,
                grammar=grammar,
                stops=options.stops,
                template_options=_template_options(body.think, model),
                log_probabilities=_log_count(body),
            ),
        )
    return await _respond(request, state, job, head, body, _generate_part)


@router.post("/embed")
async def embed(request: Request) -> Response:
    """The vectors of texts; long texts are cut off unless ``truncate`` is false.

    Args:
        request: The connection.
    """
    body = await read_body(request, EmbedBody)
    state, model = await _model_of(request, body)
    texts = inputs_of(body.input)
    begin = time.perf_counter()
    counts = await token_counts(model, texts, truncate=body.truncate is not False)
    vectors = await unless_disconnected(request, encode_texts(model, state, texts))
    return json_response(
        {
            "model": body.model,
            "embeddings": await json_rows(shorten(vectors, body.dimensions)),
            "total_duration": int((time.perf_counter() - begin) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(counts),
        }
    )


@router.post("/embeddings")
async def embeddings(request: Request) -> Response:
    """The vector of one text; the older form of ``/embed``.

    Args:
        request: The connection.
    """
    body = await read_body(request, EmbeddingsBody)
    state, model = await _model_of(request, body)
    texts = inputs_of(body.prompt)
    await token_counts(model, texts, truncate=True)
    vectors = await unless_disconnected(request, encode_texts(model, state, texts))
    return json_response({"embedding": vectors[0].tolist()})


async def _model_of(
    request: Request, body: ChatBody | GenerateBody | EmbedBody | EmbeddingsBody
) -> tuple[ServerState, ServedModel]:
    """The server's state, and the model of a request, which is loaded."""
    state = state_of(request, body)
    return state, await state.model(body.model, keep_alive_seconds(body.keep_alive))


def _load_response(
    head: dict[str, Any],
    keep_alive: float | str | None,
    part: Callable[[Answer], dict[str, Any]],
) -> Response:
    """The answer to a request without text, by which clients load a model, or unload it with ``keep_alive`` 0."""
    reason = "unload" if keep_alive_seconds(keep_alive) == 0 else "load"
    done = {"done": True, "done_reason": reason}
    return json_response({**head, "created_at": _now(), **part(Answer()), **done})


def _log_count(body: ChatBody | GenerateBody) -> int:
    """The number of likeliest tokens whose log-probabilities the engine computes; 0: none."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return max(body.top_logprobs or 0, 1) if body.logprobs else 0


def _chat_part(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["thinking"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": call.parsed_arguments()}}
            for call in answer.tool_calls
        ]
    return {"message": message}


def _generate_part(answer: Answer) -> dict[str, Any]:
    part: dict[str, Any] = {"response": answer.content}
    return {**part, "thinking": answer.reasoning} if answer.reasoning else part


async def _respond(
    request: Request,
    state: ServerState,
    job: ChatJob,
    head: dict[str, Any],
    body: ChatBody | GenerateBody,
    part: Callable[[Answer], dict[str, Any]],
) -> Response:
    stream = body.stream is not False
    top = (body.top_logprobs or 0) if body.logprobs else None

    def with_logs(answer: Answer) -> dict[str, Any]:
        fields = part(answer)
        if top is None or not answer.logs:
            return fields
        logs = chat_logprobs(answer.logs, top, job.model.vocabulary)
        return {**fields, "logprobs": logs["content"]}

    lines = _lines(job, head, state, with_logs, whole=not stream)
    if stream:
        return await event_stream(request, lines, _error_line, "application/x-ndjson")
    async with aclosing(lines):
        line = await unless_disconnected(request, anext(lines))
    return Response(line, media_type="application/json")


async def _lines(
    job: ChatJob,
    head: dict[str, Any],
    state: ServerState,
    part: Callable[[Answer], dict[str, Any]],
    whole: bool,
) -> AsyncGenerator[bytes, None]:
    """The lines of an answer: the pieces, then the times; or one line with everything."""
    begin = first = time.perf_counter()
    # the whole answer, and what no line has sent yet
    collected, calls, has_begun = Answer(), Answer(), False
    stream = stream_answers(job, state.settings.request_timeout_s, state.metrics)
    async with aclosing(stream):
        async for deltas in stream:
            for delta in deltas:
                if not has_begun:
                    first, has_begun = time.perf_counter(), True
                collected.add(delta)
                calls.add(delta)
            if whole:
                continue
            # a client of Ollama takes a call as a whole, never in parts
            piece = calls
            # calls are sent when they are complete: at the end of the answer
            done = deltas[-1].finish_reason is not None
            if not done:
                piece = Answer(calls.content, calls.reasoning, logs=calls.logs)
            calls = Answer(tool_calls=[] if done else calls.tool_calls)
            if piece.content or piece.reasoning or piece.tool_calls or piece.logs:
                yield json_line({**head, "created_at": _now(), **part(piece), "done": False})
    end = time.perf_counter()
    last = Answer()
    if whole:
        last = collected
        note_misfits([collected])
    yield json_line(
        {
            **head,
            "created_at": _now(),
            **part(last),
            "done": True,
            "done_reason": _REASONS.get(collected.finish_reason, collected.finish_reason),
            "total_duration": int((end - begin) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": job.prompt_tokens,
            "prompt_cached_count": current_request().cached_tokens,
            "prompt_eval_duration": int((first - begin) * 1e9),
            "eval_count": collected.tokens,
            "eval_duration": int((end - first) * 1e9),
        }
    )


def _grammar(field: str | dict[str, Any] | None) -> AnswerGrammar:
    if not field:
        return AnswerGrammar()
    try:
        if isinstance(field, str):
            return AnswerGrammar(of_any_object())
        return schema_grammar(field)
    except UserError as error:
        raise of_user_error(error, "format") from error


async def _compile_format(field: str | dict[str, Any] | None) -> str | None:
    """The grammar of a format; what it does not hold is noted for a header."""
    if not field:
        return None
    made = await in_grammar_thread(_grammar, field)
    note_relaxed(made)
    return made.grammar


def _template_options(think: bool | str | None, model: ServedModel) -> dict[str, Any]:
    """The variables of the chat template for ``think``: whether, or how much (``low``, ``medium``, ``high``)."""
    if think and not model.marks_reasoning:
        raise ApiError(f"{model.name} does not support thinking", param="think")
    if not isinstance(think, str):
        return thinking_options(think)
    return thinking_options(bool(think), think or None)


def _tool(field: dict[str, Any], index: int) -> Tool:
    function = field.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"tools.{index}.function has no name", param=f"tools.{index}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ApiError(f"tools.{index}.function.parameters is no object", param=f"tools.{index}")
    return Tool(function["name"], str(function.get("description") or ""), parameters)


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    if message.pop("images", None):
        raise ApiError("images are not supported: the model takes text", param=f"messages.{index}")
    if thought := message.pop("thinking", None):
        message["reasoning_content"] = thought
    # chat templates know the name of a result's tool by the field of OpenAI's messages
    if (name := message.pop("tool_name", None)) is not None:
        message["name"] = name
    return message
