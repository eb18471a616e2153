"""The process of a router, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.serve.metrics import Counts
from max.serve.remote.connections import connect
from max.serve.routers import lifeline
from max.serve.routers.address import LINK
from max.serve.routers.adopted import AdoptedProcess
from max.serve.routers.messages import End, Link, Look, Metrics, Order, Reply, RouterSettings

if TYPE_CHECKING:
    from max.serve.routers import router
else:
    # only the new process needs it
    router = lazy_module("max.serve.routers.router")


def _run(
    settings: RouterSettings,
    listener: socket.socket,
    connection: Connection,
    life: Connection | None,
) -> None:
    """The main function of the process, whose imports are its own."""
    router.run_router(settings, listener, connection, life)


class RouterProcess:
    """A router.

    Args:
        settings: What it is started with.
        listener: The socket of the server.
        ended: Called when it has ended.
    """

    def __init__(
        self, settings: RouterSettings, listener: socket.socket, ended: Callable[[], None]
    ) -> None:
        self._settings, self._listener, self._ended = settings, listener, ended
        self.row, self.door = settings.row, settings.door
        """Its row of the counts, and where the next owner connects to it."""
        self.counts: Counts = {}
        """Its last counts of metrics."""
        self.open = 0
        """Its open requests, when it was asked last."""
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.retires = False
        """Whether it ends as it was told to."""
        self.began = self.answered = time.monotonic()
        """When it was started, and when it has answered last."""
        self._process: Any = None
        self._link: Link | None = None
        self._last = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._looks: set[int] = set()

    @property
    def is_ready(self) -> bool:
        """Whether it answers requests itself."""
        return self.ready.is_set()

    @property
    def is_asked(self) -> bool:
        """Whether it has not answered the last look yet."""
        return bool(self._looks)

    @property
    def state(self) -> str:
        """Its state in a word."""
        if self.retires:
            return "draining"
        return "ready" if self.is_ready else "starting"

    @property
    def pid(self) -> int | None:
        """The number of its process."""
        return None if self._process is None else self._process.pid

    @property
    def exit_reason(self) -> str:
        """How it has ended, in words."""
        code = None if self._process is None else self._process.exitcode
        if code is None:
            return "an earlier owner has started it"
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    async def start(self, ready: Callable[[], None]) -> None:
        """Starts the process.

        Args:
            ready: Called when it answers requests itself.

        Raises:
            OSError: No process can be started.
        """
        self._told = ready
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_run,
            args=(self._settings, self._listener, there, lifeline.current_lifeline()),
            name="max router",
            daemon=True,
        )
        try:
            await asyncio.to_thread(process.start)
        except BaseException:
            here.close()
            raise
        finally:
            # otherwise the pipe would stay open after the end of the process
            there.close()
        self._process = process
        self._link = Link(here, self._take)  # pyright: ignore[reportArgumentType]

    async def adopt(self, ready: Callable[[], None]) -> None:
        """Takes over a process that an earlier owner has started.

        Args:
            ready: Called when it answers requests itself.

        Raises:
            OSError: It has ended.
        """
        self._told = ready

        def link() -> tuple[Connection, AdoptedProcess]:
            connection = connect(self.door.host, self.door.port, self.door.key, LINK)
            try:
                return connection, AdoptedProcess.behind(connection)
            except BaseException:
                connection.close()
                raise

        connection, self._process = await asyncio.to_thread(link)
        self._link = Link(connection, self._take)

    async def ask(self, what: Any) -> Any:
        """Tells it something, and waits until it has done it.

        Args:
            what: The message.

        Returns:
            Its answer; None: it has ended.
        """
        if self._link is None or self.ended.is_set():
            return None
        self._last += 1
        number = self._last
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        if isinstance(what, Look):
            self._looks.add(number)
        try:
            self._link.send(Order(number, what))
            value = await answer
        finally:
            del self._asked[number]
            self._looks.discard(number)
        # kept: they count in the sums after the router has ended too
        if isinstance(what, Metrics) and value is not None:
            self.counts = value
        return value

    async def look(self) -> None:
        """Asks whether it goes on."""
        found = await self.ask(Look())
        if found is not None:
            self.open, self.counts = found

    def retire(self, end: End) -> None:
        """Tells it to end.

        Args:
            end: How.
        """
        self.retires = True
        if self._link is not None:
            self._last += 1
            self._link.send(Order(self._last, end))

    def kill(self) -> None:
        """Ends it at once."""
        if self._process is not None:
            self._process.kill()

    def _take(self, message: Reply | None) -> None:
        if message is None:
            # None: the pipe is closed
            asyncio.ensure_future(self._end())
            return
        self.answered = time.monotonic()
        # 0 is no order: the router is ready
        if not message.number:
            self.ready.set()
            self._told()
        elif (answer := self._asked.get(message.number)) is not None and not answer.done():
            answer.set_result(message.value)

    async def _end(self) -> None:
        # its end of the pipe is closed, so it ends, or has ended
        await asyncio.to_thread(self._process.join, 5.0)
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        if self._link is not None:
            self._link.close()
        # those that wait for it go on
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        self._ended()
        self.ended.set()
