"""The statuses of exceptions, and errors that are sent without a route."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.types import Send

from max.pipelines.core.exceptions import UserError
from max.serve.errors import ApiError, of_user_error
from max.serve.worker.client import EngineLostError, EngineUnavailableError

logger = logging.getLogger("max.serve")

ErrorBody: TypeAlias = Callable[[str, ApiError], Mapping[str, Any]]
"""Makes the body of an error in the form of the API that a path belongs to."""


def openai_body(path: str, error: ApiError) -> Mapping[str, Any]:
    """OpenAI's body of an error, for every path.

    Args:
        path: The path of the request.
        error: The error.
    """
    return error.body()


async def send_error(send: Send, error: ApiError, body: Mapping[str, Any] | None = None) -> None:
    """Sends an error as a whole response.

    Args:
        send: Sends a part of the response.
        error: The error.
        body: Its body; None: OpenAI's.
    """
    content = msgspec.json.encode(error.body() if body is None else body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def as_api_error(error: Exception) -> ApiError:
    """The error that a client gets for an exception; logs unexpected exceptions.

    Args:
        error: The exception.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return of_user_error(error)
    if isinstance(error, EngineLostError):
        return ApiError(str(error), status=500, code="engine_lost")
    if isinstance(error, EngineUnavailableError):
        return ApiError(str(error), status=503, code="engine_unavailable")
    if isinstance(error, RecursionError):  # raised by values of the request that passed its schema
        return ApiError(
            "the arrays and objects of the request are nested too deeply", code="nested_too_deeply"
        )
    if isinstance(error, UnicodeEncodeError):  # JSON may have halves of characters
        code = ord(error.object[error.start])
        return ApiError(
            f"a text of the request has the surrogate U+{code:X}, which UTF-8 cannot have"
        )
    if isinstance(error, TimeoutError):
        return ApiError(str(error), status=504, code="timeout")
    logger.error("a request failed", exc_info=error)
    return ApiError("the server failed; its log says why", status=500, code="internal_error")
