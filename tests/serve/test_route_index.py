"""The look-up of routes finds what a search through all of them finds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, NoMatchFound, Route
from starlette.types import Scope

from max.serve.http.route_index import RouteIndex


def scope_of(method: str, path: str, **more: Any) -> Scope:
    return {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], **more}


@pytest.mark.parametrize("seed", range(20))
def test_random_routes(seed: int) -> None:
    draw = random.Random(seed)
    paths = ["/a", "/b", "/a/b", "/{name}", "/a/{rest:path}", "/b/{name}", "/", "/a/"]

    async def endpoint(request: Request) -> Response:
        return Response(request.url.path)

    routes = [
        Route(draw.choice(paths), endpoint, methods=draw.sample(["GET", "POST", "PUT"], draw.randint(1, 3)))
        for _ in range(draw.randint(1, 12))
    ]  # fmt: skip
    if draw.random() < 0.3:
        routes.insert(draw.randrange(len(routes)), Mount("/a", app=endpoint))  # pyright: ignore
    index = RouteIndex(routes)
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
        for path in ("/a", "/b", "/a/b", "/c", "/a/c/d", "/b/c", "/", "/a/", "/none/at/all"):
            scope = scope_of(method, path)
            full = [route for route in routes if route.matches(scope)[0] is Match.FULL]
            found = index.find(scope)
            match, child = index.matches(scope)
            literal = [r for r in routes if isinstance(r, Route) and r.path == path]
            is_literal = any(method in (route.methods or ()) for route in literal)
            assert found is (full[0] if is_literal and full else None)
            if found is None:
                assert match is Match.NONE and child == {}
            else:
                assert (match, child) == found.matches(scope)
                assert index.find(scope_of(method, f"/root{path}", root_path="/root")) is found
    assert index.find({"type": "websocket", "path": "/a"}) is None
    with pytest.raises(NoMatchFound):
        index.url_path_for("a")


def test_a_request_is_handled_by_its_route() -> None:
    said: list[Any] = []

    async def endpoint(request: Request) -> Response:
        return Response("here")

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        raise AssertionError

    index = RouteIndex([Route("/a", endpoint)])
    asyncio.run(
        index.handle(scope_of("GET", "/a", endpoint=endpoint, path_params={}), receive, send)
    )
    assert said[0]["status"] == 200 and said[1]["body"] == b"here"
