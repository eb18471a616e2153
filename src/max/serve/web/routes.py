"""The chat page and the page of the API; they load nothing from another host."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from max._host.process_caches import cached_results
from max.serve.errors import ApiError, short_text
from max.serve.http.state import json_response
from max.serve.web.page_files import FOLDER, PAGE_POLICY, caching, modules, page_file, version

router = APIRouter(include_in_schema=False)
docs_router = APIRouter(include_in_schema=False)


@cached_results()
def _html(name: str) -> str:
    text = (FOLDER / name).read_text(encoding="utf-8")
    preloads = "".join(
        f'<link rel="modulepreload" href="{{assets}}/{each}">\n' for each in modules()
    )
    return text.replace("{preloads}", preloads).replace("{assets}", f"ui/{version()}")


def _page(name: str) -> Response:
    """A page with a policy that forbids loading from other hosts."""
    headers = {
        "Content-Security-Policy": PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # a page that opens this one, or is opened by it, gets no handle of its window
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return Response(_html(name), media_type="text/html", headers=headers)


@router.get("/")
async def chat_page() -> Response:
    """The chat page."""
    return _page("index.html")


@router.get("/signed-in")
async def signed_in_page() -> Response:
    """The page to which an authorization server of an MCP server sends the user."""
    return _page("signed_in.html")


@docs_router.get("/docs")
async def docs_page() -> Response:
    """The routes and their fields, from ``/openapi.json``."""
    return _page("docs.html")


@docs_router.get("/ui/{of_version}/{name:path}")
async def file_of_pages(of_version: str, name: str, request: Request) -> Response:
    """A script, style or font of the pages.

    Args:
        of_version: The version of the files that the page was made for.
        name: The file.
        request: The connection.
    """
    found = page_file(name)
    if found is None:
        raise ApiError(f"the pages have no file {short_text(name)}", status=404)
    headers = {
        "Cache-Control": caching(of_version),
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
        # RFC 9110, 12.5.5: caches keep the plain answer and the compressed one apart
        "Vary": "Accept-Encoding",
    }
    if found.policy:
        headers["Content-Security-Policy"] = found.policy
    packed = found.compressed and "gzip" in request.headers.get("accept-encoding", "")
    if packed:
        headers["Content-Encoding"] = "gzip"
    data = found.compressed if packed else found.data
    return Response(data, media_type=found.media_type, headers=headers)


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
