"""Runs several rounds of speculative decoding with a draft model in one native call.

A round is one step of the target model, which verifies the drafted tokens, and the steps of the draft model that
generate the next ones. The first drafted tokens of the call were generated before it. Between two rounds the draft
model reads the last two tokens. It may have read the first of them already, in which case it writes the same cache
entries again: so all rounds have the same sizes. Rejected tokens are removed from a cache by lowering its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.joined_models import JoinedModels, PartInputs, PartJump
from max.engine.load.staged_graphs import load_staged_graph
from max.graph import BufferType, DeviceRef, Dim, Graph, TensorType, ops
from max.interfaces import TextGenerationContext
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.call_watch import CallWatch
from max.pipelines.generation.drafts.draft_model import DraftedText, ModelDrafter
from max.pipelines.generation.drafts.draft_steps import DraftSteps
from max.pipelines.generation.drafts.round_calls import (
    RoundModel,
    RoundTokens,
    graph_of_round,
    greedy,
    reading_rounds,
    reserve_pages,
    takes_rounds,
    tokens_of_rounds,
)
from max.pipelines.generation.steps.decode_loop import DecodeLoop, next_step_model
from max.pipelines.generation.steps.step_reader import NO_TOKEN, StepReader
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.models.decoder.model import DecoderInputs
from max.pipelines.sampling.inputs import (
    SamplingInputs,
    sampling_input_types,
)

__all__ = ["DraftRounds", "RoundPlan", "round_graph", "rows_graph"]

MORE, AGAIN = 0, 1
"""The flags of the program: whether the draft model generates another token, and whether there is another round."""


def rows_graph(device: DeviceRef) -> Graph:
    """The graph that copies the drafted tokens into the rows that the target model verifies.

    Its inputs: the tokens int64 ``[steps, batch]``; the target's vocabulary size int64 ``[1]``; the rows int64
    ``[batch * (steps + 1)]``, of which all but the first of each sequence are updated in place. Tokens outside of the
    target's vocabulary become token 0, which will be rejected or right by chance.

    Args:
        device: The device of the model.
    """
    types = [
        TensorType(DType.int64, ["steps", "batch"], device),
        TensorType(DType.int64, [1], device),
        BufferType(DType.int64, [Dim("batch") * (Dim("steps") + 1)], device),
    ]
    with Graph("drafted_rows", input_types=types) as graph:
        drafted, vocabulary, rows = graph.inputs
        none = ops.constant(0, DType.int64, device)
        tokens = ops.permute(drafted.tensor, [1, 0])  # [batch, steps]
        known = (tokens >= none) & (tokens < vocabulary.tensor)
        shape = [Dim("batch"), Dim("steps") + 1]
        first = ops.reshape(ops.buffer_load(rows.buffer), shape)[:, :1]
        joined = ops.concat([first, ops.where(known, tokens, none)], axis=1)
        ops.buffer_store(rows.buffer, ops.reshape(joined, [Dim("batch") * (Dim("steps") + 1)]))
        graph.output()
    return graph


def round_graph(device: DeviceRef) -> Graph:
    """The graph that samples the token after each verified row and computes the inputs of the next round.

    Its inputs: logits float32 ``[rows, vocab]``; temperature, top_k, top_p, min_p, each ``[rows]``; the operands of
    ``mo.next_round.ragged.paged`` after the tokens.

    Args:
        device: The device of the model.
    """
    lengths, pairs = BufferType(DType.uint32, ["batch"], device), ["steps", 2]
    one, most = BufferType(DType.int64, [1], device), BufferType(DType.uint32, pairs, device)
    types = [
        TensorType(DType.float32, ["rows", "vocab"], device),
        *sampling_input_types(device, "rows")[:-1],
        TensorType(DType.uint64, ["batch"], device),
        TensorType(DType.int64, ["batch", "ends"], device),
        TensorType(DType.int64, ["batch"], device),
        TensorType(DType.int64, [1], device),
        TensorType(DType.uint8, [1], device),
        BufferType(DType.int64, ["rows"], device),
        lengths,
        most,
        BufferType(DType.uint64, ["rows"], device),
        BufferType(DType.int64, [2 * Dim("batch")], device),
        lengths,
        most,
        lengths,
        most,
        BufferType(DType.uint64, ["batch"], device),
        one,
        BufferType(DType.int64, ["rounds", "rows"], device),
        one,
        BufferType(DType.uint8, [1], device),
    ]
    return graph_of_round("next_round", types)


def _load_graphs(session: InferenceSession, device: DeviceRef) -> tuple[Model, Model]:
    """Loads `rows_graph` and `round_graph`."""
    rows = load_staged_graph(
        session, f"drafted_rows {device}", {}, lambda: (rows_graph(device), {})
    )
    after = load_staged_graph(
        session, f"next_round {device}", {}, lambda: (round_graph(device), {})
    )
    return rows, after


class RoundPlan(NamedTuple):
    """The plan of a call.

    Args:
        length: The number of drafted tokens per request and round.
        rounds: The maximum number of rounds.
        bounds: The maximum number of cached tokens of each request, for which pages are reserved.
        texts: The requests' texts as the draft model's cache has them.
    """

    length: int
    rounds: int
    bounds: list[int]
    texts: list[DraftedText]


class _LastTokens(NamedTuple):
    """A placeholder for a request in a batch of the draft model, which determines input sizes."""

    next_tokens: npt.NDArray[np.int64]

    @property
    def active_length(self) -> int:
        """The number of tokens."""
        return len(self.next_tokens)


class DraftRounds:
    """The joined program of a target model and its draft model.

    Args:
        replica: The target model.
        loop: Its decode loop, whose interrupts also end a call.
        draft: The draft model.
        drafter: Generates the first drafted tokens, and tracks what the draft model's cache holds.
        models: The parts: the draft model's first step of a round and its sampling, its further steps and their
            sampling, `rows_graph`, the target model, `round_graph`.
    """

    def __init__(
        self,
        replica: RoundModel,
        loop: DecodeLoop,
        draft: RoundModel,
        drafter: ModelDrafter,
        models: Sequence[Model],
    ) -> None:
        self._replica, self._loop, self._draft, self._drafter = replica, loop, draft, drafter
        self._models = models
        self._device = replica.model.devices[0]
        jumps = [
            # the first drafted tokens exist already
            PartJump(-1, 5),
            PartJump(1, 4, MORE),
            PartJump(3, 4, MORE),
            PartJump(3, 2),
            PartJump(6, 7, AGAIN),
            PartJump(6, 0),
        ]
        self._joined = JoinedModels(models, jumps, 2)

    @classmethod
    def of(
        cls,
        session: InferenceSession,
        replica: RoundModel,
        draft: RoundModel,
        drafter: ModelDrafter,
    ) -> DraftRounds | None:
        """Joins a target model and its draft model; None if they cannot be joined, so that rounds run one by one.

        Args:
            session: The session of the target model.
            replica: The target model.
            draft: The draft model.
            drafter: Drafts by the draft model.
        """
        loop, own, small = replica.loop, replica.model, draft.model
        if loop is None or own.decoding_graph is None or small.decoding_graph is None:
            return None
        # a recurrent state cannot be rolled back by lowering a length
        if replica.cache.slots is not None or draft.cache.slots is not None:
            return None
        if len(own.devices) > 1 or len(small.devices) > 1 or own.devices != small.devices:
            return None
        device = own.devices[0]
        rows, after = _load_graphs(session, DeviceRef.from_device(device))
        step = next_step_model(session, device)
        graph = small.decoding_graph
        models = [graph, step, graph, step, rows, own.decoding_graph, after]
        if not JoinedModels.run_together(models):
            return None
        return cls(replica, loop, draft, drafter, models)

    def plan(
        self, batch: Sequence[TextGenerationContext], most: int, drafts: DraftSteps
    ) -> RoundPlan | None:
        """Plans the rounds of a batch and reserves their pages; None if the batch runs a single step.

        Args:
            batch: The requests.
            most: The maximum number of rounds.
            drafts: Has drafted their tokens, and limits the number of rounds.
        """
        if most < 2 or not all(map(takes_rounds, batch)) or not all(map(draft_length, batch)):
            return None
        if not JoinedModels.run_together(self._models):
            return None  # for example while a model is profiled
        contexts = [context for context in batch if isinstance(context, TextContext)]
        # other drafters' tokens may equal the draft model's by chance
        if not drafts.are_of_steps(contexts):
            return None
        length = min(context.draft_length for context in contexts)
        texts = [self._drafter.written_text(context, length) for context in contexts]
        if None in texts:
            return None
        found = [text for text in texts if text is not None]
        kind = drafts.kind_of_steps or 0
        rounds = drafts.lengths.rounds(len(batch), length * len(batch), most, kind)
        longest = min(self._replica.model.max_seq_len, self._draft.model.max_seq_len)
        rooms = [min(context.max_length, longest) - 1 for context in contexts]
        width = length + 1
        # a second round begins at least one token later
        if any(c.end_idx + width > room for c, room in zip(contexts, rooms, strict=True)):
            return None
        while rounds > 1:
            bounds = [
                min(context.end_idx - 1 + rounds * width, room)
                for context, room in zip(contexts, rooms, strict=True)
            ]
            if reserve_pages([self._replica.cache, self._draft.cache], contexts, bounds):
                return RoundPlan(length, rounds, bounds, found)
            rounds //= 2
        return None

    def run(
        self,
        batch: Sequence[TextContext],
        plan: RoundPlan,
        reader: StepReader | None,
        watch: CallWatch | None = None,
    ) -> RoundTokens:
        """Runs rounds until a sequence ends or has no room for another round, or the call is interrupted.

        Args:
            batch: The requests, as they were planned.
            plan: The plan.
            reader: Delivers the tokens of each round while the next one runs.
            watch: Decides from the tokens so far whether to interrupt the call; None: never.
        """
        count, width, loop = len(batch), plan.length + 1, self._loop
        for context in batch:
            if context.draft_length > plan.length:
                context.set_draft(context.draft_tokens[: plan.length])
        inputs = self._model_inputs(batch)
        cache = inputs.kv_cache_inputs
        assert isinstance(cache, RaggedKVCacheInputs)
        repeated = [context for context in batch for _ in range(width)]
        places = [place for _ in batch for place in range(width)]
        # [batch * width]
        sampling = SamplingInputs.of(repeated, self._device, places)
        first, other, draft_sampling = self._draft_inputs(batch, plan)
        pair_cache, one_cache = first.kv_cache_inputs, other.kv_cache_inputs
        assert isinstance(pair_cache, RaggedKVCacheInputs)
        assert isinstance(one_cache, RaggedKVCacheInputs)
        # [rounds, batch * width]: the reader polls its rows while native code writes them
        history_tensor, history = loop.share_memory(DType.int64, (plan.rounds, count * width))
        history[:] = NO_TOKEN
        done_tensor, done = loop.share_memory(DType.int64, (1,))
        more, again = (loop.share_memory(DType.uint8, (1,))[0] for _ in range(2))
        drafted = self._place(np.zeros((plan.length, count), np.int64))
        written = self._place(np.zeros(1, np.int64))
        seeds, ends = loop.constants(batch)
        no_ends = self._place(np.zeros((count, 0), np.int64))
        never = self._place(np.zeros(1, np.uint8))
        step_rest = [
            seeds, no_ends, never, other.tokens, one_cache.cache_lengths, one_cache.max_lengths,
            draft_sampling.seed, drafted, written, more,
        ]  # fmt: skip
        own_vocabulary = self._place(np.array([self._drafter.vocabulary], np.int64))
        vocabulary = self._place(np.array([self._drafter.draft_vocabulary], np.int64))
        bounds = self._place(np.array(plan.bounds, np.int64))
        round_rest = [
            *list(sampling)[:-1], seeds, ends, bounds, vocabulary, loop.interrupt_flag,
            inputs.tokens, cache.cache_lengths, cache.max_lengths, sampling.seed,
            first.tokens, pair_cache.cache_lengths, pair_cache.max_lengths,
            one_cache.cache_lengths, one_cache.max_lengths, draft_sampling.seed, written,
            history_tensor, done_tensor, again,
        ]  # fmt: skip
        draft_model, model = self._draft.model, self._replica.model
        parts: list[PartInputs] = [
            lambda made: draft_model.decoding_inputs(first),
            lambda made: [made[0][0], *step_rest],
            lambda made: draft_model.decoding_inputs(other),
            lambda made: [made[2][0], *step_rest],
            lambda made: [drafted, own_vocabulary, inputs.tokens],
            lambda made: model.decoding_inputs(inputs),
            lambda made: [made[5][2], *round_rest],
        ]
        with reading_rounds(loop, batch, history, reader, watch):
            try:
                self._joined.run_parts(parts, [more, again])
            except BaseException:
                # the contents of the draft model's cache are unknown
                for context in batch:
                    self._drafter.forget(context.request_id)
                raise
        found = tokens_of_rounds(history[: int(done[0])], count)
        for column, (context, own) in enumerate(zip(batch, found.tokens, strict=True)):
            # the draft model has not read the last drafted token
            unread = 1 + int(found.num_accepted[-1, column] == plan.length)
            self._drafter.follow_rounds(context, own, unread)
        return found

    def _model_inputs(self, batch: Sequence[TextContext]) -> DecoderInputs:
        """The target model's inputs in the first round."""
        inputs = self._replica.inputs([*batch], 1)
        if type(inputs) is not DecoderInputs:
            raise TypeError(f"rounds of {type(inputs).__name__}")
        # the graph's own sampled tokens are not used, so the cheapest sampling does
        inputs.update(sampling=greedy(len(batch), self._device))
        return inputs

    def _draft_inputs(
        self, batch: Sequence[TextContext], plan: RoundPlan
    ) -> tuple[DecoderInputs, DecoderInputs, SamplingInputs]:
        """The draft model's inputs in the first step of a round and in further steps; native code updates what depends
        on the round."""
        model, count = self._draft.model, len(batch)
        cache: PagedKVCacheManager = self._draft.cache
        tables = cache.get_runtime_inputs(plan.texts)
        sampling = SamplingInputs.of(plan.texts, self._device)
        made: list[DecoderInputs] = []
        for new in (2, 1):
            own = replace(
                tables,
                cache_lengths=self._place(np.zeros(count, np.uint32)),
                max_lengths=self._place(np.array([[new, 0]], np.uint32)),
            )
            contexts: Any = [_LastTokens(np.zeros(new, np.int64))] * count
            inputs = model.prepare_initial_token_inputs(contexts, own, 1)
            if type(inputs) is not DecoderInputs:
                raise TypeError(f"rounds of {type(inputs).__name__}")
            inputs.update(sampling=sampling)
            made.append(inputs)
        return made[0], made[1], sampling

    def _place(self, array: npt.NDArray[Any]) -> Tensor:
        return Tensor.from_numpy(array).to(self._device)
