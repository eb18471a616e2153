"""Finds the route of a path without variables by one look-up, as a search through all routes takes its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.routing import BaseRoute, Match, NoMatchFound, Route
from starlette.types import Receive, Scope, Send

RAISED = "raised"
"""The key of a connection for the error that its route has raised already: the middleware answers it."""


class RouteIndex(BaseRoute):
    """Stands before the routes of an application, and has the same order of precedence.

    Args:
        routes: The routes, in their order.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes: dict[tuple[str, str], BaseRoute] = {}
        for route in routes:
            if isinstance(route, Route) and "{" not in route.path:
                for method in route.methods or ():
                    self._add(routes, method, route.path)

    def _add(self, routes: Sequence[BaseRoute], method: str, path: str) -> None:
        scope = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}
        # a route with variables may come first
        first = next(r for r in routes if r.matches(dict(scope))[0] is Match.FULL)
        self._routes[method, path] = first

    def find(self, scope: Scope) -> BaseRoute | None:
        """The route of a connection; None: its path has variables, or there is none.

        Args:
            scope: The connection.
        """
        if scope["type"] != "http":
            return None
        path = get_route_path(scope) if scope.get("root_path") else scope["path"]
        return self._routes.get((scope["method"], path))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether it has the route of a connection.

        Args:
            scope: The connection.
        """
        route = self.find(scope)
        return (Match.NONE, {}) if route is None else route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection that it matches.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        if (error := scope.get(RAISED)) is not None:
            raise error
        route = self.find(scope)
        assert route is not None
        await route.handle(scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        """Makes no URLs: the routes behind it do."""
        raise NoMatchFound(name, path_params)
