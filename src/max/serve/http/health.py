"""The routes of operators: ``/health``, ``/ping``, ``/version``, ``/metrics``, ``/load``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from max._version import __version__
from max.serve.http.state import json_response, refuse_foreign_pages, state_of
from max.serve.metrics import CONTENT_TYPE
from max.serve.models.pool import RETRY_AFTER_S
from max.serve.requests.request_context import current_request
from max.serve.worker.client import EngineClient, EngineState

router = APIRouter(tags=["operation"])


@router.get("/health")
@router.get("/v1/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """Whether requests run now: 200, else 503 with the state of the engine; a router is always ready.

    Models that are being loaded are listed in ``loading``, with the step that each load is at.

    Args:
        request: The connection.
    """
    pool = state_of(request).pool
    # a router is healthy even if an engine has stopped: the next request loads the model
    engines = [model.engine for model in pool.loaded_models() if pool.is_pinned(model)]
    words = sorted({_word(engine) for engine in engines} - {EngineState.READY.value})
    if pool.is_starting:
        words = ["loading"]
    well = not words
    body: dict[str, Any] = {"status": "ok" if well else ", ".join(words)}
    if loading := pool.loading():
        body["loading"] = [{"model": name, "step": step} for name, step in loading.items()]
    headers = {"Retry-After": RETRY_AFTER_S} if pool.is_starting else None
    return json_response(body, 200 if well else 503, headers)


def _word(engine: EngineClient) -> str:
    """The state of an engine in a word."""
    if engine.state is EngineState.READY and not engine.responds:
        return "unresponsive"
    return engine.state.value


@router.get("/version")
async def version() -> Response:
    """The version of this package."""
    return json_response({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of requests that run or wait.

    Args:
        request: The connection.
    """
    models = state_of(request).pool.loaded_models()
    return json_response({"server_load": sum(model.admission.open for model in models)})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request,
    reset_running_requests: bool = False,
    reset_external: bool = False,
) -> Response:
    """Empties the prefix cache of every loaded model, the part on the host included.

    Requests that run keep their pages and go on; a request that starts afterwards reads its whole prompt. A client
    with an API key or a tenant's name drops only the prefixes that are its own, unless all clients share theirs.

    Args:
        request: The connection.
        reset_running_requests: vLLM's: changes nothing, as running requests do not keep the cache from
            being emptied.
        reset_external: vLLM's: changes nothing, as no other process holds a part of the cache.
    """
    state = state_of(request)
    refuse_foreign_pages(request, state)
    # a tenant empties its own part only
    if tenant := current_request().tenant:
        state.epochs.drop(tenant)
        if state.routers is not None:
            await state.routers.tell_epochs(state.epochs)
        return json_response({"success": True})
    engines = [model.engine for model in state.pool.loaded_models() if not model.encodes]
    await asyncio.gather(*(engine.forget_prefixes() for engine in engines))
    return json_response({"success": True})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The metrics in the format of Prometheus.

    Args:
        request: The connection.
    """
    state = state_of(request)
    if state.routers is not None:
        await state.routers.collect()
    return Response(state.metrics.text(), media_type=CONTENT_TYPE)
