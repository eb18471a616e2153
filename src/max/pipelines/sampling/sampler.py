"""Samples tokens from logits outside of a model's graph.

Most batches are sampled in the model's graph. This sampler serves models that do not sample, and
requests with penalties, a minimum length or logits processors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.engine import InferenceSession, Model
from max.graph import DeviceRef
from max.interfaces import ProcessorInputs, TextGenerationContext
from max.pipelines.config.model_config import SamplingConfig
from max.pipelines.sampling.graph import has_penalties, penalty_inputs, token_sampler
from max.pipelines.sampling.inputs import SamplingInputs
from max.pipelines.structured.constraint import is_constrained, unpacked


def needs_sampler(context: TextGenerationContext, step: int = 0) -> bool:
    """Whether a request needs more than the sampling in a model's graph.

    Args:
        context: The request.
        step: The number of the step, in an execution of several.
    """
    params = context.sampling_params
    return (
        has_penalties(params)
        or bool(params.logits_processors)
        or bool(params.logit_bias)
        or is_constrained(context)
        or len(context.generated_tokens) + step < context.min_tokens
    )


class Sampler:
    """Samples tokens; its graphs are compiled when they are first used.

    Args:
        session: Compiles and runs the graphs.
        device: The device of the graphs.
        config: The features of the graphs.
    """

    def __init__(self, session: InferenceSession, device: Device, config: SamplingConfig) -> None:
        self._session, self._device, self._config = session, device, config
        self._models: dict[tuple[bool, bool], Model] = {}

    def _model(self, penalties: bool, structured: bool) -> Model:
        """The sampling graph with these features; compiled on first use."""
        key = penalties, structured
        if key not in self._models:
            config = dataclasses.replace(
                self._config,
                in_dtype=None,
                enable_penalties=penalties,
                enable_structured_output=structured,
            )
            graph = token_sampler(config, DeviceRef.from_device(self._device))
            self._models[key] = self._session.load(graph)
        return self._models[key]

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
        if any(needs_masks(context) for context in batch):
            # a copy, as the masks are written in place and the memory may be the model's output
            logits = Tensor.from_numpy(
                masked_logits(np.array(logits.to(CPU()).to_numpy()), batch)
            ).to(self._device)
        # one graph for the batch: rows without penalties get neutral ones
        penalties = any(has_penalties(context.sampling_params) for context in batch)
        inputs: list[Any] = [logits, *SamplingInputs.of(batch, self._device, step)]
        if penalties:
            inputs += [tensor.to(self._device) for tensor in penalty_inputs(batch)]
        # [batch, words] of 32 tokens to [batch, vocab] of bool
        if bitmask is not None:
            allowed = Tensor.from_numpy(unpacked(bitmask, int(logits.shape[1])))
            inputs.append(allowed.to(self._device))
        (tokens,) = self._model(penalties, bitmask is not None).execute(*inputs)
        return tokens

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
        # the seed of a row depends on its position only, so a draft changes no choice
        inputs = SamplingInputs.of(contexts, self._device, steps)
        (tokens,) = self._model(False, False).execute(logits, *inputs)
        return tokens


def needs_masks(context: TextGenerationContext) -> bool:
    """Whether a request modifies its logits before the sampling graph."""
    params = context.sampling_params
    return (
        bool(params.logits_processors)
        or bool(params.logit_bias)
        or len(context.generated_tokens) < context.min_tokens
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
