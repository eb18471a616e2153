"""The text generation pipeline: runs batches of contexts on a model, and updates them with the new tokens."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, cast

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import CPU, Tensor
from max.engine import InferenceSession
from max.engine.load.staged_graphs import while_compiling
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
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.nn.transformer.transformer import ReturnLogits
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.text_context import draft_length
from max.pipelines.generation.batch_pipeline import BatchPipeline, StepResult
from max.pipelines.generation.drafts.draft_steps import DraftSteps
from max.pipelines.generation.mixin import GenerateMixin
from max.pipelines.generation.steps.decode_loop import DecodeLoop, next_step_model
from max.pipelines.generation.steps.prompt_logits import PromptLogits
from max.pipelines.generation.steps.reusable_inputs import ReusableInputs
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.generation.steps.step_tokens import (
    append_tokens,
    bounded_steps,
    last_logits,
    log_probabilities_of_step,
    with_closing_tokens,
)
from max.pipelines.kv_cache.prefix_store import PrefixStore
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.kv_cache import load_cache
from max.pipelines.models.loading import load_model
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter
from max.pipelines.sampling.inputs import SamplingInputs
from max.pipelines.sampling.sampler import Sampler, needs_sampler
from max.pipelines.structured.constraint import Constraints, is_constrained
from max.pipelines.structured.step_masks import StepMasks
from max.pipelines.tokenization.tokenizer import TextTokenizer

logger = logging.getLogger("max.pipelines")


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
        self._pipeline_config = pipeline_config
        self._tokenizer = tokenizer
        self._devices = model_config.devices
        invariant = pipeline_config.batch_invariant
        self._session = InferenceSession(devices=self._devices, batch_invariant=invariant)
        pipeline_config.configure_session(self._session)
        self._reusable: ReusableInputs | None = None
        # computed before the weights are loaded, as it subtracts their size from the free memory
        available = pipeline_config.available_cache_memory()
        with ExitStack() as stack:
            if DecodeLoop.runs_on(self._session, self._devices[0]):
                work = partial(next_step_model, self._session)  # the graph of the decode loop
                stack.enter_context(while_compiling(self._session, work))
            load = partial(
                load_model, pipeline_model, weight_adapters, pipeline_config, self._session, self._devices
            )  # fmt: skip
            self._pipeline_model = load()
        self._prompt_logits = PromptLogits(
            pipeline_config, self._pipeline_model, partial(load, return_logits=ReturnLogits.ALL)
        )
        self._kv_manager = load_cache(
            self._pipeline_model, pipeline_config, self._session, available
        )
        self._sampler = Sampler(self._session, self._devices[0], pipeline_config.sampling_config)
        # grammars need the vocabulary of the tokenizer below
        self._constraints = Constraints(getattr(tokenizer, "delegate", None))
        self._prefixes = PrefixStore.of(pipeline_config, self._kv_manager)
        self._drafts = DraftSteps.of(
            pipeline_config, self._pipeline_model, self._sampler, self._kv_manager.slots is not None
        )
        self._loop = DecodeLoop.of(self._session, self._pipeline_model)
        self._step_reader: StepReader | None = None

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
        return (0, 0) if self._drafts is None else (self._drafts.drafted, self._drafts.accepted)

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The files of cached prefixes; None if the configuration has no folder for them."""
        return self._prefixes

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
        left = context.compute_num_available_steps(self._pipeline_model.max_seq_len)
        if left <= 0:
            raise ValueError(
                f"request {context.request_id} has {context.current_length} tokens, and the context "
                f"holds {self._pipeline_model.max_seq_len}"
            )
        return min(num_steps, left)

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
            ValueError: The schema or the grammar is invalid.
        """
        self._constraints.begin(context)

    def load_prompt_logits(self) -> None:
        """Loads the graph with the logits of prompts, unless it is loaded; thread-safe, even while a batch runs.

        Raises:
            UserError: It does not fit into memory.
        """
        self._prompt_logits.load()

    def warm_up(self) -> None:
        """Builds the vocabulary of structured output in advance, so that the first request with a grammar does not wait
        for it; thread-safe. Does nothing if requests cannot have grammars."""
        if isinstance(self._tokenizer, TextTokenizer) and importlib.util.find_spec("llguidance"):
            self._constraints.warm_up(self._tokenizer.eos_token_ids)

    def prepare_batch(
        self, batches: list[dict[RequestID, TextGenerationContextType]], num_steps: int
    ) -> tuple[ModelInputs, int, npt.NDArray[np.int32] | None, list[TextGenerationContextType]]:
        """Reserves a batch's pages and makes the inputs of its first step.

        Args:
            batches: One dictionary, as there is a single replica.
            num_steps: The maximum number of steps.

        Returns:
            The inputs; the number of steps, limited by the room in all sequences; the bitmask of structured output or
            None;
                the requests in batch order.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError: A sequence has no room for a token, or an invalid schema.
        """
        flat, num_steps = self._reserve(batches, num_steps)
        bitmask = self.initialize_bitmask(flat)
        for index, context in enumerate(flat):
            if bitmask is not None:
                self.update_for_structured_output(context, bitmask, index)
        return self._inputs(flat, num_steps), num_steps, bitmask, flat

    def _reserve(
        self, batches: list[dict[RequestID, TextGenerationContextType]], num_steps: int
    ) -> tuple[list[TextGenerationContextType], int]:
        """Reserves the pages of a batch; returns the requests in batch order and the number of steps."""
        flat = [context for batch in batches for context in batch.values()]
        for context in flat:
            self._constraints.begin(context)
            num_steps = self.calculate_num_steps(num_steps, context)
            num_steps = bounded_steps(num_steps, context, self._tokenizer)
        if not self._pipeline_model.continues_steps:
            num_steps = 1
        self._kv_manager.reserve(flat, num_steps)
        return flat, num_steps

    def _inputs(
        self,
        flat: list[TextGenerationContextType],
        num_steps: int,
        model: PipelineModel[TextGenerationContextType] | None = None,
    ) -> ModelInputs:
        """The inputs of the first step of a model, by default the plain one: those of its last step, updated, if the
        batch is the same as before.
        """
        last, self._reusable = self._reusable, None
        drafted = max(map(draft_length, flat))
        if model is not None and model is not self._pipeline_model:
            return model.prepare_initial_token_inputs(
                flat, self._kv_manager.get_runtime_inputs(flat, num_steps)
            )
        if last and num_steps == 1 and not drafted and last.precedes(flat):
            cache = cast(RaggedKVCacheInputs, last.inputs.kv_cache_inputs)
            last.inputs.update(kv_cache_inputs=self._kv_manager.advance(cache, flat))
            inputs = self._pipeline_model.prepare_next_token_inputs(last.tokens, last.inputs)
            if self._pipeline_model.samples_in_graph:
                sampling = cast(SamplingInputs, last.inputs.sampling)
                inputs.update(sampling=sampling.advance(flat))
            return inputs
        cache_inputs = self._kv_manager.get_runtime_inputs(flat, num_steps)
        # a draft of n tokens is verified by the logits before, between and after them
        return self._pipeline_model.prepare_initial_token_inputs(flat, cache_inputs, drafted + 1)

    @property
    def repeats_steps(self) -> bool:
        """Whether several steps in one call save time: the model's graph repeats without Python in between."""
        return self._loop is not None

    def interrupt(self) -> None:
        """Ends an execution of several steps after the current step; thread-safe."""
        if self._loop is not None:
            self._loop.interrupt()

    def read_steps(self, reader: StepReader | None) -> None:
        """Sets the reader that delivers tokens during an execution of several steps.

        Args:
            reader: Delivers the tokens; None: no reader.
        """
        self._step_reader = reader

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
        if not inputs:
            return StepResult({}, 0)
        if self._drafts is not None:
            self._drafts.drop(inputs.batch.values())
        batch, num_steps = self._reserve(inputs.batches, inputs.num_steps)
        loop = self._loop
        if (
            num_steps > 1
            and loop is not None
            and loop.usable
            and not inputs.enable_log_probs
            and all(context.active_length == 1 for context in batch)  # no prompts, no drafts
        ):
            return self._run_loop(loop, batch, num_steps)
        drafted = any(map(draft_length, batch))
        model = self._prompt_logits.model_of(batch, self._pipeline_model)
        masks = self._constraints.start_masks(batch)  # computed while the model runs
        model_inputs = self._inputs(batch, num_steps, model)
        steps: list[npt.NDArray[np.int64]] = []
        logs: list[list[LogProbabilities | None]] = []
        verified: list[list[int]] = []
        enable_log_probs = inputs.enable_log_probs
        for step in range(num_steps):
            if model.samples_in_graph and (step or model_inputs.sampling is None):
                device = self._devices[0]
                model_inputs.update(sampling=SamplingInputs.of(batch, device, step))
            outputs = model.execute(model_inputs)
            if drafted and self._drafts is not None:
                verified = self._drafts.verified_tokens(outputs, batch, self._devices[0])
            tokens = self._next_tokens(outputs, batch, step, masks)
            chosen = np.asarray(tokens.to(CPU()).to_numpy(), np.int64)
            if num_steps == 1:
                steps.append(with_closing_tokens(chosen, batch, self._tokenizer))
            else:
                steps.append(chosen)
            if enable_log_probs:
                logs.append(log_probabilities_of_step(outputs, batch, steps[-1]))
            if (chosen < 0).any():
                break  # a row of NaN has no token that could follow
            if step + 1 < num_steps:
                cache = model_inputs.kv_cache_inputs
                model_inputs.update(
                    kv_cache_inputs=self._kv_manager.next_step(cast(Any, cache), batch, step + 1)
                )
                model_inputs = model.prepare_next_token_inputs(tokens, model_inputs)
            elif (
                step == 0
                and steps[-1] is chosen
                and not drafted
                and model is self._pipeline_model
                and model.continues_steps
            ):
                self._reusable = ReusableInputs.of(batch, model_inputs, tokens)
        new_tokens: list[list[int]] = np.array(steps).T.tolist()
        if verified:
            new_tokens = [own or one for own, one in zip(verified, new_tokens, strict=True)]
        return self._result(batch, new_tokens, len(steps), logs)

    def _run_loop(
        self,
        loop: DecodeLoop,
        batch: list[TextGenerationContextType],
        num_steps: int,
    ) -> StepResult:
        """Runs a decoding batch for several steps, or until one of its sequences ends."""
        model_inputs = self._inputs(batch, 1)
        if model_inputs.sampling is None:
            model_inputs.update(sampling=SamplingInputs.of(batch, self._devices[0]))
        model_inputs, tokens, chosen = loop.run(model_inputs, batch, num_steps, self._step_reader)
        self._reusable = ReusableInputs.of(batch, model_inputs, tokens, len(chosen))
        return self._result(batch, chosen.T.tolist(), len(chosen))

    def _result(
        self,
        batch: list[TextGenerationContextType],
        tokens: Sequence[Sequence[int]],
        steps: int,
        logs: Sequence[Sequence[LogProbabilities | None]] = (),
    ) -> StepResult:
        """Adds the tokens of an execution to the contexts, and records what is in the cache now.

        Args:
            batch: The requests.
            tokens: The new tokens of each request, any number.
            steps: How often the model ran.
            logs: For each step, the log-probabilities of each request; empty: none.
        """
        outputs = append_tokens(batch, tokens, logs, self._constraints)
        self._kv_manager.step(batch)
        if self._drafts is not None:
            self._drafts.propose(batch)
        return StepResult(outputs, steps)

    def _next_tokens(
        self,
        outputs: ModelOutputs,
        batch: Sequence[TextGenerationContextType],
        step: int,
        masks: StepMasks | None,
    ) -> Tensor:
        """The next tokens of a batch: the graph's, or the sampler's if a request needs it."""
        if outputs.next_tokens is not None and not any(needs_sampler(c, step) for c in batch):
            return outputs.next_tokens
        bitmask = None if masks is None else masks.result()
        return self._sampler.sample(last_logits(outputs), batch, step, bitmask)

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
        self._kv_manager.close(request_id)
        if self._drafts is not None:
            self._drafts.forget(request_id)
