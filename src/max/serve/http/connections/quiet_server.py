"""A uvicorn server that does not wake while it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

try:
    from max.serve.http.connections.protocol import BoundedProtocol
except ImportError:  # without httptools uvicorn uses its other parser
    HTTP_PROTOCOL: Any = "auto"
else:
    HTTP_PROTOCOL = BoundedProtocol


class QuietServer(uvicorn.Server):
    """A server without signal handlers, which :meth:`stop` ends.

    uvicorn wakes ten times a second to check for its exit and to renew the header `date`; here an event ends
    the wait, and there is no such header.

    Args:
        config: The settings; without `date_header`, `limit_max_requests` and `callback_notify`, which need that clock.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        if config.date_header or config.limit_max_requests or config.callback_notify:
            raise ValueError("QuietServer: the configuration needs a clock")
        self._exit = asyncio.Event()
        self.begun = asyncio.Event()
        """Set when the server takes connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections.

        Args:
            sockets: Sockets that listen already.
        """
        await super().startup(sockets)
        if self.started:
            self.begun.set()

    def stop(self) -> None:
        """Ends the server: it accepts no more connections, and open requests may end for some time."""
        self.should_exit = True
        self._exit.set()

    async def close_connections(self, timeout: float) -> None:
        """Closes the connections that :meth:`stop` has left open; their requests end as after a disconnect.

        Args:
            timeout: The seconds to wait for the ends of the requests.
        """
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=timeout)

    async def main_loop(self) -> None:
        """Waits for :meth:`stop`."""
        await self.on_tick(0)  # sets the default headers of all responses
        await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals: the caller does."""
        yield
