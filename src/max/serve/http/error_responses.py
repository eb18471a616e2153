"""Errors that are sent without a route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.types import Send

from max.serve.errors import ApiError

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
