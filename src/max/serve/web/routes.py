"""The chat page and the page of the API; they load nothing from another host."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from max.serve.http.state import json_response

router = APIRouter(include_in_schema=False)
docs_router = APIRouter(include_in_schema=False)

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _text(name: str) -> str:
    return files("max.serve.web").joinpath(name).read_text(encoding="utf-8")


@cache
def _with_theme(name: str) -> str:
    """A page with the colors and the header that all pages share: it loads no second file."""
    return _text(name).replace("/* theme.css */\n", _text("theme.css"))


def _page(name: str) -> Response:
    """A page with a policy that forbids loading from other hosts."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(_with_theme(name), media_type="text/html", headers=headers)


@router.get("/")
async def chat_page() -> Response:
    """The chat page."""
    return _page("index.html")


@docs_router.get("/docs")
async def docs_page() -> Response:
    """The routes and their fields, from ``/openapi.json``."""
    return _page("docs.html")


@docs_router.get("/openapi.json")
async def schema(request: Request) -> Response:
    """The schema of the routes, which takes a fifth of a second to make.

    Args:
        request: The connection.
    """
    return json_response(await asyncio.to_thread(request.app.openapi))


@router.get("/favicon.ico")
async def icon() -> Response:
    """No icon."""
    return Response(status_code=204)
