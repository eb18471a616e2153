"""The engines of a model as a router knows them: the owner tells where they are, and the router connects to each."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from max.serve.process.settings import WatchLimits
from max.serve.remote.connections import CONNECT_S
from max.serve.remote.worker import RemoteWorker
from max.serve.routers.address import DoorAddress
from max.serve.worker.client import EngineClient
from max.serve.worker.engine_state import EngineState
from max.serve.worker.replica import Replica
from max.serve.worker.started_worker import start_in_thread

logger = logging.getLogger("max.serve")

_AGAIN_S = 0.2
"""Seconds between two tries to connect."""


class FollowedEngines:
    """Connects to the engines of a model, in an event loop.

    A replica of the client is one engine of the owner, whatever worker runs it: where that is lost, the replica waits
    until the owner tells of the next one.

    Args:
        limits: How long an engine may be silent before it counts as unresponsive; the owner replaces it.
        is_single: Whether there is no second engine ever.
        first: Where equally loaded engines begin, another place for each router.
    """

    def __init__(self, limits: WatchLimits, is_single: bool, first: int = 0) -> None:
        # the owner replaces engines; a router only notes their silence
        self._limits = replace(limits, restart_s=0.0, step_s=0.0)
        self._is_single, self._first = is_single, first
        self._doors: dict[int, DoorAddress] = {}
        self._ends = False
        self._changed = threading.Condition()  # guards the two before
        self._replicas: dict[int, Replica] = {}
        self._client: EngineClient | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._told = asyncio.Event()

    async def client(self) -> EngineClient:
        """The client of the engines, connected to one of them; waits until the owner tells of one."""
        while not self._doors:
            self._told.clear()
            await self._told.wait()
        number = next(iter(self._doors))
        start = partial(self._connect, number)
        try:
            worker = await start_in_thread(start)
        except ConnectionError:
            if self._ends:
                raise
            return await self.client()  # this engine is no more
        self._client = client = EngineClient(
            start, worker, self._limits, self._is_single, self._first
        )
        # a replica that waits for its next engine would be waited for
        client.close_before(self._close)
        client.start()
        self._replicas[number] = client.replicas[0]
        # the other engines, of which the owner told meanwhile
        self.tell(self._doors)
        return client

    def tell(self, doors: Mapping[int, DoorAddress]) -> None:
        """Notes where the engines are now.

        Args:
            doors: Where they are.
        """
        with self._changed:
            self._doors = dict(doors)
            self._changed.notify_all()
        self._told.set()
        if self._client is None:
            return
        for number in doors:
            if number not in self._tasks:
                self._tasks[number] = asyncio.ensure_future(self._keep(number))
        # engines that the owner has left out
        for number in set(self._tasks) - set(doors):
            task = asyncio.ensure_future(self._leave(number, self._tasks.pop(number)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def wait_connected(self) -> None:
        """Waits until it is connected to all engines, for some time."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=CONNECT_S)

    async def wait_left(self) -> None:
        """Waits until no request runs on an engine that the owner has left out."""
        if self._leaving:
            await asyncio.wait(list(self._leaving))

    def close(self) -> None:
        """Ends all tries to connect; the client is closed after it."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for task in self._tasks.values():
            task.cancel()

    async def _close(self) -> None:
        self.close()

    async def _keep(self, engine: int) -> None:
        """Adds the replica of an engine; again, if the engine is lost before it was ready."""
        client = self._client
        assert client is not None
        while True:
            replica = self._replicas.get(engine)
            try:
                if replica is None or replica.state is EngineState.STOPPED:
                    start = partial(self._connect, engine)
                    new = client.add_replica(start, await start_in_thread(start))
                    new.start()
                    # before the old one is removed, as a client has at least one replica
                    self._replicas[engine] = new
                    if replica is not None:
                        await client.remove_replica(replica, timeout=0)
                    replica = new
                await replica.wait_ready()
                return  # from now on it waits for its next worker itself
            except Exception as error:
                if self._ends or engine not in self._doors:
                    return
                logger.warning("engine %d is lost before it was ready: %s", engine, error)
                await asyncio.sleep(_AGAIN_S)

    async def _leave(self, engine: int, task: asyncio.Task[None]) -> None:
        """Removes the replica of an engine after its requests have ended."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        replica, client = self._replicas.pop(engine, None), self._client
        # its successor may not be connected yet, and a client has at least one replica
        while client is not None and len(client.replicas) < 2 and not self._ends:
            await asyncio.sleep(_AGAIN_S / 4)
        if self._ends:
            return
        if replica is not None and client is not None and replica in client.replicas:
            await client.remove_replica(replica)

    def _connect(self, engine: int) -> RemoteWorker:
        """Connects to an engine; waits for it if it is not there."""
        last: DoorAddress | None = None
        while True:
            with self._changed:
                # the address that did not answer: waits for another one, and tries again after some time
                if self._doors.get(engine) == last is not None:
                    self._changed.wait(_AGAIN_S)
                door = self._doors.get(engine)
                if self._ends or door is None:
                    raise ConnectionError(f"there is no engine {engine} any more")
            last = door
            try:
                return RemoteWorker(
                    door.host,
                    door.port,
                    door.key,
                    self._limits.unhealthy_s,
                    _ignore,
                    _ignore,
                    name=f"{engine}",
                )
            except OSError as error:
                logger.debug("engine %d does not answer: %s", engine, error)


def _ignore(*arguments: object) -> None:
    """The owner ends an engine, and waits for its end."""
