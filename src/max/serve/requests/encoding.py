"""Vectors and scores of texts from the worker of an encoder."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from max.pipelines.core.text import utf8, utf8_size
from max.pipelines.generation.process.encoder_messages import (
    EncodeRequest,
    RankRequest,
    TextsEncoded,
)
from max.serve.errors import ApiError, of_user_error
from max.serve.http.state import ServerState
from max.serve.models.model import ServedModel
from max.serve.requests.threads import by_size, in_body_thread

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


async def token_counts(
    model: ServedModel, texts: Sequence[str | tuple[int, ...]], truncate: bool = False
) -> list[int]:
    """The numbers of tokens of texts.

    Args:
        model: The model.
        texts: The texts, or their tokens.
        truncate: Whether texts beyond the model's limit are cut off; else they are errors.

    Raises:
        ApiError: A text is too long, or a number is not a token of the model.
    """

    def count() -> list[int]:
        longest, counts = model.tokenizer.max_length, list[int]()
        for number, text in enumerate(texts):
            if not isinstance(text, str) and max(text) >= model.vocabulary_size:
                raise ApiError(
                    f"input.{number} has the token {max(text)}; the model's are 0 to "
                    f"{model.vocabulary_size - 1}",
                    param="input",
                )
            if isinstance(text, str):
                model.check_text(utf8_size(text), "input")
            tokens = model.count_tokens(text, True) if isinstance(text, str) else len(text)
            if longest is not None and tokens > longest and not truncate:
                raise ApiError(
                    f"input.{number} has {tokens} tokens, and the model reads {longest}",
                    param="input",
                )
            counts.append(tokens)
        return counts

    try:
        return await in_body_thread(count)
    except ValueError as error:
        raise of_user_error(error, "input") from error


async def encode_texts(
    model: ServedModel,
    state: ServerState,
    texts: Sequence[str | tuple[int, ...]],
    prompt_name: str | None = None,
) -> Floats:
    """The vectors of texts ``[texts, size]``.

    Args:
        model: The model.
        state: The server.
        texts: The texts, or their tokens.
        prompt_name: The name of a prompt of the model.

    Raises:
        ApiError: The model is of another kind.
        UserError: A text does not fit.
    """
    named = [] if prompt_name is None else [prompt_name]
    await by_size(_check_texts, model, [*texts, *named], "input")
    request = EncodeRequest(secrets.token_hex(12), tuple(texts), prompt_name)
    vectors = await _run(model, state, request)
    if vectors.ndim != 2:
        raise ApiError(f"{model.name} makes no vectors of whole texts", param="model")
    return vectors


async def rank_texts(
    model: ServedModel, state: ServerState, query: str, texts: Sequence[str]
) -> Floats:
    """The scores of texts for a query ``[texts]``.

    Args:
        model: The model.
        state: The server.
        query: The query.
        texts: The texts.

    Raises:
        ApiError: The model is of another kind.
        UserError: A text does not fit.
    """
    await by_size(_check_texts, model, [query, *texts], "documents")
    return await _run(model, state, RankRequest(secrets.token_hex(12), query, tuple(texts)))


def _check_texts(model: ServedModel, texts: Sequence[str | tuple[int, ...]], param: str) -> None:
    """Refuses texts that are too long, or that the worker cannot be sent."""
    for text in texts:
        if isinstance(text, str):
            model.check_text(utf8_size(text), param)
            utf8(text)


async def _run(
    model: ServedModel, state: ServerState, request: EncodeRequest | RankRequest
) -> Floats:
    if not model.encodes:
        raise ApiError(
            f"{model.name} generates text; embeddings and ranks need a model that is made for them",
            param="model",
        )
    timeout = state.settings.request_timeout_s
    with model.admission.enter(), state.metrics.request():
        with model.engine.open([request], timeout) as subscription:
            while True:
                for _, event in await subscription.next_events():
                    if isinstance(event, TextsEncoded):
                        return event.values
