"""Runs requests on a pipeline, batch by batch.

The engine is the only place that connects scheduler and pipeline. It has no thread: a driver calls
:meth:`Engine.step` as long as there are requests. Drivers are :class:`~max.pipelines.generation.generation.Generation`
for threads of this process, and :func:`~max.pipelines.generation.service.serve` for another process.
"""

from __future__ import annotations

import bisect
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from max._dataclass import dataclass
from max.interfaces import (
    BatchType,
    GenerationStatus,
    RequestID,
    TextGenerationContext,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.generation.prefix_store import PrefixWrite
from max.pipelines.generation.protocol import STEP_BOUNDS_MS, StepTimes
from max.pipelines.generation.step_reader import StepReader
from max.pipelines.scheduler import PageSource, SchedulerLimits, TextScheduler

MAX_SECONDS = 0.04
"""The time limit in seconds of an execution of several steps, if the configuration leaves their number open. It keeps
streamed tokens arriving one by one."""

MIXED_STEP_RATIO = 1.8
"""The time limit of a step that decodes and reads prompts, as a multiple of a decoding step. Running requests then wait
at most twice as long for a token; the difference to 2 leaves a margin for errors of the estimate."""


class BatchPipeline(Protocol):
    """The interface of a pipeline that an engine requires; ``TextGenerationPipeline`` implements it."""

    @property
    def kv_managers(self) -> Sequence[PageSource]:
        """The KV cache, in a list."""
        ...

    def execute(self, inputs: TextGenerationInputs[Any]) -> dict[RequestID, TextGenerationOutput]:
        """Runs a batch, and updates its contexts.

        Args:
            inputs: The batch, with reserved pages.

        Returns:
            The new tokens of each request.
        """
        ...

    def interrupt(self) -> None:
        """Ends an execution of several steps after the current step; thread-safe."""
        ...


@runtime_checkable
class ConfiguredPipeline(BatchPipeline, Protocol):
    """A pipeline whose configuration defines the limits of batches."""

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The configuration."""
        ...

    @property
    def repeats_steps(self) -> bool:
        """Whether several steps in one call save time."""
        ...


@runtime_checkable
class PreparingPipeline(BatchPipeline, Protocol):
    """A pipeline that can prepare a request before its first batch."""

    def prepare(self, context: Any) -> None:
        """Prepares a request, for example compiles its grammar; thread-safe, even while a batch runs.

        Args:
            context: The request, which was in no batch yet.

        Raises:
            ValueError: The request is invalid.
        """
        ...


@runtime_checkable
class WarmingPipeline(BatchPipeline, Protocol):
    """A pipeline that can build state shared by requests before the first request arrives."""

    def warm_up(self) -> None:
        """Builds the shared state; thread-safe, even while a batch runs."""
        ...


@runtime_checkable
class ReadablePipeline(BatchPipeline, Protocol):
    """A pipeline whose tokens can be read during an execution of several steps."""

    def read_steps(self, reader: StepReader | None) -> None:
        """Sets the reader of the tokens.

        Args:
            reader: Delivers the tokens; None: no reader.
        """
        ...


@runtime_checkable
class KeepingPipeline(BatchPipeline, Protocol):
    """A pipeline that can store its cached prefixes for a later engine."""

    def load_prefixes(self) -> None:
        """Fills the cache with the prefixes that an earlier engine stored; called before the first batch."""
        ...

    def save_prefixes(self) -> None:
        """Stores the cached prefixes; called after the last batch."""
        ...

    def new_prefixes(self) -> PrefixWrite | None:
        """The cached prefixes that are not stored yet, to be written by another thread; called between two batches."""
        ...

    def forget_prefixes(self) -> None:
        """Empties the cache and deletes the stored prefixes; called between two batches, while no write runs."""
        ...


def limits_of(pipeline: ConfiguredPipeline) -> SchedulerLimits:
    """The limits of batches from the configuration of a pipeline.

    Args:
        pipeline: The pipeline.
    """
    config = pipeline.pipeline_config
    batch = config.max_batch_size or 1
    steps = max(config.max_num_steps, 1)
    if config.finds_num_steps and not pipeline.repeats_steps:
        steps = 1  # several steps in one call would save no time
    return SchedulerLimits(
        max_batch_size=min(batch, config.max_queue_size_tg or batch),
        max_ce_batch_size=min(batch, config.max_ce_batch_size),
        prefill_chunk_size=config.prefill_chunk_size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_in_flight_batching=config.enable_in_flight_batching,
        max_num_steps=steps,
        max_seconds=MAX_SECONDS if config.finds_num_steps else None,
        max_batch_context_length=config.max_batch_context_length,
        mixed_step_ratio=MIXED_STEP_RATIO,
    )


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
        pipeline: BatchPipeline,
        limits: SchedulerLimits,
        reader: StepReader | None = None,
    ) -> None:
        (cache,) = pipeline.kv_managers
        self._pipeline = weakref.ref(pipeline)
        self.scheduler = TextScheduler(cache, limits)
        self._stepping = False
        self._lock = threading.Lock()  # guards _changes and _started
        self._changes: list[_Submission | RequestID] = []
        # outcomes that the next step() returns: an interrupted step leaves its outcomes here
        self._outcomes: list[Outcome] = []
        self.prompt_steps, self.decode_steps = StepRecorder(), StepRecorder()
        # requests that were in no batch yet; requests whose first batch began since take_started()
        self._new: set[RequestID] = set()
        self._started: list[tuple[RequestID, float, int]] = []
        self._reader = reader if isinstance(pipeline, ReadablePipeline) else None
        if isinstance(pipeline, ReadablePipeline):
            pipeline.read_steps(reader)

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
                self.scheduler.remove(change)
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

    def take_started(self) -> list[tuple[RequestID, float, int]]:
        """The requests whose first batch began since the last call, with its time in seconds since the epoch and the
        tokens that the prefix cache had; thread-safe.
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
        if self._new:
            now, started = time.time(), list[tuple[RequestID, float, int]]()
            for context in batch:
                if context.request_id in self._new:
                    self._new.discard(context.request_id)
                    started.append((context.request_id, now, context.start_idx))
            with self._lock:
                self._started += started
        start = time.perf_counter()
        try:
            outputs = pipeline.execute(inputs)
        except Exception as error:
            self._end_reading(0)
            for context in batch:
                self.scheduler.remove(context.request_id)
                self._outcomes.append(Failure(context.request_id, error))
            return
        except BaseException:
            self._keep_delivered(batch)
            for context in batch:
                if context.is_done:
                    self._outcomes.append(context.to_generation_output())
                    self.scheduler.remove(context.request_id)
                else:
                    self.scheduler.requeue(context)
            raise
        seconds = time.perf_counter() - start
        steps = max([len(output.tokens) for output in outputs.values()], default=0)
        delivered = self._end_reading(steps)
        for context, count in zip(batch[: len(delivered)], delivered, strict=True):
            output = outputs[context.request_id]
            outputs[context.request_id] = replace(output, tokens=output.tokens[count:])
        if inputs.batch_type is BatchType.TG:
            self.scheduler.record_step(seconds, steps)
            self.decode_steps.record(seconds, steps)
        else:
            self.scheduler.record_prompts(seconds)
            self.prompt_steps.record(seconds)
        self.scheduler.update(batch)
        for context in batch:
            output, error = outputs.get(context.request_id), getattr(context, "failure", None)
            if error is not None:
                self._outcomes.append(Failure(context.request_id, error))
            elif output is not None and (output.tokens or output.is_done):
                self._outcomes.append(output)

    def _keep_delivered(self, batch: Sequence[TextGenerationContext]) -> None:
        """Appends the tokens that an interrupted execution delivered to the sequences of their requests.

        The next step continues after them and samples the same tokens as without the interrupt, since the seed of a
        token depends only on its position.
        """
        if self._reader is None:
            return
        for context, (begin, tokens) in zip(batch, self._reader.end_interrupted(), strict=False):
            # the execution may already have updated the context before the interrupt
            for token in tokens[context.current_length - begin :]:
                context.update(token)
            output = context.to_generation_output()
            later = context.all_tokens[begin + len(tokens) :].tolist()
            if later:
                self._outcomes.append(replace(output, tokens=later))

    def _end_reading(self, steps: int) -> list[int]:
        """The number of delivered tokens per request during the batch; empty if there is no reader."""
        return [] if self._reader is None else self._reader.end(steps)
