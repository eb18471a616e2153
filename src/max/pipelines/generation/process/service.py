"""Runs an engine for the requests of another process."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.interfaces import GenerationStatus, RequestID, TextGenerationOutput
from max.pipelines.generation.batch_pipeline import BatchPipeline, batch_pipeline, limits_of
from max.pipelines.generation.engine import Engine, Failure, Outcome
from max.pipelines.generation.process.arrivals import (
    AdapterLoaded,
    Arrival,
    Arrivals,
    Message,
    Prepared,
    Put,
    adapters_of,
)
from max.pipelines.generation.process.channel import Channel
from max.pipelines.generation.process.commands import (
    CancelRequest,
    Command,
    ForgetPrefixes,
    KeepPrefixes,
    Shutdown,
    UnloadAdapter,
)
from max.pipelines.generation.process.events import (
    AdapterChanged,
    EngineReady,
    EngineStats,
    EngineStopped,
    ErrorInfo,
    Event,
    PagesChanged,
    PredictionVerified,
    PrefixesForgotten,
    PrefixesKept,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.pipelines.generation.process.prefix_keeper import (
    KEEP_DELAY_S,
    KEEP_INTERVAL_S,
    PrefixKeeper,
)
from max.pipelines.generation.process.worker_loop import StepSigns, Work, WorkerLoop
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.scheduler import SchedulerLimits

if TYPE_CHECKING:
    from max.pipelines.core import predicted_text
else:
    predicted_text = lazy_module("max.pipelines.core.predicted_text")

logger = logging.getLogger("max.pipelines")
WARM_UP_DELAY_S = 0.3
"""The idle time in seconds after the start before an engine warms up its pipeline."""


def serve_pipeline(
    load: Callable[[], object],
    channel: Channel[Command, Event],
    stats_interval: float | None = None,
    steps: StepSigns | None = None,
) -> None:
    """Loads a pipeline and runs it for the requests of a channel; the main function of an engine process.

    An error during loading is sent as :class:`EngineStopped`.

    Args:
        load: Loads a pipeline of text; for example the result of ``PIPELINE_REGISTRY.retrieve_factory``.
        channel: The engine's end of the channel.
        stats_interval: The number of seconds between two ``EngineStats`` while the engine works; one more is sent when
            it becomes idle. None: none are sent.
        steps: Is told when steps begin and end; None: nobody is.
    """
    try:
        loaded = load()  # kept until the end, as a wrapper does not keep it alive
        pipeline = batch_pipeline(loaded)
        limits = limits_of(pipeline, are_steps_read=True)
    except Exception as error:
        channel.send(EngineStopped(ErrorInfo.of(error)))
        return
    serve(pipeline, limits, channel, stats_interval, steps)


def serve(
    pipeline: BatchPipeline[Any],
    limits: SchedulerLimits,
    channel: Channel[Command, Event],
    stats_interval: float | None = None,
    steps: StepSigns | None = None,
) -> None:
    """Runs a pipeline for the requests of a channel.

    The function returns after a :class:`Shutdown`, or when the other end of the channel is closed.

    Args:
        pipeline: The pipeline.
        limits: The limits of batches.
        channel: The engine's end of the channel.
        stats_interval: The number of seconds between two ``EngineStats``; None: none are sent.
        steps: Is told when steps begin and end; None: nobody is.
    """
    WorkerLoop(TextWork(pipeline, limits, channel, stats_interval), channel, steps).run()


class TextWork(Work[Prepared, Event]):
    """The work of a process that generates text: an engine.

    Args:
        pipeline: The pipeline.
        limits: The limits of batches.
        channel: Receives tokens during an execution of several steps.
        stats_interval: The number of seconds between two ``EngineStats``; None: none are sent.
    """

    def __init__(
        self,
        pipeline: BatchPipeline[Any],
        limits: SchedulerLimits,
        channel: Channel[Command, Event],
        stats_interval: float | None,
    ) -> None:
        self._pipeline = pipeline  # keeps the pipeline alive, which an engine does not
        self._arrivals = Arrivals(pipeline)
        self._reader = StepReader(self._send_early)
        self._engine = Engine(pipeline, limits, self._reader)
        self._channel, self._limits = channel, limits
        self._open: set[RequestID] = set()
        self._predictions: dict[RequestID, predicted_text.PredictedText] = {}  # of open requests
        self._stats_interval, self._next_stats = stats_interval, 0.0
        self._keeper = PrefixKeeper()
        self._next_keep = time.monotonic() + KEEP_INTERVAL_S
        self._has_new_prefixes = False  # whether prefixes may have been cached since the last write
        # the requests that unloads wait for, by the numbers of the unloads
        self._unloads: dict[int, Set[RequestID]] = {}
        self._warming: threading.Thread | None = None
        self._ends = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self._engine.idle

    @property
    def is_finished(self) -> bool:
        """Whether no request is open."""
        return self._engine.idle and not self._arrivals.waiting

    def begin(self) -> EngineReady:
        """Fills the cache with stored prefixes, and starts to warm up the pipeline."""
        if self._stats_interval is not None:
            for copy in self._engine.scheduler.pages.replicas:
                copy.report_changes()
        # after the caches begin to note changes, so that the first report has these pages
        self._pipeline.load_prefixes()
        self._warming = threading.Thread(target=self._warm_up, name="engine warm-up", daemon=True)
        self._warming.start()
        pages = self._engine.scheduler.pages
        return EngineReady(
            self._limits.max_batch_size * len(pages.replicas),
            pages.page_size,
            pages.total_num_pages,
        )

    def after_begin(self) -> Sequence[Event]:
        """The prefixes that were stored."""
        return self._changed_pages()

    def interrupt(self) -> None:
        """Ends an execution of several steps after the current step."""
        self._engine.interrupt()

    def read(self, message: Message, put: Put) -> None:
        """Prepares a message, in another thread if that takes long.

        Args:
            message: The message.
            put: Queues the command.
        """
        self._arrivals.read(message, put)

    def _warm_up(self) -> None:
        """Warms up the pipeline while the engine is idle, as warming up may hold the interpreter lock for long."""
        while not self._ends.wait(WARM_UP_DELAY_S):
            if self._engine.idle:
                break
        else:
            return
        try:
            self._pipeline.warm_up()
        except Exception as error:  # requests that need the state fail with the same error
            logger.debug("warm-up: %s", error)

    def obey(self, command: Prepared, late: bool) -> Sequence[Event]:
        """Executes a command.

        Args:
            command: The command.
            late: Whether a shutdown came before it.

        Returns:
            The events of a request that cannot run, or the answer to ``ForgetPrefixes``.
        """
        match command:
            case Arrival() as arrival:
                return self._submit(arrival, late)
            case CancelRequest(request_id):
                if not self._arrivals.cancel(RequestID(request_id)):
                    self._engine.cancel(RequestID(request_id))
                return ()
            case AdapterLoaded(number, error):
                return (AdapterChanged(number, None if error is None else ErrorInfo.of(error)),)
            case UnloadAdapter(number, name):
                return self._unload(number, name)
            case ForgetPrefixes(number):
                # a write that goes on would bring forgotten prefixes back
                self._keeper.stop()
                self._pipeline.forget_prefixes()
                return (*self._changed_pages(), PrefixesForgotten(number))
            case KeepPrefixes(number, action, name):
                return (self._keep(number, action, name),)

    def _keep(self, command_number: int, action: str, name: str) -> PrefixesKept:
        """Saves, restores or removes a file of prefixes."""
        self._keeper.stop()
        try:
            tokens, size = self._pipeline.keep_prefixes(action, name)
        except Exception as error:
            return PrefixesKept(command_number, error=ErrorInfo.of(error))
        return PrefixesKept(command_number, tokens, size)

    def _unload(self, command_number: int, name: str) -> Sequence[Event]:
        """Unloads an adapter; the answer waits for its requests."""
        try:
            self._unloads[command_number] = adapters_of(self._pipeline).unload(name)
        except Exception as error:
            return (AdapterChanged(command_number, ErrorInfo.of(error)),)
        return self._ended_unloads()

    def _ended_unloads(self) -> list[Event]:
        """The answers of unloads whose requests have ended."""
        ended = [number for number, requests in self._unloads.items() if not requests]
        for number in ended:
            del self._unloads[number]
        return [AdapterChanged(number) for number in ended]

    def step(self) -> Sequence[Event]:
        """Runs the next batch.

        Returns:
            Tokens, failures, and reports.
        """
        # the events of a step leave in one frame
        outcomes = self._engine.step()
        # before requests are closed
        verified = self._verified_predictions()
        events = [self._event(outcome) for outcome in outcomes]
        if time.monotonic() >= self._next_keep:  # the engine has not been idle for long
            self._keep_new_prefixes()
        return [
            *self._started_prompts(),
            *verified,
            *events,
            *self._ended_unloads(),
            *self._due_stats(),
        ]

    def wait(self, commands: queue.SimpleQueue[Prepared | Shutdown]) -> Prepared | Shutdown:
        """Waits for a command; if none arrives for some time, stores new prefixes.

        Args:
            commands: The queue of commands.
        """
        self._keeper.resume()
        try:
            # retry if the previous write is still running, as an idle engine has no later occasion
            while self._has_new_prefixes:
                try:
                    return commands.get(timeout=KEEP_DELAY_S)
                except queue.Empty:
                    self._keep_new_prefixes()
            return commands.get()
        finally:
            self._keeper.pause()

    def _keep_new_prefixes(self) -> None:
        """Starts a write of the prefixes that no file has."""
        if self._keeper.writes:
            return  # retried at the next interval
        self._has_new_prefixes = not self._engine.idle  # running requests add pages after this
        self._next_keep = time.monotonic() + KEEP_INTERVAL_S
        if (write := self._pipeline.new_prefixes()) is not None:
            self._keeper.start(write)

    def _changed_pages(self) -> list[PagesChanged]:
        """The report of what the caches have gained and lost, if there is anything."""
        events: list[PagesChanged] = []
        for copy in self._engine.scheduler.pages.replicas:
            if changes := copy.take_changes():
                new, lost = b"".join(changes.new_pages), b"".join(changes.lost_pages)
                events.append(PagesChanged(new, lost, changes.is_anew, copy.used_salt_key))
        return events

    def _due_stats(self) -> list[EngineStats | PagesChanged]:
        """The report of the load, if it is due."""
        now = time.monotonic()
        if self._stats_interval is None or (now < self._next_stats and not self._engine.idle):
            return []
        self._next_stats = now + self._stats_interval
        engine, (drafted, accepted) = self._engine, self._pipeline.draft_counts
        return [
            EngineStats(
                **engine.scheduler.counts(),
                prompt_steps=engine.prompt_steps.times,
                decode_steps=engine.decode_steps.times,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
            ),
            *self._changed_pages(),
        ]

    def _started_prompts(self) -> list[PromptStarted]:
        """The requests whose first batch has begun since the last call, if reports are enabled."""
        started = self._engine.take_started()
        if not started or self._stats_interval is None:
            return []
        return [
            PromptStarted(request_id.value, at, cached, "" if miss is None else miss.reason.value)
            for request_id, at, cached, miss in started
        ]

    def _verified_predictions(self) -> list[PredictionVerified]:
        """What of the predictions of open requests was right and wrong since the last call."""
        counts = [(name, each.take_counts()) for name, each in self._predictions.items()]
        return [PredictionVerified(name.value, *own) for name, own in counts if any(own)]

    def _submit(self, arrival: Arrival, late: bool) -> Sequence[Event]:
        """Submits a request that has arrived; returns its end if it was cancelled or is invalid."""
        request, context = arrival.request, arrival.context
        request_id = RequestID(request.request_id)
        waited, cancelled = self._arrivals.take(request_id)
        if cancelled:
            return (TokensGenerated(request.request_id, (), GenerationStatus.CANCELLED),)
        try:
            # one that waited for a thread came before the shutdown
            if late and not waited:
                raise RuntimeError("the engine is shutting down")
            if request_id in self._open:
                raise ValueError(f"request {request_id} is open already")
            if context is None:
                raise arrival.error or RuntimeError("the request has no context")
        except Exception as error:
            return (RequestFailed(request.request_id, ErrorInfo.of(error)),)
        # from here on each way out of the engine sends a last event
        self._open.add(request_id)
        if context.prediction is not None:
            self._predictions[request_id] = context.prediction
        self._has_new_prefixes = True
        if not self._keeper.writes:
            self._pipeline.read_shared_prefixes()
        self._engine.submit(context, request.priority, request.client)
        return ()

    def _event(self, outcome: Outcome) -> TokensGenerated | RequestFailed:
        """Converts an outcome to an event, and closes the request if it has ended."""
        request_id = outcome.request_id
        if isinstance(outcome, Failure):
            self._close(request_id)
            return RequestFailed(request_id.value, ErrorInfo.of(outcome.error))
        if outcome.is_done:
            self._close(request_id)
        return TokensGenerated.of(outcome)

    def _close(self, request_id: RequestID) -> None:
        self._open.discard(request_id)
        self._predictions.pop(request_id, None)

    def _send_early(self, outputs: list[TextGenerationOutput]) -> None:
        """Sends tokens of an execution that is still running; its result is sent after them."""
        events = [TokensGenerated.of(output) for output in outputs]
        # starts first, as their tokens may be among the events
        self._channel.send_all([*self._started_prompts(), *events])

    def end(self, error: BaseException | None) -> Sequence[Event]:
        """Frees the pages of open requests, and stores the cached prefixes unless an error has ended the loop.

        Args:
            error: The error.

        Returns:
            The cancellations of open requests.
        """
        self._reader.close()
        self._ends.set()
        if self._warming is not None:
            self._warming.join()  # native code that still runs at interpreter shutdown may crash
        self._arrivals.close()
        for request_id in self._open:
            self._engine.cancel(request_id)
        self._engine.apply_changes()
        self._keeper.stop()
        if error is None:
            self._pipeline.save_prefixes()
        status = GenerationStatus.CANCELLED
        ended = self._open | self._arrivals.waiting
        return [TokensGenerated(request.value, (), status) for request in ended]
