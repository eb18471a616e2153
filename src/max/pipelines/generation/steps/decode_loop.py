"""Runs several decoding steps of a batch in one call, without Python in between.

The model's graph alternates with a small graph that makes the inputs of the next step from the new tokens. If requests
have grammars, that graph also samples the tokens, among those that the masks of the call allow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.load.staged_graphs import load_staged_graph
from max.engine.loop import ModelLoop
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.graph.ops.staging.stage import stage_declared
from max.interfaces import TextGenerationContext
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.generation.steps.reusable_inputs import has_same_requests
from max.pipelines.generation.steps.step_reader import NO_TOKEN, StepReader
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.models.pipeline_model import PipelineModel
from max.pipelines.sampling.inputs import (
    SEED_MASK,
    SamplingInputs,
    sample_tokens,
    sampling_input_types,
)

if TYPE_CHECKING:
    from max.pipelines.structured import call_masks
else:
    call_masks = lazy_module("max.pipelines.structured.call_masks")


class TokenTables(NamedTuple):
    """What the grammars of a batch say of each token, in memory that the host writes while steps run.

    Args:
        allowed_tokens: Whether a token may follow, a bit a token, int32
            ``[batch, ceil(vocab / 32)]``.
        continuing_tokens: Whether a further step may follow a token, bool ``[batch, vocab]``.
    """

    allowed_tokens: Tensor
    continuing_tokens: Tensor


_KEPT_TIMES = 4


class LoopResult(NamedTuple):
    """The result of a run.

    Args:
        inputs: The inputs, updated in place.
        tokens: The tokens of the last step ``[batch]``, which are the input of the next step.
        history: The tokens of all steps ``[steps, batch]``.
        outputs: The outputs of the model's graph in the last step: the likeliest tokens ``[batch]`` and the logits
            ``[batch, vocab]`` if the requests have grammars.
    """

    inputs: ModelInputs
    tokens: Tensor
    history: npt.NDArray[np.int64]
    outputs: Sequence[Tensor]


def _next_step_types(device: DeviceRef) -> list[TensorType | BufferType]:
    """The operands of ``mo.next_step.ragged.paged`` after the tokens of the step."""
    return [
        TensorType(DType.uint64, ["batch"], device),  # the seeds of the requests
        TensorType(DType.int64, ["batch", "ends"], device),  # the tokens that end each request
        TensorType(DType.uint8, [1], device),  # whether to stop after this step
        BufferType(
            DType.int64, ["batch"], device
        ),  # the input of the next step, as the three below
        BufferType(DType.uint32, ["batch"], device),
        BufferType(DType.uint32, [1, 2], device),
        BufferType(DType.uint64, ["batch"], device),
        BufferType(DType.int64, ["steps", "batch"], device),  # the tokens of all steps
        BufferType(DType.int64, [1], device),  # the number of steps run
        BufferType(DType.uint8, [1], device),  # whether another step follows
    ]


def next_step_graph(device: DeviceRef) -> Graph:
    """The graph that updates the inputs of a decoding step in place for the next step.

    Its operands are those of ``mo.next_step.ragged.paged``: tensors, then the buffers that it updates.

    Args:
        device: The device of the model.
    """
    tokens = TensorType(DType.int64, ["batch"], device)
    with Graph("next_step", input_types=[tokens, *_next_step_types(device)]) as graph:
        stage_declared("next_step.ragged.paged", graph.inputs)
        graph.output()
    return graph


def constrained_step_graph(device: DeviceRef) -> Graph:
    """The graph that samples the tokens of a step among those that grammars allow, and updates its inputs as
    `next_step_graph`.

    Its inputs: logits float32 ``[batch, vocab]``; temperature, top_k, top_p, min_p as in `SamplingInputs`; those of
    `TokenTables`; the operands of ``mo.next_step.ragged.paged`` after the tokens; the number of steps whose tables are
    complete. The run ends after a token that is not among the kept ones of its row, and after a step without complete
    tables, whose tokens are negative.

    Args:
        device: The device of the model.
    """
    types = [
        TensorType(DType.float32, ["batch", "vocab"], device),
        *sampling_input_types(device)[:-1],
        BufferType(DType.int32, ["batch", "words"], device),
        TensorType(DType.bool, ["batch", "vocab"], device),
        *_next_step_types(device),
        BufferType(DType.int64, [1], device),
    ]
    with Graph("constrained_step", input_types=types) as graph:
        inputs = iter(graph.inputs)
        logits, temperature, top_k, top_p, min_p = (value.tensor for value in islice(inputs, 5))
        allowed, kept = next(inputs).buffer, next(inputs).tensor
        first_seeds, ends, interrupted = (value.tensor for value in islice(inputs, 3))
        *changed, prepared = (value.buffer for value in inputs)
        # before the tables are read
        (ready,) = stage_declared("step.ready", [changed[5], prepared, allowed])
        seeds = ops.buffer_load(changed[3])
        tokens = sample_tokens(logits, temperature, top_k, top_p, min_p, seeds, allowed=allowed)
        none = ops.constant(NO_TOKEN, DType.int64, device)
        tokens = ops.where(ops.cast(ready, DType.bool), tokens, none)
        # a negative token ends the run by itself
        # [batch, 1]
        places = ops.unsqueeze(ops.max(tokens, ops.constant(0, DType.int64, device)), -1)
        stays = ops.cast(ops.gather_nd(kept, places, batch_dims=1), DType.int32)
        leaves = 1 - ops.cast(ops.min(stays, axis=0), DType.uint8)
        stops = ops.max(interrupted, leaves)
        stage_declared("next_step.ragged.paged", [tokens, first_seeds, ends, stops, *changed])
        graph.output()
    return graph


def next_step_model(session: InferenceSession, device: Device) -> Model:
    """Loads `next_step_graph`."""
    ref = DeviceRef.from_device(device)
    return load_staged_graph(session, f"next_step {ref}", {}, lambda: (next_step_graph(ref), {}))


class DecodeLoop:
    """Runs steps of a decoding batch until one of its sequences ends.

    Args:
        session: Compiles the graph between steps.
        pipeline_model: The model, which has a :attr:`~PipelineModel.decoding_graph`.
        model: That graph.
    """

    def __init__(
        self,
        session: InferenceSession,
        pipeline_model: PipelineModel[Any],
        model: Model,
    ) -> None:
        self._pipeline_model, self._model = pipeline_model, model
        self._device = pipeline_model.devices[0]
        self._session = session
        self._loop = ModelLoop(model, next_step_model(session, self._device))
        self._constrained: ModelLoop | None = None
        self._lock = threading.Lock()  # guards the above
        # tensors of one element, as the device reads the first and writes the second while it runs
        self.interrupt_flag, self._interrupted = self.share_memory(DType.uint8, (1,))
        """Whether the run is to end after its current step, uint8 ``[1]``."""
        self._again, _ = self.share_memory(DType.uint8, (1,))
        self._done = self.share_memory(DType.int64, (1,))
        self._last_constants: tuple[list[TextGenerationContext], list[Tensor]] = ([], [])
        # the times of a step of the last runs: the shortest one is that of runs that nothing delayed
        self._step_times = deque[float](maxlen=_KEPT_TIMES)

    def share_memory(self, dtype: DType, shape: tuple[int, ...]) -> tuple[Tensor, npt.NDArray[Any]]:
        """A tensor of zeros that the host reads and writes while the loop runs, and the same memory for the host.

        Args:
            dtype: Its element type.
            shape: Its sizes.

        Raises:
            ValueError: The device has no such memory.
        """
        shared = self._loop.share(dtype, shape, self._device)
        if shared is None:
            raise ValueError(f"{self._device} has no memory that it shares with the host")
        return shared

    def token_tables(
        self, batch: int, vocabulary: int
    ) -> tuple[TokenTables, npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Makes the tables of a batch, in which no token may follow; and the same memory for the host.

        Args:
            batch: The number of requests.
            vocabulary: The number of logits of a token.
        """
        words = (vocabulary + 31) // 32
        allowed, allowed_array = self.share_memory(DType.int32, (batch, words))
        kept, kept_array = self.share_memory(DType.bool, (batch, vocabulary))
        return TokenTables(allowed, kept), allowed_array, kept_array

    @staticmethod
    def runs_on(session: InferenceSession, device: Device) -> bool:
        """Whether loops run on a device, and the host reads their tokens and interrupts them.

        Args:
            session: The session.
            device: A device of the session.
        """
        return ModelLoop.runs_on(session, device, with_shared_memory=True)

    @classmethod
    def of(cls, session: InferenceSession, pipeline_model: PipelineModel[Any]) -> DecodeLoop | None:
        """The loop of a model; None if its device does not repeat its graph, or shares no memory with the host.

        Args:
            session: The model's session.
            pipeline_model: The model.
        """
        model, device = pipeline_model.decoding_graph, pipeline_model.devices[0]
        if model is None or not cls.runs_on(session, device) or not ModelLoop.supports(model):
            return None
        return cls(session, pipeline_model, model)

    @property
    def usable(self) -> bool:
        """Whether the loop can run now; not while the model is profiled."""
        return ModelLoop.supports(self._model)

    @property
    def vocabulary(self) -> int | None:
        """The number of logits of a token; None if the graph does not return the logits of last tokens second."""
        outputs = self._model.output_metadata
        shape = outputs[1].shape if len(outputs) > 1 else None
        return None if shape is None or len(shape) != 2 else shape[1]

    def load_constrained(self) -> ModelLoop:
        """The loop of batches with grammars; its graph is loaded once. Thread-safe."""
        with self._lock:
            if self._constrained is None:
                ref = DeviceRef.from_device(self._device)
                step = load_staged_graph(
                    self._session,
                    f"constrained_step {ref}",
                    {},
                    lambda: (constrained_step_graph(ref), {}),
                )
                self._constrained = ModelLoop(self._model, step)
            return self._constrained

    def interrupt(self) -> None:
        """Ends the current run after its current step, or the next run after its first step; thread-safe."""
        self._interrupted[0] = 1

    def end_interrupt(self) -> None:
        """Lets the next run go on, after one that an interrupt may have ended."""
        self._interrupted[0] = 0

    def run(
        self,
        inputs: ModelInputs,
        batch: Sequence[TextGenerationContext],
        steps: int,
        reader: StepReader | None = None,
        grammars: tuple[TokenTables, call_masks.CallMasks | call_masks.ReadyMasks] | None = None,
        watch: Callable[[Sequence[Sequence[int]]], bool] | None = None,
    ) -> LoopResult:
        """Runs up to a number of steps.

        The run ends early after a step that ends a sequence or whose token is not among the kept ones, after one that
        was not prepared in time, and after :meth:`interrupt`.

        Args:
            inputs: The inputs of the first step, made for a single step; they are updated in place.
            batch: The requests in the batch's order; each has one new token, and pages for all steps.
            steps: The maximum number of steps.
            reader: Delivers the tokens of each step while the next one runs.
            grammars: What the grammars of the requests say of tokens, and what computes it; None: no request has a
                grammar. A step that was not prepared in time is the last one, with negative tokens.
            watch: Whether the run should end after its current step, from the tokens of each request so far; called in
                the reader's thread. None: nothing is watched.

        Raises:
            TypeError: The inputs have no paged cache, or no sampling parameters.
            ValueError: The tables do not have the shape of the logits.
        """
        cache, sampling = inputs.kv_cache_inputs, inputs.sampling
        if not isinstance(cache, RaggedKVCacheInputs) or sampling is None:
            raise TypeError(f"DecodeLoop: {type(inputs).__name__} lacks a paged cache or sampling")
        # [batch]: the loop replaces them by those of each step
        last = np.array([context.next_tokens[-1] for context in batch], np.int64)
        tokens = self._on_device(last)
        inputs = self._pipeline_model.prepare_next_token_inputs(tokens, inputs)
        inputs.update(sampling=sampling)
        # [steps, batch]: the reader polls its rows while native code writes them
        history_tensor, history = self.share_memory(DType.int64, (steps, len(batch)))
        history[:] = NO_TOKEN
        done_tensor, done = self._done
        done[0] = 0
        again = self._again
        read = [*self.constants(batch), self.interrupt_flag]
        changed = [
            tokens, cache.cache_lengths, cache.max_lengths, sampling.seed,
            history_tensor, done_tensor, again,
        ]  # fmt: skip

        def after(outputs: list[Tensor]) -> list[Tensor]:
            if grammars is None:
                return [outputs[0], *read, *changed]
            own = [outputs[1], *list(sampling)[:-1], *grammars[0]]
            return [*own, *read, *changed, *prepared_tensor]

        loop = self._loop
        prepared_tensor: list[Tensor] = []
        if grammars is not None:
            loop = self.load_constrained()
            # the tokens of the model's own graph are not read: the cheapest ones
            greedy = self._on_device(np.zeros(len(batch), np.float32))
            _, top_k, top_p, min_p, seed = sampling
            inputs.update(sampling=SamplingInputs(greedy, top_k, top_p, min_p, seed))
        model_inputs = self._pipeline_model.decoding_inputs(inputs)
        inputs.update(sampling=sampling)
        outputs, needed, ran, start = list[Tensor](), 0, 0, time.perf_counter()
        if grammars is not None:
            # of this call only: the thread of an earlier one may still write its own
            tensor, prepared = self.share_memory(DType.int64, (1,))
            prepared_tensor.append(tensor)
            grammars[1].begin(history, prepared, min(self._step_times, default=0.0))
        try:
            if reader is not None:
                counted = None if grammars is None else grammars[1].counted_steps
                watching = None if watch is None else partial(self.watch, watch)
                reader.begin(batch, history, counted, watching)
            outputs = loop.run(model_inputs, after, again)
            ran = int(done[0])
            if min(history[ran - 1].tolist()) < 0:
                needed = ran
        finally:
            if grammars is not None:
                grammars[1].end(needed)
            if reader is not None and watch is not None:
                reader.end_watch()
        self._step_times.append((time.perf_counter() - start) / max(ran, 1))
        # only after the run: an interrupt from before it ends it after its first step
        self.end_interrupt()
        return LoopResult(inputs, tokens, history[:ran], outputs)

    def watch(
        self, watch: Callable[[Sequence[Sequence[int]]], bool], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Ends the current run after its current step if a watch says so.

        Args:
            watch: As for :meth:`run`.
            tokens: The tokens of each request so far.
        """
        if watch(tokens):
            self.interrupt()

    def constants(self, batch: Sequence[TextGenerationContext]) -> list[Tensor]:
        """The seeds of requests ``[batch]`` and the tokens that end them ``[batch, n]``; those of the last batch if it
        had the same requests.

        Args:
            batch: The requests.
        """
        last, constants = self._last_constants
        if not has_same_requests(batch, last):
            seeds = np.array([c.sampling_params.seed & SEED_MASK for c in batch], np.uint64)
            constants = [*map(self._on_device, (seeds, _ends(batch)))]
            self._last_constants = list(batch), constants
        return constants

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return Tensor.from_numpy(array).to(self._device)


def _ends(batch: Sequence[TextGenerationContext]) -> npt.NDArray[np.int64]:
    """The tokens that end the sequence of each request ``[batch, n]``, padded with ``NO_TOKEN``."""
    ends = [
        () if context.sampling_params.ignore_eos else sorted(context.eos_token_ids)
        for context in batch
    ]
    rows = np.full((len(batch), max(map(len, ends))), NO_TOKEN, np.int64)
    for row, tokens in zip(rows, ends, strict=True):
        row[: len(tokens)] = tokens
    return rows
