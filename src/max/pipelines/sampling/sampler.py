"""Samples tokens from logits outside of a model's graph.

Most batches are sampled in the model's graph. This sampler serves models that do not sample, and
requests with penalties, a minimum length or logits processors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.engine import InferenceSession, Model
from max.engine.sampling_device import sampling_device
from max.graph import DeviceRef
from max.interfaces import ProcessorInputs, TextGenerationContext
from max.pipelines.config.model_config import SamplingConfig
from max.pipelines.sampling.graph import (
    bias_inputs,
    has_penalties,
    penalty_inputs,
    token_sampler,
)
from max.pipelines.sampling.inputs import SamplingInputs, is_greedy
from max.pipelines.structured.constraint import is_constrained
from max.pipelines.structured.step_masks import unpack_mask

MOST_ON_HOST = 1 << 20
"""The most logits whose greatest ones are found on the host, in less time than a graph is begun."""


def needs_sampler(context: TextGenerationContext, step: int = 0) -> bool:
    """Whether a request needs more than the sampling in a model's graph.

    Args:
        context: The request.
        step: The number of the step, in an execution of several.
    """
    return changes_logits(context, step) or is_constrained(context)


def changes_logits(context: TextGenerationContext, step: int = 0) -> bool:
    """Whether a request chooses by other logits than the model's, a grammar aside.

    Args:
        context: The request.
        step: The number of the step, in an execution of several.
    """
    return has_penalties(context.sampling_params) or needs_masks(context, step)


def grammar_tokens(
    tokens: Tensor,
    logits: Tensor,
    batch: Sequence[TextGenerationContext],
    step: int,
    bitmask: npt.NDArray[np.int32],
) -> Tensor | None:
    """The tokens of a batch whose grammars are followed greedily, without a sampling graph; None if it needs that.

    The likeliest of all tokens is the likeliest of those that a grammar allows, if it allows it; else the likeliest of
    these is found on the host.

    Args:
        tokens: The token of each request, ``[batch]``, chosen without grammars.
        logits: ``[batch, vocab]``, float32; not modified.
        batch: The requests.
        step: The number of the step, in an execution of several.
        bitmask: The tokens that may follow ``[batch, words]``, a bit a token.
    """
    chosen = tokens.to(CPU()).to_numpy().tolist()
    most = 32 * bitmask.shape[1]
    others: dict[int, int] = {}
    for row, (context, token) in enumerate(zip(batch, chosen, strict=True)):
        if changes_logits(context, step):
            return None
        if not is_constrained(context):
            continue
        if not is_greedy(context):
            return None
        if 0 <= token < most and int(bitmask[row, token >> 5]) >> (token & 31) & 1:
            continue
        # a row of logits is short beside the run of a sampling graph, on any device
        other = _likeliest(logits, row, bitmask)
        if other is None:
            return None
        others[row] = other
    if not others:
        return tokens
    made = np.array(chosen, np.int64)
    made[list(others)] = list(others.values())
    return Tensor.from_numpy(made).to(tokens.device)


def _likeliest(logits: Tensor, row: int, bitmask: npt.NDArray[np.int32]) -> int | None:
    """The likeliest token of a row among those that may follow; None if there are none, or logits are no numbers."""
    values = logits[row].to(CPU()).to_numpy()  # [vocab]
    # [vocab] of 0 and 1
    bits = np.unpackbits(bitmask[row].view(np.uint8), bitorder="little")[: len(values)]
    (allowed,) = bits.nonzero()
    if not len(allowed):
        return None
    place = int(values[allowed].argmax())
    return int(allowed[place]) if np.isfinite(values[allowed[place]]) else None


class Sampler:
    """Samples tokens; its graphs are compiled when they are first used.

    They run on the device of the model, or on the host if that device has no sampling. Only logits processors, which
    are functions of the caller, change logits on the host.

    Args:
        session: Compiles and runs the graphs.
        device: The device of the model.
        config: The features of the graphs.
    """

    def __init__(self, session: InferenceSession, device: Device, config: SamplingConfig) -> None:
        self._session, self._config = session, config
        self._model_device = device
        self._device = sampling_device(session, device)
        self._models: dict[tuple[bool, bool, bool], Model] = {}

    def _model(self, penalties: bool, structured: bool, biases: bool = False) -> Model:
        """The sampling graph with these features; compiled on first use."""
        key = penalties, structured, biases
        if key not in self._models:
            config = dataclasses.replace(
                self._config,
                in_dtype=None,
                enable_penalties=penalties,
                enable_structured_output=structured,
            )
            ref = DeviceRef.from_device(self._device)
            graph = token_sampler(config, ref, biases=biases)
            self._models[key] = self._session.load(graph)
        return self._models[key]

    def load_plain(self) -> None:
        """Loads the graph without penalties, biases and masks, unless it is loaded."""
        self._model(False, False)

    def sample(
        self,
        logits: Tensor,
        batch: Sequence[TextGenerationContext],
        step: int = 0,
        bitmask: npt.NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Samples the next token of each request.

        Args:
            logits: ``[batch, vocab]``, float32; not modified.
            batch: The requests in the batch's order.
            step: The number of the step; only the first may have penalties.
            bitmask: The tokens that may follow ``[batch, words]``, a bit a token; None: all.

        Returns:
            int64 ``[batch]``.
        """
        biases = any(map(needs_masks, batch))
        if any(context.sampling_params.logits_processors for context in batch):
            # a copy, as the masks are written in place and the memory may be the model's output
            masked = masked_logits(np.array(logits.to(CPU()).to_numpy()), batch)
            logits, biases = Tensor.from_numpy(masked), False
        # one graph for the batch: rows without penalties get neutral ones
        penalties = any(has_penalties(context.sampling_params) for context in batch)
        inputs: list[Any] = [logits.to(self._device)]
        inputs += SamplingInputs.of(batch, self._device, step)
        for tensor in (
            *(bias_inputs(batch) if biases else ()),
            *(penalty_inputs(batch) if penalties else ()),
        ):
            inputs.append(tensor.to(self._device))
        # [batch, words] of 32 tokens to [batch, vocab] of bool
        if bitmask is not None:
            allowed = Tensor.from_numpy(unpack_mask(bitmask, int(logits.shape[1])))
            inputs.append(allowed.to(self._device))
        (tokens,) = self._model(penalties, bitmask is not None, biases).execute(*inputs)
        return tokens.to(self._model_device)

    def sample_rows(
        self, logits: Tensor, contexts: Sequence[TextGenerationContext], steps: Sequence[int]
    ) -> Tensor:
        """Samples a token of each row, several rows of a request among them.

        Args:
            logits: ``[rows, vocab]``, float32; not modified.
            contexts: The request of each row, which needs no penalties, masks or processors.
            steps: The number of tokens between the request's next one and that of the row.

        Returns:
            int64 ``[rows]``.
        """
        if all(map(is_greedy, contexts)) and math.prod(logits.shape) <= MOST_ON_HOST:
            values = logits.to(CPU()).to_numpy()
            likeliest = values.argmax(1)
            # the first NaN is the likeliest one for NumPy
            if all(math.isfinite(row[token]) for row, token in zip(values, likeliest, strict=True)):
                return Tensor.from_numpy(likeliest.astype(np.int64)).to(self._model_device)
        # the seed of a row depends on its position only, so a draft changes no choice
        return self.sample_with(logits, SamplingInputs.of(contexts, self._device, steps))

    def sample_with(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Samples a token of each row with given parameters.

        Args:
            logits: ``[rows, vocab]``, float32; not modified.
            inputs: The parameters of each row, on the host.

        Returns:
            int64 ``[rows]``.
        """
        (tokens,) = self._model(False, False).execute(logits.to(self._device), *inputs)
        return tokens.to(self._model_device)


def needs_masks(context: TextGenerationContext, step: int = 0) -> bool:
    """Whether a request has biases, a minimum length that it has not reached, or logits processors.

    Args:
        context: The request.
        step: The number of the step, in an execution of several.
    """
    params = context.sampling_params
    return (
        bool(params.logits_processors)
        or bool(params.logit_bias)
        or len(context.generated_tokens) + step < context.min_tokens
    )


def masked_logits(
    logits: npt.NDArray[np.float32], batch: Sequence[TextGenerationContext]
) -> npt.NDArray[np.float32]:
    """Applies the biases, minimum lengths and logits processors of requests, in place.

    Args:
        logits: ``[batch, vocab]``.
        batch: The requests in the batch's order.

    Returns:
        The same array.
    """
    for row, context in enumerate(batch):
        # processors come last: they see all other changes of the logits
        for token, bias in (context.sampling_params.logit_bias or {}).items():
            logits[row, token] += bias
        (banned,) = context.get_min_token_logit_mask(1)
        logits[row, banned[:, 1]] = -np.inf
        for process in context.sampling_params.logits_processors or ():
            process(ProcessorInputs(Tensor.from_numpy(logits[row : row + 1]), context))
    return logits
