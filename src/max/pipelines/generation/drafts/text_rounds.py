"""Runs several steps that verify drafts from known texts in one native call.

While all drafted tokens are accepted and the model's own token is the next one of the text, the next draft is the
continuation of the text. So the host passes as much of each text as the call may use, and native code drafts from it. A
request without a draft generates one token per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.load.staged_graphs import load_staged_graph
from max.engine.loop import ModelLoop
from max.graph import BufferType, DeviceRef, Dim, Graph, TensorType
from max.interfaces import TextGenerationContext
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.call_watch import CallWatch
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
from max.pipelines.generation.steps.decode_loop import DecodeLoop
from max.pipelines.generation.steps.reusable_inputs import has_same_requests
from max.pipelines.generation.steps.step_reader import NO_TOKEN, StepReader
from max.pipelines.models.decoder.model import DecoderInputs
from max.pipelines.sampling.inputs import SamplingInputs, sampling_input_types

__all__ = ["TextPlan", "TextRounds", "text_round_graph", "text_round_model"]

ANY_TOKEN = -1
"""The text's value where any token is accepted: of a request without a draft, and after the end of a text."""


def text_round_graph(device: DeviceRef) -> Graph:
    """The graph that samples the token after each verified row and computes the inputs of the next step.

    Its inputs: logits float32 ``[rows, vocab]``; temperature, top_k, top_p, min_p, each ``[rows]``; the operands of
    ``mo.next_text_round.ragged.paged`` after the tokens.

    Args:
        device: The device of the model.
    """
    one = BufferType(DType.int64, [1], device)
    types = [
        TensorType(DType.float32, ["rows", "vocab"], device),
        *sampling_input_types(device, "rows")[:-1],
        TensorType(DType.uint64, ["batch"], device),
        TensorType(DType.int64, ["batch", "ends"], device),
        TensorType(DType.uint32, [Dim("batch") + 1], device),
        TensorType(DType.int64, ["batch", "text"], device),
        TensorType(DType.uint8, [1], device),
        BufferType(DType.int64, ["total"], device),
        BufferType(DType.uint32, ["batch"], device),
        BufferType(DType.uint32, ["steps", 2], device),
        BufferType(DType.uint64, ["rows"], device),
        BufferType(DType.int64, ["rounds", "rows"], device),
        one,
        BufferType(DType.uint8, [1], device),
    ]
    return graph_of_round("next_text_round", types)


def text_round_model(session: InferenceSession, device: Device) -> Model:
    """Loads `text_round_graph`."""
    ref = DeviceRef.from_device(device)
    return load_staged_graph(
        session, f"next_text_round {ref}", {}, lambda: (text_round_graph(ref), {})
    )


class TextPlan(NamedTuple):
    """The plan of a call.

    Args:
        rounds: The maximum number of steps.
        texts: The expected continuation of each request, beginning with its draft; empty: none.
        lengths: The number of drafted tokens of each request per step.
    """

    rounds: int
    texts: list[Sequence[int]]
    lengths: list[int]


