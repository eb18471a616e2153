"""``/slots/{id}``: cached prefixes are saved to named files and restored.

All slots share one cache here, so that a file has the prefixes of all requests, whatever the slot.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import json_response, refuse_foreign_pages, state_of
from max.serve.openai.fields import Name, StrictBody

ACTIONS = ("save", "restore", "erase")

router = APIRouter(tags=["llama.cpp"], route_class=BodyRoute)


class SlotBody(StrictBody):
    """The body of ``/slots/{id}``."""

    filename: Annotated[str, Field(max_length=100)] | None = None
    """The name of the file in the folder of ``--kv-cache-folder``."""
    model: Name | None = None


@router.post("/slots/{slot}")
async def change_slot(body: SlotBody, request: Request) -> Response:
    """Saves the cached prefixes to a file, restores those of a file, or removes the file, as `action` says.

    A request that begins with a restored prefix does not read it again. Files are for one model, and stay until they
    are removed.

    Args:
        body: The name of the file.
        request: The connection.
    """
    state = state_of(request, body)
    refuse_foreign_pages(request, state)
    slot, action = request.path_params["slot"], request.query_params.get("action", "")
    if not (slot.isascii() and slot.isdecimal() and len(slot) < 10):
        raise ApiError(f"the slot is {short_text(slot)}, expected a number", param="id_slot")
    if action not in ACTIONS:
        raise ApiError(
            f"the action is {short_text(action)}, expected {', '.join(ACTIONS)}", param="action"
        )
    if body.filename is None:
        remedy = "; POST /reset_prefix_cache empties the cache" if action == "erase" else ""
        raise ApiError(f"'filename' names the file to {action}{remedy}", param="filename")
    model = await state.model(body.model)
    begin = time.perf_counter()
    tokens, size = await model.engine.keep_prefixes(action, body.filename)
    milliseconds = round((time.perf_counter() - begin) * 1e3, 3)
    answer: dict[str, Any] = {"id_slot": int(slot), "filename": body.filename}
    if action == "save":
        answer |= {"n_saved": tokens, "n_written": size, "timings": {"save_ms": milliseconds}}
    elif action == "restore":
        answer |= {"n_restored": tokens, "n_read": size, "timings": {"restore_ms": milliseconds}}
    else:
        answer["n_erased"] = size
    return json_response(answer)
