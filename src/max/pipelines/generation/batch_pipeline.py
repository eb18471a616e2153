"""The base of pipelines that an engine runs, and the result of one execution."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.interfaces import (
    Pipeline,
    RequestID,
    TextGenerationContextType,
    TextGenerationInputs,
    TextGenerationOutput,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core import ConfigError
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler import SchedulerLimits

if TYPE_CHECKING:
    from max.pipelines.adapters import manager as adapter_manager
    from max.pipelines.kv_cache import prefix_store as prefix_stores
else:
    adapter_manager = lazy_module("max.pipelines.adapters.manager")
    prefix_stores = lazy_module("max.pipelines.kv_cache.prefix_store")

MAX_SECONDS = 0.04
"""The time limit in seconds of an execution of several steps, if the configuration leaves their number open. It keeps
streamed tokens arriving one by one."""

READ_SECONDS = 0.2
"""The same where a `StepReader` delivers each token meanwhile. Between two executions Python takes less than a
hundredth of it, and a request that arrives or is cancelled ends an execution after its current step."""

MIXED_STEP_RATIO = 1.8
"""The time limit of a step that decodes and reads prompts, as a multiple of a decoding step. Running requests then wait
at most twice as long for a token; the difference to 2 leaves a margin for errors of the estimate."""


class StepResult(dict[RequestID, TextGenerationOutput]):
    """The result of one execution of a batch: the new tokens of each request.

    A request may get any number of tokens: none after a chunk of its prompt or after an error, otherwise one for each
    step, or several for a step that verifies drafted tokens.

    Args:
        outputs: The new tokens of each request.
        steps: How often the model ran, from which the duration of a step is computed; None: once for each token of the
            request with the most tokens.
    """

    def __init__(
        self, outputs: Mapping[RequestID, TextGenerationOutput], steps: int | None = None
    ) -> None:
        super().__init__(outputs)
        if steps is None:
            # a pipeline of a program that gives no number: its longest answer tells
            steps = max([len(output.tokens) for output in outputs.values()], default=0)
        self.steps = steps
        """How often the model ran."""


class BatchPipeline(
    Pipeline[TextGenerationInputs[TextGenerationContextType], TextGenerationOutput]
):
    """A text pipeline that an engine runs, batch by batch.

    A subclass defines the abstract members, and those of the others that it supports.
    """

    @property
    @abstractmethod
    def kv_managers(self) -> Sequence[RequestPages]:
        """The KV caches, which hold the same tokens of each request; most pipelines have one."""

    @property
    def scheduled_caches(self) -> Sequence[RequestPages]:
        """The caches whose pages a scheduler reserves; all, if the pipeline manages none of them by itself."""
        return self.kv_managers

    @property
    @abstractmethod
    def pipeline_config(self) -> PipelineConfig:
        """The configuration, which defines the limits of batches."""

    @property
    def repeats_steps(self) -> bool:
        """Whether several steps in one call save time; False by default."""
        return False

    @property
    def repeats_drafts(self) -> bool:
        """Whether one call runs several steps that verify drafted tokens; False by default."""
        return False

    @abstractmethod
    def execute(
        self, inputs: TextGenerationInputs[TextGenerationContextType]
    ) -> dict[RequestID, TextGenerationOutput]:
        """Runs a batch, and updates its contexts.

        Args:
            inputs: The batch, with reserved pages.

        Returns:
            The new tokens of each request; a `StepResult` also states the number of steps.
        """

    def interrupt(self) -> None:
        """Ends an execution of several steps after the current step; thread-safe. Does nothing by default."""

    def read_steps(self, reader: StepReader | None) -> None:
        """Sets the reader that delivers tokens during an execution of several steps; not used by default.

        Args:
            reader: Delivers the tokens; None: no reader.
        """

    def follow(self, context: TextGenerationContextType, token: int) -> None:
        """Advances the grammar of a request by a token that was delivered before an execution was interrupted. Does
        nothing by default.

        Args:
            context: The request; the token is already part of it.
            token: The token.
        """

    def prepare(self, context: TextGenerationContextType) -> None:
        """Prepares a request, for example compiles its grammar; thread-safe, even while a batch runs.

        Args:
            context: The request, which was in no batch yet.

        Raises:
            ValueError: The request is invalid.
        """

    def load_prompt_logits(self) -> None:
        """Prepares the pipeline for requests with log-probabilities of their prompts; thread-safe, even while a batch
        runs. Does nothing by default."""

    def warm_up(self) -> None:
        """Builds state that requests share before the first one arrives; thread-safe, even while a batch runs."""

    @property
    def lora_manager(self) -> adapter_manager.LoRAManager | None:
        """The adapters that requests may name; None, as by default: requests take none."""
        return None

    @property
    def draft_counts(self) -> tuple[int, int]:
        """The number of tokens that were drafted, and of those that were right; 0 for a pipeline that drafts none."""
        return 0, 0

    @property
    def prefix_store(self) -> prefix_stores.PrefixStore | None:
        """The files of cached prefixes; None, as by default: prefixes are not stored."""
        return None

    def load_prefixes(self) -> None:
        """Fills the cache with the prefixes that an earlier engine stored; called before the first batch."""
        if self.prefix_store is not None:
            self.prefix_store.load()

    def save_prefixes(self) -> None:
        """Stores the cached prefixes for a later engine; called after the last batch."""
        if self.prefix_store is not None:
            self.prefix_store.save()

    def new_prefixes(self) -> prefix_stores.PrefixWrite | None:
        """The cached prefixes that are not stored yet, to be written by another thread; called between two batches.

        None if there are none, or if they are not stored.
        """
        return None if self.prefix_store is None else self.prefix_store.new_pages()

    def keep_prefixes(self, action: str, name: str) -> tuple[int, int]:
        """Saves, restores or removes a file of prefixes; called between two batches, while no write runs.

        Args:
            action: ``save``, ``restore`` or ``erase``.
            name: The name of the file.

        Returns:
            The tokens whose pages were saved or restored, and the size of the file.

        Raises:
            UserError: There is no folder of prefixes, no file of this name, or it is of another model.
            OSError: The file cannot be written.
        """
        if self.prefix_store is None:
            raise ConfigError(
                "the engine keeps no prefixes on the disk", "Start with --kv-cache-folder."
            )
        return self.prefix_store.keep(action, name)

    def read_shared_prefixes(self) -> None:
        """Fills the cache with what other engines have stored meanwhile; called between two batches, while no write
        runs.
        """
        if self.prefix_store is not None:
            self.prefix_store.read_shared()

    def forget_prefixes(self) -> None:
        """Empties the cache and deletes the stored prefixes; called between two batches, while no write runs."""
        for cache in self.kv_managers:
            cache.forget_prefixes()
        if self.prefix_store is not None:
            self.prefix_store.forget()


class ForeignPipeline(BatchPipeline[Any]):
    """A pipeline that does not derive from :class:`BatchPipeline`.

    Args:
        pipeline: The pipeline, which this object does not keep alive.

    Raises:
        TypeError: It does not generate text.
    """

    def __init__(self, pipeline: object) -> None:
        # told before the first request, which would otherwise fail with an AttributeError
        for name in ("execute", "kv_managers", "pipeline_config"):
            if not hasattr(pipeline, name):
                raise TypeError(
                    f"{type(pipeline).__name__} does not generate text: it lacks {name}"
                )
        # as in `Engine`: weights of a pipeline that nobody uses are not kept in memory
        self._pipeline: weakref.ref[Any] = weakref.ref(pipeline)

    @property
    def _foreign(self) -> Any:
        pipeline = self._pipeline()
        if pipeline is None:
            raise RuntimeError("the pipeline of this engine was deleted")
        return pipeline

    @property
    def kv_managers(self) -> Sequence[RequestPages]:
        """The KV caches."""
        return self._foreign.kv_managers

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The configuration, which defines the limits of batches."""
        return self._foreign.pipeline_config

    def execute(self, inputs: TextGenerationInputs[Any]) -> dict[RequestID, TextGenerationOutput]:
        """Runs a batch, and updates its contexts.

        Args:
            inputs: The batch.
        """
        return self._foreign.execute(inputs)

    def release(self, request_id: RequestID) -> None:
        """Frees the resources of a request; nothing happens if the pipeline knows nothing of it."""
        # as caches raise it of a request that waits, or that they have never had
        with contextlib.suppress(KeyError):
            self._foreign.release(request_id)


