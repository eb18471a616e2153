"""What the handlers of all APIs share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from max.serve.errors import model_not_found
from max.serve.metrics import ServerMetrics
from max.serve.model import ServedModel
from max.serve.settings import ServerSettings


class HasUnknownFields(Protocol):
    """A body that may have fields that nothing reads."""

    @property
    def unknown_fields(self) -> str:
        """The fields, with commas between."""
        ...


@dataclass
class ServerState:
    """What the handlers of a server share.

    Args:
        settings: The settings.
        metrics: The metrics.
        models: The models by name; the first is the default.
    """

    settings: ServerSettings
    metrics: ServerMetrics
    models: dict[str, ServedModel] = field(default_factory=dict)

    def model(self, name: str | None) -> ServedModel:
        """The model that a request asks for.

        Args:
            name: Its name; None: the default.

        Raises:
            ApiError: Status 404: there is none of that name.
        """
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise model_not_found(name, list(self.models))
        return self.models[name]


def state_of(request: Request, body: HasUnknownFields | None = None) -> ServerState:
    """The state of the server that a request came to.

    Args:
        request: The request.
        body: Its body; the fields that nothing reads are named in a header of the response.
    """
    if body is not None and body.unknown_fields:
        names = body.unknown_fields[:500]
        plain = "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in names)
        request.scope["state"]["unknown_fields"] = plain
    return request.app.state.server


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON.

    Args:
        data: The data.
        status: The status.
        headers: More headers.
    """
    return Response(
        msgspec.json.encode(data), status, media_type="application/json", headers=headers
    )
