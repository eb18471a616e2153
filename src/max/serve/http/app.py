"""The application: all routes behind the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from max._spelling import did_you_mean
from max._version import __version__
from max.pipelines.core.exceptions import UserError
from max.serve.anthropic import messages
from max.serve.errors import ApiError
from max.serve.http import cluster_routes, health, stream_routes, tokens, unsupported_routes
from max.serve.http.bodies.body import BodyRoute
from max.serve.http.bodies.content_types import ContentTypes
from max.serve.http.bodies.validation import validation_error
from max.serve.http.connections.hosts import HostRule
from max.serve.http.error_responses import as_api_error
from max.serve.http.kept_streams import StreamKeeper, is_kept
from max.serve.http.middleware import Gate
from max.serve.http.response_sockets import ResponseSockets
from max.serve.http.route_index import RAISED, RouteIndex
from max.serve.http.state import ServerState, json_response
from max.serve.http.streaming import ClientLeftError
from max.serve.llama_cpp import infill, slots
from max.serve.ollama import blobs, library
from max.serve.ollama import create as ollama_create
from max.serve.ollama import routes as ollama
from max.serve.openai import (
    adapters,
    chat,
    completions,
    decisions,
    embeddings,
    invocations,
    models,
    stored_chats,
)
from max.serve.openai.responses import compaction
from max.serve.openai.responses import routes as responses
from max.serve.openai.responses import stored as stored_responses
from max.serve.process.settings import ServerSettings
from max.serve.requests.steps import next_step
from max.serve.tracing import Tracing
from max.serve.web import routes as web
from max.serve.worker.client import EngineLostError, EngineUnavailableError

CLIENT_CLOSED = 499
"""The status that logs and metrics show for a request whose client has left."""


def build_app(
    state: ServerState, tracing: Tracing | None = None, hosts: HostRule | None = None
) -> ASGIApp:
    """Makes the application of a server.

    Args:
        state: What its handlers share.
        tracing: Traces its requests; None: no traces.
        hosts: The hosts that it answers; None: every host, as no socket listens.
    """
    app = _application(state)
    index, content_types = _add_routes(app, state.settings)
    _add_error_handlers(app)
    origins = state.settings.cors_origins
    gate = Gate(
        # only the stack adds the headers of CORS
        _Stack(app, None if origins else index),
        state.settings,
        state.metrics,
        tracing,
        epochs=state.epochs,
        bodies=state.bodies,
        hosts=hosts,
        content_types=content_types,
        error_body=error_body,
        counts=state.shared_counts,
    )
    # outside of the gate, so that each message passes it as a request of its own
    return ResponseSockets(
        gate, gate.refusal, origins, is_served="responses" in state.settings.api_types
    )


def _application(state: ServerState) -> FastAPI:
    """The application with its middleware, without routes."""
    origins = list(state.settings.cors_origins)
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    keeper = Middleware(StreamKeeper, streams=state.streams, error_body=error_body)
    app = FastAPI(
        title="Supremum",
        version=__version__,
        middleware=[*([cors] if origins else []), keeper],
        # FastAPI's own pages load scripts from other hosts; /docs and /openapi.json are in max.serve.web
        docs_url=None,
        openapi_url=None,
        redoc_url=None,
    )
    app.state.server = state
    return app


def _add_routes(app: FastAPI, settings: ServerSettings) -> tuple[RouteIndex, ContentTypes]:
    """Adds the routes of the APIs that are served; returns their index, and the types of their bodies."""
    apis = {
        "openai": (tokens, embeddings, chat, stored_chats, completions, decisions),
        "responses": (responses, compaction, stored_responses),
        "anthropic": (messages,),
        "ollama": (ollama, library, ollama_create, blobs),
        "sagemaker": (invocations,),
        "llama.cpp": (infill, slots),
    }
    served = settings.api_types
    of_apis = [module for name, api in apis.items() if name in served for module in api]
    modules = (health, models, adapters, cluster_routes, stream_routes, *of_apis)
    routes = app.router.routes
    # not `include_router`: it searches the routes of each router twice for a request
    for module in (*modules, unsupported_routes):
        routes += module.router.routes
    # routes that are absent say so whatever the type of their body is
    json_routes = [
        each for module in modules if module is not blobs for each in module.router.routes
    ]
    unmarked = [
        route.path
        for module in (ollama, ollama_create)
        for route in module.router.routes
        if isinstance(route, Route)
    ]
    app.state.paths = [
        each.path_format
        for module in modules
        for each in module.router.routes
        if isinstance(each, APIRoute) and each.include_in_schema
    ]
    routes += web.docs_router.routes
    if settings.web_page and "openai" in served:  # the chat page uses it
        routes += web.router.routes
    index = RouteIndex(list(routes))
    # routes are searched in their order
    routes.insert(0, index)
    return index, ContentTypes(json_routes, unmarked, blobs.router.routes)


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientLeftError, _client_left)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    # other errors are logged with a traceback, and their connection is closed, as the answer says
    for expected in (
        UserError,
        EngineLostError,
        EngineUnavailableError,
        TimeoutError,
        RecursionError,
        UnicodeEncodeError,
    ):
        app.add_exception_handler(expected, _api_error)
    app.add_exception_handler(Exception, _unexpected_error)


class _Stack:
    """The middleware and the routes of an application, without what FastAPI does before them for each request.

    A route that reads its body itself is called past all of them: nothing is left to do for it, but for answers that
    are kept, and for its errors, which take the whole way.

    Args:
        app: The application, which is not changed any more.
        index: Finds the routes that may be called in this way; None: there are none.
    """

    def __init__(self, app: FastAPI, index: RouteIndex | None) -> None:
        self._app, self._stack, self._index = app, app.build_middleware_stack(), index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        scope["app"] = self._app
        route = None if self._index is None else self._index.find(scope)
        if not isinstance(route, BodyRoute) or not route.reads_body or is_kept(scope):
            await self._stack(scope, receive, send)
            return
        scope["route"] = route
        try:
            response = await route.respond(Request(scope, receive, send))
        except Exception as error:
            scope[RAISED] = error
            await self._stack(scope, receive, send)
            return
        await next_step()
        await response(scope, receive, send)


def error_response(request: Request, error: ApiError) -> Response:
    """The response of an error, with the body of the API that the request used."""
    body = error_body(request.url.path, error)
    return json_response(body, error.status, error.headers)


def error_body(path: str, error: ApiError) -> Mapping[str, Any]:
    """The body of an error, in the form of the API that a path belongs to.

    Args:
        path: The path of the request.
        error: The error.
    """
    if path.startswith("/v1/messages"):
        return messages.error_body(error)
    if path.startswith("/api/"):
        return {"error": error.message}
    return error.body()


async def _api_error(request: Request, error: Exception) -> Response:
    return error_response(request, as_api_error(error))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    response = error_response(request, as_api_error(error))
    # Starlette raises the error again after it, and uvicorn then closes the connection
    response.headers["connection"] = "close"
    return response


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    match error.status_code:
        case 404:
            paths = request.app.state.paths
            message = f"there is no route {path[:200]}{did_you_mean(path, paths, cutoff=0.75)}"
        case 405:
            takes = f"; it takes {headers['Allow']}" if "Allow" in headers else ""
            message = f"{path} does not take {request.method}{takes}"
        case _:
            message = str(error.detail)
    return error_response(request, ApiError(message, status=error.status_code, headers=headers))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(request, validation_error(error.errors()))
