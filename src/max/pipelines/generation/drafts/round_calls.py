"""The parts that calls of several rounds share, whether a draft model or a text drafts the tokens.

A round is a step of the target model that verifies drafted tokens; native code computes the inputs of the next round.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.graph import BufferType, BufferValue, Graph, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.interfaces import TextGenerationContext
from max.pipelines.core.draft_tree import tree_parents
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.drafts.call_watch import CallWatch
from max.pipelines.generation.steps.decode_loop import DecodeLoop
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.models.inputs import ModelInputs
from max.pipelines.models.pipeline_model import PipelineModel
from max.pipelines.sampling.inputs import SamplingInputs, sample_tokens
from max.pipelines.sampling.sampler import needs_sampler

__all__ = [
    "NOTHING",
    "RoundModel",
    "RoundTokens",
    "chosen_tokens",
    "graph_of_round",
    "greedy",
    "reading_rounds",
    "reserve_pages",
    "takes_rounds",
    "tokens_of_rounds",
]

NOTHING = -2
"""The history's value in place of a rejected drafted token and of those after it."""


def chosen_tokens(
    logits: TensorValue, parameters: Sequence[TensorValue], seeds: TensorValue, rows: BufferValue
) -> TensorValue:
    """Stages the sampling of the target model's token after each row.

    Args:
        logits: float32 ``[rows, vocab]``.
        parameters: temperature, top_k, top_p, min_p, each ``[rows]``.
        seeds: uint64 ``[rows]``.
        rows: The tokens of the rows; not read.

    Returns:
        int64 ``[rows]``.
    """
    temperature, top_k, top_p, min_p = parameters
    return sample_tokens(logits, temperature, top_k, top_p, min_p, seeds)


def graph_of_round(name: str, types: Sequence[TensorType | BufferType]) -> Graph:
    """The graph that samples the token after each verified row, and calls the op that computes the next inputs.

    Args:
        name: The name of the graph; the op is ``mo.<name>.ragged.paged``.
        types: The inputs: logits, temperature, top_k, top_p and min_p of the rows, five operands that the op reads, and
            those that it updates, the rows first and the seeds fourth.
    """
    with Graph(name, input_types=types) as graph:
        logits, *parameters = (value.tensor for value in graph.inputs[:5])
        read = [value.tensor for value in graph.inputs[5:10]]
        changed = [value.buffer for value in graph.inputs[10:]]
        seeds = ops.buffer_load(changed[3])
        chosen = chosen_tokens(logits, parameters, seeds, changed[0])
        stage_declared(f"{name}.ragged.paged", [chosen, *read, *changed])
        graph.output()
    return graph


class RoundModel(Protocol):
    """The attributes of a model replica that rounds use."""

    @property
    def model(self) -> PipelineModel[Any]:
        """The model."""
        ...

    @property
    def cache(self) -> PagedKVCacheManager:
        """Its cache."""
        ...

    @property
    def loop(self) -> DecodeLoop | None:
        """Its decode loop."""
        ...

    def inputs(self, batch: list[Any], num_steps: int) -> ModelInputs:
        """The inputs of a step."""
        ...


class RoundTokens(NamedTuple):
    """The results of a call.

    Args:
        tokens: The new tokens of each request; negative where no token could be sampled.
        num_accepted: The number of accepted drafted tokens ``[rounds, batch]``.
    """

    tokens: list[list[int]]
    num_accepted: npt.NDArray[np.int64]

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.num_accepted)


def reserve_pages(
    caches: Sequence[PagedKVCacheManager], contexts: Sequence[TextContext], bounds: Sequence[int]
) -> bool:
    """Reserves pages for a call; False if too few are free. Unused ones are released after the call.

    Args:
        caches: The caches of the models that run.
        contexts: The requests.
        bounds: The maximum number of cached tokens of each request.
    """
    try:
        for context, bound in zip(contexts, bounds, strict=True):
            for cache in caches:
                cache.pages.reserve(context.request_id, bound)
    except OutOfPagesError:
        return False
    return True


@contextmanager
def reading_rounds(
    loop: DecodeLoop,
    batch: Sequence[TextContext],
    history: npt.NDArray[np.int64],
    reader: StepReader | None,
    watch: CallWatch | None,
) -> Generator[None]:
    """Lets a reader deliver the tokens of rounds while they run in a ``with`` block.

    Args:
        loop: The decode loop, whose interrupts end the call.
        batch: The requests.
        history: The tokens ``[rounds, batch * width]``, which native code writes.
        reader: Delivers the tokens; None: nobody does.
        watch: Decides from the tokens so far whether to interrupt the call; None: never.
    """
    if reader is not None:
        watching = None if watch is None else partial(loop.watch, watch.pays)
        reader.begin(batch, history.reshape(len(history), len(batch), -1), None, watching)
    try:
        yield
    finally:
        if reader is not None and watch is not None:
            reader.end_watch()
    # cleared after the run, so that an earlier interrupt ends it after its first round
    loop.end_interrupt()


def tokens_of_rounds(history: npt.NDArray[np.int64], batch: int) -> RoundTokens:
    """Decodes the history of a call.

    Args:
        history: The tokens that the rounds have written ``[rounds, batch * width]``.
        batch: The number of requests.
    """
    rows = history.reshape(len(history), batch, -1)
    tokens = [own[own != NOTHING].tolist() for own in rows.transpose(1, 0, 2).reshape(batch, -1)]
    return RoundTokens(tokens, (rows != NOTHING).sum(axis=2) - 1)


def takes_rounds(context: TextGenerationContext) -> bool:
    """Whether a request can run in rounds: its draft is a chain, and each token depends only on logits and sampling
    parameters.

    Args:
        context: The request.
    """
    return (
        isinstance(context, TextContext)
        and context.active_length == context.draft_length + 1
        and not tree_parents(context)
        and not context.log_probabilities
        and not needs_sampler(context)
        and len(context.generated_tokens) >= context.min_tokens
        and context.reasoning_limit is None
    )


def greedy(count: int, device: Any) -> SamplingInputs:
    """Sampling parameters of greedy decoding.

    Args:
        count: The number of rows.
        device: The device of the model.
    """
    arrays = (
        np.zeros(count, np.float32), np.ones(count, np.int64), np.ones(count, np.float32),
        np.zeros(count, np.float32), np.zeros(count, np.uint64),
    )  # fmt: skip
    return SamplingInputs(*[Tensor.from_numpy(array).to(device) for array in arrays])
