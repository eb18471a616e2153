"""``/v1/completions``: continues texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.interfaces import RequestID, TextGenerationRequest
from max.pipelines.core.text import utf8_size
from max.pipelines.tokenization.text_stream import TextPiece, TokenLog
from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import JsonResponse, ServerState, answering_name, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.limits import LONG_LOGS, MAX_PROMPTS
from max.serve.models.model import ServedModel
from max.serve.openai.fields import (
    FIRST_ERROR,
    SamplingFields,
    TokenList,
    sampling_of,
)
from max.serve.openai.peer_fields import refuse
from max.serve.openai.structure import GrammarFields, compiled_grammar
from max.serve.openai.wire import (
    HOLE,
    Chunks,
    completion_logprobs,
    encode_in_steps,
    encode_json,
    error_event,
    new_id,
    prompt_logprobs,
    usage,
)
from max.serve.requests.generation import (
    NumberedPieces,
    TextSequence,
    choices_of,
    generate_choices,
)
from max.serve.requests.infill import infill_of, prompt_tokens
from max.serve.requests.parts import GrowingText
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import by_size, in_body_thread

router = APIRouter(route_class=BodyRoute)


class CompletionRequest(SamplingFields, GrammarFields):
    """The body of ``/v1/completions``."""

    prompt: (
        str
        | TokenList
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FIRST_ERROR]
        | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_PROMPTS), FIRST_ERROR]
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    # vLLM's: whether a text begins with the model's special tokens
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            # one prompt of tokens, not several prompts
            return [cast("list[int]", self.prompt)]
        return cast("list[str | list[int]]", self.prompt)


@dataclass
class _Choice:
    """One choice of an answer.

    Args:
        prompt: The prompt's tokens.
        prefix: The text before the generated text: the prompt, with echo.
    """

    prompt: tuple[int, ...]
    prefix: str
    text: GrowingText = field(default_factory=GrowingText)
    logs: list[TokenLog] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logs: tuple[TokenLog, ...] = ()
    tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class _Plan:
    """The sequences and choices of a request.

    Args:
        body: The request.
        model: The model.
        sequences: The sequences, one a choice.
        choices: The choices.
        drop_generated: Whether the generated token is dropped, because the client asked for the prompt only.
    """

    body: CompletionRequest
    model: ServedModel
    sequences: list[TextSequence]
    choices: list[_Choice]
    drop_generated: bool
    head: dict[str, Any]

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        # choices of one prompt share its tuple
        # by identity: equal prompts are read and counted one by one
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}
        generated = 0 if self.drop_generated else sum(c.tokens for c in self.choices)
        return usage(sum(prompts.values()), generated)

    def logprobs(
        self, choice: _Choice, logs: Sequence[TokenLog], first: bool
    ) -> dict[str, Any] | None:
        """The log-probabilities of new text; with echo, first those of the prompt."""
        top = self.body.logprobs
        if top is None:
            return None
        vocabulary = self.body.named_tokens(self.model.vocabulary)
        shown = [] if self.drop_generated else list(logs)
        offset = len(choice.prefix)
        if not (first and self.body.echo):
            return completion_logprobs(shown, top, vocabulary, offset)
        # nothing predicts the first token
        entries = [TokenLog(choice.prompt[0], float("nan"), (), -offset)]
        # `completion_logprobs` adds the length of the prefix to all offsets
        at = len(vocabulary.text(choice.prompt[0])) - offset
        for token, log in zip(choice.prompt[1:], choice.prompt_logs, strict=False):
            entries.append(TokenLog(token, log.log_probability, log.top, at))
            at += len(vocabulary.text(token))
        return completion_logprobs([*entries, *shown], top, vocabulary, offset)

    def tokens(
        self, choice: _Choice, token_ids: Sequence[int], first: bool = True
    ) -> dict[str, Any]:
        """The fields of tokens, if they are wanted; those of the prompt come with the first ones."""
        if not self.body.return_token_ids:
            return {}
        fields = {"token_ids": () if self.drop_generated else token_ids}
        return {**fields, "prompt_token_ids": choice.prompt} if first else fields

    def prompt_logprobs(self, choice: _Choice) -> dict[str, Any]:
        """The field of the prompt's log-probabilities, if it is wanted."""
        top = self.body.prompt_logprobs
        if top is None:
            return {}
        logs = prompt_logprobs(choice.prompt, choice.prompt_logs, top, self.model.vocabulary)
        return {"prompt_logprobs": logs}


