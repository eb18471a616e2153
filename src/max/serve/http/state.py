"""The state that the handlers of all APIs share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from max.pipelines.config.lora_config import MOST_SCALE
from max.pipelines.store.creation import ADAPTER_NAME
from max.pipelines.store.local import ModelStore
from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.open_bodies import OpenBodies
from max.serve.http.kept_streams import KeptStreams
from max.serve.http.prefix_epochs import PrefixEpochs
from max.serve.http.streaming import unless_left
from max.serve.metrics import ServerMetrics
from max.serve.models.model import ServedModel
from max.serve.models.pool import ModelPool
from max.serve.models.tallies import KeyCounts, Tally
from max.serve.openai.chat_store import ChatStore
from max.serve.openai.responses.background import BackgroundResponses
from max.serve.openai.responses.store import ResponseStore
from max.serve.process.settings import ServerSettings
from max.serve.remote.cluster import Cluster
from max.serve.requests.request_context import current_request


class HasUnknownFields(Protocol):
    """A body that may have unknown fields."""

    @property
    def unknown_fields(self) -> str:
        """The unknown fields, separated by commas."""
        ...


class SharedCounts(KeyCounts, Protocol):
    """Counts that processes of the server share; ``CountFile`` implements it."""

    @property
    def bodies(self) -> Tally:
        """The bytes of the bodies of open requests."""
        ...


class Routers(Protocol):
    """The other processes of the server; ``Supervisor`` implements it."""

    async def tell_adapters(self, model: ServedModel) -> None:
        """Waits until requests to any process find the adapters of a model as they are now."""
        ...

    async def tell_epochs(self, epochs: PrefixEpochs) -> None:
        """Waits until no process uses the prefixes that a tenant has dropped."""
        ...

    async def collect(self) -> None:
        """Asks for the counts of the metrics."""
        ...

    async def restart(self) -> list[dict[str, Any]]:
        """Replaces the processes one after another, and returns which by which."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """The processes, with their states."""
        ...


@dataclass
class ServerState:
    """The state that the handlers of a server share.

    Args:
        settings: The settings.
        metrics: The metrics.
        pool: The models.
        store: The models folder; None: the server has one model.
        responses: The latest responses of OpenAI's API.
        chats: The latest chat completions that are stored.
        background: Those that are made without a connection.
        epochs: How often each tenant's cached prefixes were dropped.
        streams: The answers that outlive their connection.
        cluster: The machines of the engines; None: this one has all of them.
        shared_counts: Where bodies and the requests of keys are counted with other processes of the server; None:
            there are none.
        routers: Those processes, in the one that started them; None: there are none.

    Attributes:
        bodies: The bytes of the bodies of open requests.
    """

    settings: ServerSettings
    metrics: ServerMetrics
    pool: ModelPool
    store: ModelStore | None = None
    responses: ResponseStore = field(default_factory=ResponseStore)
    chats: ChatStore = field(default_factory=ChatStore)
    background: BackgroundResponses = field(default_factory=BackgroundResponses)
    epochs: PrefixEpochs = field(default_factory=PrefixEpochs)
    streams: KeptStreams = field(default_factory=KeptStreams)
    cluster: Cluster | None = None
    shared_counts: SharedCounts | None = None
    routers: Routers | None = None

    def __post_init__(self) -> None:
        # at least one body of the greatest size has to be open
        limit = getattr(self.settings, "max_open_request_bytes", 0)
        most = max(limit, getattr(self.settings, "max_request_bytes", 0))
        self.bodies = OpenBodies(
            most, None if self.shared_counts is None else self.shared_counts.bodies
        )

    async def model(self, name: str | None, keep_alive: float | None = None) -> ServedModel:
        """The model of a request, loaded first if it is not.

        Args:
            name: Its name; None: the default.
            keep_alive: Seconds that it stays loaded after the request; None: as before.

        Raises:
            ApiError: Status 404: no model has this name; 503: it cannot be loaded.
            ClientLeftError: The client disconnected before it was loaded.
        """
        # no watcher for the usual case, a model that is loaded
        use, receive = self.pool.use(name, keep_alive), current_request().receive
        if receive is None or self.pool.is_ready(name):
            model = await use
        else:
            model = await unless_left(receive, use)
        choose_adapter(model, name)
        return model


def choose_adapter(model: ServedModel, name: str | None) -> None:
    """Notes the adapter of the current request, which the name of its model or its field ``lora`` states.

    Args:
        model: The model.
        name: The name that the request gives; None: none.

    Raises:
        ApiError: Status 404: the adapter is not loaded.
    """
    current = current_request()
    current.named_adapter = name if name is not None and name in model.adapters else ""
    current.adapter = current.adapter or current.named_adapter
    # a model that was created with an adapter (ADAPTER of a Modelfile) runs with it unless another one is named
    if not current.adapter and model.recipe.has_adapter:
        current.adapter = ADAPTER_NAME
        return
    if current.adapter and current.adapter not in model.adapters:
        raise adapter_not_found(model, current.adapter)


def answering_name(model: ServedModel) -> str:
    """The name of the model in an answer to the current request: the one that the request gives, also of an adapter.

    Args:
        model: The model.
    """
    return current_request().named_adapter or model.name


def adapter_not_found(model: ServedModel, name: str) -> ApiError:
    """The error of a request for an adapter that is not loaded.

    Args:
        model: The model.
        name: The name of the adapter.
    """
    names = ", ".join(sorted(model.adapters)) or "none"
    return ApiError(
        f"there is no adapter {short_text(name)} of {model.name}; loaded are: {names}",
        status=404,
        param="lora",
        code="model_not_found",
    )


def state_of(request: Request, body: HasUnknownFields | None = None) -> ServerState:
    """The state of the server that a request came to.

    Args:
        request: The request.
        body: Its body; a header of the response lists its unknown fields. Its ``cache_salt`` is noted.
    """
    if body is not None and body.unknown_fields:
        names = body.unknown_fields[:500]
        # a header holds printable ASCII
        plain = "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in names)
        request.scope["state"]["unknown_fields"] = plain
    if (salt := getattr(body, "cache_salt", None)) is not None:
        current_request().cache_salt = salt
    if (lora := getattr(body, "lora", None)) is not None:
        current = current_request()
        current.adapter, current.adapter_scale = _named_adapter(lora)
    return request.app.state.server


def _named_adapter(value: Any) -> tuple[str, float]:
    """The name and the scale of the field ``lora``: a name, or an object with ``name`` and ``scale``.

    Raises:
        ApiError: It is something else.
    """
    scale: Any = 1.0
    if isinstance(value, dict):
        scale = value.get("scale", 1.0)
        value = value.get("name") if value.keys() <= {"name", "scale"} else None
    numeric = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not isinstance(value, str) or not value or not numeric or not abs(scale) <= MOST_SCALE:
        raise ApiError(
            f"lora is the name of an adapter, or an object with name and scale, a number of at most {MOST_SCALE:g}",
            param="lora",
        )
    return value, float(scale)


def refuse_foreign_pages(request: Request, state: ServerState) -> None:
    """Refuses a request from a web page of another host: browsers send POST requests of any page.

    Args:
        request: The request.
        state: The server; the origins of its ``cors_origins`` may send it.

    Raises:
        ApiError: Status 403.
    """
    origin = request.headers.get("origin")
    # programs send no origin, browsers always do
    if origin is None or origin in state.settings.cors_origins:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(f"web pages of {origin} may not change models", status=403)


class JsonResponse(Response):
    """A response of JSON, whose headers are made at once.

    Args:
        body: The JSON.
        status: The status.
        headers: More headers.
    """

    media_type = "application/json"

    def __init__(
        self, body: bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        if headers:
            super().__init__(body, status, headers)
            return
        self.status_code, self.background, self.body = status, None, body
        self.raw_headers = [_JSON_TYPE, (b"content-length", b"%d" % len(body))]


_JSON_TYPE = (b"content-type", b"application/json")


def json_response(
    data: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON.

    Args:
        data: The data.
        status: The status.
        headers: More headers.
    """
    return JsonResponse(msgspec.json.encode(data), status, headers)
