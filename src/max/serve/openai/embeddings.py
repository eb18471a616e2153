"""``/v1/embeddings``, the rerank family and ``/score``."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import json_response, state_of
from max.serve.http.streaming import unless_disconnected
from max.serve.limits import MAX_INPUTS
from max.serve.models.model import ServedModel
from max.serve.openai.fields import FIRST_ERROR, Name, StrictBody, TokenList
from max.serve.openai.wire import encode_json, new_id
from max.serve.requests.encoding import Floats, encode_texts, rank_texts, token_counts
from max.serve.requests.threads import by_size, in_body_thread

router = APIRouter(tags=["embeddings"], route_class=BodyRoute)
_OF_INPUTS = Field(min_length=1, max_length=MAX_INPUTS)
Texts = Annotated[list[str], _OF_INPUTS, FIRST_ERROR]
TokenLists = Annotated[list[TokenList], _OF_INPUTS, FIRST_ERROR]


class EmbeddingsBody(StrictBody):
    """The body of ``/v1/embeddings``."""

    input: str | TokenList | Texts | TokenLists
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: Name | None = None
    user: str | None = None


class DocumentField(StrictBody):
    """A document as an object."""

    text: str


class RerankBody(StrictBody):
    """The body of ``/rerank`` and its other paths."""

    query: str
    documents: Annotated[list[str | DocumentField], _OF_INPUTS, FIRST_ERROR]
    model: Name | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class ScoreBody(StrictBody):
    """The body of ``/score``."""

    text_1: str
    text_2: str | Texts
    model: Name | None = None


def inputs_of(
    field: str | Sequence[Any],
) -> list[str | tuple[int, ...]]:
    """The texts of an input, or their tokens.

    Args:
        field: A text, its tokens, or a list of either.
    """
    if isinstance(field, str):
        return [field]
    # one text as tokens, not several texts
    if field and isinstance(field[0], int):
        return [tuple(field)]
    return [each if isinstance(each, str) else tuple(each) for each in field]


def shorten(vectors: Floats, dimensions: int | None) -> Floats:
    """Vectors of fewer dimensions, scaled to length 1.

    Args:
        vectors: ``[texts, size]``.
        dimensions: The number of leading dimensions to keep; None: all.

    Raises:
        ApiError: The vectors have fewer dimensions.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise ApiError(
            f"dimensions is {dimensions}; the model's vectors have {vectors.shape[1]}",
            param="dimensions",
        )
    cut = vectors[:, :dimensions]  # [texts, dimensions]
    # a vector of zeros stays one
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.float32(1e-12))


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """The vectors of texts.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    texts = await by_size(inputs_of, body.input)
    counts = await token_counts(model, texts)
    work = encode_texts(model, state, texts, body.prompt_name)
    vectors = await unless_disconnected(request, work)
    rows = shorten(vectors, body.dimensions)
    packed = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": row}
        for index, row in enumerate(await json_rows(rows, packed))
    ]
    total = sum(counts)
    usage = {"prompt_tokens": total, "total_tokens": total}
    return json_response({"object": "list", "data": data, "model": model.name, "usage": usage})


_MANY_FLOATS = 16384


async def json_rows(vectors: Floats, packed: bool = False) -> list[msgspec.Raw]:
    """Vectors as JSON; many are written in a thread, one by one, so that streams go on meanwhile.

    Args:
        vectors: ``[texts, size]``.
        packed: Whether they are base64 of float32, else lists of numbers.
    """

    def write_rows() -> list[msgspec.Raw]:
        return [
            msgspec.Raw(encode_json(_pack_base64(row) if packed else row.tolist()))
            for row in vectors
        ]

    return write_rows() if vectors.size <= _MANY_FLOATS else await in_body_thread(write_rows)


def _pack_base64(vector: Floats) -> str:
    # little-endian, as clients of OpenAI's API read it
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/reranking")
@router.post("/v1/reranking")
async def rerank(body: RerankBody, request: Request) -> Response:
    """Orders documents by their scores for a query.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    scores = await unless_disconnected(request, rank_texts(model, state, body.query, documents))
    # stable: equal documents keep their order
    best = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": float(scores[index])} for index in best
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    # the query counts once, though each document is read together with it
    usage = {"total_tokens": await _tokens_of(model, [body.query, *documents])}
    head = {"id": new_id("rerank"), "model": model.name}
    return json_response({**head, "results": results, "usage": usage})


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreBody, request: Request) -> Response:
    """The scores of texts for a text, in their order.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    texts = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    scores = await unless_disconnected(request, rank_texts(model, state, body.text_1, texts))
    data = [
        {"object": "score", "index": index, "score": float(value)}
        for index, value in enumerate(scores)
    ]
    total = await _tokens_of(model, [body.text_1, *texts])
    usage = {"prompt_tokens": total, "total_tokens": total}
    head = {"id": new_id("score"), "object": "list", "model": model.name}
    return json_response({**head, "data": data, "usage": usage})


async def _tokens_of(model: ServedModel, texts: Sequence[str]) -> int:
    def count() -> int:
        return sum(model.count_tokens(text, special=True) for text in texts)

    return await by_size(count)
