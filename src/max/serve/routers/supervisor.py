"""Starts and watches the routers of a server: processes that share its port, each connected to every engine.

It runs in the process that owns the engines. That process starts the engines, watches and replaces them, checks their
answers, and holds the state that is no engine's (stored responses, kept streams, adapters); routers hand it the
requests that need it. A router holds nothing that is not there again when its successor has connected to the engines.
If this process is lost, the next owner takes engines and routers over (`max.serve.routers.guardian`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from max.serve.http.prefix_epochs import PrefixEpochs
from max.serve.metrics import Counts
from max.serve.models.model import ServedModel
from max.serve.process.settings import ServerSettings
from max.serve.routers.address import OWNER, DoorAddress
from max.serve.routers.count_file import counts_of
from max.serve.routers.handover import Handover, KnownEngine, KnownModel, KnownRouter
from max.serve.routers.messages import (
    End,
    Engines,
    Epochs,
    Metrics,
    RoutedModel,
    RouterSettings,
)
from max.serve.routers.process import RouterProcess
from max.serve.worker.engine_state import EngineState
from max.serve.worker.replica import Replica
from max.serve.worker.started_worker import StartOf

logger = logging.getLogger("max.serve")

LOOK_S = 2.0
"""Seconds between two looks at a router."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0
"""Seconds before a router that has ended early is started again: at first, and at the most."""
_STEADY_S = 30.0
"""A router that has run for so long has not ended early."""
_LAST_S = 8.0
"""Seconds that a router may take to end, beyond those of its open requests."""
_COLLECT_S = 2.0
"""The longest time to wait for the counts of a router; then its last ones are shown."""


