"""The pipeline of a model whose tokens a smaller model drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Tensor
from max.graph.weights import WeightsFormat
from max.interfaces import (
    PipelineTokenizer,
    RequestID,
    TextGenerationContextType,
    TextGenerationInputs,
    TextGenerationOutput,
    TextGenerationRequest,
)
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.config.draft_options import draft_pipeline_config
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.config.resolver import resolver
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.batch_pipeline import StepResult
from max.pipelines.generation.drafts.draft_model import DraftedText, ModelDrafter
from max.pipelines.generation.drafts.draft_rounds import DraftRounds
from max.pipelines.generation.drafts.draft_steps import DraftSteps
from max.pipelines.generation.drafts.drafter import DraftersInTurn
from max.pipelines.generation.drafts.prediction import PredictionDrafter
from max.pipelines.generation.drafts.rejection import (
    kept_tokens,
    pad_rows,
    sampled_logits,
    softmax,
    uniform_numbers,
)
from max.pipelines.generation.drafts.vocabularies import check_vocabularies, vocabulary_size
from max.pipelines.generation.steps.step_tokens import last_logits, steps_with_room
from max.pipelines.generation.text_generation import TextGenerationPipeline
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter
from max.pipelines.sampling.inputs import SamplingInputs
from max.pipelines.sampling.sampler import Sampler

__all__ = ["SpeculativeDecodingMetrics", "SpeculativeDecodingTextGenerationPipeline"]


@dataclass(frozen=True)
class SpeculativeDecodingMetrics:
    """What drafts have saved so far.

    Args:
        draft_tokens_generated: The number of tokens that were drafted.
        draft_tokens_accepted: The number of these that were right.
        verified_steps: The number of drafts that were verified.
    """

    draft_tokens_generated: int = 0
    draft_tokens_accepted: int = 0
    verified_steps: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were right; 0 before the first draft."""
        return self.draft_tokens_accepted / max(self.draft_tokens_generated, 1)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a request gets of a step that verifies a draft; 0 before the first draft."""
        steps = self.verified_steps
        # each verified step gives the right tokens and one more
        return (self.draft_tokens_accepted + steps) / steps if steps else 0.0


class _DraftPipeline(TextGenerationPipeline[TextContext]):
    """The pipeline of the draft model; its drafter says which tokens are certain, and only these are cached."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for replica in self.replicas:
            replica.records_tokens = False

    @property
    def vocabulary(self) -> int:
        """The number of its tokens."""
        return vocabulary_size(self.pipeline_config)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return self.model.max_seq_len

    @property
    def model(self) -> PipelineModel[TextContext]:
        """The model."""
        return self.replicas[0].model

    @property
    def states(self) -> Sequence[Tensor]:
        """Its recurrent states ``[slots, layers, …]``; empty: it has none."""
        return self.replicas[0].cache.states


