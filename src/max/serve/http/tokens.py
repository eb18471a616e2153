"""``/tokenize``, ``/detokenize``, ``/apply-template``: texts to tokens, and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.pipelines.core.exceptions import PromptTooLongError
from max.pipelines.core.text import utf8_size
from max.serve.chat.conversation_text import conversation_text
from max.serve.errors import ApiError, of_user_error
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import json_response, state_of
from max.serve.limits import MAX_DETOKENIZED, MAX_LISTED
from max.serve.models.model import ServedModel
from max.serve.openai.fields import Name, StrictBody, TokenList
from max.serve.openai.messages import ChatMessages, plain_messages
from max.serve.openai.tools import ToolFields, tools_of
from max.serve.requests.threads import by_size

router = APIRouter(tags=["tokens"], route_class=BodyRoute)


class TemplateBody(StrictBody):
    """The body of ``/apply-template``."""

    model: Name | None = None
    messages: ChatMessages
    tools: ToolFields | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(StrictBody):
    """The body of ``/tokenize``: a text as ``prompt`` or ``content``, or messages."""

    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    messages: ChatMessages | None = None
    tools: ToolFields | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(StrictBody):
    """The body of ``/detokenize``."""

    model: Name | None = None
    tokens: TokenList | Annotated[list[Any], Field(max_length=0)]


async def _template(model: ServedModel, body: TemplateBody | TokenizeBody) -> str:
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        **(body.chat_template_kwargs or {}),
    }
    messages = model.recipe.before(plain_messages(body.messages or []))
    return await conversation_text(model, messages, tools_of(body.tools), options)


@router.post("/apply-template")
@router.post("/v1/apply-template")
async def apply_template(body: TemplateBody, request: Request) -> Response:
    """The text of a conversation by the model's chat template.

    Args:
        body: The conversation.
        request: The connection.
    """
    model = await state_of(request, body).model(body.model)
    return json_response({"prompt": await _template(model, body)})


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The tokens of a text, or of a conversation.

    Args:
        body: The text.
        request: The connection.
    """
    model = await state_of(request, body).model(body.model)
    texts = [each for each in (body.prompt, body.content) if each is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise ApiError("give one of prompt, content and messages", param="prompt")
    try:
        if body.messages is not None:
            # a template writes the special tokens itself
            text, special = await _template(model, body), False
        else:
            text, special = texts[0], True
        if body.add_special_tokens is not None:
            special = body.add_special_tokens
        model.check_text(utf8_size(text), "prompt")
        return await by_size(_tokenize, model, text, special, body.return_token_strs)
    except ValueError as error:
        raise of_user_error(error, "prompt") from error


def _tokenize(model: ServedModel, text: str, special: bool, with_texts: bool) -> Response:
    try:
        tokens = model.all_tokens(text, special, most=MAX_LISTED)
    except PromptTooLongError as error:
        raise ApiError(
            f"the text has {error.size} tokens, and at most {MAX_LISTED} are listed; give a shorter text",
            param="prompt",
        ) from None
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": model.max_length,
    }
    if with_texts:
        answer["token_strs"] = [model.vocabulary.text(token) for token in tokens]
    return json_response(answer)


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of tokens, special ones included.

    Args:
        body: The tokens.
        request: The connection.
    """
    model = await state_of(request, body).model(body.model)
    return await by_size(_detokenize, model, body.tokens)


def _detokenize(model: ServedModel, tokens: list[int]) -> Response:
    if len(tokens) > MAX_DETOKENIZED:
        raise ApiError(
            f"tokens has {len(tokens)} entries; at most {MAX_DETOKENIZED} are decoded at once",
            param="tokens",
        )
    size = model.vocabulary_size
    # the usual answer in one pass of C
    if tokens and max(tokens) >= size:
        number = next(number for number, token in enumerate(tokens) if token >= size)
        raise ApiError(
            f"tokens.{number} is {tokens[number]}; the model's tokens are 0 to {size - 1}",
            param="tokens",
        )
    text = model.tokenizer.decode_now(tokens) if tokens else ""
    return json_response({"prompt": text, "content": text})
