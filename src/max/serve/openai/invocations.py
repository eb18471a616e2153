"""``/invocations``, SageMaker's route: the body decides which of OpenAI's routes is meant."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute, of_schema
from max.serve.openai.chat import ChatCompletionRequest, chat_completions
from max.serve.openai.completions import CompletionRequest, completions
from max.serve.openai.embeddings import EmbeddingsBody, embeddings
from max.serve.requests.threads import by_size

router = APIRouter(route_class=BodyRoute)
_KINDS: dict[str, tuple[type[BaseModel], Any]] = {
    "messages": (ChatCompletionRequest, chat_completions),
    "prompt": (CompletionRequest, completions),
    "input": (EmbeddingsBody, embeddings),
}


@router.post("/invocations", tags=["SageMaker"])
async def invoke(body: dict[str, Any], request: Request) -> Response:
    """Answers a conversation (``messages``), completes a ``prompt``, or makes vectors of an ``input``.

    Args:
        body: The request of OpenAI's route for it.
        request: The connection.

    Raises:
        ApiError: The body has none of the three.
    """
    for field, (kind, route) in _KINDS.items():
        if field in body:
            return await route(await by_size(of_schema, body, kind), request)
    raise ApiError(
        f"a body of /invocations has one of {', '.join(_KINDS)}", status=400, param="messages"
    )