class SpeculativeDecodingTextGenerationPipeline(
    TextGenerationPipeline[TextGenerationContextType], Generic[TextGenerationContextType]
):
    """Runs a text model whose next tokens a smaller model drafts, several of which one step verifies.

    :meth:`execute` keeps a drafted token if the model chooses it there: the likeliest one, or the one that the
    request's seed samples at this position. So the texts are those of the model alone. The stages of a step can be
    called one by one, too: :meth:`prepare_batch` and :meth:`generate_draft_tokens` with the draft model,
    :meth:`verify_draft_tokens_with_target_model` by rejection sampling, :meth:`update_contexts`,
    :meth:`build_response`.

    Args:
        pipeline_config: The configuration, resolved; it has a draft model.
        pipeline_model: The model's class.
        eos_token_id: The tokenizer's end token; not read, as each context names the tokens that end it.
        weight_adapters: For each format of weights the function that renames a checkpoint's weights.
        tokenizer: Makes the contexts of requests.

    Raises:
        ConfigError: There is no draft model, or it does not fit.
        UserError: The files of a model do not fit its architecture.
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
        self._draft = _draft_pipeline(pipeline_config, eos_token_id, tokenizer)
        super().__init__(pipeline_config, pipeline_model, eos_token_id, weight_adapters, tokenizer)
        device = self.replicas[0].model.devices[0]
        self._sampler = Sampler(self.session, device, pipeline_config.sampling_config)
        chunk = self._draft.pipeline_config.prefill_chunk_size
        # one for all copies of the model: requests have their own texts in it
        self._drafter = ModelDrafter(self._draft, vocabulary_size(pipeline_config), chunk)
        for replica in self.replicas:
            replica.drafts = DraftSteps.of(
                pipeline_config,
                replica.model,
                self._sampler,
                replica.cache,
                self._constraints,
                # what a client expects comes before a guess, and takes no steps
                DraftersInTurn([PredictionDrafter(), self._drafter]),
            )
            if replica.drafts is not None:
                replica.rounds = DraftRounds.of(
                    self.session, replica, self._draft.replicas[0], self._drafter
                )

    @property
    def kv_managers(self) -> list[Any]:
        """The managers of the KV caches: of the draft model, and of the model."""
        return [self._draft.kv_manager, *super().kv_managers]

    @property
    def repeats_drafts(self) -> bool:
        """See `BatchPipeline.repeats_drafts`."""
        return (
            all(replica.rounds is not None for replica in self.replicas) or super().repeats_drafts
        )

    @property
    def scheduled_caches(self) -> list[Any]:
        """The caches whose pages a scheduler reserves: those of the model."""
        return super().kv_managers

    @property
    def metrics(self) -> SpeculativeDecodingMetrics:
        """What drafts have saved so far."""
        drafts = [replica.drafts for replica in self.replicas if replica.drafts is not None]
        return SpeculativeDecodingMetrics(
            sum(each.drafted for each in drafts),
            sum(each.accepted for each in drafts),
            sum(each.verified for each in drafts),
        )

    def calculate_num_steps(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: PipelineModel[TextGenerationContextType],
        huggingface_config: HuggingFaceConfig,
        num_steps: int,
        context: TextGenerationContextType,
        is_draft: bool = False,
    ) -> int:
        """The number of steps for which a request has room.

        Args:
            model: The model, or the draft model.
            huggingface_config: Its config.json; not read.
            num_steps: The maximum number of steps.
            context: The request.
            is_draft: Whether the steps draft tokens, after which the model adds one more.

        Raises:
            ValueError: The sequence has no room for a token.
        """
        return steps_with_room(num_steps, context, model.max_seq_len, int(is_draft))

    def prepare_batch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: PipelineModel[TextGenerationContextType],
        batch: list[TextGenerationContextType],
        num_steps: int,
        return_n_logits: int,
        is_draft: bool = False,
        draft_inputs: ModelInputs | None = None,
        merged_draft_tokens: Tensor | None = None,
        merged_draft_offsets: Tensor | None = None,
    ) -> tuple[ModelInputs, int]:
        """Reserves the pages of a batch in the cache of a model, and makes the inputs of its first step.

        Args:
            model: The model, or the draft model.
            batch: The requests.
            num_steps: The maximum number of steps.
            return_n_logits: The number of last tokens whose logits are returned.
            is_draft: Whether `model` is the draft model.
            draft_inputs: The inputs of the draft model; not read.
            merged_draft_tokens: For the model: the next tokens of each request and its drafted tokens after them, int64
                ``[total_seq_len]``. None: no tokens are drafted.
            merged_draft_offsets: The offset of each request in these, ``[batch + 1]``.

        Returns:
            The inputs, and the number of steps, limited by the room in all sequences.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError: A sequence has no room for a token.
        """
        for context in batch:
            config = model.huggingface_config
            num_steps = self.calculate_num_steps(model, config, num_steps, context, is_draft)
        if is_draft:
            texts = self._draft_texts(batch, num_steps)
            cache = self._draft.kv_manager.get_runtime_inputs(texts)
            inputs = model.prepare_initial_token_inputs(cast(Any, texts), cache, return_n_logits)
            return inputs, num_steps
        if merged_draft_tokens is not None and merged_draft_offsets is not None:
            tokens = merged_draft_tokens.to(CPU()).to_numpy()
            offsets = merged_draft_offsets.to(CPU()).to_numpy().astype(np.int64).tolist()
            for context, begin, end in zip(batch, offsets[:-1], offsets[1:], strict=True):
                own = tokens[begin:end].tolist()
                # the merged tokens begin with those of the request itself
                cast(Any, context).set_draft(own[context.active_idx - context.start_idx :])
        self._kv_manager.reserve(batch, 1)
        cache = self._kv_manager.get_runtime_inputs(batch)
        return model.prepare_initial_token_inputs(batch, cache, return_n_logits), num_steps

    def _draft_texts(
        self, batch: Sequence[TextGenerationContextType], steps: int
    ) -> list[DraftedText]:
        """The texts of requests as the draft model has them, with pages for some steps."""
        contexts = cast(Sequence[TextContext], batch)
        return self._drafter.texts(contexts, steps)

    def sample_draft_logits(
        self,
        batch: list[TextGenerationContextType],
        model_outputs: ModelOutputs,
        prev_tokens: Tensor,
        prev_logits: Tensor,
        top_k: Tensor,
        max_k: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        min_top_p: Tensor,
        seed: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples the next drafted token of each request.

        Args:
            batch: The requests.
            model_outputs: The outputs of the draft model.
            prev_tokens: The tokens that were drafted before, int64 ``[batch, steps]``.
            prev_logits: Their logits ``[batch, steps]``.
            top_k: The number of the likeliest tokens to sample from ``[batch]``.
            max_k: The greatest of these; not read.
            temperature: The divisor of the logits ``[batch]``.
            top_p: The total probability of the tokens to sample from ``[batch]``.
            min_top_p: The least of these; not read.
            seed: The seeds ``[batch]``.

        Returns:
            The tokens ``[batch]``, and `prev_tokens` and `prev_logits` with these and their logits appended.
        """
        logits = last_logits(model_outputs)
        floor = Tensor.from_numpy(np.zeros(len(batch), np.float32)).to(logits.device)
        inputs = SamplingInputs(temperature, top_k, top_p, floor, seed)
        tokens = self._sampler.sample_with(logits, inputs)
        chosen = tokens.to(CPU()).to_numpy()[:, None]  # [batch, 1]
        of_chosen = np.take_along_axis(logits.to(CPU()).to_numpy(), chosen, 1)
        joined = [
            Tensor.from_numpy(np.concatenate([before.to(CPU()).to_numpy(), new], 1))
            for before, new in ((prev_tokens, chosen), (prev_logits, of_chosen))
        ]
        return tokens, joined[0], joined[1]

    def generate_draft_tokens(
        self, batch: list[TextGenerationContextType], num_steps: int, model_inputs: ModelInputs
    ) -> tuple[int, Tensor, Tensor, ModelInputs, Tensor]:
        """Lets the draft model write tokens.

        Args:
            batch: The requests.
            num_steps: The number of tokens of each.
            model_inputs: Made by :meth:`prepare_batch` with ``is_draft``.

        Returns:
            The number of steps; the tokens int64 ``[batch, steps]`` and their logits ``[batch, steps]``; the inputs of
            the last step; and all logits ``[steps, batch, vocab]`` of the tokens that both models have, as they were
            sampled from: a token that the request's parameters leave out has the least logit.
        """
        texts, model = self._draft_texts(batch, num_steps), self._draft.model
        params = [text.sampling_params for text in texts]
        device = model.devices[0]
        tokens = Tensor.from_numpy(np.zeros((len(batch), 0), np.int64))
        of_tokens = Tensor.from_numpy(np.zeros((len(batch), 0), np.float32))
        all_logits: list[npt.NDArray[np.float32]] = []
        for step in range(num_steps):
            sampling = SamplingInputs.of(texts, device, step)
            if model.samples_in_graph:
                model_inputs.update(sampling=sampling)
            outputs = model.execute(model_inputs)
            # a draft model with a larger vocabulary drafts none of the tokens that the model lacks
            rows = last_logits(outputs).to(CPU()).to_numpy()[:, : self._drafter.vocabulary]
            logits = sampled_logits(rows, params)
            all_logits.append(logits)
            # the filters are in the logits: what is left of the parameters is the seed
            ones = Tensor.from_numpy(np.ones(len(batch), np.float32))
            every = Tensor.from_numpy(np.full(len(batch), -1, np.int64))
            new, tokens, of_tokens = self.sample_draft_logits(
                batch, ModelOutputs(Tensor.from_numpy(logits).to(device)), tokens, of_tokens,
                every, every, ones, ones, ones, sampling.seed,
            )  # fmt: skip
            if step + 1 < num_steps:
                cache = cast(Any, model_inputs.kv_cache_inputs)
                cache = self._draft.kv_manager.next_step(cache, texts, step + 1)
                model_inputs.update(kv_cache_inputs=cache)
                model_inputs = model.prepare_next_token_inputs(new, model_inputs)
        for text, own in zip(texts, tokens.to_numpy().tolist(), strict=True):
            for token in own:
                text.update(token)
        stacked = Tensor.from_numpy(np.stack(all_logits))
        return num_steps, tokens, of_tokens, model_inputs, stacked

    def verify_draft_tokens_with_target_model(
        self,
        draft_inputs: ModelInputs,
        context_batch: list[TextGenerationContextType],
        num_draft_tokens_generated: int,
        draft_tokens: Tensor,
        draft_logits: Tensor,
        merged_draft_tokens: Tensor,
        merged_draft_offsets: Tensor,
        all_draft_logits: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the model on the drafted tokens, and decides by rejection sampling how many of them are kept.

        Args:
            draft_inputs: The inputs of the draft model.
            context_batch: The requests.
            num_draft_tokens_generated: The number of drafted tokens of each.
            draft_tokens: The drafted tokens int64 ``[batch, steps]``.
            draft_logits: Their logits; not read, as `all_draft_logits` has them.
            merged_draft_tokens: As for :meth:`prepare_batch`.
            merged_draft_offsets: As for :meth:`prepare_batch`.
            all_draft_logits: The logits that the tokens were sampled from ``[steps, batch, vocab]``.

        Returns:
            The number of kept tokens int64 ``[batch]``; the token in place of each drafted one if it is the first that
            is not kept, int64 ``[batch, steps]``; and the token after all of them, int64 ``[batch, 1]``.
        """
        count = num_draft_tokens_generated
        replica = self.replicas[0]
        model, device = replica.model, replica.model.devices[0]
        inputs, _ = self.prepare_batch(
            model, context_batch, 1, count + 1, False, draft_inputs, merged_draft_tokens, merged_draft_offsets
        )  # fmt: skip
        if model.samples_in_graph:
            inputs.update(sampling=SamplingInputs.of(context_batch, device))
        outputs = model.execute(inputs)
        assert outputs.logit_offsets is not None  # the configuration drafts tokens
        ends = outputs.logit_offsets.to(CPU()).to_numpy()[1:].astype(np.int64)
        logits = outputs.logits.to(CPU()).to_numpy()
        drafted = draft_tokens.to(CPU()).to_numpy().tolist()  # [batch, count]
        draft = softmax(all_draft_logits.to(CPU()).to_numpy())  # [count, batch, vocab]
        kept: list[int] = []
        others: list[list[int]] = []
        for row, context in enumerate(context_batch):
            params, end = context.sampling_params, int(ends[row])
            # [count + 1, vocab]: before, between and after the drafted tokens
            target = softmax(sampled_logits(logits[end - count - 1 : end], [params] * (count + 1)))
            numbers = [
                uniform_numbers(params.seed, context.active_idx + step) for step in range(count + 1)
            ]
            own, replaced = kept_tokens(
                drafted[row],
                pad_rows(draft[:, row], target.shape[-1]),
                target,
                np.array(numbers),
            )
            kept.append(own)
            others.append(replaced)
        tokens = np.array(others, np.int64)
        return (
            Tensor.from_numpy(np.array(kept, np.int64)),
            Tensor.from_numpy(np.ascontiguousarray(tokens[:, :count])),
            Tensor.from_numpy(np.ascontiguousarray(tokens[:, count:])),
        )

    def update_contexts(
        self,
        context_batch: list[TextGenerationContextType],
        first_rejected_tokens: npt.NDArray[np.integer[Any]],
        recovered_tokens: npt.NDArray[np.integer[Any]],
        bonus_tokens: npt.NDArray[np.integer[Any]],
        draft_tokens: npt.NDArray[np.integer[Any]],
        num_draft_tokens_generated: int,
    ) -> None:
        """Appends the kept tokens to the requests, and the one after them.

        Args:
            context_batch: The requests.
            first_rejected_tokens: The number of kept tokens of each ``[batch]``.
            recovered_tokens: The token in place of the first that is not kept ``[batch, steps]``.
            bonus_tokens: The token after all of them ``[batch, 1]``.
            draft_tokens: The drafted tokens ``[batch, steps]``.
            num_draft_tokens_generated: The number of drafted tokens of each.
        """
        count = num_draft_tokens_generated
        # [batch, count + 1]
        replaced = np.concatenate([recovered_tokens, bonus_tokens.ravel()[:, None]], 1)
        for row, context in enumerate(context_batch):
            kept = int(first_rejected_tokens.ravel()[row])
            if (drafts := self.replicas[0].drafts) is not None:
                drafts.count(count, kept)
            for token in [*draft_tokens[row, :kept].tolist(), int(replaced[row, kept])]:
                if not context.is_done:
                    context.update(token)
        self._kv_manager.step(context_batch)

    def build_response(
        self, context_batch: list[TextGenerationContextType]
    ) -> dict[RequestID, TextGenerationOutput]:
        """The new tokens of requests.

        Args:
            context_batch: The requests.
        """
        return {context.request_id: context.to_generation_output() for context in context_batch}

    def execute(self, inputs: TextGenerationInputs[TextGenerationContextType]) -> StepResult:
        """Runs a batch: the model verifies the tokens that were drafted after the last step, and adds one; then the
        draft model drafts those of the next step.

        Args:
            inputs: The batch.
        """
        return super().execute(inputs)

    def release(self, request_id: RequestID) -> None:
        """Frees the pages of a request in both caches; nothing happens if it has none."""
        super().release(request_id)

    @property
    def tokenizer(
        self,
    ) -> PipelineTokenizer[
        TextGenerationContextType, npt.NDArray[np.integer[Any]], TextGenerationRequest
    ]:
        """The tokenizer of both models."""
        return super().tokenizer

    @property
    def pipeline_config(self) -> PipelineConfig:
        """The configuration of the model; its ``draft_model_config`` is that of the draft model."""
        return super().pipeline_config


def _draft_pipeline(config: PipelineConfig, eos: int, tokenizer: Any) -> _DraftPipeline:
    """Loads the draft model of a configuration."""
    model, draft = config.model_config, config.draft_model_config
    if draft is None:
        raise ConfigError("there is no draft model", "Give one with --draft-model.")
    own = draft_pipeline_config(config)
    check_vocabularies(model.huggingface_model_repo, draft.huggingface_model_repo)
    architecture = resolver().architecture_of(own)
    pipeline = _DraftPipeline(
        own, architecture.pipeline_model, eos, architecture.weight_adapters, tokenizer
    )
    slots = pipeline.kv_manager.slots
    if slots is not None and not slots.spares:
        raise ConfigError(
            f"the draft model {draft.model_path} has recurrent states, and no memory is left to save one",
            "Give a smaller --max-length or --max-batch-size.",
        )
    return pipeline
