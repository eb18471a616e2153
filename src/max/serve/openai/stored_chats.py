"""Chat completions that are stored: clients list, read, mark and delete them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import json_response, state_of
from max.serve.openai.chat_store import StoredChat
from max.serve.openai.fields import StrictBody
from max.serve.openai.responses.pages import PageQuery, page_query
from max.serve.openai.wire import encode_json
from max.serve.requests.request_context import current_request

router = APIRouter(prefix="/v1/chat/completions", tags=["OpenAI"], route_class=BodyRoute)
PREFIX = "chatcmpl"
_MOST_MARKS, _MOST_KEY, _MOST_VALUE = 16, 64, 512
_MARK = re.compile(r"metadata\[(.+)\]")


class _Identifier(StringConvertor):
    """The identifier of a completion, and not the path of another route below ``/v1/chat/completions``."""

    # Starlette takes the first route that fits, and those have routes of their own
    regex = "(?!(?:batch|control|input_tokens|render)(?:/|$))[^/]+"


register_url_convertor("chat_completion", _Identifier())
_PAGE = Depends(page_query("asc"))
_ONE = "/{completion_id:chat_completion}"


class MetadataBody(StrictBody):
    """New metadata of a completion."""

    metadata: dict[str, Any] | None = None


def check_metadata(metadata: dict[str, Any] | None) -> dict[str, str]:
    """The metadata of a completion that is stored.

    Args:
        metadata: The field of the request.

    Raises:
        ApiError: There are more than 16 entries, or one is no text, or too long.
    """
    entries = metadata or {}
    if len(entries) > _MOST_MARKS:
        raise ApiError(
            f"metadata has {len(entries)} entries; at most {_MOST_MARKS} are stored",
            param="metadata",
        )
    for name, value in entries.items():
        if not isinstance(value, str) or len(value) > _MOST_VALUE or len(name) > _MOST_KEY:
            raise ApiError(
                f"metadata.{short_text(name)} is {short_text(value)}; a name has up to {_MOST_KEY} letters, "
                f"and its value is a text of up to {_MOST_VALUE}",
                param="metadata",
            )
    return entries


def stored_chat(
    client: str, completion: dict[str, Any], messages: list[dict[str, Any]]
) -> StoredChat:
    """A completion as it is stored.

    Args:
        client: Who may read it.
        completion: The completion.
        messages: The messages of the request.
    """
    size = len(encode_json(completion)) + len(encode_json(messages))
    return StoredChat(client, completion, messages, size)


def _chat_of(identifier: str, request: Request) -> StoredChat:
    found = state_of(request).chats.find(identifier, current_request().client)
    if found is None:
        raise ApiError(
            f"there is no chat completion {short_text(identifier)}: it was sent without store, deleted, or dropped "
            "for newer ones",
            status=404,
            param="completion_id",
        )
    return found


@router.get("")
async def chat_completions_stored(
    request: Request, page: Annotated[PageQuery, _PAGE], model: str | None = None
) -> Response:
    """Lists the completions that are stored, those of a model or with some metadata (``metadata[key]=value``).

    Args:
        request: The connection.
        page: Which of the completions.
        model: The model; None: any.
    """
    # FastAPI has no type for fields of any name
    marks = {m[1]: v for k, v in request.query_params.items() if (m := _MARK.fullmatch(k))}
    found = [
        each.completion
        for each in state_of(request).chats.of_client(current_request().client)
        if model in (None, each.completion["model"])
        and marks.items() <= each.completion["metadata"].items()
    ]
    return json_response(page.page(found))


@router.get(_ONE)
async def chat_completion(completion_id: str, request: Request) -> Response:
    """Shows a completion that is stored.

    Args:
        completion_id: Identifies it.
        request: The connection.
    """
    return json_response(_chat_of(completion_id, request).completion)


@router.post(_ONE)
async def mark(body: MetadataBody, request: Request) -> Response:
    """Changes the metadata of a completion that is stored.

    Args:
        body: The new metadata.
        request: The connection.
    """
    # a route with a body gets no other arguments
    found = _chat_of(request.path_params["completion_id"], request)
    completion = {**found.completion, "metadata": check_metadata(body.metadata)}
    made = stored_chat(found.client, completion, found.messages)
    state_of(request, body).chats.put(made.completion["id"], made)
    return json_response(completion)


@router.delete(_ONE)
async def delete(completion_id: str, request: Request) -> Response:
    """Drops a completion.

    Args:
        completion_id: Identifies it.
        request: The connection.
    """
    # answers 404 where there is none
    _chat_of(completion_id, request)
    state_of(request).chats.delete(completion_id, current_request().client)
    return json_response(
        {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    )


@router.get(f"{_ONE}/messages")
async def chat_messages(
    completion_id: str, request: Request, page: Annotated[PageQuery, _PAGE]
) -> Response:
    """Lists the messages of the request of a completion that is stored.

    Args:
        completion_id: Identifies it.
        request: The connection.
        page: Which of the messages.
    """
    found = _chat_of(completion_id, request)
    listed = [
        _message(f"{completion_id}-{number}", message)
        for number, message in enumerate(found.messages)
    ]
    return json_response(page.page(listed))


def _message(identifier: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as clients read it: parts stand in a field of their own."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    text = None if parts is not None else content
    return {**message, "id": identifier, "content": text, "content_parts": parts}
