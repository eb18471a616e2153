"""``/v1/models``, and the routes by which clients load and unload models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import json_response, state_of
from max.serve.models.pool_entry import ModelStatus, PoolEntry
from max.serve.openai.fields import Name, StrictBody

router = APIRouter(route_class=BodyRoute)
_ANTHROPIC = "anthropic-version"
"""The header that clients of Anthropic's API send."""


class ModelBody(StrictBody):
    """The body of ``/models/load`` and ``/models/unload``."""

    model: Name


def _entry(entry: PoolEntry) -> dict[str, Any]:
    """A model with OpenAI's fields, vLLM's ``max_model_len`` and llama.cpp's ``status``."""
    status: dict[str, Any] = {"value": entry.status.value}
    if entry.status is ModelStatus.FAILED:
        status |= {"failed": True, "error": entry.error}
    model, stored = entry.model, entry.stored_model
    # of a model that is loaded on demand, both tell about its files, loaded or not
    created, root = 0, entry.name
    if stored is not None:
        created, root = int(stored.modified_at), str(stored.path)
    elif model is not None:
        created, root = model.created, model.config.model_config.model_path
    return {
        "id": entry.name,
        "object": "model",
        "created": created,
        "owned_by": "supremum",
        "root": root,
        "parent": None,
        "max_model_len": None if model is None else model.max_length,
        "status": status,
    }


def _adapters(entry: PoolEntry) -> list[dict[str, Any]]:
    """The adapters of a model that are loaded, with the model's fields."""
    if entry.model is None:
        return []
    return [
        {**_entry(entry), "id": name, "root": path, "parent": entry.name}
        for name, path in sorted(entry.model.adapters.items())
    ]


def _anthropic(entry: PoolEntry) -> dict[str, Any]:
    """A model with Anthropic's fields."""
    # Anthropic's has a text in place of seconds
    created = datetime.fromtimestamp(_entry(entry)["created"], UTC)
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@router.get("/v1/models", tags=["OpenAI"])
@router.get("/models", tags=["models"])
async def models(request: Request) -> Response:
    """Lists the models, loaded or not.

    Args:
        request: The connection.
    """
    entries = await state_of(request).pool.entries()
    # loaded ones first: clients without a model's name take the first
    entries.sort(key=lambda entry: (entry.status is not ModelStatus.LOADED, entry.name))
    if _ANTHROPIC in request.headers:
        data = [_anthropic(entry) for entry in entries]
        # fields of its list, which it sends page by page; this one is whole
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        none = {"first_id": None, "last_id": None}
        return json_response({"data": data, "has_more": False, **none, **ends})
    listed = [each for entry in entries for each in (_entry(entry), *_adapters(entry))]
    return json_response({"object": "list", "data": listed})


@router.post("/models/load", tags=["models"])
@router.post("/v1/models/load", tags=["models"])
async def load(body: ModelBody, request: Request) -> Response:
    """Loads a model, and answers when requests can run.

    Args:
        body: The model.
        request: The connection.
    """
    state = state_of(request, body)
    await state.model(body.model)
    return json_response({"success": True, **_entry(await state.pool.find(body.model))})


@router.post("/models/unload", tags=["models"])
@router.post("/v1/models/unload", tags=["models"])
async def unload(body: ModelBody, request: Request) -> Response:
    """Unloads a model; one with open requests is unloaded when they have ended.

    Args:
        body: The model.
        request: The connection.
    """
    entry = await state_of(request, body).pool.unload(body.model)
    return json_response({"success": True, **_entry(entry)})


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(name: str, request: Request) -> Response:
    """Shows one model.

    Args:
        name: Its name.
        request: The connection.
    """
    entry = await state_of(request).pool.find(name)
    if _ANTHROPIC in request.headers:
        return json_response(_anthropic(entry))
    adapters = (each for each in _adapters(entry) if each["id"] == name)
    return json_response(next(adapters, _entry(entry)))
