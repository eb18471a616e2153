"""The client of the engines of a model: it sends each request to one, and on to another if that one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Protocol

from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStats,
    OthersLoad,
    PagesChanged,
    PromptStarted,
    StepTimes,
)
from max.pipelines.kv_cache.salts import NO_SALT
from max.serve.process.settings import WatchLimits
from max.serve.worker import subscription
from max.serve.worker.engine_state import EngineLostError, EngineState, EngineUnavailableError
from max.serve.worker.prefix_router import PrefixRouter, Route
from max.serve.worker.replica import Replica
from max.serve.worker.started_worker import Worker, start_in_thread
from max.serve.worker.subscription import Mailbox, OpenRequest, Subscription, WorkerRequest
from max.serve.worker.suspects import OwnTurn, Turn

__all__ = ["EngineClient", "EngineLostError", "EngineState", "EngineUnavailableError"]

_DRAIN_LOOK_S = 0.05
_STOP_S = 5.0
"""Seconds that the worker of a replica that is removed may take to end."""


class Follower(Protocol):
    """What other users of the replicas are told by."""

    def note_change(self) -> None:
        """A replica was added or has another state."""
        ...

    async def leave(self, replica: Replica) -> None:
        """Waits until no other user has requests of a replica, which is removed then.

        Args:
            replica: The replica.
        """
        ...


class EngineClient:
    """Generates on the engines of a model, its replicas, for the tasks of one event loop.

    Args:
        start_worker: Starts a worker process of the first replica.
        worker: Its first worker, if it was started already.
        limits: How long a worker may be silent.
        is_single: Whether there is no second replica ever, so that nothing is routed.
        first: Where equally loaded replicas begin: clients that do not know each other's requests begin elsewhere.
        number: The number of its first replica.
    """

    def __init__(
        self,
        start_worker: Callable[[], Worker],
        worker: Worker | None = None,
        limits: WatchLimits | None = None,
        is_single: bool = False,
        first: int = 0,
        number: int = 0,
    ) -> None:
        self._limits, self._first = limits, first
        self.is_single = is_single
        """Whether there is no second replica ever."""
        self.entries: dict[str, OpenRequest] = {}
        """The open requests of all replicas, by their identifiers."""
        self.turn: Turn = OwnTurn()
        """The turn to try a request that may end workers."""
        self._router = PrefixRouter()
        self._closes, self._next = False, number
        self.replicas: list[Replica] = []
        """The replicas, in the order in which they were added; those that have stopped stay until they are removed."""
        self._draining: set[Replica] = set()
        self.changes = asyncio.Lock()
        """Held by who replaces replicas or changes their number, one after another."""
        # None: a state has changed since it was asked for
        self._takers: dict[int, Replica] | None = None
        self._closed_first: list[Callable[[], Awaitable[None]]] = []
        self.followers: list[Follower] = []
        """Those that are told of changes of the replicas."""
        self.add_replica(start_worker, worker)

    def add_replica(
        self,
        start_worker: Callable[[], Worker],
        worker: Worker | None = None,
        number: int | None = None,
    ) -> Replica:
        """Adds a replica; it is started with the client, or by its :meth:`Replica.start` afterwards.

        Args:
            start_worker: Starts a worker process.
            worker: The first worker, if it was started already.
            number: Its number, greater than those before; None: the next one.
        """
        self._next = self._next if number is None else number
        replica = Replica(self._next, start_worker, self, worker, self._limits)
        self._next += 1
        if self.replicas:
            replica.adapters = dict(self.replicas[0].adapters)
        self.replicas.append(replica)
        return replica

    async def remove_replica(self, replica: Replica, timeout: float | None = None) -> None:
        """Removes a replica after its requests have ended; no request goes to it meanwhile.

        Args:
            replica: The replica, not the last one.
            timeout: Seconds after which its requests go on with other replicas; None: no limit.

        Raises:
            ValueError: It is no replica of this client, or the only one.
        """
        if replica not in self.replicas or len(self.replicas) < 2:
            raise ValueError(f"replica {replica.number} is the only one, or none of this model")
        self._draining.add(replica)
        self._takers = None
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        # other server processes send requests to it too
        left = [asyncio.ensure_future(each.leave(replica)) for each in self.followers]
        while (self.of(replica) or not all(each.done() for each in left)) and (
            end is None or loop.time() < end
        ):
            await asyncio.sleep(_DRAIN_LOOK_S)
        for each in left:
            each.cancel()
        self.replicas.remove(replica)
        self._draining.discard(replica)
        self._takers = None
        # requests that did not end in time go on elsewhere
        self._move_all({replica})
        self._router.remove(replica.number)
        await replica.close(finish=False, timeout=_STOP_S)

    async def replace_replica(self, replica: Replica, timeout: float | None = None) -> Replica:
        """Starts a replica in place of another one, which then ends as with :meth:`remove_replica`.

        Args:
            replica: The replica.
            timeout: Seconds after which its requests go on with other replicas; None: no limit.

        Raises:
            ValueError: It is no replica of this client.
            OSError: No worker can be started.
            RuntimeError: The new one cannot load the model; the old one goes on.
        """
        if replica not in self.replicas:
            raise ValueError(f"replica {replica.number} is none of this model")
        worker = await start_in_thread(replica.start_worker)
        new = self.add_replica(replica.start_worker, worker)
        new.start()
        try:
            await new.wait_ready()
        except BaseException:
            await self.remove_replica(new, timeout=0)
            raise
        await self.remove_replica(replica, timeout)
        return new

    @property
    def taking(self) -> list[Replica]:
        """The replicas but those that are being removed."""
        return [replica for replica in self.replicas if replica not in self._draining]

    @property
    def state(self) -> EngineState:
        """The state of the engine: that of the replica that is nearest to running requests."""
        states = {replica.state for replica in self.replicas}
        # requests run while any replica is ready, and may wait while any is to start
        order = (EngineState.READY, EngineState.RESTARTING, EngineState.STARTING)
        return next((state for state in order if state in states), EngineState.STOPPED)

    @property
    def ready(self) -> EngineReady | None:
        """The limits of all replicas together; None before the first one is ready."""
        ready = [replica.ready for replica in self.replicas if replica.ready is not None]
        if not ready:
            return None
        return replace(
            ready[0],
            max_batch_size=sum(each.max_batch_size for each in ready),
            total_pages=sum(each.total_pages for each in ready),
        )

    @property
    def stats(self) -> EngineStats:
        """The last reports of the load of all replicas, added."""
        return reduce(EngineStats.__add__, [replica.stats for replica in self.replicas])

    @property
    def loading(self) -> str:
        """The step that the load of the first replica that loads is at; empty: unknown, or all are loaded."""
        return next(filter(None, [replica.loading for replica in self.replicas]), "")

    @property
    def responds(self) -> bool:
        """Whether a replica that is ready gives signs of life; also while none is ready, as the state tells that."""
        ready = [each for each in self.replicas if each.state is EngineState.READY]
        return not ready or any(replica.responds for replica in ready)

    @property
    def open_requests(self) -> int:
        """Requests of this process that run or wait."""
        return len(self.entries)

    @property
    def all_open_requests(self) -> int:
        """Requests that run or wait, with those that other processes have sent to the engines."""
        return len(self.entries) + sum(map(self._router.others_open, self._ready))

    @property
    def tokens_before_next(self) -> int:
        """The tokens that the least loaded replica reads before the next request, with what its open requests cost."""
        loads = [self._router.load(number) for number in self._ready]
        return min(loads, default=0)

    @property
    def restarts(self) -> int:
        """The number of workers that died."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def prompt_steps(self) -> StepTimes:
        """The times of steps that read prompts, of all workers."""
        return reduce(StepTimes.__add__, [replica.prompt_steps for replica in self.replicas])

    @property
    def decode_steps(self) -> StepTimes:
        """The times of the other steps, of all workers."""
        return reduce(StepTimes.__add__, [replica.decode_steps for replica in self.replicas])

    @property
    def worker_pid(self) -> int | None:
        """The number of the process of the first replica's worker."""
        return self.replicas[0].worker_pid

    def start(self) -> None:
        """Starts the workers, or takes those that were given; within the event loop."""
        self._loop = asyncio.get_running_loop()
        for replica in self.replicas:
            replica.start()

    async def wait_ready(self) -> EngineReady:
        """Waits until the model is loaded by all replicas.

        Raises:
            UserError: It cannot be loaded, for a reason that the user can correct.
            RuntimeError: It cannot be loaded.
        """
        # a copy, as a client may add replicas meanwhile
        for replica in list(self.replicas):
            await replica.wait_ready()
        assert self.ready is not None
        return self.ready

    @contextmanager
    def open(
        self,
        requests: Sequence[WorkerRequest],
        timeout: float | None = None,
        on: Replica | None = None,
    ) -> Iterator[Subscription]:
        """Opens requests for the length of a block; those that have not ended are cancelled after it.

        If the worker of a request dies, the request goes on with another replica or the next worker, and the caller
        does not notice: prompt and answer so far are read again there, and the answer goes on as it would have.

        Args:
            requests: The requests.
            timeout: The longest time in seconds; None: no limit.
            on: The replica that they are sent to, which is ready; None: the router chooses.

        Raises:
            EngineUnavailableError: No worker runs and reads its requests, and none will be started.
        """
        takers = self.replicas if on is None else [on]
        if not any(replica.waits for replica in takers):
            raise takers[0].refusal
        names = [request.request_id for request in requests]
        if duplicates := [
            name for i, name in enumerate(names) if name in self.entries or name in names[:i]
        ]:
            raise ValueError(f"request {duplicates[0]} is open already")
        mailbox = Mailbox()  # one for all, so that the task wakes once for a step
        entries = [OpenRequest(request, i, mailbox) for i, request in enumerate(requests)]
        deadline = None
        try:
            for entry in entries:
                self.entries[entry.request.request_id] = entry
                if on is None:
                    self._place(entry)
                else:
                    entry.replica = on
                    on.run(entry)
            if timeout is not None:
                # an exception ends the whole subscription, whichever request it is put for
                late = TimeoutError(f"the request took more than {timeout:g} s")
                deadline = self._loop.call_later(timeout, mailbox.put, 0, late)
            yield Subscription(entries, mailbox, self.cancel)
        finally:
            if deadline is not None:
                deadline.cancel()
            for entry in entries:
                # not if it has ended: its name may be that of a later request
                if self.entries.get(entry.request.request_id) is entry:
                    self.cancel(entry.request.request_id)

    def cancel(self, request_id: str) -> None:
        """Ends a request; does nothing if it has ended."""
        entry = self.entries.get(request_id)
        if entry is not None:
            self.end(entry)
            if entry.replica is not None:
                entry.replica.cancel(request_id)

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter in all replicas, or unloads it when its requests have ended.

        Args:
            name: Its name.
            path: Its folder or file; None: it is unloaded.

        Raises:
            UserError: It cannot be loaded, or none of this name is loaded.
            EngineUnavailableError: The model is not loaded.
            RuntimeError: A worker was lost meanwhile.
        """
        ready = [each for each in self.replicas if each.state is EngineState.READY]
        if not ready:
            raise EngineUnavailableError("the model is not loaded")
        await asyncio.gather(*(replica.change_adapter(name, path) for replica in ready))
        for replica in self.replicas:
            replica.adapters[name] = path  # for the next worker of those that start

    async def keep_prefixes(self, action: str, name: str) -> tuple[int, int]:
        """Saves, restores or removes a file of prefixes; all replicas restore it, the first one saves.

        Args:
            action: ``save``, ``restore`` or ``erase``.
            name: The name of the file.

        Returns:
            The tokens whose pages were saved or restored, and the size of the file.

        Raises:
            UserError: The file cannot be used.
            EngineUnavailableError: The model is not loaded.
            RuntimeError: A worker was lost meanwhile.
        """
        # a file holds the pages of one cache
        replicas = self.replicas if action == "restore" else self.replicas[:1]
        answers = await asyncio.gather(*(r.keep_prefixes(action, name) for r in replicas))
        return answers[0]

    async def forget_prefixes(self) -> None:
        """Empties the prefix caches, and waits until they are empty; running requests keep their pages."""
        await asyncio.gather(*(replica.forget_prefixes() for replica in self.replicas))
        for number in self._router.replicas:
            self._router.forget(number)

    def close_before(self, close: Callable[[], Awaitable[None]]) -> None:
        """Notes what is to be closed before the replicas are.

        Args:
            close: Closes it.
        """
        self._closed_first.append(close)

    async def close(self, finish: bool = True, timeout: float | None = None) -> None:
        """Stops the workers, and waits until they have ended; open requests then end with an error.

        Args:
            finish: Whether open requests are finished first.
            timeout: The longest time in seconds; then the workers are killed.
        """
        self._closes = True
        for close in self._closed_first:
            await close()
        await asyncio.gather(*(replica.close(finish, timeout) for replica in self.replicas))

    def of(self, replica: Replica) -> list[OpenRequest]:
        """The requests of a replica, oldest first."""
        return [entry for entry in self.entries.values() if entry.replica is replica]

    def end(self, entry: OpenRequest) -> None:
        """Forgets a request."""
        del self.entries[entry.request.request_id]
        self._leave(entry, cached=True)

    def prompt_started(self, entry: OpenRequest, event: PromptStarted) -> None:
        """Takes the event that a request begins."""
        if entry.route is not None:
            self._router.note_start(entry.route, event.cached_tokens)
        # one that goes on after tokens that were received began before
        if not entry.has_begun:
            entry.put(event)

    def prompt_read(self, route: Route) -> None:
        """Takes that the prompt of a request was read, as its first tokens have come."""
        self._router.read(route)

    def take_report(self, replica: Replica, event: PagesChanged | OthersLoad) -> None:
        """Takes what the cache of a replica has gained and lost, or what other processes have sent to it."""
        if replica.number not in self._router.replicas:
            return
        if isinstance(event, OthersLoad):
            self._router.others(replica.number, event.open, event.unread)
            return
        new, lost = event.hashes(event.new_pages), event.hashes(event.lost_pages)
        self._router.note_changes(replica.number, new, lost, event.is_anew, event.salt_key)

    def state_changed(self, replica: Replica) -> None:
        """Moves the requests of a replica that is lost to others, and those of others to one that is ready."""
        self._takers = None
        if self._closes:
            return
        if replica.state is EngineState.READY:
            assert replica.ready is not None
            self._router.page_size = replica.ready.page_size
            self._router.add(
                replica.number, replica.ready.total_pages, replica.ready.max_batch_size
            )
            # also those that waited for this one
            others = {each for each in self.replicas if each.state is not EngineState.READY}
            self._move_all({replica, *others})
        else:
            self._router.remove(replica.number)
            self._move_all({replica})
        for follower in self.followers:
            follower.note_change()

    def _move_all(self, replicas: set[Replica]) -> None:
        """Moves the requests of replicas to those that are ready, if there are any, in the order of their arrival."""
        if not self._ready:
            return
        for entry in [each for each in self.entries.values() if each.replica in replicas]:
            # a worker that was lost took its pages along
            self._leave(entry, cached=False)
            entry.is_sent = False
            try:
                self._place(entry)
            except Exception as error:  # one that cannot be encoded fails alone
                if self.entries.get(entry.request.request_id) is entry:
                    self.end(entry)
                entry.put(error)

    @property
    def _ready(self) -> dict[int, Replica]:
        """The replicas that take requests, by their numbers."""
        if self._takers is None:
            ready = [each for each in self.taking if each.state is EngineState.READY]
            # the router takes the first of equal loads, in this order
            begin = self._first % max(len(ready), 1)
            self._takers = {each.number: each for each in (*ready[begin:], *ready[:begin])}
        return self._takers

    def _place(self, entry: OpenRequest) -> None:
        """Sends a request to a replica, or lets it wait for one."""
        waiting = [replica for replica in self.replicas if replica.waits]
        # one whose worker does not read gets only what others cannot take, as that was accepted before
        ready = {number: each for number, each in self._ready.items() if each.waits or not waiting}
        if not ready:
            # there is one, as `open` refuses requests otherwise
            entry.replica = min(waiting, key=lambda each: len(self.of(each)))
            return
        if self.is_single:
            replica = next(iter(ready.values()))
        else:
            tokens, salt, length = subscription.prompt_of(entry.request)
            entry.route = self._router.choose(ready, tokens, salt, length)
            replica = ready[entry.route.replica]
        entry.replica = replica
        replica.run(entry)

    def _leave(self, entry: OpenRequest, cached: bool) -> None:
        """Tells the router that a request has left its replica."""
        route, entry.route = entry.route, None
        if route is None:
            return
        tokens: Sequence[int] = ()
        salt = NO_SALT
        if cached and isinstance(entry.request, GenerationRequest):
            tokens, salt, _ = subscription.prompt_of(entry.request)
            # a later prompt of the conversation begins with the answer, too
            tokens = (*tokens, *entry.generated)
        self._router.note_end(route, tokens, salt)
