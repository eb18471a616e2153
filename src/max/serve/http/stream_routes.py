"""``/v1/streams/{id}``: reads and stops answers that outlive their connection."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response

from max.serve.errors import ApiError
from max.serve.http.kept_streams import KeptStream
from max.serve.http.state import json_response, state_of
from max.serve.http.streaming import EVENTS_TYPE, EventStream, unless_disconnected
from max.serve.openai.wire import error_event
from max.serve.requests.request_context import current_request

router = APIRouter(prefix="/v1/streams", tags=["OpenAI"])


@router.get("/{stream_id}")
async def stream(stream_id: str, request: Request) -> Response:
    """Sends an answer again from its start, and goes on while it is made.

    The answer is that of a POST request with the header X-Stream-Id.

    Args:
        stream_id: Identifies it.
        request: The connection.
    """
    streams = state_of(request).streams
    kept = streams.find(stream_id, current_request().client)
    streams.attach(kept)
    # the response reads it after this function has returned
    current_request().cleanups.append(lambda: streams.detach(kept))
    await unless_disconnected(request, _wait_started(kept))
    if kept.start is None:
        raise ApiError("the stream was stopped before its answer began", status=410)
    kind = Headers(raw=kept.start["headers"]).get("content-type", "")
    if kind.startswith(EVENTS_TYPE):
        return EventStream(b"", kept.body(), error_event)
    body = await unless_disconnected(request, _whole(kept))
    return Response(body, kept.start["status"], headers={"content-type": kind})


@router.delete("/{stream_id}")
async def stop(stream_id: str, request: Request) -> Response:
    """Stops an answer, or drops one that has ended.

    Args:
        stream_id: Identifies it.
        request: The connection.
    """
    streams = state_of(request).streams
    streams.stop(streams.find(stream_id, current_request().client))
    return json_response({"id": stream_id, "object": "stream.deleted", "deleted": True})


async def _wait_started(stream: KeptStream) -> None:
    while stream.start is None and not stream.ended:
        await stream.change_event.wait()


async def _whole(stream: KeptStream) -> bytes:
    return b"".join([part async for part in stream.body()])
