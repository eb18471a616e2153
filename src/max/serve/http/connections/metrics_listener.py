"""The second listener, for the metrics only, as on MAX's port 8001."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import uvicorn
from prometheus_client import make_asgi_app

from max.serve.http.connections.hosts import HostGuard, HostRule
from max.serve.http.connections.quiet_server import HTTP_PROTOCOL, QuietServer
from max.serve.metrics import ServerMetrics
from max.serve.process.listener import open_socket
from max.serve.process.logs import share_handlers
from max.serve.process.settings import ServerSettings

logger = logging.getLogger("max.serve")


@contextlib.asynccontextmanager
async def metrics_listener(settings: ServerSettings, metrics: ServerMetrics) -> AsyncIterator[None]:
    """Serves the metrics on a port of their own for the length of a block.

    A taken port is only a warning: ``/metrics`` of the server has the same.

    Args:
        settings: The settings.
        metrics: The metrics.
    """
    if settings.metrics_port is None:
        yield
        return
    try:
        listener = open_socket(replace(settings, port=settings.metrics_port))
        # with SO_REUSEADDR `bind` may succeed on a port that another process listens on soon; `listen` does not
        listener.listen()
        address = listener.getsockname()[0]
    except OSError as error:
        logger.warning(
            "no metrics on port %d: %s; /metrics on port %d has them, and "
            "--metrics-port sets another",
            settings.metrics_port, error.strerror or error, settings.port,
        )  # fmt: skip
        yield
        return
    config = uvicorn.Config(
        HostGuard(make_asgi_app(metrics.shown), HostRule.of(settings, address)),
        http=HTTP_PROTOCOL,
        log_config=None,
        log_level=share_handlers(),
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    server = QuietServer(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        yield
    finally:
        server.stop()
        await serving
