"""``/v1/responses/compact``: shortens a conversation to its messages of the user and a summary by the model."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.interfaces import SamplingParamsInput
from max.serve.chat.prompt import Conversation, prepare
from max.serve.chat.run import collect_answers
from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import json_response, state_of
from max.serve.http.streaming import unless_disconnected
from max.serve.openai.responses.body import CompactBody, messages_with
from max.serve.openai.responses.events import usage_of
from max.serve.openai.responses.input import items_of, packed_summary
from max.serve.openai.responses.stored import history_of, resolve_references
from max.serve.openai.wire import new_id
from max.serve.requests.threads import by_size

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
MOST_SUMMARY = 1024
"""Tokens of a summary."""
_ASK = (
    "Summarize our conversation so far for yourself, as you will go on with it without the earlier messages: the "
    "task, what was done and found, names of files and values that matter, and what remains to do. Write only the "
    "summary."
)


@router.post("/v1/responses/compact")
async def compact(body: CompactBody, request: Request) -> Response:
    """Shortens a conversation.

    Args:
        body: The conversation.
        request: The connection.
    """
    state = state_of(request, body)
    history = history_of(body.previous_response_id, state)
    resolve_references(body, state)
    items = [*history, *items_of(body.input or [])]
    if not items:
        raise ApiError(
            "there is nothing to shorten; give input or previous_response_id", param="input"
        )
    model = await state.model(body.model)
    # the request begins like those of the conversation, so that its prompt is in the prefix cache
    messages = await by_size(messages_with, body, history)
    job = await prepare(
        model,
        # without tools, so that the answer is a text
        Conversation(
            request_id=new_id("resp"),
            messages=[*messages, {"role": "user", "content": _ASK}],
            sampling=model.sampling_params(
                SamplingParamsInput(temperature=0, max_new_tokens=MOST_SUMMARY)
            ),
        ),
    )
    timeout = state.settings.request_timeout_s
    (answer,) = await unless_disconnected(request, collect_answers(job, state.metrics, timeout))
    # what the user has said stays as it is; the summary stands for all answers
    kept = [
        {"type": "message", "id": new_id("msg"), "status": "completed", **item}
        for item in items
        if item.get("type", "message") == "message" and item.get("role") == "user"
    ]
    summary = {
        "type": "compaction",
        "id": new_id("cmp"),
        "encrypted_content": packed_summary(answer.content.strip()),
    }
    return json_response(
        {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*map(_as_output, kept), summary],
            "usage": usage_of(job, answer.tokens),
        }
    )


def _as_output(item: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    return {**item, "content": [{"type": "input_text", "text": content}]}