class TextRounds:
    """A loop of a model's decoding graph and `text_round_graph`.

    Args:
        replica: The model.
        loop: Its decode loop, whose interrupts also end a call.
        steps: The loop of both graphs.
    """

    def __init__(self, replica: RoundModel, loop: DecodeLoop, steps: ModelLoop) -> None:
        self._replica, self._loop, self._steps = replica, loop, steps
        self._device = replica.model.devices[0]
        self._done, self._again = (
            loop.share_memory(kind, (1,)) for kind in (DType.int64, DType.uint8)
        )
        self._greedy = greedy(0, self._device)
        self._last_batch: list[TextGenerationContext] = []
        self._last_lengths: list[int] = []
        self._last_sampling: SamplingInputs | None = None

    @classmethod
    def of(cls, session: InferenceSession, replica: RoundModel) -> TextRounds | None:
        """Builds the loop of a model; None if its steps with drafts run one by one.

        Args:
            session: The session of the model.
            replica: The model, which verifies drafts.
        """
        loop, graph, devices = replica.loop, replica.model.decoding_graph, replica.model.devices
        # a recurrent state cannot be rolled back by lowering a length
        if loop is None or graph is None or replica.cache.slots is not None or len(devices) > 1:
            return None
        after = text_round_model(session, devices[0])
        return cls(replica, loop, ModelLoop(graph, after)) if ModelLoop.supports(after) else None

    def plan(
        self,
        batch: Sequence[TextGenerationContext],
        most: int,
        drafts: DraftSteps,
        is_watched: bool,
    ) -> TextPlan | None:
        """Plans the steps of a batch and reserves their pages; None if the batch runs a single step.

        Args:
            batch: The requests.
            most: The maximum number of steps.
            drafts: Has drafted their tokens.
            is_watched: Whether the call is interrupted when a draft would pay for a request that has none.
        """
        lengths = [draft_length(context) for context in batch]
        if most < 2 or not any(lengths) or not (is_watched or all(lengths)):
            return None
        if not all(map(takes_rounds, batch)) or not self._loop.usable:
            return None  # for example while the model is profiled
        contexts = [context for context in batch if isinstance(context, TextContext)]
        rounds, longest = (
            min(most, drafts.lengths.steps_with_drafts),
            self._replica.model.max_seq_len,
        )
        for context, length in zip(contexts, lengths, strict=True):
            # the last token is not written to the cache
            room = min(context.max_length, longest) - context.end_idx
            rounds = min(rounds, room // (length + 1))
        texts: list[Sequence[int]] = []
        for context, length in zip(contexts, lengths, strict=True):
            if rounds < 2:
                return None
            # the model's token after the last draft needs no expected value
            text = drafts.text(context, rounds * (length + 1) - 1) if length else ()
            rounds = min(rounds, (len(text) + 1) // (length + 1)) if length else rounds
            texts.append(text)
        if drafts.grows(contexts):
            return None
        while rounds > 1:
            bounds = [
                context.end_idx - 1 + rounds * (length + 1)
                for context, length in zip(contexts, lengths, strict=True)
            ]
            if reserve_pages([self._replica.cache], contexts, bounds):
                return TextPlan(rounds, texts, lengths)
            rounds //= 2
        return None

    def run(
        self,
        batch: Sequence[TextContext],
        plan: TextPlan,
        reader: StepReader | None,
        watch: CallWatch | None,
    ) -> RoundTokens:
        """Runs steps until a request leaves its text or ends, or the call is interrupted.

        Args:
            batch: The requests, as they were planned.
            plan: The plan.
            reader: Delivers the tokens of each step while the next one runs.
            watch: Looks up drafts for the requests without one, and interrupts the call; None: never.
        """
        count, width, loop, model = (
            len(batch),
            max(plan.lengths) + 1,
            self._loop,
            self._replica.model,
        )
        inputs = self._replica.inputs([*batch], 1)
        if type(inputs) is not DecoderInputs:
            raise TypeError(f"rounds of {type(inputs).__name__}")
        # the graph's own sampled tokens are not used, so the cheapest sampling does
        if self._greedy.seed.num_elements != count:
            self._greedy = greedy(count, self._device)
        inputs.update(sampling=self._greedy)
        cache = inputs.kv_cache_inputs
        assert isinstance(cache, RaggedKVCacheInputs)
        sampling = self._sampling(batch, plan.lengths, width)
        # [rounds, batch * width]: the reader polls its rows while native code writes them
        history_tensor, history = loop.share_memory(DType.int64, (plan.rounds, count * width))
        history[:] = NO_TOKEN
        (done_tensor, done), (again, _) = self._done, self._again
        done[0] = 0
        rest = [
            *list(sampling)[:-1], *loop.constants(batch), inputs.input_row_offsets,
            self._place(_table(plan, width)), loop.interrupt_flag,
            inputs.tokens, cache.cache_lengths, cache.max_lengths, sampling.seed,
            history_tensor, done_tensor, again,
        ]  # fmt: skip
        with reading_rounds(loop, batch, history, reader, watch):
            self._steps.run(model.decoding_inputs(inputs), lambda made: [made[2], *rest], again)
        return tokens_of_rounds(history[: int(done[0])], count)

    def _sampling(
        self, batch: Sequence[TextContext], lengths: Sequence[int], width: int
    ) -> SamplingInputs:
        """The sampling parameters of all rows with logits ``[batch * width]``."""
        repeated = [context for context in batch for _ in range(width)]
        # the places of a request with fewer rows come last; the first row stands for those that it lacks
        places = [
            place - width for length in lengths for place in range(length + 1, width + length + 1)
        ]
        steps, last = [max(place, 0) for place in places], self._last_sampling
        if (
            last is None
            or lengths != self._last_lengths
            or not has_same_requests(batch, self._last_batch)
        ):
            # on the host, where the seeds of the next call are written in place
            made = SamplingInputs.of(repeated, None, steps)
            lacking = np.array(places) < 0
            # the cheapest choice
            made.temperature.to_numpy()[lacking] = 0
            made.top_k.to_numpy()[lacking] = 1
            self._last_batch, self._last_lengths = list(batch), list(lengths)
        else:
            made = last.advance(repeated, steps)
        self._last_sampling = made
        if self._device == CPU():
            return made
        return SamplingInputs(*[tensor.to(self._device) for tensor in made])

    def _place(self, array: npt.NDArray[np.int64]) -> Tensor:
        device: Device = self._device
        return Tensor.from_numpy(array).to(device)


def _table(plan: TextPlan, width: int) -> npt.NDArray[np.int64]:
    """The texts of a plan ``[batch, rounds * width - 1]``, padded with `ANY_TOKEN`."""
    rows = np.full((len(plan.texts), plan.rounds * width - 1), ANY_TOKEN, np.int64)
    for row, text in zip(rows, plan.texts, strict=True):
        row[: len(text)] = text[: len(row)]
    return rows