class Supervisor:
    """The routers of a server, in the event loop of the process that owns its engines.

    Args:
        settings: The settings of the server.
        models: Its models.
        folder: The folder of its socket files and counts.
        listener: The socket of the server, which listens.
        log_level: The level of the ``max`` logger.
        last: What an earlier owner has left; None: there was none.
    """

    def __init__(
        self,
        settings: ServerSettings,
        models: Sequence[RoutedModel],
        folder: str,
        listener: socket.socket,
        log_level: str,
        last: Handover | None = None,
    ) -> None:
        self._last = last or Handover()
        self._noted: Handover | None = None
        self._settings, self._models, self._folder = settings, tuple(models), folder
        self._listener, self._log_level = listener, log_level
        # a router that is replaced and its successor run at the same time
        self._rows = 1 + 2 * settings.routers
        self.counts = counts_of(settings, folder, self._rows, 0, len(models))
        """What the processes of the server count together."""
        self.owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        """The socket of requests that routers forward."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, OWNER))  # an earlier owner's
        self.owner.bind(os.path.join(folder, OWNER))
        self._routers: dict[int, RouterProcess] = {}
        self._ready = asyncio.Event()
        self._served: list[ServedModel] = []
        self._doors: list[dict[int, DoorAddress]] = [{} for _ in models]
        self._epochs = Epochs(*self._last.epochs)
        self._past: Counter[Any] = Counter(self._last.past)
        self._numbers = itertools.count(
            # numbers go on where the last owner's ended, as clients may know them
            1 + max((each.number for each in self._last.routers), default=-1)
        )
        # what an earlier owner has counted is open no more
        known = {each.row for each in self._last.routers}
        for row in set(range(self._rows)) - known:
            self.counts.clear(row)
        self.excluded: Callable[[], Sequence[str]] = tuple
        """The machines of a cluster that take no further engine."""
        self._early = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ends = False
        self._restarting = asyncio.Lock()
        self.restarts = 0
        """The number of routers that have died."""

    async def start(self) -> None:
        """Starts the routers; they hand on all requests until the models are loaded."""
        for known in self._last.routers:
            await self._adopt(known)
        for _ in range(self._settings.routers - sum(not r.retires for r in self._routers.values())):
            await self._start()
        self._run(self._watch())

    async def wait_ready(self) -> None:
        """Waits until each router answers requests itself."""
        while not all(router.is_ready for router in self._routers.values()) or not self._routers:
            self._ready.clear()
            await self._ready.wait()

    def follow(self, models: Sequence[ServedModel]) -> None:
        """Tells the routers of the engines of the models, which are loaded, and of all changes.

        Args:
            models: The models, in the order of those of the constructor.
        """
        self._served = list(models)
        for number, model in enumerate(models):
            model.admission.tally = self.counts.model(number)
            model.engine.turn = self.counts.turn(number)
            model.engine.followers.append(_Follower(self, number))
            self.engines_changed(number)
        self.note()

    def engines_changed(self, model_index: int) -> None:
        """Tells the routers where the engines of a model are now.

        Args:
            model_index: The number of the model.
        """
        replicas = self._served[model_index].engine.taking
        known = self._doors[model_index]
        doors: dict[int, DoorAddress] = {}
        for replica in replicas:
            # of one that starts again the earlier address stays until the next one is known
            door = getattr(replica.worker, "door", None)
            if replica.state is EngineState.READY and door is not None:
                doors[replica.number] = door
            elif replica.number in known:
                doors[replica.number] = known[replica.number]
        # none: all engines start again, and routers keep trying the doors that they know
        if doors and doors != known:
            self._doors[model_index] = doors
            self._run(self._ask_all(self._engines(model_index)))
        self.note()

    async def leave(self, model_index: int, replica: Replica) -> None:
        """Waits until no router has requests of an engine.

        Args:
            model_index: The number of the model.
            replica: The engine, to which no request is sent any more.
        """
        # routers keep the last engine that they know until there is another one
        if self._doors[model_index].keys() == {replica.number}:
            return
        self._doors[model_index].pop(replica.number, None)
        self.note()
        await self._ask_all(self._engines(model_index))

    async def tell_adapters(self, model: ServedModel) -> None:
        """Waits until requests to any router find the adapters of a model as they are now."""
        self.note()
        await self._ask_all(self._engines(self._served.index(model)))

    async def tell_epochs(self, epochs: PrefixEpochs) -> None:
        """Waits until no router uses the prefixes that a tenant has dropped."""
        self._epochs = Epochs(*epochs.all())
        self.note()
        await self._ask_all(self._epochs)

    async def collect(self) -> None:
        """Asks the routers for the counts of their metrics."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COLLECT_S):
                await self._ask_all(Metrics())

    def others(self) -> Counts:
        """The counts of all routers, those that have ended too."""
        total = Counter(self._past)
        for router in self._routers.values():
            total.update(router.counts)
        return dict(total)

    def describe(self) -> list[dict[str, Any]]:
        """The routers, with their states."""
        return [
            {
                "router": number,
                "pid": router.pid,
                "state": router.state,
                "requests": router.open,
            }
            for number, router in self._routers.items()
        ]

    async def restart(self) -> list[dict[str, Any]]:
        """Replaces the routers one after another: the next one takes requests before the earlier one takes no more.

        Each ends after its last request, which may be the one that asks for this.

        Returns:
            The numbers of each and of its successor.

        Raises:
            OSError: No process can be started.
        """
        done: list[dict[str, Any]] = []
        async with self._restarting:
            for number in [n for n, each in self._routers.items() if not each.retires]:
                earlier = self._routers.get(number)
                if earlier is None:
                    continue  # it has died, and its successor is new
                new = await self._start()
                ready = asyncio.ensure_future(self._routers[new].ready.wait())
                ended = asyncio.ensure_future(self._routers[new].ended.wait())
                await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
                ended.cancel()
                if new not in self._routers:
                    raise OSError("the new router has ended before it was ready")
                earlier.retire(End(None))
                self.note()
                done.append({"router": number, "by": new})
        return done

    async def stop(self, graceful_s: float, again: asyncio.Event) -> None:
        """Ends the routers after their open requests.

        Args:
            graceful_s: Seconds that these get to end.
            again: Ends the wait for them.
        """
        self._ends = True
        routers = list(self._routers.values())
        for router in routers:
            router.retire(End(graceful_s))
        ended = asyncio.gather(*(router.ended.wait() for router in routers))
        hurry = asyncio.ensure_future(again.wait())
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({ended, hurry}, timeout=graceful_s + _LAST_S, return_when=first)
        hurry.cancel()
        if not ended.done():
            for router in routers:
                router.retire(End(0.0))
            await asyncio.wait({ended}, timeout=_LAST_S)
        if not ended.done():
            for router in routers:  # one that does not run, and its successors have no use
                router.kill()
            await asyncio.wait({ended}, timeout=_LAST_S)
            ended.cancel()

    async def close(self) -> None:
        """Ends all routers at once."""
        self._ends = True
        for task in self._tasks:
            task.cancel()
        routers = list(self._routers.values())
        for router in routers:
            router.kill()
        ends = [
            asyncio.ensure_future(each.ended.wait()) for each in routers if each.pid is not None
        ]
        if ends:
            await asyncio.wait(ends, timeout=_LAST_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.owner.close()

    def note(self) -> None:
        """Writes what the next owner has to know, if it has changed."""
        if self._ends:
            return
        # until the models are loaded the last owner's still hold
        models = self._last.models if not self._served else tuple(map(_known_model, self._served))
        routers = tuple(
            KnownRouter(number, each.row, each.door, each.retires)
            for number, each in self._routers.items()
        )
        epochs = (self._epochs.first, self._epochs.of_tenants)
        handover = Handover(models, routers, epochs, dict(self._past), tuple(self.excluded()))
        if handover == self._noted:
            return
        try:
            handover.write(self._folder)
            self._noted = handover
        except OSError as error:  # the disk is full
            logger.error("the next owner of the engines cannot be told of them: %s", error)

    def _engines(self, model_index: int) -> Engines:
        adapters = self._served[model_index].adapters
        return Engines(model_index, dict(self._doors[model_index]), dict(adapters))

    async def _ask_all(self, what: Any) -> None:
        """Waits until all routers have done something, or have ended."""
        await asyncio.gather(*(router.ask(what) for router in list(self._routers.values())))

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> int:
        number = next(self._numbers)
        used = {router.row for router in self._routers.values()}
        # row 0 is the owner's
        row = next((row for row in range(1, self._rows) if row not in used), 0)
        if not row:
            raise OSError(f"{len(used)} routers run, most of which wait for their last requests")
        router = self._process(number, row, DoorAddress.in_folder(self._folder, "router"))
        # before the process runs, so that nothing it is told is missed
        self._routers[number] = router
        self.note()
        try:
            await router.start(self._ready.set)
        except BaseException:
            del self._routers[number]
            raise
        self._tell(router)
        return number

    async def _adopt(self, known: KnownRouter) -> None:
        """Takes over a router of an earlier owner; does nothing if it has ended."""
        router = self._process(known.number, known.row, known.door)
        router.retires = known.retires
        try:
            await router.adopt(self._ready.set)
        except OSError as error:
            logger.warning("router %d is no more: %s", known.number, error)
            self.counts.clear(known.row)
            return
        self._routers[known.number] = router
        self._tell(router)

    def _process(self, router_number: int, row: int, door: DoorAddress) -> RouterProcess:
        settings = RouterSettings(
            self._settings, self._models, self._folder, self._rows, row, self._log_level, door
        )
        return RouterProcess(settings, self._listener, partial(self._replace_router, router_number))

    def _tell(self, router: RouterProcess) -> None:
        """Tells a router what the others know already."""
        for model, doors in enumerate(self._doors):
            if doors:
                self._run(router.ask(self._engines(model)))
        self._run(router.ask(self._epochs))

    def _replace_router(self, router_number: int) -> None:
        """A router has ended: what it counted is no more open, and another one is started in its place."""
        router = self._routers.pop(router_number, None)
        if router is None:
            return
        self.counts.clear(router.row)
        self._past.update(router.counts)
        self._ready.set()
        self.note()
        if self._ends or router.retires:
            return
        self.restarts += 1
        # routers that end at once are started less and less often
        self._early = 0 if time.monotonic() - router.began > _STEADY_S else self._early + 1
        logger.error(
            "router %d has ended (%s); it is started again", router_number, router.exit_reason
        )
        self._run(self._start_again())

    async def _start_again(self) -> None:
        if self._early > 1:
            await asyncio.sleep(min(_FIRST_DELAY_S * 2**self._early, _LONGEST_DELAY_S))
        while not self._ends:
            try:
                await self._start()
                return
            except Exception as error:  # no memory or no process is left
                logger.error("a router cannot be started: %s", error)
                await asyncio.sleep(_LONGEST_DELAY_S)

    async def _watch(self) -> None:
        """Looks at the routers at intervals; one that does not go on is ended, and another one takes its place."""
        limit = self._settings.watch.restart_s
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            now = loop.time()
            if now - looked_at > 2 * LOOK_S:  # this process was stopped itself
                # their answers wait in the pipes
                for router in self._routers.values():
                    router.answered = time.monotonic()
            looked_at = now
            self.note()  # of engines that start too
            for number, router in list(self._routers.items()):
                silence = time.monotonic() - router.answered
                if limit and router.is_ready and silence > limit:
                    logger.error(
                        "router %d has not answered for %.0f s; it is ended", number, silence
                    )
                    router.kill()
                elif not router.is_asked:
                    self._run(router.look())


def _known_model(model: ServedModel) -> KnownModel:
    """What the next owner has to know of a model."""
    engines = model.engine.taking
    found: list[KnownEngine] = []
    for each in engines:
        if isinstance(start := each.start_worker, StartOf):
            # workers of tests and of single servers have none
            door, actor = (getattr(each.worker, name, None) for name in ("door", "actor"))
            if door is not None and not door.host.startswith("/") and not actor:
                door = None  # on another machine: it ends with its owner
            found.append(KnownEngine(each.number, start.settings, door, actor or ""))
    return KnownModel(tuple(found), dict(model.adapters), dict(engines[0].adapters))


class _Follower:
    """What the client of a model's engines tells the supervisor."""

    def __init__(self, supervisor: Supervisor, number: int) -> None:
        self._supervisor, self._number = supervisor, number

    def note_change(self) -> None:
        """A replica was added or has another state."""
        self._supervisor.engines_changed(self._number)

    async def leave(self, replica: Replica) -> None:
        """Waits until no router has requests of a replica, which is removed then."""
        await self._supervisor.leave(self._number, replica)
