"""The routes of replicas: ``/cluster``, ``/cluster/drain``, ``/cluster/upgrade``; `max cluster` calls them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from max.pipelines.generation.process.events import StartCounts
from max.serve.errors import ApiError
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.state import ServerState, json_response, refuse_foreign_pages, state_of
from max.serve.models.model import ServedModel
from max.serve.worker.replica import Replica

router = APIRouter(tags=["operation"], route_class=BodyRoute)


class DrainBody(BaseModel):
    """What is to be drained: a machine, or one replica of a model."""

    model_config = ConfigDict(extra="forbid")
    node: str | None = None
    """The first characters of a machine's identifier, or its address."""
    model: str | None = None
    replica: int | None = None


class UpgradeBody(BaseModel):
    """What is replaced: the replicas of a model, or the routers."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    routers: bool = False


@router.get("/cluster")
async def cluster(request: Request) -> Response:
    """The machines, the replicas of each loaded model with their load, the routers, and the process that owns them.

    Args:
        request: The connection.
    """
    state = state_of(request)
    machines = [] if state.cluster is None else await asyncio.to_thread(state.cluster.nodes)
    nodes = [
        {
            "node": node.identifier,
            "address": node.address,
            "cpus": node.cpus,
            "alive": node.is_alive,
        }
        for node in machines
    ]
    models = [
        {
            "model": model.name,
            "state": model.engine.state.value,
            "replicas": [_describe_replica(model, replica) for replica in model.engine.replicas],
        }
        for model in state.pool.loaded_models()
    ]
    routers = [] if state.routers is None else state.routers.describe()
    found = {"owner": os.getpid(), "nodes": nodes, "models": models, "routers": routers}
    return json_response(found)


def _describe_replica(model: ServedModel, replica: Replica) -> dict[str, Any]:
    stats, ready = replica.stats, replica.ready
    return {
        "replica": replica.number,
        "state": replica.state.value if replica.responds else "unresponsive",
        "loading": replica.loading,
        "node": replica.node,
        # those of routers are in the engine's report only
        "requests": max(len(model.engine.of(replica)), stats.running + stats.waiting),
        "running": stats.running,
        "waiting": stats.waiting,
        "used_pages": stats.used_pages,
        "total_pages": 0 if ready is None else ready.total_pages,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.reused_tokens,
        "restarts": replica.restarts,
        "start": asdict(StartCounts() if ready is None else ready.start),
    }


@router.post("/cluster/drain")
async def drain(body: DrainBody, request: Request) -> Response:
    """Replaces the replicas of a machine, or one replica, by others elsewhere, and ends them after their requests.

    Answers when they have ended.

    Args:
        body: What is drained.
        request: The connection.
    """
    state = state_of(request)
    refuse_foreign_pages(request, state)
    if (body.node is None) == (body.replica is None):
        raise ApiError("give either node, or replica and model", param="node")
    if body.node is not None:
        node = await _exclude_node(state, body.node)
        models = state.pool.loaded_models()
        replaced = await _replace(models, lambda model: _of_node(model, node))
    else:
        number = body.replica
        replaced = await _replace(
            [_model(state, body.model)], lambda model: _of_number(model, number)
        )
    return json_response({"replaced": replaced})


@router.post("/cluster/upgrade")
async def upgrade(body: UpgradeBody, request: Request) -> Response:
    """Replaces the replicas of a model, or the routers, one after another, so that files and program are read anew.

    Answers when all are replaced.

    Args:
        body: The model, or that the routers are meant.
        request: The connection.
    """
    state = state_of(request)
    refuse_foreign_pages(request, state)
    if body.routers:
        if body.model is not None:
            raise ApiError("give either model or routers", param="routers")
        if state.routers is None:
            raise ApiError("this server has one process; --routers gives it more", param="routers")
        return json_response({"replaced": await _finish_shielded(state.routers.restart())})
    replaced = await _replace(
        [_model(state, body.model)], lambda model: list(model.engine.replicas)
    )
    return json_response({"replaced": replaced})


def _model(state: ServerState, name: str | None) -> ServedModel:
    """A loaded model; the only one, if no name is given."""
    loaded = state.pool.loaded_models()
    found = [model for model in loaded if name in (None, model.name)]
    if len(found) != 1:
        names = ", ".join(repr(model.name) for model in loaded) or "none"
        raise ApiError(f"name one of the loaded models; they are {names}", param="model")
    return found[0]


async def _exclude_node(state: ServerState, name: str) -> str:
    """The identifier of a machine, on which no further replica is started from now on."""
    if state.cluster is None:
        raise ApiError("this server runs on one machine; --ray runs it on several", param="node")
    nodes = await asyncio.to_thread(state.cluster.nodes)
    found = [node for node in nodes if name and node.is_one_of([name])]
    if len(found) != 1:
        names = ", ".join(f"{node.identifier[:12]} ({node.address})" for node in nodes)
        raise ApiError(f"{name!r} names {len(found)} machines; there are {names}", param="node")
    identifier = found[0].identifier
    if all(node.identifier == identifier or not node.is_alive for node in nodes):
        raise ApiError(f"{name!r} is the only machine", param="node")
    # first, so that no replacement starts there
    state.cluster.exclude(identifier)
    return identifier


def _of_node(model: ServedModel, identifier: str) -> list[Replica]:
    """The replicas of a model on a machine."""
    return [each for each in model.engine.replicas if each.node == identifier]


def _of_number(model: ServedModel, number: int | None) -> list[Replica]:
    """The replica of a number."""
    if found := [each for each in model.engine.replicas if each.number == number]:
        return found
    numbers = ", ".join(str(each.number) for each in model.engine.replicas)
    raise ApiError(f"{model.name} has no replica {number}; it has {numbers}", param="replica")


async def _replace(
    models: list[ServedModel], choose: Callable[[ServedModel], list[Replica]]
) -> list[dict[str, Any]]:
    """Replaces replicas, one after another; goes on if the client disconnects.

    Args:
        models: The models.
        choose: Returns those of a model, after earlier changes of its replicas have ended.
    """

    async def work() -> list[dict[str, Any]]:
        done: list[dict[str, Any]] = []
        for model in models:
            async with model.engine.changes:
                for replica in choose(model):
                    try:
                        new = await model.engine.replace_replica(replica)
                    except (OSError, RuntimeError) as error:
                        raise ApiError(
                            f"replicas replaced: {len(done)}; no other can be started: {error}",
                            status=503,
                        ) from error
                    done.append({"model": model.name, "replica": replica.number, "by": new.number})
        return done

    return await _finish_shielded(work())


async def _finish_shielded(work: Coroutine[Any, Any, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The result of what goes on if the client disconnects.

    Raises:
        ApiError: Status 503: it cannot be finished.
    """
    try:
        # a replacement that stops halfway would leave two replicas
        return await asyncio.shield(asyncio.ensure_future(work))
    except OSError as error:
        raise ApiError(str(error), status=503) from error
