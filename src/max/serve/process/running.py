"""What the event loop of a server process runs: its HTTP server, from the first connection to the last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from max._host.heap_pages import gather_heap
from max._host.threads import DaemonThread
from max.pipelines.core.exceptions import ConfigError
from max.serve.http.connections.quiet_server import HTTP_PROTOCOL, QuietServer
from max.serve.models.pool import ModelPool
from max.serve.process.logs import share_handlers
from max.serve.process.settings import ServerSettings

logger = logging.getLogger("max.serve")

BACKLOG = 2048
"""Connections that the system queues before the server accepts them."""
_COLLECTIONS = (5000, 20, 20)
"""The new objects after which a collection starts, and how many of these pass before one of older objects."""
LAST_WRITES_S = 3.0
"""The seconds for clients to read the errors of requests that were ended by a stop."""


def say(line: str) -> None:
    """Writes a line to stdout at once.

    Args:
        line: The line.
    """
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def keep_heap() -> None:
    """Lets the garbage collector pass over all objects that there are, and run less often; gathers them in huge pages.

    A collection that a large body starts visits its objects only: all of a server's take 50 ms. By default one starts
    for each few requests, whose objects it finds in use.
    """
    # what the load has made is never looked at again, so that collections take little time
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    with contextlib.suppress(RuntimeError):  # the system refused a thread
        DaemonThread(gather_heap, name="huge pages").start()


class Stop(asyncio.Event):
    """Set by the signals that end a server: gracefully, and at once by a second signal.

    Args:
        graceful_s: Seconds that open requests get to end.
        numbers: The signals; none: those of an operator and of a terminal.
    """

    def __init__(self, graceful_s: float, numbers: Sequence[signal.Signals] = ()) -> None:
        super().__init__()
        self.graceful_s: float | None = graceful_s
        """Seconds that open requests get to end; None: no limit."""
        self.number: int | None = None
        """The first signal."""
        loop = asyncio.get_running_loop()
        for number in numbers or _operators_signals():
            try:
                loop.add_signal_handler(number, self.take, number)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda n, _: loop.call_soon_threadsafe(self.take, n))

    def take(self, signal_number: int) -> None:
        """Ends the server; at once, if it is called again.

        Args:
            signal_number: The signal.
        """
        self.number = self.number or signal_number
        self.set()


def _operators_signals() -> list[signal.Signals]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    # under nohup the end of the terminal is ignored
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    return numbers


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """The class of event loops; None: that of asyncio, as uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def wait_started(server: QuietServer, serving: asyncio.Future[None]) -> None:
    """Waits until a server takes connections.

    Args:
        server: The server.
        serving: Its task.

    Raises:
        Exception: It has ended.
    """
    has_begun = asyncio.ensure_future(server.begun.wait())
    await asyncio.wait({serving, has_begun}, return_when=asyncio.FIRST_COMPLETED)
    has_begun.cancel()
    if serving.done():
        await serving  # raises the server's error if there is one, which says more
        raise RuntimeError("the server has ended without a signal")


def http_server(
    settings: ServerSettings, app: ASGIApp, listener: socket.socket, sockets: Any = "auto"
) -> QuietServer:
    """Begins to listen, and makes the server that takes the connections.

    Args:
        settings: The settings of the server.
        app: The application.
        listener: The socket.
        sockets: The protocol of WebSockets; ``auto``: that of the package websockets, if it is installed.

    Raises:
        ConfigError: Another process listens on the port.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another process has bound the same port, and listens already
        host, port = listener.getsockname()[:2]
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            "Give another --port; 0 takes one that is free.",
        ) from error
    if sockets == "auto":
        sockets = "websockets-sansio" if find_spec("websockets") else "none"
    config = uvicorn.Config(
        app,
        http=HTTP_PROTOCOL,
        log_config=None,
        log_level=share_handlers(),
        access_log=False,
        # the process starts and ends its parts itself
        lifespan="off",
        ws=sockets,
        ws_max_size=settings.max_request_bytes,
        ws_per_message_deflate=False,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        server_header=False,
        date_header=False,
        # a router that is drained waits a little longer (`router.IDLE_S`)
        timeout_keep_alive=30,
    )
    return QuietServer(config)


async def until_stopped(serving: asyncio.Future[None], stop: Stop) -> None:
    """Waits for a signal.

    Args:
        serving: The task of the server.
        stop: The signals.

    Raises:
        Exception: The server has ended without one.
    """
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.number is None:
        await serving  # raises the server's error if there is one, which says more
        raise RuntimeError("the server has ended without a signal")


async def end_gracefully(
    server: QuietServer, serving: asyncio.Future[None], stop: Stop, pool: ModelPool
) -> None:
    """Ends a server after a signal; open requests get some time to end.

    Args:
        server: The server.
        serving: Its task.
        stop: The signals; a second one ends the wait.
        pool: The models.
    """
    if open_requests := pool.open_requests:
        logger.warning("waiting for %d open requests to end", open_requests)
    # takes no more connections
    server.stop()
    # a second signal sets it again
    stop.clear()
    again = asyncio.ensure_future(stop.wait())
    first = asyncio.FIRST_COMPLETED
    await asyncio.wait({serving, again}, timeout=stop.graceful_s, return_when=first)
    again.cancel()
    if not serving.done():
        if open_requests := pool.open_requests:
            logger.warning("%d open requests end with an error", open_requests)
        # clients get the errors while the workers stop
        closing = asyncio.ensure_future(pool.close())
        await asyncio.wait({serving}, timeout=LAST_WRITES_S)
        await server.close_connections(LAST_WRITES_S)
        await closing
    await serving
