"""The content types of bodies: a web page of another host can send JSON only if the server allows it (CORS)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from max.serve.errors import ApiError, short_text
from max.serve.http.route_index import RouteIndex

_UNMARKED = frozenset({"", "application/x-www-form-urlencoded"})
"""The types of clients that set none: of most libraries, and of ``curl -d``."""
_BROWSER_HEADERS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
"""Headers of browsers. Each has the first one in every POST and DELETE request, and pages cannot leave it out."""
_BYTES = "application/octet-stream"
"""The type of files. As that of JSON, a page can send it to another host only if the server allows it."""


class ContentTypes:
    """Decides which bodies are read.

    Args:
        routes: The routes whose bodies are JSON.
        unmarked_paths: The paths of those that also take bodies without a type, or with that of ``curl -d``, unless
            a browser sends them: Ollama's documentation and clients omit the type.
        file_routes: The routes whose bodies are files. They have any type, or that of files if a browser sends them.
    """

    def __init__(
        self,
        routes: Iterable[BaseRoute] = (),
        unmarked_paths: Iterable[str] = (),
        file_routes: Iterable[BaseRoute] = (),
    ) -> None:
        changing = ("POST", "PUT", "PATCH", "DELETE")
        self._routes: Sequence[Route] = [
            route
            for route in routes
            if isinstance(route, Route) and any(each in changing for each in route.methods or ())
        ]
        self._unmarked = frozenset(unmarked_paths)
        self._index = RouteIndex(self._routes)
        self._files = [route for route in file_routes if isinstance(route, Route)]

    def refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Why the body of a request is refused; None if it is not, or if there is none.

        Args:
            scope: The request.
            headers: Its headers.
        """
        # RFC 9112, 6.3: a request with neither header has no body
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if not has_body:
            return None
        is_file = False
        # most requests are found by one look-up
        if self._index.find(scope) is None:
            is_file = _matches(self._files, scope)
            if not is_file and not _matches(self._routes, scope):
                return None
        # each of several headers counts, as readers differ in which one they take
        given = headers.getlist("content-type") or [""]
        types = [each.partition(";")[0].strip().lower() for each in given]
        if not is_file and all(map(_is_json, types)):
            return None
        from_browser = any(name in headers for name in _BROWSER_HEADERS)
        if is_file and (not from_browser or set(types) == {_BYTES}):
            return None
        if scope["path"] in self._unmarked and set(types) <= _UNMARKED and not from_browser:
            return None
        got = f"Content-Type: {short_text(given[0])[1:-1]}" if given[0] else "no Content-Type"
        wanted = f"Content-Type: {_BYTES if is_file else 'application/json'}"
        return ApiError(
            f"the body has {got}; send the header {wanted} (curl: -H '{wanted}')",
            status=415,
            code="invalid_content_type",
        )


def _matches(routes: Sequence[Route], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
