"""``/v1/decisions``: typed questions about an input, answered by the probabilities of their options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictStr
from starlette.responses import Response

from max.interfaces import RequestID, SamplingParamsInput, TextGenerationRequest
from max.pipelines.core.text import utf8_size
from max.pipelines.generation.process.commands import GenerationRequest
from max.serve.chat.conversation_text import prompt_text
from max.serve.chat.reasoning import thinking_options
from max.serve.errors import CONTEXT_LENGTH_EXCEEDED, ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, answering_name, json_response, state_of
from max.serve.http.streaming import unless_disconnected
from max.serve.limits import MAX_MESSAGES, MAX_SEQUENCE_TOKENS
from max.serve.models.model import ServedModel
from max.serve.openai.decision_questions import Form, LabelTokens, form_of
from max.serve.openai.fields import FIRST_ERROR, CacheSalt, Name, StrictBody
from max.serve.openai.responses.input import messages_of
from max.serve.openai.wire import encode_json, new_id
from max.serve.requests.generation import TextSequence, generate_choices
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import in_body_thread

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
MOST_QUESTIONS = 400
MOST_CHOICES = 255
_MOST_TEXT = 32 << 20
"""Bytes of the prompts of all questions, each of which has the input."""

Parts = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=256), FIRST_ERROR]


class ChoiceField(StrictBody):
    """An option of a choice."""

    value: StrictStr | StrictBool
    description: str | None = None


class LevelField(StrictBody):
    """A level of a score."""

    label: str
    description: str | None = None


class PredicateQuestion(StrictBody):
    """Whether a statement is true."""

    type: Literal["predicate"]
    instructions: str | Parts
    name: str | None = None


class ChoiceQuestion(StrictBody):
    """Which option fits."""

    type: Literal["choice"]
    instructions: str | Parts
    choices: Annotated[list[ChoiceField], Field(min_length=2, max_length=MOST_CHOICES), FIRST_ERROR]
    name: str | None = None


class ScoreQuestion(StrictBody):
    """Which of ordered levels fits."""

    type: Literal["score"]
    instructions: str | Parts
    levels: Annotated[list[LevelField], Field(min_length=2, max_length=MOST_CHOICES), FIRST_ERROR]
    name: str | None = None


Question = Annotated[
    PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")
]


class DecisionsBody(StrictBody):
    """The body of ``/v1/decisions``."""

    model: Name | None = None
    input: (
        str
        | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
    )
    questions: Annotated[
        list[Question], Field(min_length=1, max_length=MOST_QUESTIONS), FIRST_ERROR
    ]
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    # accepted without effect
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True)
class _Read:
    """A question, ready to run.

    Args:
        form: Its options.
        request: The prompt that ends where the label of an option would come.
        labels: The tokens of the options' labels.
    """

    form: Form
    request: GenerationRequest
    labels: tuple[int, ...]


@router.post("/v1/decisions")
async def decisions(body: DecisionsBody, request: Request) -> Response:
    """Answers typed questions about an input.

    Args:
        body: The questions.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    reads, shared = await _reads(body, model)
    # the first question reads the input; the others find it in the prefix cache, and read their own text together
    answers = await unless_disconnected(
        request, _answers(model, state, [reads[:1], reads[1:]] if shared else [reads])
    )
    context = current_request()
    cached = context.cached_by_request.get(reads[0].request.request_id, (0, 0))[1]
    # the common start counts once
    tokens = sum(len(read.request.tokens) for read in reads) - shared * (len(reads) - 1)
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": min(cached, tokens), "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }
    name = answering_name(model)
    return json_response({"model": name, "answers": answers, "usage": usage})


