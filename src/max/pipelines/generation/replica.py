"""One copy of a text model, with its KV cache and what chooses its tokens: it runs the steps of its requests."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.driver import CPU, Device, Tensor
from max.engine import InferenceSession
from max.engine.load.staged_graphs import while_compiling
from max.graph.weights import WeightsFormat
from max.interfaces import (
    LogProbabilities,
    PipelineTokenizer,
    RequestID,
    TextGenerationContextType,
)
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.nn.transformer.transformer import ReturnLogits
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.batch_pipeline import StepResult
from max.pipelines.generation.steps.decode_loop import (
    DecodeLoop,
    TokenTables,
    next_step_model,
)
from max.pipelines.generation.steps.grammar_steps import GrammarSteps
from max.pipelines.generation.steps.prompt_logits import PromptLogits
from max.pipelines.generation.steps.reusable_inputs import BatchInputs, ReusableInputs
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.generation.steps.step_tokens import (
    append_tokens,
    bounded_steps,
    last_logits,
    log_probabilities_of_step,
    steps_with_room,
    with_closing_tokens,
)
from max.pipelines.kv_cache.saved_states import rewind_states, save_states
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.models.kv_cache import load_cache
from max.pipelines.models.loading import load_model
from max.pipelines.models.pipeline_model import PipelineModel, WeightsAdapter
from max.pipelines.sampling.inputs import SamplingInputs, is_greedy
from max.pipelines.sampling.sampler import Sampler, grammar_tokens, needs_sampler
from max.pipelines.structured.constraint import Constraints, is_constrained
from max.pipelines.structured.step_masks import Mask, StepMasks

if TYPE_CHECKING:
    from max.pipelines.generation.drafts import (
        call_watch,
        draft_rounds,
        draft_steps,
        drafted_rows,
        text_rounds,
    )
    from max.pipelines.structured import call_masks
else:
    draft_rounds = lazy_module("max.pipelines.generation.drafts.draft_rounds")
    draft_steps = lazy_module("max.pipelines.generation.drafts.draft_steps")
    drafted_rows = lazy_module("max.pipelines.generation.drafts.drafted_rows")
    text_rounds = lazy_module("max.pipelines.generation.drafts.text_rounds")
    call_masks = lazy_module("max.pipelines.structured.call_masks")


class Replica(Generic[TextGenerationContextType]):
    """A copy of a text model on devices of its own. Requests keep their pages in its cache from step to step.

    Args:
        config: The configuration, resolved.
        pipeline_model: The model's class.
        weight_adapters: For each format of weights the function that renames a checkpoint's weights.
        session: Compiles and runs the model.
        devices: Where this copy runs.
        available: The bytes for its KV cache.
        tokenizer: Made the contexts of requests.
        constraints: The grammars of requests, which all copies share.

    Raises:
        UserError: The model's files do not fit the architecture.
    """

    def __init__(
        self,
        config: PipelineConfig,
        pipeline_model: type[PipelineModel[TextGenerationContextType]],
        weight_adapters: dict[WeightsFormat, WeightsAdapter],
        session: InferenceSession,
        devices: Sequence[Device],
        available: int,
        tokenizer: PipelineTokenizer[TextGenerationContextType, Any, Any],
        constraints: Constraints,
    ) -> None:
        self._device, self._tokenizer, self._constraints = devices[0], tokenizer, constraints
        with ExitStack() as stack:
            if DecodeLoop.runs_on(session, self._device):
                # the graph of the decode loop
                work = partial(next_step_model, session, devices[0])
                stack.enter_context(while_compiling(session, work))
                if config.drafts_tokens:
                    work = partial(text_rounds.text_round_model, session, devices[0])
                    stack.enter_context(while_compiling(session, work))
            load = partial(load_model, pipeline_model, weight_adapters, config, session, devices)
            self.model: PipelineModel[TextGenerationContextType] = load()
        self.prompt_logits = PromptLogits(
            config, self.model, partial(load, return_logits=ReturnLogits.ALL)
        )
        self.adapters = self.model.lora_manager
        if self.adapters is not None and config.lora_config is not None:
            available = max(available - self.adapters.total_bytes, 0)
            for name, path in config.lora_config.paths.items():
                self.adapters.load(name, path)
        self.cache = load_cache(self.model, config, session, available)
        self.cache.adapters = self.adapters
        self._sampler = Sampler(session, self._device, config.sampling_config)
        self.drafts: draft_steps.DraftSteps | None = None
        if config.drafts_tokens:
            self.drafts = draft_steps.DraftSteps.of(
                config, self.model, self._sampler, self.cache, constraints
            )
        self.loop = DecodeLoop.of(session, self.model)
        self.rounds: draft_rounds.DraftRounds | None = None
        """Runs several steps with drafts of a smaller model in one call; None: they run one by one."""
        self.text_rounds: text_rounds.TextRounds | None = None
        """Runs several steps with drafts of texts in one call; None: they run one by one."""
        if self.drafts is not None:
            self.text_rounds = text_rounds.TextRounds.of(session, self)
        self._grammar_steps: GrammarSteps | None = None
        if self.loop is not None and (vocabulary := self.loop.vocabulary) is not None:
            self._grammar_steps = GrammarSteps(constraints, self.loop, vocabulary)
        self.reader: StepReader | None = None
        """Delivers the tokens of an execution of several steps while it runs; None: nobody does."""
        self._finds_num_steps = config.finds_num_steps
        self.records_tokens = True
        """Whether the new tokens are certain, so that their pages are recorded; of drafts, the drafter does it."""
        self._reusable: ReusableInputs | None = None
        self._batch_inputs = BatchInputs(self.cache, self._device)

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
        return steps_with_room(num_steps, context, self.model.max_seq_len)

    def reserve(self, batch: Sequence[TextGenerationContextType], num_steps: int) -> int:
        """Reserves the pages of a batch.

        Args:
            batch: The requests.
            num_steps: The maximum number of steps.

        Returns:
            The number of steps for which all sequences have room.

        Raises:
            OutOfPagesError: Too few pages are free.
            ValueError: A sequence has no room for a token, or an invalid schema.
        """
        for context in batch:
            self._constraints.begin(context)
            num_steps = self.calculate_num_steps(num_steps, context)
            num_steps = bounded_steps(num_steps, context, self._tokenizer)
        if not self.model.continues_steps:
            num_steps = 1
        self.cache.reserve(batch, num_steps)
        return num_steps

    def inputs(
        self,
        batch: list[TextGenerationContextType],
        num_steps: int,
        model: PipelineModel[TextGenerationContextType] | None = None,
    ) -> ModelInputs:
        """The inputs of the first step of a model: those of its last step, updated, if the batch is the same as before.

        Args:
            batch: The requests; their pages are reserved.
            num_steps: The number of steps.
            model: The model; None: the plain one.
        """
        last, self._reusable = self._reusable, None
        drafted = max(map(draft_length, batch))
        # the graph with the logits of prompts, whose steps are not repeated
        if model is not None and model is not self.model:
            return model.prepare_initial_token_inputs(
                batch, self.cache.get_runtime_inputs(batch, num_steps)
            )
        if last and num_steps == 1 and not drafted and last.precedes(batch):
            self._update(last.inputs, batch)
            inputs = self.model.prepare_next_token_inputs(last.tokens, last.inputs)
            inputs.update(sampling=last.inputs.sampling)
            return inputs
        cache_inputs = self._batch_inputs.of_cache(batch, num_steps)
        # a draft of n tokens is verified by the logits before, between and after them
        return self.model.prepare_initial_token_inputs(batch, cache_inputs, drafted + 1)

    def _update(self, inputs: ModelInputs, batch: list[TextGenerationContextType]) -> None:
        """Makes the cache and the sampling parameters of inputs those of a later step of the same requests."""
        cache = cast(RaggedKVCacheInputs, inputs.kv_cache_inputs)
        inputs.update(kv_cache_inputs=self.cache.advance(cache, batch))
        if self.model.samples_in_graph:
            inputs.update(sampling=cast(SamplingInputs, inputs.sampling).advance(batch))

    def execute(
        self, batch: list[TextGenerationContextType], num_steps: int, enable_log_probs: bool
    ) -> StepResult:
        """Runs a batch for one or several steps, and updates its contexts.

        Args:
            batch: The requests.
            num_steps: The maximum number of steps.
            enable_log_probs: Whether log-probabilities are returned.

        Returns:
            The new tokens of each request.

        Raises:
            OutOfPagesError: The batch does not come from a scheduler, and too few pages are free.
            ValueError: A sequence has no room for a token, or an invalid schema.
        """
        begin, watch = time.perf_counter(), None
        if self.drafts is not None:
            self.drafts.drop(batch)
            if self.rounds is not None and not enable_log_probs:
                plan = self.rounds.plan(batch, num_steps, self.drafts)
                if plan is not None:
                    return self._run_rounds(self.rounds, self.drafts, batch, plan, begin)
            # without a reader nobody sees the tokens of a call that runs
            watch = None if self.reader is None else self.drafts.watch(batch)
            if self.text_rounds is not None and not enable_log_probs:
                texts = self.text_rounds.plan(batch, num_steps, self.drafts, watch is not None)
                if texts is not None:
                    return self._run_texts(
                        self.text_rounds, self.drafts, batch, texts, watch, begin
                    )
            num_steps = self.drafts.plain_steps(batch, num_steps, watch is not None)
        num_steps = self.reserve(batch, num_steps)
        loop, grammars, constrained = self.loop, None, any(map(is_constrained, batch))
        if loop is not None and loop.usable and not enable_log_probs:
            if constrained and self._grammar_steps is not None:
                grammars = self._grammar_steps.plan(batch, num_steps)
            if grammars is not None or (
                num_steps > 1
                and not constrained
                and all(context.active_length == 1 for context in batch)  # no prompts, no drafts
            ):
                return self._run_loop(loop, batch, num_steps, grammars, watch)
        if constrained or (self.reader is not None and self._finds_num_steps):
            # the masks of a later step depend on the tokens before it; and no reader sees the steps that Python repeats
            num_steps = 1
        rows = None if self.drafts is None else self.drafts.rows(batch)
        drafted = rows is not None
        model = self.prompt_logits.model_of(batch, self.model)
        # computed while the model runs
        masks: StepMasks | None = None
        # nothing would wait for those of drafts while the matchers move on
        if rows is None or not rows.all_drafted:
            masks = self._constraints.start_masks(batch)
        model_inputs = self.inputs(batch, num_steps, model)
        steps: list[npt.NDArray[np.int64]] = []
        logs: list[list[LogProbabilities | None]] = []
        verified: list[list[int]] = []
        self._save_states(batch)
        for step in range(num_steps):
            if model.samples_in_graph and (step or model_inputs.sampling is None):
                model_inputs.update(sampling=self._batch_inputs.of_sampling(batch, step))
            outputs = model.execute(model_inputs)
            if rows is not None and self.drafts is not None:
                verified = self.drafts.verified_tokens(rows, outputs, batch, self._device)
                rows.keep_branches(self.cache)
            if rows is None or not rows.all_drafted:
                tokens = self._next_tokens(outputs, batch, step, masks)
            elif enable_log_probs:
                # the last of each is the token after the right ones, which the logs below are of
                tokens = Tensor.from_numpy(np.array([own[-1] for own in verified], np.int64))
            else:
                break
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
                    kv_cache_inputs=self.cache.next_step(cast(Any, cache), batch, step + 1)
                )
                model_inputs = model.prepare_next_token_inputs(tokens, model_inputs)
            elif (
                step == 0
                and steps[-1] is chosen
                and not drafted
                and model is self.model
                and model.continues_steps
            ):
                self._reusable = ReusableInputs.of(batch, model_inputs, tokens)
        # [steps, batch], transposed to a list for each request
        new_tokens: list[list[int]] = np.array(steps).T.tolist() if steps else verified
        if rows is not None:
            new_tokens = [own or one for own, one in zip(verified, new_tokens, strict=True)]
            if enable_log_probs:
                logs = _logs_of_drafts(rows, new_tokens, logs[0])
        rewound = () if rows is None else rewind_states(self.cache.slots, batch, verified)
        # a drafted batch runs one step, which has no others
        count = len(steps) or 1
        # one that ended early, as by NaN, has no time of a whole execution
        if count == num_steps:
            self._measure(batch, rows, verified, begin, num_steps)
        return self._result(batch, new_tokens, count, logs, rewound)

    def _measure(
        self,
        batch: Sequence[TextGenerationContextType],
        rows: drafted_rows.DraftedRows | None,
        verified_tokens: Sequence[Sequence[int]],
        begin: float,
        steps: int,
    ) -> None:
        """Records the duration of a step of a batch without prompts, before its tokens are added."""
        if self.drafts is None:
            return
        again = self.drafts.rows_again(batch)
        # each request has one token besides its draft and what it reads again: no prompts
        if all(
            c.active_length - draft_length(c) - n == 1 for c, n in zip(batch, again, strict=True)
        ):
            drafted = 0 if rows is None else sum(rows.counts) - sum(map(bool, rows.counts))
            accepted = sum(len(own) - 1 for own in verified_tokens if own)
            self.drafts.measure(batch, drafted + sum(again), accepted, begin, steps)

    def _save_states(self, batch: Sequence[TextGenerationContextType]) -> None:
        # those of a draft model are saved by its drafter
        if self.records_tokens:
            save_states(self.cache.slots, self.cache.states, batch)

    def _run_loop(
        self,
        loop: DecodeLoop,
        batch: list[TextGenerationContextType],
        num_steps: int,
        grammars: tuple[TokenTables, call_masks.CallMasks | call_masks.ReadyMasks] | None = None,
        watch: call_watch.CallWatch | None = None,
    ) -> StepResult:
        """Runs a decoding batch for several steps, or until one of its sequences ends, or text is forced."""
        begin = time.perf_counter()
        self._save_states(batch)
        last, self._reusable = self._reusable, None
        if last is not None and last.fits(batch):
            # the loop replaces the tokens
            model_inputs = last.inputs
            self._update(model_inputs, batch)
        else:
            model_inputs = self.inputs(batch, 1)
            model_inputs.update(sampling=self._batch_inputs.of_sampling(batch))
        model_inputs, tokens, chosen, (likeliest, logits, *_) = loop.run(
            model_inputs,
            batch,
            num_steps,
            self.reader,
            grammars,
            None if watch is None else watch.pays,
        )
        if self.drafts is not None and watch is not None:
            self.drafts.end_watch(watch)
        steps = len(chosen)
        if grammars is not None and min(chosen[-1].tolist()) < 0:
            # the masks of the last step came too late for it
            masks, own = grammars[1].last(), likeliest if all(map(is_greedy, batch)) else None
            tokens = self._allowed_tokens(own, logits, batch, steps - 1, masks)
            chosen[-1] = tokens.to(CPU()).to_numpy()
        self._reusable = ReusableInputs.of(batch, model_inputs, tokens, steps)
        self._measure(batch, None, (), begin, steps)
        new_tokens: list[list[int]] = chosen.T.tolist()
        if grammars is not None:
            new_tokens = grammars[1].valid(batch, new_tokens)
        return self._result(batch, new_tokens, steps)

    def _run_rounds(
        self,
        rounds: draft_rounds.DraftRounds,
        drafts: draft_steps.DraftSteps,
        batch: list[TextGenerationContextType],
        plan: draft_rounds.RoundPlan,
        begin: float,
    ) -> StepResult:
        """Runs several steps that verify drafts of a smaller model, or until one of the sequences ends."""
        contexts = cast(list[TextContext], batch)
        watch = None if self.reader is None else drafts.watch_rounds(contexts)
        found = rounds.run(contexts, plan, self.reader, watch)
        if watch is not None:
            drafts.end_watch(watch)
        drafts.record_rounds(
            contexts, [plan.length] * len(batch), found.num_accepted, begin, drafts_inside=True
        )
        return self._result(batch, found.tokens, found.rounds)

    def _run_texts(
        self,
        rounds: text_rounds.TextRounds,
        drafts: draft_steps.DraftSteps,
        batch: list[TextGenerationContextType],
        plan: text_rounds.TextPlan,
        watch: call_watch.CallWatch | None,
        begin: float,
    ) -> StepResult:
        """Runs several steps that verify drafts of texts, or until a request leaves its text or ends."""
        contexts = cast(list[TextContext], batch)
        found = rounds.run(contexts, plan, self.reader, watch)
        if watch is not None:
            drafts.end_watch(watch)
        drafts.record_rounds(contexts, plan.lengths, found.num_accepted, begin, drafts_inside=False)
        return self._result(batch, found.tokens, found.rounds)

    def _result(
        self,
        batch: list[TextGenerationContextType],
        tokens: Sequence[Sequence[int]],
        steps: int,
        logs: Sequence[Sequence[LogProbabilities | None]] = (),
        rewound: Collection[RequestID] = (),
    ) -> StepResult:
        """Adds the tokens of an execution to the contexts, and records what is in the cache now.

        Args:
            batch: The requests.
            tokens: The new tokens of each request, any number.
            steps: How often the model ran.
            logs: For each step, the log-probabilities of each request; empty: none.
            rewound: Requests whose recurrent states have gone back.
        """
        outputs = append_tokens(batch, tokens, logs, self._constraints, rewound)
        if self.records_tokens:
            self.cache.step(batch)
        if self.drafts is not None:
            # last: it drafts from the texts with their new tokens
            self.drafts.propose(batch)
        return StepResult(outputs, steps)

    def _next_tokens(
        self,
        outputs: ModelOutputs,
        batch: Sequence[TextGenerationContextType],
        step: int,
        masks: StepMasks | None,
    ) -> Tensor:
        """The next tokens of a batch: the graph's, or the sampler's if a request needs it."""
        chosen = outputs.next_tokens
        if chosen is not None and not any(needs_sampler(c, step) for c in batch):
            return chosen
        bitmask = None if masks is None else masks.result()
        return self._allowed_tokens(chosen, last_logits(outputs), batch, step, bitmask)

    def _allowed_tokens(
        self,
        graph_tokens: Tensor | None,
        logits: Tensor,
        batch: Sequence[TextGenerationContextType],
        step: int,
        bitmask: Mask | None,
    ) -> Tensor:
        """The next tokens of a batch, from its logits; `graph_tokens` are those of the graph, without grammars."""
        if graph_tokens is not None and bitmask is not None:
            followed = grammar_tokens(graph_tokens, logits, batch, step, bitmask)
            if followed is not None:
                return followed
        return self._sampler.sample(logits, batch, step, bitmask)

    def release(self, request_id: RequestID) -> None:
        """Frees the pages of a request; nothing happens if it has none."""
        self.cache.close(request_id)
        if self.drafts is not None:
            self.drafts.forget(request_id)


def _logs_of_drafts(
    rows: drafted_rows.DraftedRows,
    tokens: Sequence[Sequence[int]],
    others: Sequence[LogProbabilities | None],
) -> list[list[LogProbabilities | None]]:
    """For each number of a new token, the log-probabilities of each request; `others` are those of undrafted ones."""
    own = [
        rows.log_probabilities(row, len(tokens[row])) if count else [others[row]]
        for row, count in enumerate(rows.counts)
    ]
    return [
        [entries[step] if step < len(entries) else None for entries in own]
        for step in range(max(map(len, own)))
    ]
