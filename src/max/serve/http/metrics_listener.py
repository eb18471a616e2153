"""The second listener, which has the metrics alone, as MAX has it on port 8001."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from prometheus_client import start_http_server

from max.serve.metrics import ServerMetrics
from max.serve.settings import ServerSettings

logger = logging.getLogger("max.serve")


@contextlib.contextmanager
def start_metrics_listener(settings: ServerSettings, metrics: ServerMetrics) -> Iterator[None]:
    """Shows the metrics on a port of their own for the length of a block.

    A port that is taken is a warning: ``/metrics`` of the server has the same.

    Args:
        settings: The settings.
        metrics: The metrics.
    """
    if settings.metrics_port is None:
        yield
        return
    try:
        server, thread = start_http_server(
            settings.metrics_port, settings.host, registry=metrics.registry
        )
    except OSError as error:
        logger.warning(
            "no metrics on port %d: %s; /metrics on port %d has them, and "
            "--metrics-port sets another",
            settings.metrics_port, error.strerror or error, settings.port,
        )  # fmt: skip
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
