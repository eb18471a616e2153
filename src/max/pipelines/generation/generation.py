"""Drives a pipeline: takes requests from any thread, batches them, hands their tokens out.

There is no thread of its own. Of the threads that wait for tokens one at a time drives: it makes
the next batch out of the requests of all of them, runs it, hands out what came, and lets another
one drive if its own requests have ended.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from max.interfaces import (
    BatchType,
    GenerationStatus,
    LogProbabilities,
    RequestID,
    TextGenerationContext,
    TextGenerationOutput,
)
from max.pipelines.core.exceptions import UserError
from max.pipelines.scheduler import SchedulerLimits, TextScheduler
from max.pipelines.tokenization.text_stream import StopStrings, TextStream

T = TypeVar("T")

MAX_SECONDS = 0.04
"""How long an execution may take for the sake of giving several tokens at once, where the configuration leaves their number open: to who reads along, tokens come as before."""


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, from a thread that may run an event loop already.

    Args:
        coroutine: The coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(coroutine))
        except BaseException as error:  # raised again in the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def limits_of(pipeline: Any) -> SchedulerLimits:
    """The limits of batches that a pipeline's configuration gives.

    Args:
        pipeline: The pipeline.
    """
    config = pipeline.pipeline_config
    batch = config.max_batch_size or 1
    steps = max(config.max_num_steps, 1)
    if config.finds_num_steps and not pipeline.repeats_steps:
        steps = 1  # a further step in one call saves nothing
    return SchedulerLimits(
        max_batch_size=min(batch, config.max_queue_size_tg or batch),
        max_ce_batch_size=min(batch, config.max_ce_batch_size),
        prefill_chunk_size=config.prefill_chunk_size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_in_flight_batching=config.enable_in_flight_batching,
        max_num_steps=steps,
        max_seconds=MAX_SECONDS if config.finds_num_steps else None,
        max_batch_context_length=config.max_batch_context_length,
    )


class _Call:
    """The requests that one thread waits for."""

    def __init__(self, contexts: Sequence[TextGenerationContext]) -> None:
        self.contexts = {context.request_id: context for context in contexts}
        self.open = set(self.contexts)
        self.outputs: deque[TextGenerationOutput] = deque()
        self.news = threading.Event()
        self.error: BaseException | None = None


class Generation:
    """Runs requests on a pipeline.

    Args:
        pipeline: The pipeline; all its requests must go through one ``Generation``.
        limits: How big batches may be; those of its configuration where they are not given.
    """

    _of: weakref.WeakKeyDictionary[Any, Generation] = weakref.WeakKeyDictionary()
    _of_lock = threading.Lock()

    def __init__(self, pipeline: Any, limits: SchedulerLimits | None = None) -> None:
        self.pipeline = pipeline
        (cache,) = pipeline.kv_managers
        self.scheduler = TextScheduler(cache, limits or limits_of(pipeline))
        self._driving = threading.Lock()
        self._calls: list[_Call] = []
        # guards the list of calls and the scheduler's set of requests, not the steps
        self._guard = threading.Lock()
        self._gone: list[RequestID] = []
        self._new: list[TextGenerationContext] = []

    @classmethod
    def of(cls, pipeline: Any) -> Generation:
        """The one generation of a pipeline, made when it is first asked for.

        Args:
            pipeline: The pipeline.
        """
        with cls._of_lock:
            if pipeline not in cls._of:
                cls._of[pipeline] = cls(_Weak(pipeline))
            return cls._of[pipeline]

    def run(self, contexts: Sequence[TextGenerationContext]) -> list[TextGenerationOutput]:
        """Runs requests until they have ended.

        Args:
            contexts: The requests.

        Returns:
            For each one, in their order, all its tokens.

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
        return [
            TextGenerationOutput(key, tokens[key], status[key], logs[key] or None)
            for key in (context.request_id for context in contexts)
        ]

    def stream(
        self, contexts: Sequence[TextGenerationContext]
    ) -> Generator[TextGenerationOutput, None, None]:
        """Runs requests, and gives their tokens as they come.

        Requests that have not ended when the iterator is closed are cancelled.

        Args:
            contexts: The requests.

        Raises:
            InputError: A request can never run.
            RuntimeError: A step failed.
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
                call.news.clear()
                if self._driving.acquire(blocking=False):
                    try:
                        if not call.outputs and call.open:
                            self._step()
                    finally:
                        self._driving.release()
                        self._wake()
                elif not call.outputs and call.open and call.error is None:
                    call.news.wait()
        finally:
            self._leave(call)

    def cancel(self, request_id: RequestID) -> None:
        """Ends a request; its pages are free before the next step.

        Args:
            request_id: The request; nothing happens where it has ended.
        """
        self._interrupt()
        with self._guard:
            self._gone.append(request_id)
            for call in self._calls:
                if request_id in call.open:
                    call.open.discard(request_id)
                    call.contexts[request_id].status = GenerationStatus.CANCELLED
                    call.outputs.append(
                        TextGenerationOutput(request_id, [], GenerationStatus.CANCELLED)
                    )
                    call.news.set()

    def _enter(self, call: _Call) -> None:
        with self._guard:
            self._calls.append(call)
            self._new.extend(call.contexts.values())
        self._interrupt()

    def _interrupt(self) -> None:
        """Lets who drives look at what has changed after the step that runs, where that is one of several."""
        if self._driving.locked():
            self.pipeline.interrupt()

    def _leave(self, call: _Call) -> None:
        with self._guard:
            self._calls.remove(call)
            self._gone.extend(call.open)
        self._interrupt()
        # pages are given back now if nobody drives, else by who does
        if self._driving.acquire(blocking=False):
            try:
                self._take_changes()
            finally:
                self._driving.release()
                self._wake()

    def _wake(self) -> None:
        with self._guard:
            for call in self._calls:
                call.news.set()

    def _take_changes(self) -> None:
        """Gives the scheduler the requests that came, and takes those that left."""
        with self._guard:
            new, self._new = self._new, []
            gone, self._gone = self._gone, []
        left = set(gone)
        for context in new:
            if context.request_id in left:
                continue
            try:
                self.scheduler.add(context)
            except ValueError as error:
                self._fail([context.request_id], error)
        for request_id in gone:
            self.scheduler.remove(request_id)

    def _step(self) -> None:
        """Runs the next batch, and hands its tokens out."""
        self._take_changes()
        inputs = self.scheduler.schedule()
        if inputs is None:
            return
        batch = list(inputs.batch.values())
        start = time.perf_counter()
        try:
            outputs = self.pipeline.execute(inputs)
        except Exception as error:
            for context in batch:
                self.scheduler.remove(context.request_id)
            self._fail([context.request_id for context in batch], error)
            return
        except BaseException:
            # an interrupt is for this thread; what it left in the cache is not known, so the
            # requests of others are read anew
            for context in batch:
                self.scheduler.requeue(context)
            raise
        if inputs.batch_type is BatchType.TG:
            steps = max([len(output.tokens) for output in outputs.values()], default=0)
            self.scheduler.record_step(time.perf_counter() - start, steps)
        self.scheduler.update(batch)
        with self._guard:
            for call in self._calls:
                for key in call.open & outputs.keys():
                    output = outputs[key]
                    if output.tokens or output.is_done:
                        call.outputs.append(output)
                        call.news.set()
                    if output.is_done:
                        call.open.discard(key)

    def _fail(self, requests: Sequence[RequestID], error: BaseException) -> None:
        with self._guard:
            for call in self._calls:
                if call.open.intersection(requests):
                    call.open.difference_update(requests)
                    call.error = error
                    call.news.set()


class _Weak:
    """A pipeline that its generation does not keep alive."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = weakref.ref(pipeline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline(), name)


class RequestText:
    """The text of one request, out of its tokens.

    Args:
        decode: Turns a run of tokens into text, special ones left out.
        eos_token_ids: Tokens that end the sequence; they are no text.
        stops: Texts that end it.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: set[int],
        stops: Sequence[str] = (),
    ) -> None:
        self._stream = TextStream(decode)
        self._eos = eos_token_ids
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._stops.found

    def push(self, output: TextGenerationOutput) -> str:
        """Takes new tokens, and gives the text that is certain.

        Args:
            output: The tokens.
        """
        tokens = output.tokens
        ended = output.final_status == GenerationStatus.END_OF_SEQUENCE
        if ended and tokens and tokens[-1] in self._eos:
            tokens = tokens[:-1]
        piece = self._stops.push(self._stream.push(tokens))
        if output.is_done and not self.stopped:
            piece += self._stops.push(self._stream.finish())
            piece += "" if self.stopped else self._stops.finish()
        return piece
