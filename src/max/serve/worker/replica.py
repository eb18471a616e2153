"""One engine of a model: its worker process, which is started again when it dies, and the requests that it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import (
    CancelRequest,
    Command,
    ForgetPrefixes,
    Shutdown,
)
from max.pipelines.generation.process.encoder_messages import (
    EncodeRequest,
    RankRequest,
    TextsEncoded,
)
from max.pipelines.generation.process.events import (
    AdapterChanged,
    EngineReady,
    EngineStats,
    EngineStopped,
    ErrorInfo,
    OthersLoad,
    PagesChanged,
    PredictionVerified,
    PrefixesForgotten,
    PrefixesKept,
    PromptStarted,
    RequestFailed,
    StepTimes,
    TokensGenerated,
)
from max.serve.process.settings import WatchLimits
from max.serve.worker.answers import Answers, adapter_change
from max.serve.worker.engine_state import EngineLostError, EngineState, EngineUnavailableError
from max.serve.worker.prefix_router import Route
from max.serve.worker.started_worker import (
    Worker,
    end_in_thread,
    end_logged,
    kill_in_thread,
    start_with_patience,
)
from max.serve.worker.subscription import EventReader, OpenRequest, WorkerMessage
from max.serve.worker.suspects import Suspects, Turn
from max.serve.worker.watch import WorkerWatch

logger = logging.getLogger("max.serve")

MOST_FAILED_STARTS, _FIRST_DELAY_S = 5, 0.1
"""The number of starts in a row that may fail, and the wait in seconds after the first of them."""


class Requests(Protocol):
    """The open requests of all replicas, and what is done with them; ``EngineClient`` implements it."""

    turn: Turn
    """The turn to try a request that may end workers."""

    @property
    def entries(self) -> Mapping[str, OpenRequest]:
        """The requests of all replicas, by their identifiers."""
        ...

    def of(self, replica: Replica) -> list[OpenRequest]:
        """The requests of a replica, oldest first."""
        ...

    def end(self, entry: OpenRequest) -> None:
        """Forgets a request, before its last event is put."""
        ...

    def prompt_started(self, entry: OpenRequest, event: PromptStarted) -> None:
        """Takes the event that a request begins."""
        ...

    def prompt_read(self, route: Route) -> None:
        """Takes that the prompt of a request was read, as its first tokens have come."""
        ...

    def take_report(self, replica: Replica, event: PagesChanged | OthersLoad) -> None:
        """Takes what the cache of a replica has gained and lost, or what other processes have sent to it."""
        ...

    def state_changed(self, replica: Replica) -> None:
        """A replica has another state: if it is ready, requests are sent to it, else its own may go to another one."""
        ...


class Replica:
    """One engine of a model, for the tasks of one event loop.

    Args:
        number: Its number among the replicas of the model.
        start_worker: Starts a worker process.
        requests: The open requests.
        worker: The first worker, if it was started already.
        limits: How long a worker may be silent, and take to end.
    """

    def __init__(
        self,
        number: int,
        start_worker: Callable[[], Worker],
        requests: Requests,
        worker: Worker | None = None,
        limits: WatchLimits | None = None,
    ) -> None:
        self.number, self._requests = number, requests
        self._entries = requests.entries
        self._suspects = Suspects(self._is_open, self._submit, lambda: requests.turn)
        self.start_worker, self._limits = start_worker, limits or WatchLimits()
        self._watch: WorkerWatch | None = None
        # ends the waiting of requests for the next worker
        self._waits: asyncio.TimerHandle | None = None
        self._starts_for_long = False
        self._killing: asyncio.Future[None] | None = None  # of the last worker that did not respond
        self.worker = worker
        """The worker; None: the next one is not started yet."""
        self._state = EngineState.STARTING
        self._changed = asyncio.Event()
        self._failed_starts, self._ends_well = 0, False
        self._error: ErrorInfo | None = None
        self._restart: asyncio.Task[None] | None = None
        self.ready: EngineReady | None = None
        """The engine's limits; None before the first worker is ready."""
        self.stats = EngineStats()
        """The last report of the engine's load."""
        self.restarts = 0
        """The number of workers that died."""
        self._past_steps = (StepTimes(), StepTimes())  # the times of workers that died
        self._answers = Answers(self._send)
        self.adapters: dict[str, str | None] = {}
        """The paths of adapters that were loaded since the start, by name; None: it was unloaded since."""

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        return self._state

    @property
    def loading(self) -> str:
        """The step that the worker's load is at; empty: unknown, or it is loaded."""
        signs = None if self.worker is None else self.worker.signs
        return "" if signs is None else signs.loading

    @property
    def responds(self) -> bool:
        """Whether the worker gives signs of life; also while none is to give any, as the state tells that."""
        return self._watch is None or self._watch.responds

    @property
    def waits(self) -> bool:
        """Whether requests may wait for it: it runs and reads them, or starts and has not done so for long."""
        return not (self._state is EngineState.STOPPED or self._starts_for_long or self._is_full)

    @property
    def _is_full(self) -> bool:
        """Whether the worker does not read, so that what is sent to it only takes memory."""
        return self.worker is not None and self.worker.channel.is_full

    @property
    def refusal(self) -> EngineUnavailableError:
        """Why it takes no request, if none may wait for it."""
        if self._state is EngineState.STOPPED:
            return EngineUnavailableError("the engine has stopped")
        if self._is_full:
            return EngineUnavailableError("the engine does not read its requests; try again later")
        since = f"for more than {self._limits.wait_s:g} s; try again later"
        return EngineUnavailableError(f"the engine has been starting again {since}")

    @property
    def prompt_steps(self) -> StepTimes:
        """The times of steps that read prompts, of all workers."""
        return self._past_steps[0] + self.stats.prompt_steps

    @property
    def decode_steps(self) -> StepTimes:
        """The times of the other steps, of all workers."""
        return self._past_steps[1] + self.stats.decode_steps

    @property
    def node(self) -> str:
        """The identifier of the machine that it runs on; empty: this one."""
        return "" if self.worker is None else getattr(self.worker, "node", "")

    @property
    def worker_pid(self) -> int | None:
        """The number of the worker's process."""
        return None if self.worker is None else self.worker.pid

    def start(self) -> None:
        """Starts the worker, or takes the one that was given; within the event loop."""
        self._loop = asyncio.get_running_loop()
        self._attach(self.worker or self.start_worker())

    async def wait_ready(self) -> EngineReady:
        """Waits until the model is loaded.

        Raises:
            UserError: It cannot be loaded, for a reason that the user can correct.
            RuntimeError: It cannot be loaded.
        """
        while self._state not in (EngineState.READY, EngineState.STOPPED):
            self._changed.clear()
            await self._changed.wait()
        if self._state is EngineState.STOPPED or self.ready is None:
            raise (self._error or ErrorInfo("RuntimeError", "the engine stopped")).to_exception()
        return self.ready

    def run(self, entry: OpenRequest) -> None:
        """Runs a request, as the model is loaded.

        Args:
            entry: The request, whose ``replica`` is this one.

        Raises:
            Exception: It cannot be encoded.
        """
        run = self._suspects.run if entry.is_suspect else self._submit
        run(entry)

    def cancel(self, request_id: str) -> None:
        """Ends a request, which is not among the open ones any more.

        Args:
            request_id: The request.
        """
        self._send(CancelRequest(request_id))
        self._suspects.clear(request_id)

    def _submit(self, entry: OpenRequest) -> None:
        entry.is_sent = True
        self._send(entry.next_request())

    def _is_open(self, entry: OpenRequest) -> bool:
        return self._find(entry.request.request_id) is entry

    def _find(self, request_id: str) -> OpenRequest | None:
        """A request of this replica; None: it has ended, or it is another replica's."""
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.replica is self else None

    def _blame(self, silent: str) -> None:
        """Ends the requests over which too many workers were lost.

        Args:
            silent: Why the last one is ended although it runs; empty: it has ended.
        """
        sent = [entry for entry in self._requests.of(self) if entry.is_sent]
        for entry in self._suspects.blame(sent, bool(silent)):
            self._requests.end(entry)
            how = f"do not respond ({silent})" if silent else "died"
            entry.put(EngineLostError(f"{entry.losses} worker processes {how} over this request"))

    async def forget_prefixes(self) -> None:
        """Empties the prefix cache, and waits until it is empty; running requests keep their pages."""
        if self._state is EngineState.READY:  # else the next worker begins with an empty cache
            await self._answers.ask(ForgetPrefixes)

    async def keep_prefixes(self, action: str, name: str) -> tuple[int, int]:
        """Saves the cached prefixes to a file, restores those of a file, or removes a file.

        Args:
            action: ``save``, ``restore`` or ``erase``.
            name: The name of the file.

        Returns:
            The tokens whose pages were saved or restored, and the size of the file.

        Raises:
            UserError: The file cannot be used.
            EngineUnavailableError: The model is not loaded.
            RuntimeError: The worker was lost meanwhile.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailableError("the model is not loaded")
        return await self._answers.keep_prefixes(action, name)

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Loads an adapter, or unloads it when its requests have ended; a later worker has the change, too.

        Args:
            name: Its name.
            path: Its folder or file; None: it is unloaded.

        Raises:
            UserError: It cannot be loaded, or none of this name is loaded.
            EngineUnavailableError: The model is not loaded.
            RuntimeError: The worker was lost meanwhile.
        """
        if self._state is not EngineState.READY:
            raise EngineUnavailableError("the model is not loaded")
        await self._answers.change_adapter(name, path)
        self.adapters[name] = path

    async def close(self, finish: bool = True, timeout: float | None = None) -> None:
        """Stops the worker, and waits until it has ended; open requests then end with an error.

        Args:
            finish: Whether open requests are finished first.
            timeout: The longest time in seconds; then the worker is killed.
        """
        worker, restart = self.worker, self._restart
        self._suspects.blame([], False)  # none is tried here any more
        # first: the end of the worker starts no other one then
        self._set_state(EngineState.STOPPED)
        if not finish or worker is None:
            # before the worker is told: it reports a cancelled request like a complete one
            self._fail_open(EngineUnavailableError("the server shuts down"))
        if restart is not None:
            restart.cancel()
            await asyncio.wait({restart})  # after that no start of a worker is under way
        if self._killing is not None:
            await asyncio.wait({self._killing}, timeout=timeout)
        if worker is None:
            return
        self._send(Shutdown(finish))
        await end_in_thread(worker, timeout)
        self._fail_open(EngineUnavailableError("the server shuts down"))
        self._answers.end()
        # errors of requests may keep this client alive, and with it the worker's files
        self.worker = None

    def _set_state(self, state: EngineState) -> None:
        self._state = state
        # only a worker that is ready is watched: compiling and reading a model may take any time
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if state is not EngineState.RESTARTING:
            self._starts_for_long = False
            if self._waits is not None:
                self._waits.cancel()
                self._waits = None
        elif self._waits is None and self._limits.wait_s:
            self._waits = self._loop.call_later(self._limits.wait_s, self._end_waiting)
        worker = self.worker
        if state is EngineState.READY and worker is not None and worker.signs is not None:
            self._watch = WorkerWatch(
                worker.signs, self._limits, lambda reason: self._replace(worker, reason)
            )
        self._requests.state_changed(self)
        self._changed.set()

    def _attach(self, worker: Worker) -> None:
        try:
            EventReader(worker, self._loop, self, self._entries, self._take)
        except BaseException:  # no thread could be started
            self.worker = None
            worker.kill()
            raise
        self.worker, self._ends_well = worker, False

    def _take(self, worker: Worker, event: WorkerMessage) -> None:
        match event:
            case PromptStarted(request_id):
                if (entry := self._find(request_id)) is not None:
                    self._requests.prompt_started(entry, event)
                    self._suspects.clear(request_id)
            case PredictionVerified(request_id):
                if (entry := self._find(request_id)) is not None:
                    entry.put(event)
            case TokensGenerated(request_id, tokens, status):
                if (entry := self._find(request_id)) is not None:
                    entry.generated += tokens
                    if entry.route is not None and entry.route.unread:
                        self._requests.prompt_read(entry.route)
                    self._put(entry, event, status is not GenerationStatus.ACTIVE)
            case RequestFailed(request_id) | TextsEncoded(request_id):
                if (entry := self._find(request_id)) is not None:
                    self._put(entry, event, True)
            case EngineReady():
                self.ready, self._failed_starts = event, 0
                logger.info("replica %d is ready: %s", self.number, event.start)
                if self._state is EngineState.STOPPED:
                    return
                # before any request: the engine reads messages in their order
                for name, path in self.adapters.items():
                    self._answers.tell(adapter_change(name, path))
                self._set_state(EngineState.READY)
            case PrefixesForgotten() | PrefixesKept() | AdapterChanged():
                self._answers.take(event)
            case EngineStats():
                self.stats = event
            case PagesChanged() | OthersLoad():
                self._requests.take_report(self, event)
            case EngineStopped(error):
                self._error, self._ends_well = error, error is None
            case None:
                self._lose(worker)

    def _put(
        self, entry: OpenRequest, event: TokensGenerated | RequestFailed | TextsEncoded, ends: bool
    ) -> None:
        """Hands an event to the task of its request."""
        # first, as the task that wakes may open a request of the same name
        if ends:
            self._requests.end(entry)
        entry.put(event)
        if entry.is_suspect:
            self._suspects.clear(entry.request.request_id)

    def _send(self, command: Command | EncodeRequest | RankRequest) -> None:
        if self.worker is not None:
            # if it has ended, the reader finds that, and ends the open requests
            self.worker.channel.send_soon(command, self._loop)

    def _replace(self, worker: Worker, reason: str) -> None:
        """Ends a worker that does not go on; its channel may never be closed, so nothing waits for that."""
        logger.error("the worker process %s does not respond: %s; it is ended", worker.pid, reason)
        self._killing = kill_in_thread(worker)
        self._lose(worker, reason)

    def renew(self, reason: str) -> None:
        """Ends the worker although it goes on, and starts another one; its requests are not the cause.

        Args:
            reason: Why.
        """
        if (worker := self.worker) is None or self._state is not EngineState.READY:
            return
        logger.error("the worker process %s is replaced: %s", worker.pid, reason)
        self._killing = kill_in_thread(worker)
        self._lose(worker, blames=False)

    def _lose(self, worker: Worker, silent: str = "", blames: bool = True) -> None:
        """Starts another worker; requests go on with another replica or wait for the worker.

        Args:
            worker: The worker that is lost.
            silent: Why it is ended although it runs; empty: it has ended.
            blames: Whether its requests may be the cause.
        """
        self._answers.end()
        if self._state is EngineState.STOPPED:
            return
        # what it has still sent is dropped from here on, as its requests run elsewhere
        self.worker = None
        # before `stats` begins anew, as both sums read it
        self._past_steps = (self.prompt_steps, self.decode_steps)
        self.stats = EngineStats()
        # a first start that fails tells why; to try it again would only hide that
        if self._state is EngineState.STARTING:
            self._restart = asyncio.ensure_future(self._fail_start(worker))
            return
        if self._state is EngineState.READY:
            self.restarts += 1
        else:
            self._failed_starts += 1
        if blames and not self._ends_well:  # its owner has ended it, if there is another one
            self._blame(silent)
        else:
            self._suspects.blame([], False)
        self._set_state(EngineState.RESTARTING)
        self._restart = asyncio.ensure_future(self._start_again(worker))

    async def _fail_start(self, worker: Worker) -> None:
        """Gives up: the first worker has ended before it was ready."""
        await end_logged(worker, self._limits.end_s)
        self._error = self._error or ErrorInfo(
            "RuntimeError",
            f"the worker process ended while it loaded the model ({worker.exit_reason})",
        )
        self._set_state(EngineState.STOPPED)
        self._fail_open(EngineUnavailableError(self._error.problem))

    async def _start_again(self, worker: Worker) -> None:
        if self._killing is not None:
            # a hung worker holds its memory and its cores until its end
            await asyncio.wait({self._killing})
        await end_logged(worker, self._limits.end_s)
        logger.error("the worker process has ended (%s); it is started again", worker.exit_reason)
        while True:
            if self._failed_starts >= MOST_FAILED_STARTS:
                problem = self._error.problem if self._error else worker.exit_reason
                logger.error("no worker process can be started: %s", problem)
                self._set_state(EngineState.STOPPED)
                self._fail_open(EngineUnavailableError(f"no worker can be started: {problem}"))
                return
            if self._failed_starts:
                await asyncio.sleep(_FIRST_DELAY_S * 2**self._failed_starts)  # 0.2, 0.4, 0.8, 1.6 s
            self._error = None
            try:
                self._attach(await start_with_patience(self.start_worker))
                return
            except Exception as error:  # no memory, no process or no thread is left
                logger.error("a worker process cannot be started: %s", error)
                self._failed_starts += 1
                self._error = ErrorInfo.of(error)

    def _end_waiting(self) -> None:
        """Fails the requests that wait for the next worker, and later ones until it is ready."""
        self._starts_for_long = True
        self._fail_open(self.refusal)

    def _fail_open(self, error: Exception) -> None:
        for entry in self._requests.of(self):
            self._requests.end(entry)
            entry.put(error)