@router.post("/v1/completions", tags=["OpenAI"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues one text or several.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    plan = await _plan(body, state)
    if body.stream:
        return await event_stream(request, _stream(plan, state), error_event)
    answer = await unless_disconnected(request, _answer(plan, state))
    return JsonResponse(answer)


async def _plan(body: CompletionRequest, state: ServerState) -> _Plan:
    current_request().priority = body.priority or 0
    model = await state.model(body.model)
    refuse(body, {})
    if body.add_special_tokens is False and not all(
        isinstance(each, list) for each in body.prompts
    ):
        raise ApiError(
            "add_special_tokens must be true for texts; give the tokens that /tokenize returns",
            param="add_special_tokens",
        )
    count = body.n or 1
    # answers are not ranked, so none can be left out
    if body.best_of not in (None, count):
        raise ApiError(
            f"best_of is {body.best_of}, and n is {count}; give equal ones", param="best_of"
        )
    _ = body.wants_usage  # checked before any work starts
    echo_alone = body.max_tokens == 0
    if echo_alone and not body.echo:
        raise ApiError("max_tokens is 0; it must be at least 1 without echo", param="max_tokens")
    wants_prompt_logs = body.wants_prompt_logs
    infill = None if body.suffix is None else infill_of(model.infill, model.name, "suffix")
    if infill is not None and body.echo:
        raise ApiError("echo and suffix are set; give one of them", param="echo")
    # for an echo alone a token is generated and dropped; 16 is OpenAI's default
    limit = 1 if echo_alone else 16 if body.max_tokens is None else body.max_tokens
    params = await by_size(sampling_of, body, model, limit, count * len(body.prompts))
    grammar = await compiled_grammar(body)
    # those of a Modelfile are replaced, not joined
    stops = body.stops or model.recipe.stops
    request_id = new_id("cmpl")
    sequences: list[TextSequence] = []
    choices: list[_Choice] = []
    for number, prompt in enumerate(body.prompts):
        if body.truncate_prompt_tokens is not None and infill is None:
            prompt = await _last_tokens(model, prompt, body.truncate_prompt_tokens)
        if number:
            await asyncio.sleep(0)  # the event loop goes on between prompts
        request = await model.engine_request(
            TextGenerationRequest(
                request_id=RequestID(f"{request_id}-{number}"),
                model_name=model.name,
                prompt=prompt
                if infill is None
                else await prompt_tokens(infill, prompt, body.suffix or ""),
                # the engine computes log-probabilities only for one likeliest token or more
                logprobs=0
                if body.logprobs is None and not wants_prompt_logs
                else max(body.logprobs or 0, body.prompt_logprobs or 0, 1),
                echo=wants_prompt_logs or (bool(body.echo) and body.logprobs is not None),
                stop=list(stops),
                sampling_params=params,
            ),
            param="prompt",
        )
        request = request.with_grammar(grammar)
        if infill is not None:
            request = request.ending_with(infill.end_tokens)
        sequence = TextSequence(
            request,
            stops,
            bool(body.include_stop_str_in_output),
            with_tokens=bool(body.return_token_ids),
        )
        sequences += choices_of(sequence, count)
        prefix = ""
        if body.echo:
            prefix = prompt if isinstance(prompt, str) else await by_size(model.decoder(), prompt)
        choices += [_Choice(request.tokens, prefix) for _ in range(count)]
    head = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": answering_name(model),
    }
    return _Plan(body, model, sequences, choices, echo_alone, head)


async def _last_tokens(model: ServedModel, prompt: str | list[int], count: int) -> list[int]:
    """The last tokens of a prompt."""
    if isinstance(prompt, str):
        model.check_text(utf8_size(prompt), "prompt")
        prompt = await by_size(model.all_tokens, prompt, special=True)
    return prompt[-count:]


def _pieces(plan: _Plan, state: ServerState) -> AsyncGenerator[NumberedPieces, None]:
    timeout = state.settings.request_timeout_s
    return generate_choices(plan.model, plan.sequences, timeout, state.metrics)


async def _answer(plan: _Plan, state: ServerState) -> bytes:
    stream = _pieces(plan, state)
    async with aclosing(stream):
        async for pieces in stream:
            for number, piece in pieces:
                choice = plan.choices[number]
                choice.text.add(piece.text)
                choice.logs += piece.logs
                choice.token_ids += piece.token_ids
                choice.prompt_logs = piece.prompt_logs or choice.prompt_logs
                choice.tokens, choice.stop = piece.tokens, piece.stop
                choice.finish_reason = piece.finish_reason or choice.finish_reason
    if any(len(choice.prompt_logs) > LONG_LOGS for choice in plan.choices):
        return await in_body_thread(_encode_body, plan)
    return _encode_body(plan)


def _encode_body(plan: _Plan) -> bytes:
    """The body of the answer."""
    answer = {
        **plan.head,
        "choices": [
            {
                "index": index,
                "text": choice.prefix + ("" if plan.drop_generated else choice.text.text),
                "logprobs": plan.logprobs(choice, choice.logs, first=True),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop,
                **plan.prompt_logprobs(choice),
                **plan.tokens(choice, choice.token_ids),
            }
            for index, choice in enumerate(plan.choices)
        ],
        "usage": plan.usage,
    }
    if any(len(choice.prompt_logs) > LONG_LOGS for choice in plan.choices):
        return encode_in_steps(answer)
    return encode_json(answer)


async def _stream(plan: _Plan, state: ServerState) -> AsyncGenerator[bytes, None]:
    writer = _ChoiceEvents(plan)
    stream = _pieces(plan, state)
    async with aclosing(stream):
        async for pieces in stream:
            if any(len(piece.prompt_logs) > LONG_LOGS for _, piece in pieces):
                yield await in_body_thread(writer.events, pieces)
            else:
                yield writer.events(pieces)
    yield writer.end()


class _ChoiceEvents:
    """The events of the choices of a request."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._begun: set[int] = set()
        # a chunk is encoded once for each choice, and split where its text stands
        self._chunks = Chunks(plan.head, plan.body.wants_usage)
        self._plain = [
            self._chunks.around_hole(self._choice(number, HOLE, None, None, None))
            for number in range(len(plan.choices))
        ]

    def end(self) -> bytes:
        """The last events."""
        return self._chunks.end(self._plan.usage)

    def events(self, pieces: Sequence[tuple[int, TextPiece]]) -> bytes:
        """The events of pieces, with the numbers of their choices."""
        return b"".join([self.event(number, piece) for number, piece in pieces])

    def event(self, index: int, piece: TextPiece) -> bytes:
        """The event of a piece of a choice."""
        plan = self._plan
        choice = plan.choices[index]
        choice.tokens = piece.tokens
        choice.prompt_logs = piece.prompt_logs or choice.prompt_logs
        first = index not in self._begun
        self._begun.add(index)
        # an echo without an answer generates a token that is not shown
        text = "" if plan.drop_generated else piece.text
        text = choice.prefix + text if first else text
        plain = plan.body.logprobs is None and not (
            plan.body.wants_each_usage or plan.body.return_token_ids
        )
        # nearly all events differ in their text only
        if plain and piece.finish_reason is None:
            return encode_json(text).join(self._plain[index])
        logs = plan.logprobs(choice, piece.logs, first)
        fields = self._choice(index, text, logs, piece.finish_reason, piece.stop)
        fields |= plan.tokens(choice, piece.token_ids, first)
        totals = plan.usage if plan.body.wants_each_usage else None
        return self._chunks.event(fields, totals, len(piece.prompt_logs) > LONG_LOGS)

    @staticmethod
    def _choice(
        index: int,
        text: str,
        logs: dict[str, Any] | None,
        finish_reason: str | None,
        stop: str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logs,
            "finish_reason": finish_reason,
            "stop_reason": stop,
        }
