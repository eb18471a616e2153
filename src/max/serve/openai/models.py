"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.serve.http.state import json_response, state_of
from max.serve.model import ServedModel

router = APIRouter()


def _entry(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "supremum",
        "root": model.config.model_config.model_path,
        "max_model_len": model.max_length,
    }


@router.get("/v1/models", tags=["OpenAI"])
async def models(request: Request) -> Response:
    """Lists the models.

    Args:
        request: The connection.
    """
    entries = [_entry(model) for model in state_of(request).models.values()]
    return json_response({"object": "list", "data": entries})


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(name: str, request: Request) -> Response:
    """Shows one model.

    Args:
        name: Its name.
        request: The connection.
    """
    return json_response(_entry(state_of(request).model(name)))
