"""The application: all routes behind the gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from max._version import __version__
from max.serve.errors import ApiError
from max.serve.http import health
from max.serve.http.failures import as_api_error
from max.serve.http.middleware import Gate
from max.serve.http.state import ServerState, json_response
from max.serve.openai import chat, completions, models


def build_app(state: ServerState) -> ASGIApp:
    """Makes the application of a server.

    Args:
        state: What its handlers share.
    """
    origins = list(state.settings.cors_origins)
    cors = Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
    )
    app = FastAPI(
        title="Supremum",
        version=__version__,
        middleware=[cors] if origins else [],
        # its pages load scripts from other hosts
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    for module in (health, chat, completions, models):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _api_error)
    return Gate(app, state.settings, state.metrics)


def error_response(error: ApiError) -> Response:
    """The response of an error.

    Args:
        error: The error.
    """
    return json_response(error.body(), error.status, error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = {
        404: f"there is no route {path}",
        405: f"{path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    return error_response(ApiError(message, status=error.status_code, headers=headers))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The 400 of a body that does not fit its schema; it names the parameter.

    Args:
        errors: The errors of pydantic.
    """
    first = _nearest(errors)
    location = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError(f"the body is no JSON: {reason}", code="invalid_json")
    # types of unions stand in the location too
    location = [part for part in location if "[" not in part and part not in _UNION_MEMBERS]
    param = ".".join(location) or None
    if first["type"] == "missing":
        if param is None:
            return ApiError("the body is missing; give a JSON object", code="missing_body")
        return ApiError(f"{param} is missing", param=param, code="missing_required_parameter")
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    text = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(f"{param or 'the body'} is {shown}: {text[:1].lower()}{text[1:]}", param=param)


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict"})


def _nearest(errors: Sequence[Any]) -> Any:
    """Of the errors of a union's members the one that went deepest: that member was meant."""
    return max(errors, key=lambda error: len(error["loc"]))
