"""A server of uvicorn that does nothing while nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn

try:
    from max.serve.http.protocol import BoundedProtocol
except ImportError:  # httptools is not installed: uvicorn reads HTTP its own way
    HTTP_PROTOCOL: Any = "auto"
else:
    HTTP_PROTOCOL = BoundedProtocol


class QuietServer(uvicorn.Server):
    """A server without signal handlers, which :meth:`stop` ends.

    uvicorn wakes ten times a second to look whether it should exit and to renew the header `date`; here an event ends
    the wait, and there is no such header.

    Args:
        config: The settings; without `date_header`, `limit_max_requests` and `callback_notify`, which need that clock.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        if config.date_header or config.limit_max_requests or config.callback_notify:
            raise ValueError("QuietServer: the configuration needs a clock")
        self._exit = asyncio.Event()

    def stop(self) -> None:
        """Ends the server: it accepts nothing more, and open requests get some time to end."""
        self.should_exit = True
        self._exit.set()

    async def close_connections(self, timeout: float) -> None:
        """Closes the connections that :meth:`stop` has left open: their requests end as where a client leaves.

        Args:
            timeout: The seconds that the requests get for it.
        """
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=timeout)

    async def main_loop(self) -> None:
        """Waits for :meth:`stop`."""
        await self.on_tick(0)  # sets the headers of all responses
        await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals: whoever runs the server does."""
        yield
