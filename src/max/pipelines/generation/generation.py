"""Generates tokens for threads of this process.

:class:`Generation` has no thread of its own. One of the threads that wait for tokens drives at a time: it steps the
engine, distributes the outcomes, and hands over to another thread when its own requests have ended.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar

from max.interfaces import (
    GenerationStatus,
    LogProbabilities,
    RequestID,
    TextGenerationContext,
    TextGenerationOutput,
)
from max.pipelines.core.exceptions import UserError
from max.pipelines.generation.batch_pipeline import (
    BatchPipeline,
    ForeignPipeline,
    batch_pipeline,
    limits_of,
)
from max.pipelines.generation.engine import Engine, Failure, Outcome
from max.pipelines.scheduler import ReplicaScheduler, SchedulerLimits, TextScheduler

ContextT = TypeVar("ContextT", bound=TextGenerationContext, contravariant=True)


class TextGenerator(ABC, Generic[ContextT]):
    """Generates tokens for requests, in this process or in another one."""

    @abstractmethod
    def stream(self, contexts: Sequence[ContextT]) -> Generator[TextGenerationOutput, None, None]:
        """Yields the tokens of requests as they are generated.

        Requests that are still open when the iterator is closed are cancelled.

        Args:
            contexts: The requests.

        Raises:
            InputError: A request can never run.
            RuntimeError: A step failed.
        """

    @abstractmethod
    def cancel(self, request_id: RequestID) -> None:
        """Ends a request with status ``CANCELLED``; its pages are freed before the next step.

        Args:
            request_id: The request; nothing happens if it has ended.
        """

    def run(self, contexts: Sequence[ContextT]) -> list[TextGenerationOutput]:
        """Generates until all requests have ended.

        Args:
            contexts: The requests.

        Returns:
            All tokens of each request, in the order of the requests.

        Raises:
            InputError: A request can never run.
            RuntimeError: A step failed.
        """
        tokens: dict[RequestID, list[int]] = {c.request_id: [] for c in contexts}
        logs: dict[RequestID, list[LogProbabilities]] = {c.request_id: [] for c in contexts}
        status: dict[RequestID, GenerationStatus] = {}
        for output in self.stream(contexts):
            tokens[output.request_id] += output.tokens
            logs[output.request_id] += output.log_probabilities or []
            status[output.request_id] = output.final_status
        # in the order of the contexts, not of their ends
        return [
            TextGenerationOutput(key, tokens[key], status[key], logs[key] or None)
            for key in (context.request_id for context in contexts)
        ]


def by_request(contexts: Sequence[ContextT]) -> dict[RequestID, ContextT]:
    """Maps request identifiers to contexts.

    Args:
        contexts: The contexts.

    Raises:
        ValueError: Two contexts have the same identifier.
    """
    contexts_by_request = {context.request_id: context for context in contexts}
    if len(contexts_by_request) < len(contexts):
        ids = [context.request_id for context in contexts]
        twice = next(request_id for request_id in ids if ids.count(request_id) > 1)
        raise ValueError(f"request {twice} is given twice")
    return contexts_by_request


class _Call:
    """The requests of one waiting thread."""

    def __init__(self, contexts: Sequence[TextGenerationContext]) -> None:
        self.contexts = by_request(contexts)
        self.open = set(self.contexts)
        self.outputs: deque[TextGenerationOutput] = deque()
        self.error: Exception | None = None
        self.news = threading.Event()

    @property
    def waits(self) -> bool:
        """Whether no outcome is available without a further step."""
        return bool(self.open) and not self.outputs and self.error is None

    def take(self, outcome: Outcome) -> bool:
        """Adds an outcome of an open request; returns whether it is the last of its request."""
        if isinstance(outcome, Failure):
            self.error = outcome.error
        else:
            self.outputs.append(outcome)
        ended = isinstance(outcome, Failure) or outcome.is_done
        if ended:
            self.open.remove(outcome.request_id)
        self.news.set()
        return ended


class Generation(TextGenerator[TextGenerationContext]):
    """Generates on a pipeline in this process, for any number of threads.

    It updates the contexts of the requests. It holds no reference that keeps the pipeline alive.

    Args:
        pipeline: The pipeline; all its requests must go through one ``Generation``.
        limits: The limits of batches.
    """

    _of: weakref.WeakKeyDictionary[object, Generation] = weakref.WeakKeyDictionary()
    _of_lock = threading.Lock()

    def __init__(self, pipeline: BatchPipeline[Any], limits: SchedulerLimits) -> None:
        # a wrapper belongs to this object, and does not keep its pipeline alive either
        self._wrapper = pipeline if isinstance(pipeline, ForeignPipeline) else None
        self.engine = Engine(pipeline, limits)
        self._driving = threading.Lock()
        self._guard = threading.Lock()  # guards the next two attributes, not the steps
        self._calls: list[_Call] = []
        self._call_of: dict[RequestID, _Call] = {}
        """The call that waits for each open request."""

    @classmethod
    def of(cls, pipeline: object) -> Generation:
        """The generation of a pipeline, created on the first call, with the limits of its configuration.

        Args:
            pipeline: The pipeline, a `BatchPipeline` or another class with these methods.

        Raises:
            TypeError: It does not generate text.
        """
        with cls._of_lock:
            if pipeline not in cls._of:
                runnable = batch_pipeline(pipeline)
                cls._of[pipeline] = cls(runnable, limits_of(runnable))
            return cls._of[pipeline]

    @property
    def scheduler(self) -> TextScheduler | ReplicaScheduler:
        """The scheduler."""
        return self.engine.scheduler

    def stream(
        self, contexts: Sequence[TextGenerationContext]
    ) -> Generator[TextGenerationOutput, None, None]:
        """Yields the tokens of requests as they are generated.

        Requests that are still open when the iterator is closed are cancelled.

        Args:
            contexts: The requests.

        Raises:
            InputError: A request can never run.
            RuntimeError: A step failed.
            ValueError: Two open requests have the same identifier.
        """
        call = _Call(contexts)
        self._enter(call)
        try:
            while True:
                while call.outputs:
                    yield call.outputs.popleft()
                if isinstance(call.error, UserError):
                    raise call.error
                if call.error is not None:
                    raise RuntimeError(f"generation failed: {call.error}") from call.error
                if not call.open:
                    return
                # cleared before the check below, so that news from now on end the wait
                call.news.clear()
                if self._driving.acquire(blocking=False):
                    try:
                        # another thread may have run the step of this call meanwhile
                        if call.waits:
                            self._distribute(self.engine.step())
                    finally:
                        self._release_driving()
                elif call.waits:
                    call.news.wait()
        finally:
            self._leave(call)

    def cancel(self, request_id: RequestID) -> None:
        """Ends a request with status ``CANCELLED``; its pages are freed before the next step.

        Args:
            request_id: The request; nothing happens if it has ended.
        """
        # report the end at once, not after the step that may be running
        with self._guard:
            call = self._call_of.get(request_id)
            if call is not None:
                call.contexts[request_id].status = GenerationStatus.CANCELLED
                # outcomes that the engine gives later find no call, and are dropped
                self._give(TextGenerationOutput(request_id, [], GenerationStatus.CANCELLED))
        self.engine.cancel(request_id)

    def _enter(self, call: _Call) -> None:
        """Registers a call and submits its requests."""
        with self._guard:
            for request_id in call.open & self._call_of.keys():
                raise ValueError(f"request {request_id} is open already")
            self._calls.append(call)
            self._call_of.update(dict.fromkeys(call.open, call))
        for context in call.contexts.values():
            self.engine.submit(context)

    def _leave(self, call: _Call) -> None:
        """Removes a call and cancels its open requests."""
        with self._guard:
            self._calls.remove(call)
            for request_id in call.open:
                del self._call_of[request_id]
        for request_id in call.open:
            self.engine.cancel(request_id)
        # free the pages now if no thread drives, else the driving thread frees them
        if self._driving.acquire(blocking=False):
            try:
                self.engine.apply_changes()
            finally:
                self._release_driving()

    def _release_driving(self) -> None:
        """Hands over to another waiting thread."""
        self._driving.release()
        with self._guard:
            # all of them: which one has open requests left is seen when it wakes
            for call in self._calls:
                call.news.set()

    def _distribute(self, outcomes: Sequence[Outcome]) -> None:
        """Passes outcomes to the calls that wait for them; outcomes of closed calls are dropped."""
        with self._guard:
            for outcome in outcomes:
                self._give(outcome)

    def _give(self, outcome: Outcome) -> None:
        call = self._call_of.get(outcome.request_id)
        if call is not None and call.take(outcome):
            del self._call_of[outcome.request_id]