async def _reads(body: DecisionsBody, model: ServedModel) -> tuple[list[_Read], int]:
    """The prompts of all questions, and the number of first tokens that all have."""
    forms = [
        form_of(question, f"questions.{number}") for number, question in enumerate(body.questions)
    ]
    # only the log-probabilities of the first token are used
    params = model.sampling_params(
        SamplingParamsInput(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    )
    found = await in_body_thread(_prompts, body, model, forms)
    # checked and built once; the others are copies with tokens of their own
    first = await model.engine_request(
        TextGenerationRequest(
            request_id=RequestID(new_id("dec")),
            model_name=model.name,
            prompt=found[0][0],
            logprobs=1,
            sampling_params=params,
        ),
        param="input",
    )
    reads: list[_Read] = []
    shared = _shared_length([tokens for tokens, _ in found])
    for number, (form, (tokens, labels)) in enumerate(zip(forms, found, strict=True)):
        # the answer takes one token; 0: the model has no limit
        if len(tokens) >= model.max_length > 0:
            raise ApiError(
                f"questions.{number} has {len(tokens)} tokens with the input, and the context holds "
                f"{model.max_length}",
                param=f"questions.{number}",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        request = replace(
            first,
            request_id=f"{first.request_id}-{number}",
            tokens=tuple(tokens),
            max_length=len(tokens) + 1,
            logged_tokens=tuple(labels),
            # the text of a question serves no other request, and would take a page from what does
            reusable_tokens=shared or None,
        )
        reads.append(_Read(form, request, tuple(labels)))
    if sum(len(read.request.tokens) for read in reads) > MAX_SEQUENCE_TOKENS:
        raise ApiError(
            f"the questions have more than {MAX_SEQUENCE_TOKENS} tokens with the input of each",
            param="questions",
        )
    return reads, shared


def _prompts(
    body: DecisionsBody, model: ServedModel, forms: Sequence[Form]
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt, and those of the labels of its options."""
    messages = messages_of(_plain_input(body.input))
    # a label is the first token of an answer, so no reasoning may come before it
    options = {**thinking_options(False), **(body.chat_template_kwargs or {})}
    size, texts = 0, list[str]()
    for form in forms:
        last = messages[-1]
        if last["role"] == "user":  # templates want turns that alternate
            asked = [*messages[:-1], {**last, "content": f"{last['content']}\n\n{form.text}"}]
        else:
            asked = [*messages, {"role": "user", "content": form.text}]
        text = prompt_text(model, asked, (), options)
        begin, end = model.reasoning_marks if model.reasons else ("", "")
        if begin and text.rstrip().endswith(begin):
            text += f"\n{end}\n\n"  # the template begins reasoning in any case
        size += utf8_size(text)
        if size > _MOST_TEXT:
            raise ApiError(
                f"the questions have more than {_MOST_TEXT >> 20} MiB with the input of each; give fewer at once",
                param="questions",
            )
        texts.append(text)
    labels = LabelTokens(model)
    found = [
        labels.at(text, form, f"questions.{number}")
        for number, (text, form) in enumerate(zip(texts, forms, strict=True))
    ]
    return list(zip(model.tokens_of_texts(texts, special=False), found, strict=True))


def _plain_input(given_input: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The input with texts in place of JSON parts."""
    if isinstance(given_input, str):
        return given_input
    items: list[dict[str, Any]] = []
    for item in given_input:
        content = item.get("content")
        if isinstance(content, list):
            item = {**item, "content": [_plain_part(part) for part in content]}
        items.append(item)
    return items


def _plain_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_json":
        return {"type": "input_text", "text": encode_json(part.get("data")).decode()}
    return part


def _shared_length(prompts: Sequence[list[int]]) -> int:
    """The number of first tokens that all prompts have."""
    if len(prompts) < 2:
        return 0
    # in sorted order these two have the shortest common start
    first, last = min(prompts), max(prompts)
    # the last token of each prompt is its own: its logits are the answer
    limit = min(len(first), len(last)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)


async def _answers(
    model: ServedModel, state: ServerState, groups: Sequence[Sequence[_Read]]
) -> list[dict[str, Any]]:
    """The answers in the order of the questions; a group runs after the one before it."""
    answers: list[dict[str, Any]] = []
    timeout = state.settings.request_timeout_s
    for reads in filter(None, groups):
        logs: dict[int, dict[int, float]] = {}
        sequences = [TextSequence(read.request) for read in reads]
        async with aclosing(generate_choices(model, sequences, timeout, state.metrics)) as stream:
            async for pieces in stream:
                for number, piece in pieces:
                    if piece.logs:
                        logs[number] = dict(piece.logs[0].top)
        for number, read in enumerate(reads):
            found = [logs[number][token] for token in read.labels]
            # a softmax over the labels, without the likelihood of all other tokens; exp(0) keeps its sum above 0
            most = max(found)
            weights = [math.exp(value - most) for value in found]
            total = sum(weights)
            answers.append(read.form.answer([weight / total for weight in weights]))
    return answers
