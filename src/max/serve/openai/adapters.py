"""Routes that load and unload adapters (LoRA) while others are served, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from max.pipelines.config.lora_config import named_path
from max.pipelines.core.exceptions import UserError
from max.serve.errors import ApiError, of_user_error
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import (
    ServerState,
    adapter_not_found,
    json_response,
    refuse_foreign_pages,
    state_of,
)
from max.serve.models.model import ServedModel
from max.serve.openai.fields import Name, StrictBody

router = APIRouter(route_class=BodyRoute)


class LoadAdapterBody(StrictBody):
    """The body of ``/v1/load_lora_adapter``."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    # whether an adapter of this name is replaced
    load_inplace: bool = False
    model: Name | None = None


class UnloadAdapterBody(StrictBody):
    """The body of ``/v1/unload_lora_adapter``."""

    lora_name: Name
    lora_int_id: int | None = None
    model: Name | None = None


def _check_enabled(model: ServedModel) -> None:
    if model.config.lora_config is None:
        raise ApiError(f"{model.name} takes no adapters: start with --enable-lora", status=400)


async def _offer(state: ServerState, model: ServedModel, name: str, path: str) -> None:
    """Lets requests name an adapter that the engine has."""
    model.adapters[name] = path
    await _tell(state, model)


async def _tell(state: ServerState, model: ServedModel) -> None:
    """Lets the other processes of the server know the adapters of a model."""
    if state.routers is not None:
        await state.routers.tell_adapters(model)


@router.post("/v1/load_lora_adapter", tags=["models"])
async def load_adapter(body: LoadAdapterBody, request: Request) -> Response:
    """Loads an adapter, and answers when requests can name it.

    Args:
        body: Its name and its path on the server.
        request: The connection.
    """
    state = state_of(request, body)
    refuse_foreign_pages(request, state)
    model = await state.model(body.model)
    _check_enabled(model)
    try:
        name, path = named_path(f"{body.lora_name}={body.lora_path}")
    except UserError as error:
        raise of_user_error(error, "lora_name") from error
    # the field `model` of a request names either
    if name == model.name:
        raise ApiError(f"{name} is the name of the model", param="lora_name")
    replaced = model.adapters.get(name) if body.load_inplace else None
    try:
        if replaced is not None:
            # no request may find the adapter while it is exchanged
            del model.adapters[name]
            await _tell(state, model)
            await model.engine.change_adapter(name, None)
        try:
            await model.engine.change_adapter(name, str(path))
        except UserError:
            if replaced is not None:
                # one that cannot be read takes no other's place
                await model.engine.change_adapter(name, replaced)
                await _offer(state, model, name, replaced)
            raise
    except UserError as error:
        raise of_user_error(error, "lora_path") from error
    # last: from here on requests may name it
    await _offer(state, model, name, str(path))
    return json_response({"success": True, "message": f"the adapter {name} is loaded"})


@router.post("/v1/unload_lora_adapter", tags=["models"])
async def unload_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    """Unloads an adapter; requests to come do not find it, and the answer waits for those that use it.

    Args:
        body: Its name.
        request: The connection.
    """
    state = state_of(request, body)
    refuse_foreign_pages(request, state)
    model = await state.model(body.model)
    _check_enabled(model)
    # first, so that the wait below ends: no later request uses it
    path = model.adapters.pop(body.lora_name, None)
    if path is None:
        raise adapter_not_found(model, body.lora_name)
    await _tell(state, model)
    try:
        await model.engine.change_adapter(body.lora_name, None)
    except UserError as error:
        raise of_user_error(error, "lora_name") from error
    return json_response({"success": True, "message": f"the adapter {body.lora_name} is unloaded"})