def batch_pipeline(pipeline: object) -> BatchPipeline[Any]:
    """A pipeline as an engine runs it.

    Args:
        pipeline: The pipeline; one that does not derive from `BatchPipeline` is wrapped.

    Raises:
        TypeError: It does not generate text.
    """
    return pipeline if isinstance(pipeline, BatchPipeline) else ForeignPipeline(pipeline)


def limits_of(pipeline: BatchPipeline[Any], are_steps_read: bool = False) -> SchedulerLimits:
    """The limits of batches from the configuration of a pipeline.

    Args:
        pipeline: The pipeline.
        are_steps_read: Whether a `StepReader` delivers tokens while an execution of several steps runs.
    """
    config = pipeline.pipeline_config
    batch = config.max_batch_size or 1
    steps = max(config.max_num_steps, 1)
    # a number that the user has set is kept, however long its steps take
    longest = None
    if config.finds_num_steps:
        if not pipeline.repeats_steps:
            steps = 1  # several steps in one call would save no time
        longest = MAX_SECONDS
        # copies of the model take turns: the tokens of one wait for the steps of the others
        if are_steps_read and steps > 1 and config.model_config.data_parallel_degree == 1:
            longest = READ_SECONDS
    return SchedulerLimits(
        # the queue of decoding requests is the batch here: none of them waits outside of it
        max_batch_size=min(batch, config.max_queue_size_tg or batch),
        max_ce_batch_size=min(batch, config.max_ce_batch_size),
        prefill_chunk_size=config.prefill_chunk_size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_in_flight_batching=config.enable_in_flight_batching,
        max_num_steps=steps,
        max_seconds=longest,
        max_batch_context_length=config.max_batch_context_length,
        mixed_step_ratio=MIXED_STEP_RATIO,
        repeats_drafts=pipeline.repeats_drafts,
    )
