"""A router: a process that answers requests of the server's port, with connections of its own to every engine."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from max.serve.http.app import build_app, error_body
from max.serve.http.connections.hosts import HostRule
from max.serve.http.connections.quiet_server import QuietServer
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.canaries import Canary
from max.serve.models.loading import model_of
from max.serve.models.model import ServedModel
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.logs import set_up_logs
from max.serve.process.process_end import end_soon
from max.serve.process.running import (
    Stop,
    end_gracefully,
    http_server,
    keep_heap,
    loop_factory,
    until_stopped,
    wait_started,
)
from max.serve.remote.connections import Acceptor, close_listener, listen
from max.serve.requests.request_context import name_requests_in_logs
from max.serve.routers.address import LINK, OWNER
from max.serve.routers.count_file import counts_of
from max.serve.routers.followed_engines import FollowedEngines
from max.serve.routers.forwarding import Forwarder, tunnel
from max.serve.routers.lifeline import has_ended
from max.serve.routers.messages import (
    End,
    Engines,
    Epochs,
    Link,
    Look,
    Metrics,
    Order,
    Reply,
    RouterSettings,
)
from max.serve.routers.shared_channel import NEXT_OWNER_S
from max.serve.tracing import Tracing
from max.serve.worker.replica import Replica

logger = logging.getLogger("max.serve")

IDLE_S = 31.0
"""Seconds after which a connection without requests is closed by the server, and a little more."""
_LOOK_S = 0.1


def run_router(
    settings: RouterSettings,
    listener: socket.socket,
    connection: Connection,
    lifeline: Connection | None = None,
) -> None:
    """Answers requests until the owner of the engines ends it, or is gone for good; the main function of the process.

    Args:
        settings: What it is started with.
        listener: The socket of the server.
        connection: The channel to the owner.
        lifeline: The pipe that ends with the first process of the server; None: there is one owner only.
    """
    # signals of a terminal reach all processes, and the owner ends its routers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    set_up_logs(settings.log_level, settings.settings.logs)
    faulthandler.enable()
    endpoint = settings.settings.otlp_endpoint
    tracing = Tracing(endpoint) if endpoint else None
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_Router(settings, listener, connection, tracing, lifeline).run())
    if tracing is not None:
        tracing.close()
    end_soon()


class _Router:
    """A router in its event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        listener: socket.socket,
        connection: Connection,
        tracing: Tracing | None,
        lifeline: Connection | None,
    ) -> None:
        self._lifeline = lifeline
        self._routing, self._settings = settings, settings.settings
        self._listener, self._connection, self._tracing = listener, connection, tracing
        self._engines = [
            # the row: routers begin at different ones of equally loaded engines
            FollowedEngines(self._settings.watch, model.is_single, settings.row)
            for model in settings.models
        ]
        self._told: list[Engines | None] = [None] * len(settings.models)
        self._numbers = [0] * len(settings.models)  # of the last orders that were obeyed
        self._models: list[ServedModel | None] = [None] * len(settings.models)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drains = False

    async def run(self) -> None:
        """Answers requests until it is told to end."""
        name_requests_in_logs(logger)
        settings, routing = self._settings, self._routing
        self._stop = Stop(settings.graceful_timeout_s, [signal.SIGTERM])
        self._metrics = ServerMetrics()
        self._counts = counts_of(
            settings, routing.folder, routing.rows, routing.row, len(routing.models)
        )
        self._pool = ModelPool(dict, _load_nothing, PoolLimits())
        self._state = state = ServerState(
            settings, self._metrics, self._pool, shared_counts=self._counts
        )
        hosts = HostRule.of(settings, self._listener.getsockname()[0])
        owner = os.path.join(routing.folder, OWNER)
        self._is_ready = False
        self._forwarder = Forwarder(
            self._closing(build_app(state, self._tracing, hosts)),
            owner,
            lambda: self._is_ready,
            error_body,
        )
        self._links = 0
        self._take_owner(self._connection)
        door = None
        if self._lifeline is not None:
            door = listen(routing.door.host)
            self._let_owners_in(Acceptor(door, routing.door.key))
        self._server = server = http_server(
            settings, self._forwarder, self._listener, tunnel(owner)
        )
        loading = asyncio.ensure_future(self._load())
        serving = asyncio.ensure_future(server.serve([self._listener]))
        try:
            await wait_started(server, serving)
            stopped = asyncio.ensure_future(until_stopped(serving, self._stop))
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            if self._is_ready:
                self._link.send(Reply(0))
            await stopped
            if self._drains:
                await self._drain(serving)
            await end_gracefully(server, serving, self._stop, self._pool)
        finally:
            loading.cancel()
            if door is not None:
                close_listener(door)
            for engines in self._engines:
                engines.close()
            await self._pool.close()

    def _closing(self, app: Any) -> Any:
        """The application, whose answers end their connections while the router is drained."""

        async def closing(scope: Any, receive: Any, send: Any) -> None:
            if not self._drains:
                await app(scope, receive, send)
                return

            async def last_send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    # RFC 9112, 9.6: the client sends its next request on another connection, to another router
                    headers = [*message.get("headers", []), (b"connection", b"close")]
                    message = {**message, "headers": headers}
                await send(message)

            await app(scope, receive, last_send)

        return closing

    async def _drain(self, serving: asyncio.Future[None]) -> None:
        """Takes no more connections, and waits until clients have left those that there are."""
        server: QuietServer = self._server
        for each in server.servers:
            each.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + IDLE_S
        self._stop.clear()
        while (
            server.server_state.connections and loop.time() < end and not self._stop.is_set()
        ) and not serving.done():
            await asyncio.sleep(_LOOK_S)

    async def _load(self) -> None:
        """Connects to the engines of all models, and reads what requests need of the models."""
        loads = [self._load_model(number) for number in range(len(self._routing.models))]
        models = await asyncio.gather(*loads)
        for model in models:
            self._pool.pin(model)
        for model, routed in zip(models, self._routing.models, strict=True):
            if routed.canary_of:
                canary = Canary(model.name, routed.share, routed.by)
                self._pool.set_canary(routed.canary_of, canary)
        keep_heap()
        self._is_ready = True

    async def _load_model(self, model_index: int) -> ServedModel:
        routed = self._routing.models[model_index]
        client = await self._engines[model_index].client()
        model = await model_of(routed.name, self._settings, routed.config, client)
        # the limits of the queue are those of the server, not of a router
        model.admission.tally = self._counts.model(model_index)
        client.turn = self._counts.turn(model_index)
        if (told := self._told[model_index]) is not None:
            model.adapters = dict(told.adapters)
        client.followers.append(_Places(model))
        await self._engines[model_index].wait_connected()
        self._models[model_index] = model
        return model

    def _let_owners_in(self, acceptor: Acceptor) -> None:
        """Takes each process that connects and knows the key as the owner of the engines."""
        loop = asyncio.get_running_loop()

        def take() -> None:
            while True:
                try:
                    purpose, connection = acceptor.next()
                    if purpose == LINK:
                        loop.call_soon_threadsafe(self._take_owner, connection)
                    else:
                        connection.close()
                except (OSError, RuntimeError):  # the router ends
                    return

        threading.Thread(target=take, name="owners", daemon=True).start()

    def _take_owner(self, connection: Connection) -> None:
        self._links += 1
        # of an earlier owner nothing is taken any more
        self._link = Link(connection, partial(self._take, self._links))
        # each owner counts its orders anew
        self._numbers = [0] * len(self._numbers)
        if self._is_ready:
            self._link.send(Reply(0))

    def _take(self, link: int, message: Order | None) -> None:
        if link != self._links:
            return
        if message is None:
            self._await_owner(link, asyncio.get_running_loop().time() + NEXT_OWNER_S)
            return
        task = asyncio.ensure_future(self._obey(message, self._link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _await_owner(self, link: int, end: float) -> None:
        """Waits for the next owner of the engines; ends this process if there is none."""
        if link != self._links or self._stop.is_set():
            return
        loop = asyncio.get_running_loop()
        if self._lifeline is None or has_ended(self._lifeline) or loop.time() > end:
            self._stop.graceful_s = 0.0
            self._stop.take(signal.SIGTERM)
            return
        loop.call_later(_LOOK_S, self._await_owner, link, end)

    async def _obey(self, order: Order, link: Link) -> None:
        match order.what:
            case Engines() as told:
                await self._follow(order.number, told)
            case Epochs(first, of_tenants):
                self._state.epochs.set_all(first, of_tenants)
            case Metrics():
                link.send(Reply(order.number, self._metrics.counts()))
                return
            case Look():
                found = (self._forwarder.open, self._metrics.counts())
                link.send(Reply(order.number, found))
                return
            case End(graceful_s):
                self._end(graceful_s)
        link.send(Reply(order.number))

    def _end(self, graceful_s: float | None) -> None:
        self._drains = self._drains or graceful_s is None
        if self._stop.number is None or not graceful_s:
            self._stop.graceful_s = graceful_s
            self._stop.take(signal.SIGTERM)
        else:  # it is drained, and the server ends
            asyncio.get_running_loop().call_later(graceful_s, self._stop.take, signal.SIGTERM)

    async def _follow(self, version: int, told: Engines) -> None:
        """Takes what the owner tells of the engines of a model; waits for the requests of those that are no more."""
        place = told.model
        # orders are obeyed side by side, and a later one may have come first
        if version > self._numbers[place]:
            self._numbers[place], self._told[place] = version, told
            self._engines[place].tell(told.doors)
            if (model := self._models[place]) is not None:
                model.adapters = dict(told.adapters)
        # the reply lets the owner end the engines that are left out
        await self._engines[place].wait_left()


class _Places:
    """Lets a queue follow the number of requests that its engines run at once."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.note_change()

    def note_change(self) -> None:
        """A replica was added or has another state."""
        if (ready := self._model.engine.ready) is not None:
            self._model.admission.running = ready.max_batch_size

    async def leave(self, replica: Replica) -> None:
        """Waits for nobody."""


async def _load_nothing(stored: Any) -> ServedModel:
    raise RuntimeError("a router loads no model")
