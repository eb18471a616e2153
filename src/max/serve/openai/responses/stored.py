"""Responses that are kept: later requests go on with them, and clients read and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, json_response, state_of
from max.serve.http.streaming import event_stream
from max.serve.openai.responses.body import CompactBody, ResponsesBody
from max.serve.openai.responses.input import items_of
from max.serve.openai.responses.pages import PageQuery, page_query
from max.serve.openai.responses.store import ResponseStore, StoredResponse
from max.serve.openai.wire import encode_json, error_event, new_id
from max.serve.requests.request_context import current_request

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=BodyRoute)
_REFERENCE = "item_reference"
CONNECTION_RESPONSES: ContextVar[ResponseStore | None] = ContextVar("responses", default=None)
"""The responses of the running WebSocket that are not stored; None: the request has a connection of HTTP."""


def history_of(identifier: str | None, state: ServerState) -> tuple[dict[str, Any], ...]:
    """The items up to a response; empty where there is none.

    Args:
        identifier: Identifies the response.
        state: The server.

    Raises:
        ApiError: It is not kept.
    """
    previous = previous_response(identifier, state)
    return () if previous is None else previous.items


def previous_response(identifier: str | None, state: ServerState) -> StoredResponse | None:
    """The response that a request goes on with; None where there is none.

    Args:
        identifier: Identifies the response.
        state: The server.

    Raises:
        ApiError: It is not kept.
    """
    if identifier is None:
        return None
    client, of_connection = current_request().client, CONNECTION_RESPONSES.get()
    # stored ones first: they outlive the connection
    found = state.responses.find(identifier, client)
    if found is None and of_connection is not None:
        found = of_connection.find(identifier, client)
    if found is None:
        raise ApiError(
            f"the previous response {short_text(identifier)} is not kept: it was sent with store false, deleted, "
            "or dropped for newer ones; send the earlier items in input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def resolve_references(body: ResponsesBody | CompactBody, state: ServerState) -> None:
    """Puts the items to which the input of a request refers in the places of these references.

    Args:
        body: The request.
        state: The server.

    Raises:
        ApiError: An item is not kept, or there are two references to it.
    """
    if body.input is None or isinstance(body.input, str):
        return
    client, of_connection, seen = current_request().client, CONNECTION_RESPONSES.get(), set[str]()
    for number, item in enumerate(body.input):
        # OpenAI's client may leave the type out
        if item.get("type", _REFERENCE if item.keys() == {"id"} else None) != _REFERENCE:
            continue
        where, identifier = f"input.{number}.id", item.get("id")
        found = None
        if isinstance(identifier, str):
            found = state.responses.find_item(identifier, client)
            if found is None and of_connection is not None:
                found = of_connection.find_item(identifier, client)
        # each at most once, so that the input is no longer than what is kept
        if found is None or identifier in seen:
            why = "it is given twice" if found is not None else "no such item is kept"
            raise ApiError(
                f"{where} is {short_text(identifier)}: {why}; send the item itself", param=where
            )
        seen.add(str(identifier))
        body.input[number] = found


def keeper(
    state: ServerState,
    previous: StoredResponse | None,
    given_input: str | list[dict[str, Any]],
    stores: bool = True,
) -> Callable[[dict[str, Any]], None]:
    """A function that keeps a response.

    Args:
        state: The server.
        previous: The response that it goes on with.
        given_input: Its input.
        stores: Whether later connections may go on with it; False: only the same WebSocket.
    """
    client, of_connection = current_request().client, CONNECTION_RESPONSES.get()
    # clients may send None for an identifier that they do not have
    inputs = tuple(
        {**item, "id": item.get("id") or new_id("item")} for item in items_of(given_input)
    )
    size = len(encode_json(inputs))

    def keep(response: dict[str, Any]) -> None:
        # only its size is used: the objects are kept
        data = encode_json(response)
        stored = StoredResponse(client, previous, inputs, response, size + len(data))
        if stores:
            state.responses.put(response["id"], stored)
        elif of_connection is not None:
            of_connection.put(response["id"], stored)

    return keep


def _stored_response(identifier: str, request: Request) -> StoredResponse:
    found = state_of(request).responses.find(identifier, current_request().client)
    if found is None:
        raise ApiError(
            f"there is no response {short_text(identifier)}", status=404, param="response_id"
        )
    return found


@router.get("/{response_id}")
async def response(
    response_id: str,
    request: Request,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """Shows a response that is kept, or made in the background.

    Args:
        response_id: Identifies it.
        request: The connection.
        stream: Whether to send its events, which only one that is made in the background has.
        starting_after: The sequence number of the last event that the client has.
    """
    # background first: its status is newer than what was stored
    made = state_of(request).background.find(response_id, current_request().client)
    if stream and made is not None:
        events = made.read(-1 if starting_after is None else starting_after)
        return await event_stream(request, events, error_event)
    if made is not None and not made.ended:
        return json_response(made.response())
    stored = _stored_response(response_id, request)
    if stream:
        raise ApiError(
            f"the response {short_text(response_id)} has no events any more: only those of background "
            "responses are kept, for a while",
            param="stream",
        )
    return json_response(stored.response)


@router.post("/{response_id}/cancel")
async def cancel(response_id: str, request: Request) -> Response:
    """Ends a response that is made in the background; one that has ended stays as it is.

    Args:
        response_id: Identifies it.
        request: The connection.
    """
    made = state_of(request).background.find(response_id, current_request().client)
    if made is None:
        if not _stored_response(response_id, request).response.get("background"):
            raise ApiError(
                f"the response {short_text(response_id)} is not made in the background, so there is nothing to cancel",
                param="response_id",
            )
    elif made.task is not None and not made.ended:
        made.task.cancel()
        # its end stores the response that is returned
        await asyncio.wait({made.task})
    return json_response(_stored_response(response_id, request).response)


@router.delete("/{response_id}")
async def delete(response_id: str, request: Request) -> Response:
    """Drops a response.

    Args:
        response_id: Identifies it.
        request: The connection.
    """
    made = state_of(request).background.find(response_id, current_request().client)
    # one that runs is not stored yet
    if made is None or made.ended:
        _stored_response(response_id, request)
    state_of(request).background.delete(response_id, current_request().client)
    state_of(request).responses.delete(response_id, current_request().client)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


@router.get("/{response_id}/input_items")
async def input_items(
    response_id: str,
    request: Request,
    page: Annotated[PageQuery, Depends(page_query("desc"))],
) -> Response:
    """Lists the items of a response's input, with those before it.

    Args:
        response_id: Identifies it.
        request: The connection.
        page: Which of the items.
    """
    stored = _stored_response(response_id, request)
    items = [_client_item(item) for item in (*stored.history, *stored.inputs)]
    return json_response(page.page(items))


def _client_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as clients read it: the content of a message is a list of parts."""
    content = item.get("content")
    if item.get("type", "message") != "message" or not isinstance(content, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {"type": "message", **item, "content": [{"type": kind, "text": content}]}
