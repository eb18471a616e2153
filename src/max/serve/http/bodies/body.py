"""Bodies of requests: read, checked against the limits and against the schema of the route."""

from __future__ import annotations

import typing
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from max._host.process_caches import cached_results
from max.serve.errors import ApiError
from max.serve.http.bodies.json_reader import read_object
from max.serve.http.bodies.validation import validation_error
from max.serve.http.streaming import ClientLeftError
from max.serve.requests.request_context import current_request
from max.serve.requests.steps import next_step
from max.serve.requests.threads import by_size

T = TypeVar("T")


class BodyRoute(APIRoute):
    """A route whose handler gets the body of the request as ``body``, read by :func:`read_body`."""

    _handler: Callable[[Request], Coroutine[Any, Any, Response]] | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of requests."""
        # annotations are texts under `from __future__ import annotations`
        kind = typing.get_type_hints(self.endpoint).get("body")
        if kind is None:
            return super().get_route_handler()
        endpoint = self.endpoint

        async def handle(request: Request) -> Response:
            await next_step(is_first=True)
            body = await read_body(request, kind)
            await next_step()
            return await endpoint(body=body, request=request)

        self._handler = handle
        return handle

    @property
    def reads_body(self) -> bool:
        """Whether its handler has a body."""
        return self._handler is not None

    def respond(self, request: Request) -> Coroutine[Any, Any, Response]:
        """Makes the response to a request, whose errors are answered by the application's middleware.

        Args:
            request: The request, of one of the route's methods; the handler has a body.
        """
        assert self._handler is not None
        return self._handler(request)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a connection; without the stacks of dependencies, which a route with a body does not have.

        Args:
            scope: The connection.
            receive: Its body.
            send: Its response.
        """
        if self._handler is None or scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        response = await self.respond(Request(scope, receive, send))
        await response(scope, receive, send)


async def read_body(request: Request, schema: type[T]) -> T:
    """The body of a request, whose type the gate has checked; a large one is read in a thread.

    Args:
        request: The connection.
        schema: Its schema.

    Raises:
        ApiError: It is no JSON, beyond a limit, or does not fit the schema.
        ClientLeftError: The client disconnected before it was complete.
    """
    text = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        text += message.get("body", b"")
        more = message.get("more_body", False)
    if not text:
        raise ApiError("the body is missing; give a JSON object", code="missing_body")
    current_request().body_bytes = len(text)
    return await by_size(_parse_body, text, schema)


def of_schema(value: Any, schema: type[T]) -> T:
    """A value with the types of a schema.

    Args:
        value: The value, as the JSON reader made it.
        schema: The schema.

    Raises:
        ApiError: It does not fit.
    """
    try:
        return _adapter(schema).validate_python(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from error


def _parse_body(text: bytearray, schema: type[T]) -> T:
    value = read_object(text, _fields_of(schema))
    # the bytes are freed before the values are checked
    text.clear()
    return of_schema(value, schema)


@cached_results(256)
def _adapter(schema: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(schema)


@cached_results(256)
def _fields_of(schema: type[Any]) -> frozenset[str] | None:
    """The names of a schema's fields; None where it has no names."""
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return None
    fields = cast("type[BaseModel]", schema).model_fields
    return frozenset(field.alias or name for name, field in fields.items())
