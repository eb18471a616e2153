"""Generates on an engine in another process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence

from max.interfaces import RequestID, TextGenerationOutput
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.generation import TextGenerator, by_request
from max.pipelines.generation.process.channel import Channel
from max.pipelines.generation.process.commands import (
    CancelRequest,
    Command,
    GenerationRequest,
    Shutdown,
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

_RequestEvent = TokensGenerated | RequestFailed | EngineStopped


class RemoteGeneration(TextGenerator[TextContext]):
    """Generates on the engine at the other end of a channel, for any number of threads.

    The contexts of requests are read but not updated; the engine's process holds all state of a request.

    Args:
        channel: The users' end of the channel.

    Raises:
        UserError: The engine could not load the model, for a reason that the user can correct.
        RuntimeError: The engine could not load the model for another reason, or has ended.
    """

    def __init__(self, channel: Channel[Event, Command]) -> None:
        self._channel = channel
        first = self._receive()
        if not isinstance(first, EngineReady):
            raise _stop_error(first)
        self.ready = first
        """The limits of the engine."""
        self._lock = threading.Lock()  # guards the next two attributes
        # the open requests; None: the call has ended, and a cancellation was sent to the engine
        self._calls: dict[str, queue.SimpleQueue[_RequestEvent] | None] = {}
        self._stopped: EngineStopped | None = None
        self._reader = threading.Thread(target=self._read, name="engine events", daemon=True)
        self._reader.start()

    def stream(
        self, contexts: Sequence[TextContext]
    ) -> Generator[TextGenerationOutput, None, None]:
        """Yields the tokens of requests as they are generated.

        Requests that are still open when the iterator is closed are cancelled.

        Args:
            contexts: The requests; they are not updated.

        Raises:
            InputError: A request can never run.
            RuntimeError: A step failed, or the engine has ended.
            ValueError: A request is already open, or cannot be sent because it has logits processors or images.
        """
        requests = [GenerationRequest.of(context) for context in by_request(contexts).values()]
        events: queue.SimpleQueue[_RequestEvent] = queue.SimpleQueue()
        open_requests = {request.request_id for request in requests}
        self._enter(open_requests, events)
        try:
            for request in requests:
                self._send(request)
            while open_requests:
                match events.get():
                    case TokensGenerated(request_id, _, status) as event:
                        if status.is_done:
                            open_requests.discard(request_id)
                        yield event.to_output()
                    case RequestFailed(request_id, error):
                        open_requests.discard(request_id)
                        raise error.to_exception()
                    case EngineStopped() as stopped:
                        raise _stop_error(stopped)
        finally:
            with self._lock:
                # their last events are still to come, and no later call of the same name may get them
                for request_id in open_requests & self._calls.keys():
                    self._calls[request_id] = None
            for request_id in open_requests:
                self._send(CancelRequest(request_id))

    def cancel(self, request_id: RequestID) -> None:
        """Ends a request with status ``CANCELLED``; its pages are freed before the next step.

        Args:
            request_id: The request; nothing happens if it has ended.
        """
        self._send(CancelRequest(request_id.value))

    def close(self, finish: bool = False) -> None:
        """Stops the engine, and waits until it has stopped.

        Args:
            finish: Whether open requests are finished first; if not, they are cancelled.
        """
        self._send(Shutdown(finish))
        self._reader.join()
        self._channel.close()

    def _enter(self, request_ids: set[str], events: queue.SimpleQueue[_RequestEvent]) -> None:
        """Registers the queue that receives the events of requests."""
        with self._lock:
            if self._stopped is not None:
                raise _stop_error(self._stopped)
            for request_id in request_ids & self._calls.keys():
                raise ValueError(f"request {request_id} is open already")
            self._calls.update(dict.fromkeys(request_ids, events))

    def _send(self, command: Command) -> None:
        try:
            self._channel.send(command)
        except OSError:
            pass  # the reading thread finds the reason, and ends every open request

    def _receive(self) -> Event:
        try:
            return self._channel.receive()
        except EOFError:
            return EngineStopped(ErrorInfo("EOFError", "the process of the engine has ended"))

    def _read(self) -> None:
        """Passes each event to the call that waits for it, and the last event to every call."""
        while True:
            event = self._receive()
            with self._lock:
                if isinstance(event, EngineStopped):
                    self._stopped = event
                    # it is the last event of every open call
                    for events in filter(None, self._calls.values()):
                        events.put(event)
                    self._calls.clear()
                    return
                # events of no request, which only servers read
                if isinstance(
                    event,
                    EngineReady
                    | EngineStats
                    | PagesChanged
                    | PromptStarted
                    | PredictionVerified
                    | PrefixesForgotten
                    | PrefixesKept
                    | AdapterChanged,
                ):
                    continue
                if (events := self._calls.get(event.request_id)) is not None:
                    events.put(event)
                if isinstance(event, RequestFailed) or event.status.is_done:
                    self._calls.pop(event.request_id, None)


def _stop_error(event: Event) -> Exception:
    """The error of a request whose engine has stopped."""
    if isinstance(event, EngineStopped) and event.error is not None:
        return event.error.to_exception()
    return RuntimeError("generation failed: the engine has stopped")
