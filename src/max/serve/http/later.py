"""Routes of MAX and OpenAI for what this server lacks: each says so, instead of being unknown."""

from __future__ import annotations

from fastapi import APIRouter, Request

from max.serve.errors import ApiError, shown

router = APIRouter(include_in_schema=False)

_ADAPTERS = "adapters (LoRA) come later; merge one into the model's weights meanwhile"
_AUDIO = "models here read and write text; audio comes later"
_IMAGES = "models here write text; images come later"
_REASONS = {
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/v1/audio/speech": _AUDIO,
    "/v1/audio/transcriptions": _AUDIO,
    "/v1/audio/translations": _AUDIO,
    "/v1/images/generations": _IMAGES,
    "/v1/batches": "answers are not stored; `max run-batch` answers a file of requests",
}
_STORED = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items")


async def refuse(request: Request) -> None:
    """Says why a route is not there.

    Args:
        request: The connection.

    Raises:
        ApiError: Status 501.
    """
    path = request.url.path
    raise ApiError(f"{path}: {_REASONS[path]}", status=501, code="not_supported")


async def not_stored(response_id: str) -> None:
    """Says that there is no response of this identifier, as there is none of any.

    Args:
        response_id: The identifier.

    Raises:
        ApiError: Status 404.
    """
    raise ApiError(f"there is no response {shown(response_id)}: nothing is stored", status=404)


for _path in _REASONS:
    router.add_api_route(_path, refuse, methods=["POST"])
for _path in _STORED:
    router.add_api_route(_path, not_stored, methods=["GET", "DELETE"])
router.add_api_route("/v1/responses/{response_id}/cancel", not_stored, methods=["POST"])
