"""The text generation pipeline: runs batches of contexts on the copies of a model, and updates them with new tokens."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max._lazy import lazy_module
from max.engine import InferenceSession
from max.graph.weights import WeightsFormat
from max.interfaces import (
    LogProbabilities,
    PipelineTokenizer,
    RequestID,
    TextGenerationContextType,
    TextGenerationInputs,
    TextGenerationOutput,
    TextGenerationRequest,
)
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.batch_pipeline import BatchPipeline, StepResult
from max.pipelines.generation.mixin import GenerateMixin
from max.pipelines.generation.replica import Replica
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.generation.steps.step_tokens import append_tokens
from max.pipelines.kv_cache.several_caches import caches_of_replicas
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter
from max.pipelines.structured.constraint import Constraints, is_constrained
from max.pipelines.tokenization.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from max.pipelines.adapters import manager as adapter_manager
    from max.pipelines.kv_cache import prefix_store as prefix_stores
else:
    prefix_stores = lazy_module("max.pipelines.kv_cache.prefix_store")
    adapter_manager = lazy_module("max.pipelines.adapters.manager")


@dataclass
class BatchInfo:
    """The shape of a batch, for statistics.

    Args:
        past_seq_lens: The number of cached tokens of each request before the batch.
        seq_lens: The number of new tokens of each request.
        num_steps: The number of executed steps.
    """

    past_seq_lens: list[int]
    seq_lens: list[int]
    num_steps: int


class TextGenerationPipeline(
    BatchPipeline[TextGenerationContextType],
    GenerateMixin[TextGenerationContextType, TextGenerationRequest],
    Generic[TextGenerationContextType],
):
    """Runs a text model: loads and compiles it, holds its KV cache, and samples its tokens.

    The scheduler reserves the pages of its batches. If a batch does not come from a scheduler, :meth:`execute` reserves
    its pages, and the caller frees them by :meth:`release`.

    Args:
        pipeline_config: The configuration, resolved.
        pipeline_model: The model's class.
        eos_token_id: The tokenizer's end token; not read, as each context names the tokens that end it.
        weight_adapters: For each format of weights the function that renames a checkpoint's weights.
        tokenizer: Makes the contexts of requests.

    Raises:
        ValueError: The configuration has no encoding.
        UserError: The model's files do not fit the architecture.
    """

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[TextGenerationContextType]],
        eos_token_id: int,
        weight_adapters: dict[WeightsFormat, WeightsAdapter],
        tokenizer: PipelineTokenizer[
            TextGenerationContextType, npt.NDArray[np.integer[Any]], TextGenerationRequest
        ],
    ) -> None:
        model_config = pipeline_config.model_config
        if model_config.quantization_encoding is None:
            raise ValueError(
                "TextGenerationPipeline: quantization_encoding is not set; resolve the config"
            )
        if pipeline_config.lora_config is not None and len(model_config.replica_devices) > 1:
            raise ConfigError(
                f"enable_lora is set, and there are {len(model_config.replica_devices)} copies of the model",
                "Leave --data-parallel-degree out.",
            )
        self._pipeline_config = pipeline_config
        self._tokenizer = tokenizer
        self._session = InferenceSession(
            devices=model_config.devices, batch_invariant=pipeline_config.batch_invariant
        )
        pipeline_config.configure_session(self._session)
        # grammars need the vocabulary of the tokenizer below
        self._constraints = Constraints(getattr(tokenizer, "delegate", None))
        # computed before the weights are loaded, as it subtracts their size from the free memory
        available = pipeline_config.available_cache_memory()
        self.replicas = [
            Replica(
                pipeline_config,
                pipeline_model,
                weight_adapters,
                self._session,
                devices,
                available,
                tokenizer,
                self._constraints,
            )
            for devices in model_config.replica_devices
        ]
        """The copies of the model."""
        self._kv_manager = caches_of_replicas([replica.cache for replica in self.replicas])
        self._prefixes: prefix_stores.PrefixStore | None = None
        if pipeline_config.kv_cache_config.kv_cache_folder is not None:
            self._prefixes = prefix_stores.PrefixStore.of(pipeline_config, self._kv_manager)

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The configuration."""
        return self._pipeline_config

    @property
    def tokenizer(
        self,
    ) -> PipelineTokenizer[
        TextGenerationContextType, npt.NDArray[np.integer[Any]], TextGenerationRequest
    ]:
        """The tokenizer."""
        return self._tokenizer

    @property
    def kv_managers(self) -> list[Any]:
        """The manager of the KV cache, in a list."""
        return [self._kv_manager]

    @property
    def kv_manager(self) -> Any:
        """The manager of the KV cache: ``claim(context)``, ``alloc(context)``, ``release(context)``."""
        return self._kv_manager

    @property
    def draft_counts(self) -> tuple[int, int]:
        """The number of tokens that were drafted, and of those that were right."""
        drafts = [replica.drafts for replica in self.replicas if replica.drafts is not None]
        return sum(each.drafted for each in drafts), sum(each.accepted for each in drafts)

    @property
    def prefix_store(self) -> prefix_stores.PrefixStore | None:
        """The files of cached prefixes; None if the configuration has no folder for them."""
        return self._prefixes

    @property
    def lora_manager(self) -> adapter_manager.LoRAManager | None:
        """The adapters; None: requests take none."""
        return self.replicas[0].adapters

    @property
    def session(self) -> InferenceSession:
        """The session that runs the model."""
        return self._session

    def calculate_num_steps(self, num_steps: int, context: TextGenerationContextType) -> int:
        """The number of steps for which a request has room.

        Args:
            num_steps: The maximum number of steps.
            context: The request.

        Returns:
            The number of steps, at least 1.

        Raises:
            ValueError: The sequence has no room for a token.
        """
        return self.replicas[0].calculate_num_steps(num_steps, context)

    def initialize_bitmask(
        self, batch: list[TextGenerationContextType]
    ) -> npt.NDArray[np.int32] | None:
        """A bitmask that allows all tokens, for a batch with structured output.

        Args:
            batch: The requests.

        Returns:
            int32 ``[batch, words]``, one bit per token; None if no request has a schema or a grammar.
        """
        if not any(map(is_constrained, batch)):
            return None
        return np.full((len(batch), self._constraints.words()), -1, np.int32)

    def update_for_structured_output(
        self,
        context: TextGenerationContextType,
        bitmask: npt.NDArray[np.int32],
        index: int,
    ) -> None:
        """Compiles a request's schema or grammar, and fills its row of the bitmask.

        Args:
            context: The request; it gets its matcher.
            bitmask: The bitmask of the batch, changed in place.
            index: The request's row in it.

        Raises:
            ValueError: The schema or the grammar is invalid.
        """
        self._constraints.begin(context)
        masks = self._constraints.start_masks([context])
        if masks is not None:
            bitmask[index] = masks.result()[0]

    def prepare(self, context: TextGenerationContextType) -> None:
        """Compiles a request's grammar before its first batch; thread-safe, even while a batch runs.

        Args:
            context: The request, which was in no batch yet.

        Raises:
            ValueError: The schema or the grammar is invalid, or the adapter is not loaded.
        """
        self._constraints.begin(context)
        adapters = self.lora_manager
        name: str = getattr(context, "adapter", "")
        if adapters is not None and name:
            adapters.prepare(name)

    def load_prompt_logits(self) -> None:
        """Loads the graph with the logits of prompts, unless it is loaded; thread-safe, even while a batch runs.

        Raises:
            UserError: It does not fit into memory.
        """
        for replica in self.replicas:
            replica.prompt_logits.load()

    def warm_up(self) -> None:
        """Builds the vocabulary and the graph of structured output in advance, so that the first request with a grammar
        does not wait for them, and loads what the first draft needs; thread-safe."""
        for replica in self.replicas:
            if replica.drafts is not None:
                replica.drafts.warm_up()
        # an engine without the extra for servers may lack llguidance
        if isinstance(self._tokenizer, TextTokenizer) and importlib.util.find_spec("llguidance"):
            self._constraints.warm_up(self._tokenizer.eos_token_ids)
            for replica in self.replicas:
                if replica.loop is not None:
                    replica.loop.load_constrained()

    def forget_prefixes(self) -> None:
        """Empties the cache, deletes the stored prefixes, and forgets the answers that drafts are looked up in."""
        super().forget_prefixes()
        for replica in self.replicas:
            if replica.drafts is not None:
                replica.drafts.forget_answers()

    def prepare_batch(
        self, batches: list[dict[RequestID, TextGenerationContextType]], num_steps: int
    ) -> tuple[ModelInputs, int, npt.NDArray[np.int32] | None, list[TextGenerationContextType]]:
        """Reserves a batch's pages and makes the inputs of its first step.

        Args:
            batches: The requests of each copy of the model; those of one copy, as each has inputs of its own.
            num_steps: The maximum number of steps.

        Returns:
            The inputs; the number of steps, limited by the room in all sequences; the bitmask of structured output or
            None;
                the requests in batch order.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError: A sequence has no room for a token, an invalid schema, or the requests are of several copies.
        """
        parts = self._parts(batches)
        if len(parts) != 1:
            raise ValueError(
                f"prepare_batch: requests of {len(parts)} copies of the model; expected those of one"
            )
        ((replica, batch),) = parts
        num_steps = replica.reserve(batch, num_steps)
        bitmask = self.initialize_bitmask(batch)
        for index, context in enumerate(batch):
            if bitmask is not None:
                self.update_for_structured_output(context, bitmask, index)
        return replica.inputs(batch, num_steps), num_steps, bitmask, batch

    def _parts(
        self, batches: list[dict[RequestID, TextGenerationContextType]]
    ) -> list[tuple[Replica[TextGenerationContextType], list[TextGenerationContextType]]]:
        """The copies of the model that have requests in a batch, and these requests in batch order.

        Requests of one adapter are neighbors: kernels then load it once for their rows.
        """
        if len(batches) > len(self.replicas):
            raise ValueError(
                f"a batch for {len(batches)} copies of the model; there are {len(self.replicas)}"
            )
        pairs = zip(self.replicas, batches, strict=False)
        return [
            # by adapter: rows of one adapter are side by side
            (replica, sorted(batch.values(), key=lambda context: getattr(context, "adapter", "")))
            for replica, batch in pairs
            if batch
        ]

    @property
    def repeats_steps(self) -> bool:
        """Whether several steps in one call save time: the model's graph repeats without Python in between."""
        return all(replica.loop is not None for replica in self.replicas)

    @property
    def repeats_drafts(self) -> bool:
        """Whether one call runs several steps that verify drafted tokens: see `TextRounds`."""
        return all(replica.text_rounds is not None for replica in self.replicas)

    def interrupt(self) -> None:
        """Ends an execution of several steps after the current step; thread-safe."""
        for replica in self.replicas:
            if replica.loop is not None:
                replica.loop.interrupt()

    def read_steps(self, reader: StepReader | None) -> None:
        """Sets the reader that delivers tokens during an execution of several steps.

        Args:
            reader: Delivers the tokens; None: no reader.
        """
        for replica in self.replicas:
            replica.reader = reader

    def follow(self, context: TextGenerationContextType, token: int) -> None:
        """Advances the grammar of a request by a token that was delivered before an execution was interrupted.

        Args:
            context: The request; the token is already part of it.
            token: The token.
        """
        self._constraints.advance(context, token)

    def execute(self, inputs: TextGenerationInputs[TextGenerationContextType]) -> StepResult:
        """Runs a batch for one or several steps, and updates its contexts.

        Args:
            inputs: The batch.

        Returns:
            The new tokens of each request; none after a chunk of a prompt, unless it is the last.

        Raises:
            OutOfPagesError: The batch does not come from a scheduler, and too few pages are free.
            ValueError: A sequence has no room for a token, or an invalid schema.
        """
        result = StepResult({}, 0)
        # one after the other, as the devices of the CPU share its cores
        for replica, batch in self._parts(inputs.batches):
            part = replica.execute(batch, inputs.num_steps, inputs.enable_log_probs)
            result.update(part)
            result.steps = max(result.steps, part.steps)
        return result

    def update_context_and_prepare_responses(
        self,
        generated_tokens_host: npt.NDArray[np.int32],
        batch_log_probabilities: list[list[LogProbabilities | None]],
        flat_batch: list[TextGenerationContextType],
        num_steps: int,
        enable_log_probs: bool,
    ) -> dict[RequestID, TextGenerationOutput]:
        """Adds tokens to the contexts, up to the end of each sequence, and collects the outputs.

        Args:
            generated_tokens_host: The tokens ``[batch, steps]``; a negative one ends its request with an error.
            batch_log_probabilities: For each step, the log-probabilities of each request.
            flat_batch: The requests in the batch's order.
            num_steps: The number of steps.
            enable_log_probs: Whether log-probabilities are returned.

        Returns:
            The new tokens of each request.
        """
        tokens = generated_tokens_host[:, :num_steps].tolist()
        logs = batch_log_probabilities if enable_log_probs else ()
        return append_tokens(flat_batch, tokens, logs, self._constraints)

    def release(self, request_id: RequestID) -> None:
        """Frees the pages of a request; nothing happens if it has none."""
        for replica in self.replicas:
            replica.release(request_id)
