"""The route of the chat page."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _page() -> str:
    return files("max.serve.web").joinpath("index.html").read_text(encoding="utf-8")


@router.get("/")
async def page() -> Response:
    """The chat page; it loads nothing from another host, and its policy forbids it."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(_page(), media_type="text/html", headers=headers)


@router.get("/favicon.ico")
async def icon() -> Response:
    """No icon."""
    return Response(status_code=204)
