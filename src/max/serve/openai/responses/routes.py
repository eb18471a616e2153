"""``/v1/responses``: answers an input, or an input that goes on with an earlier response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.serve.chat.conversation_text import prompt_tokens
from max.serve.chat.run import collect_answers, stream_events
from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, json_response, state_of
from max.serve.http.streaming import event_stream, unless_disconnected
from max.serve.openai.peer_fields import refuse
from max.serve.openai.responses.background import BackgroundResponse
from max.serve.openai.responses.body import (
    REFUSED,
    ResponsesBody,
    job_of,
    messages_with,
    own_tools,
    template_options,
)
from max.serve.openai.responses.events import ResponseWriter
from max.serve.openai.responses.store import StoredResponse
from max.serve.openai.responses.stored import (
    CONNECTION_RESPONSES,
    history_of,
    keeper,
    previous_response,
    resolve_references,
)
from max.serve.requests.generation import AnswerDelta, ChatJob
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import by_size

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesBody, request: Request) -> Response:
    """Counts the tokens of an input.

    Args:
        body: The request whose prompt is counted.
        request: The connection.
    """
    state = state_of(request, body)
    model = await state.model(body.model)
    refuse(body, REFUSED)
    resolve_references(body, state)
    tools = () if body.tool_choice == "none" else own_tools(body)
    messages = await by_size(messages_with, body, history_of(body.previous_response_id, state))
    count = await prompt_tokens(model, messages, tools, template_options(body))
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answers an input.

    Args:
        body: The request.
        request: The connection.
    """
    state = state_of(request, body)
    # before the model is awaited: later requests may push it out of the store
    previous = previous_response(body.previous_response_id, state)
    resolve_references(body, state)
    job = await job_of(body, state, () if previous is None else previous.items)
    keep: Callable[[dict[str, Any]], None] | None = None
    stores = body.store is not False
    if body.background:
        return await _in_background(body, job, state, previous, request)
    # responses of a WebSocket are kept for it even with store false
    if stores or CONNECTION_RESPONSES.get() is not None:
        keep = keeper(state, previous, body.input, stores)
    writer = await by_size(ResponseWriter, body, job, keep)
    if body.stream:
        return await event_stream(
            request, _stream(writer, job, state), writer.error_event, waiting=writer.waiting
        )
    timeout = state.settings.request_timeout_s
    answers = await unless_disconnected(request, collect_answers(job, state.metrics, timeout))
    return json_response(writer.whole(answers[0]))


async def _in_background(
    body: ResponsesBody,
    job: ChatJob,
    state: ServerState,
    previous: StoredResponse | None,
    request: Request,
) -> Response:
    """Begins a response that goes on without the connection; answers with it as it is now, or with its events."""
    if body.store is False:
        raise ApiError(
            "background and store false are given: a response that is made in the background is stored",
            param="store",
        )
    client = current_request().client
    # before the task exists, which would run in any case
    state.background.check(client)
    keep = keeper(state, previous, body.input)
    writer = await by_size(ResponseWriter, body, job, keep)
    response = BackgroundResponse(client, writer.current_response)
    # its first events are there before the first reader
    response.add(writer.waiting())
    # starts with the first read, in the task of the background
    parts = _stream(writer, job, state)
    state.background.begin(writer.identifier, response, parts, writer.error_event, keep)
    if body.stream:
        return await event_stream(request, response.read(), writer.error_event)
    return json_response(response.response())


def _stream(
    writer: ResponseWriter, job: ChatJob, state: ServerState
) -> AsyncGenerator[bytes, None]:
    def end(last: AnswerDelta) -> bytes:
        # `response` stores it, with all of its items ended
        data = writer.end_item(last.finish_reason)
        response = writer.response(last.finish_reason, last.tokens)
        return data + writer.event(f"response.{response['status']}", response=response)

    timeout = state.settings.request_timeout_s
    return stream_events(
        job, timeout, state.metrics, writer.begin, writer.write, end, writer.note_logs
    )
