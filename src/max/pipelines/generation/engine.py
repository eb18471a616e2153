"""Runs requests on a pipeline, batch by batch.

The engine is the only place that connects scheduler and pipeline. It has no thread: a driver calls
:meth:`Engine.step` as long as there are requests. Drivers are :class:`~max.pipelines.generation.generation.Generation`
for threads of this process, and :func:`~max.pipelines.generation.process.service.serve` for another process.
"""

from __future__ import annotations

import bisect
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from max._config import flags
from max._dataclass import dataclass
from max._lazy import lazy_module
from max.interfaces import (
    BatchType,
    GenerationStatus,
    RequestID,
    TextGenerationContext,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.batch_pipeline import BatchPipeline, StepResult
from max.pipelines.generation.process.events import STEP_BOUNDS_MS, StepTimes
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.kv_cache.known_pages import Miss
from max.pipelines.kv_cache.several_caches import caches_of_models
from max.pipelines.scheduler import SchedulerLimits, scheduler_of

if TYPE_CHECKING:
    from max.pipelines.generation import step_log
else:
    step_log = lazy_module("max.pipelines.generation.step_log")


@dataclass(frozen=True)
class Failure:
    """An error that ended a request.

    Args:
        request_id: The request.
        error: The error.
    """

    request_id: RequestID
    error: Exception


@dataclass(frozen=True)
class _Submission:
    """A request that has not been passed to the scheduler yet."""

    context: TextGenerationContext
    priority: int
    client: str


Outcome: TypeAlias = TextGenerationOutput | Failure
"""The result of a step for one request: new tokens, or its failure."""


class StepRecorder:
    """A histogram of step durations, updated in place without allocation."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BOUNDS_MS) + 1)
        self._milliseconds = 0.0

    def record(self, seconds: float, steps: int = 1) -> None:
        """Adds the steps of one call.

        Args:
            seconds: The total duration of the steps.
            steps: The number of steps; nothing is recorded if it is 0.
        """
        milliseconds = seconds * 1e3
        if steps:
            # a bound belongs to the bucket below it, as in Prometheus
            self._counts[bisect.bisect_left(STEP_BOUNDS_MS, milliseconds / steps)] += steps
            self._milliseconds += milliseconds

    @property
    def times(self) -> StepTimes:
        """The durations recorded so far."""
        return StepTimes(tuple(self._counts), self._milliseconds)


class Engine:
    """Runs requests on a pipeline.

    :meth:`submit` and :meth:`cancel` may be called from any thread, :meth:`step` by one thread at a time. The engine
    holds no reference that keeps its pipeline alive.

    Args:
        pipeline: The pipeline; all its requests must go through one engine.
        limits: The limits of batches.
        reader: Delivers the tokens during an execution of several steps, if the pipeline supports it; :meth:`step` then
            returns only tokens that were not delivered.
    """

    def __init__(
        self,
        pipeline: BatchPipeline[Any],
        limits: SchedulerLimits,
        reader: StepReader | None = None,
    ) -> None:
        # an engine does not keep the weights of a pipeline that nobody uses in memory
        self._pipeline = weakref.ref(pipeline)
        self.scheduler = scheduler_of(caches_of_models(pipeline.scheduled_caches), limits)
        self._stepping = False
        self._lock = threading.Lock()  # guards _changes and _started
        self._changes: list[_Submission | RequestID] = []
        # outcomes that the next step() returns: an interrupted step leaves its outcomes here
        self._outcomes: list[Outcome] = []
        self.prompt_steps, self.decode_steps = StepRecorder(), StepRecorder()
        # requests that were in no batch yet; requests whose first batch began since take_started()
        self._new: set[RequestID] = set()
        self._started: list[tuple[RequestID, float, int, Miss | None]] = []
        self._reader = reader
        pipeline.read_steps(reader)
        path = flags.MAX_STEP_LOG
        self._log = None if path is None else step_log.StepLog(path)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        with self._lock:
            return not (self._changes or self._outcomes or len(self.scheduler))

    def submit(self, context: TextGenerationContext, priority: int = 0, client: str = "") -> None:
        """Submits a request; it is added before the next step.

        Args:
            context: The request, which the engine updates. No open request may have the same identifier.
            priority: Requests with lower values come first.
            client: The client that sent it; clients share the engine equally.
        """
        with self._lock:
            self._changes.append(_Submission(context, priority, client))
        # a call of several steps ends, so that the request joins the next batch
        self.interrupt()

    def cancel(self, request_id: RequestID) -> None:
        """Ends a request before the next step; that step returns its last output and frees its pages.

        Args:
            request_id: The request; nothing happens if it is not open.
        """
        with self._lock:
            self._changes.append(request_id)
        self.interrupt()

    def interrupt(self) -> None:
        """Ends a running :meth:`step` after its current decoding step."""
        pipeline = self._pipeline() if self._stepping else None
        if pipeline is not None:
            pipeline.interrupt()

    def apply_changes(self) -> None:
        """Adds and cancels requests without running a batch; to be called only between two steps."""
        with self._lock:
            changes, self._changes = self._changes, []
        for change in changes:
            if not isinstance(change, RequestID):
                try:
                    self.scheduler.add(change.context, change.priority, change.client)
                    self._new.add(change.context.request_id)
                except ValueError as error:
                    self._outcomes.append(Failure(change.context.request_id, error))
            elif change in self.scheduler:
                self._remove(change)
                self._new.discard(change)
                self._outcomes.append(TextGenerationOutput(change, [], GenerationStatus.CANCELLED))

    def step(self) -> list[Outcome]:
        """Runs the next batch.

        An error of the pipeline fails only the requests of the batch.

        Returns:
            The new tokens and the ends of requests.

        Raises:
            BaseException: The pipeline raised an exception that is not an ``Exception``, such as ``KeyboardInterrupt``.
                The requests of the batch are preempted, and continue after the tokens that were delivered.
        """
        # set before the changes are read: a request that arrives from now on interrupts the step
        self._stepping = True
        try:
            self.apply_changes()
            inputs = self.scheduler.schedule()
            if inputs is not None:
                self._run(inputs)
        finally:
            self._stepping = False
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_started(self) -> list[tuple[RequestID, float, int, Miss | None]]:
        """The requests whose first batch began since the last call, with its time in seconds since the epoch, the
        tokens that the prefix cache had, and why it had no more; thread-safe.
        """
        with self._lock:
            started, self._started = self._started, []
        return started

    def _run(self, inputs: TextGenerationInputs[TextGenerationContext]) -> None:
        """Runs a batch and records the outcomes; an error ends the requests of the batch."""
        pipeline = self._pipeline()
        if pipeline is None:
            raise RuntimeError("the pipeline of this engine was deleted")
        batch = list(inputs.batch.values())
        # most batches have no new request
        if self._new:
            now, started = time.time(), list[tuple[RequestID, float, int, Miss | None]]()
            for context in batch:
                if context.request_id in self._new:
                    self._new.discard(context.request_id)
                    miss = self.scheduler.pages.miss(context)
                    started.append((context.request_id, now, context.start_idx, miss))
            with self._lock:
                self._started += started
        # as they are before the batch, for an interrupt
        lengths = [context.current_length for context in batch]
        # the scheduler is not timed: its estimates are of the model
        start = time.perf_counter()
        if self._log is not None:
            self._log.begin(batch, start)
        try:
            outputs = pipeline.execute(inputs)
            if not isinstance(outputs, StepResult):
                outputs = StepResult(outputs)  # each of its tokens is of one step
        except Exception as error:
            self._end_reading(0)
            for context in batch:
                self._remove(context.request_id)
                self._outcomes.append(Failure(context.request_id, error))
            return
        except BaseException:
            # what clients have seen must stay in the texts
            self._keep_delivered(batch, lengths)
            for context in batch:
                if context.is_done:
                    self._remove(context.request_id)
                else:
                    self.scheduler.requeue(context)
            raise
        end = time.perf_counter()
        seconds, steps = end - start, outputs.steps
        # the reader has sent these tokens; the outcomes are the others
        delivered = self._end_reading(steps)
        for context in batch:
            tokens = delivered.get(context.request_id)
            if tokens:
                self._take_delivered(context, outputs, tokens)
        if inputs.batch_type is BatchType.TG:
            self.scheduler.record_step(seconds, steps)
            self.decode_steps.record(seconds, steps)
        else:
            self.scheduler.record_prompts(seconds)
            self.prompt_steps.record(seconds)
        for context in batch:
            if context.is_done:
                pipeline.release(context.request_id)
        # before the outcomes: pages of ended requests are free when their clients learn of it
        self.scheduler.update(batch)
        if self._log is not None:
            self._log.end(steps, seconds, end if len(self.scheduler) else None)
        for context in batch:
            output, error = outputs.get(context.request_id), getattr(context, "failure", None)
            if error is not None:
                self._outcomes.append(Failure(context.request_id, error))
            elif output is not None and (output.tokens or output.is_done):
                self._outcomes.append(output)

    def _remove(self, request_id: RequestID) -> None:
        """Ends a request between two steps: frees what the pipeline keeps of it, and its pages."""
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.release(request_id)
        self.scheduler.remove(request_id)

    def _keep_delivered(
        self, batch: Sequence[TextGenerationContext], lengths: Sequence[int]
    ) -> None:
        """Appends the tokens that an interrupted execution delivered to the sequences of their requests; what it added
        to a sequence besides is an outcome.

        The next step continues after them and samples the same tokens as without the interrupt, since the seed of a
        token depends only on its position.

        Args:
            batch: The requests.
            lengths: Their lengths before the execution.
        """
        interrupted, pipeline = self._end_reading(0), self._pipeline()
        for context, length in zip(batch, lengths, strict=True):
            tokens = interrupted.get(context.request_id, ())
            # the execution may already have updated the context before the interrupt
            for token in tokens[context.current_length - length :]:
                context.update(token)
                if pipeline is not None:
                    pipeline.follow(context, token)
            output = context.to_generation_output()
            later = context.all_tokens[length + len(tokens) :].tolist()
            if later or context.is_done:
                self._outcomes.append(replace(output, tokens=later))

    @staticmethod
    def _take_delivered(
        context: TextGenerationContext, outputs: StepResult, delivered: Sequence[int]
    ) -> None:
        """Leaves the tokens of a request in the outputs that were not delivered during the batch."""
        output = outputs[context.request_id]
        count = len(delivered)
        if output.tokens[:count] == delivered:
            outputs[context.request_id] = replace(output, tokens=output.tokens[count:])
        # after an error the tokens of the request end earlier
        elif isinstance(context, TextContext) and context.failure is None:
            context.status = GenerationStatus.CANCELLED
            context.failure = RuntimeError(
                f"the tokens {delivered} were delivered, and the execution returned {output.tokens}"
            )

    def _end_reading(self, steps: int) -> dict[RequestID, list[int]]:
        """The tokens of each request that were delivered during the batch; empty if there is no reader."""
        return {} if self._reader is None else self._reader.end(steps)
