"""Prepares the messages of other processes for an engine, in threads where that takes long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from max._dataclass import dataclass
from max.interfaces import RequestID
from max.pipelines.adapters.manager import LoRAManager
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.batch_pipeline import BatchPipeline
from max.pipelines.generation.process.commands import (
    CancelRequest,
    ForgetPrefixes,
    GenerationRequest,
    KeepPrefixes,
    LoadAdapter,
    UnloadAdapter,
)
from max.pipelines.structured.compile_threads import GrammarThreads


@dataclass(frozen=True)
class Arrival:
    """A request that is prepared, or the reason why it cannot run."""

    request: GenerationRequest
    context: TextContext | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class AdapterLoaded:
    """The end of a load of an adapter."""

    number: int
    error: BaseException | None


Message: TypeAlias = (
    GenerationRequest | CancelRequest | ForgetPrefixes | KeepPrefixes | LoadAdapter | UnloadAdapter
)
Prepared: TypeAlias = (
    Arrival | CancelRequest | ForgetPrefixes | KeepPrefixes | UnloadAdapter | AdapterLoaded
)
"""What the loop of the engine gets in place of a message."""
Put: TypeAlias = Callable[[Prepared], None]


class Arrivals:
    """The requests that are prepared before the engine gets them.

    Args:
        pipeline: The pipeline, which prepares contexts, compiles grammars and loads adapters.
    """

    def __init__(self, pipeline: BatchPipeline[Any]) -> None:
        self._pipeline = pipeline
        # a grammar may take seconds to compile, so another thread than the reading one compiles it
        self._compiler = GrammarThreads(1)
        # the graph with the logits of prompts takes as long to load as the model
        self._loader = ThreadPoolExecutor(1, "prompt logits")
        # reads the files of adapters, in the order of the messages that need them
        self._adapters = ThreadPoolExecutor(1, "adapters")
        self.waiting: set[RequestID] = set()
        """The requests that wait for a thread."""
        self._cancelled: set[RequestID] = set()

    def read(self, message: Message, put: Put) -> None:
        """Prepares a message in this thread, or in another one if it is a request with a grammar or an adapter, or one
        that needs another graph.

        Args:
            message: The message.
            put: Queues what the engine's loop gets in its place.
        """
        if isinstance(message, LoadAdapter):
            self._adapters.submit(self._load_adapter, message, put)
        elif isinstance(message, UnloadAdapter):
            self._adapters.submit(put, message)  # after the loads before it
        elif not isinstance(message, GenerationRequest):
            put(message)
        elif message.log_probabilities and message.log_probabilities_echo:
            # `prepare` reads the files of its adapter, if it names one
            self._put_after(self._loader, self._pipeline.load_prompt_logits, message, put)
        else:
            self._put_with_adapter(message, put)

    def cancel(self, request_id: RequestID) -> bool:
        """Notes that a request is cancelled; returns False if it does not wait for a thread.

        Args:
            request_id: The request.
        """
        if request_id not in self.waiting:
            return False
        self._cancelled.add(request_id)
        return True

    def take(self, request_id: RequestID) -> tuple[bool, bool]:
        """Takes a request that was queued.

        Args:
            request_id: The request.

        Returns:
            Whether it has waited for a thread, and whether it was cancelled meanwhile.
        """
        waited, cancelled = request_id in self.waiting, request_id in self._cancelled
        self.waiting.discard(request_id)
        self._cancelled.discard(request_id)
        return waited, cancelled

    def close(self) -> None:
        """Ends the threads."""
        self._compiler.close()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._adapters.shutdown(wait=False, cancel_futures=True)

    def _load_adapter(self, message: LoadAdapter, put: Put) -> None:
        """Loads an adapter in its thread, and queues the end of the load."""
        error: BaseException | None = None
        try:
            adapters_of(self._pipeline).load(message.name, Path(message.path))
        except Exception as failure:
            error = failure
        put(AdapterLoaded(message.number, error))

    def _put_with_adapter(self, request: GenerationRequest, put: Put) -> None:
        """Queues a request, after the files of its adapter were read."""
        if not request.adapter:
            self._put(request, put)
            return
        try:
            prepare = partial(adapters_of(self._pipeline).prepare, request.adapter)
        except ConfigError as error:
            put(Arrival(request, None, error))
            return
        self._put_after(self._adapters, prepare, request, put)

    def _put_after(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[], object],
        request: GenerationRequest,
        put: Put,
    ) -> None:
        """Queues a request after work of another thread."""
        self.waiting.add(RequestID(request.request_id))
        try:
            ready = threads.submit(work)
        except RuntimeError as error:  # no thread could be started, or the engine has ended
            put(Arrival(request, None, error))
        else:
            ready.add_done_callback(partial(self._put_ready, request, put))

    def _put_ready(self, request: GenerationRequest, put: Put, ready: Future[object]) -> None:
        """Queues a request whose graph or adapter was loaded or cannot be."""
        if ready.cancelled():
            return  # the engine has ended
        error = ready.exception()
        if error is None:
            self._put(request, put)
        else:
            put(Arrival(request, None, error))

    def _put(self, request: GenerationRequest, put: Put) -> None:
        """Queues a request, prepared in this thread or, with a grammar, in one that compiles it."""
        if request.grammar is None and request.json_schema is None:
            put(self._prepare(request))
            return
        self.waiting.add(RequestID(request.request_id))
        try:
            compiled = self._compiler.submit(self._compile, request)
        except RuntimeError as error:  # no thread could be started, or the engine has ended
            put(Arrival(request, None, error))
        else:
            compiled.add_done_callback(partial(self._put_compiled, request, put))

    def _compile(self, request: GenerationRequest) -> Arrival:
        """Prepares a request with a grammar, unless it was cancelled while it waited for the compiler."""
        # read without a lock: a cancellation that comes later only costs the compilation
        if RequestID(request.request_id) in self._cancelled:
            return Arrival(request)
        return self._prepare(request)

    def _put_compiled(
        self, request: GenerationRequest, put: Put, compiled: Future[Arrival]
    ) -> None:
        """Queues a request whose grammar was compiled or took too long."""
        if compiled.cancelled():
            return  # the engine has ended
        error = compiled.exception()
        put(compiled.result() if error is None else Arrival(request, None, error))

    def _prepare(self, request: GenerationRequest) -> Arrival:
        """The context of a request, prepared; or the error that it raised."""
        try:
            context = request.to_context()
            self._pipeline.prepare(context)
        except Exception as error:
            return Arrival(request, None, error)
        return Arrival(request, context)


def adapters_of(pipeline: BatchPipeline[Any]) -> LoRAManager:
    """The adapters of a pipeline.

    Args:
        pipeline: The pipeline.

    Raises:
        ConfigError: It takes none.
    """
    manager = pipeline.lora_manager
    if manager is None:
        raise ConfigError("the engine takes no adapters", "Start with --enable-lora.")
    return manager
