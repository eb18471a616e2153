"""The graph that samples tokens from logits, with penalties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import Tensor
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.interfaces import SamplingParams, TextGenerationContext
from max.pipelines.config.model_config import SamplingConfig
from max.pipelines.core.text_context import TextContext
from max.pipelines.sampling.inputs import sample_tokens, sampling_input_types

_FORBIDDEN = float(np.finfo(np.float32).min)
"""The logit of a token that may not follow."""
_NONE = np.zeros(0, np.int32)


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request has penalties.

    Args:
        params: Its sampling parameters.
    """
    return (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
    )


def penalty_input_types(device: DeviceRef, batch: str = "batch") -> tuple[TensorType, ...]:
    """The types of :func:`penalty_inputs`, in their order.

    Args:
        device: The device of the graph.
        batch: The name of the batch dimension.
    """
    return (
        TensorType(DType.int32, ["counted"], device),
        TensorType(DType.int32, ["counted"], device),
        TensorType(DType.uint32, ["offsets"], device),
        *(TensorType(DType.float32, [batch], device) for _ in range(3)),
    )


def penalty_inputs(batch: Sequence[TextGenerationContext]) -> list[Tensor]:
    """The token counts and the penalties of each request.

    Args:
        batch: The requests in the batch's order.

    Returns:
        Ids and counts of generated tokens int32 ``[counted]``, none of a request without penalties; the offsets of each
        request's part uint32 ``[batch + 1]``; frequency, presence and repetition penalties float32 ``[batch]``.
    """
    counted = list(map(_counts_of, batch))
    offsets = np.cumsum([0, *(len(ids) for ids, _ in counted)])  # [batch + 1]
    params = [context.sampling_params for context in batch]
    # ids and counts of all requests one after the other, and where each request's begin
    arrays = (
        np.concatenate([_NONE, *(ids for ids, _ in counted)]).astype(np.int32),
        np.concatenate([_NONE, *(counts for _, counts in counted)]).astype(np.int32),
        offsets.astype(np.uint32),
        np.array([p.frequency_penalty for p in params], np.float32),
        np.array([p.presence_penalty for p in params], np.float32),
        np.array([p.repetition_penalty for p in params], np.float32),
    )
    return [Tensor.from_numpy(array) for array in arrays]


def _counts_of(context: TextGenerationContext) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The distinct generated tokens of a request and their counts: those of the prompt have no penalty."""
    if not has_penalties(context.sampling_params):
        return _NONE, _NONE
    # a row of a draft counts the tokens of its request
    own = getattr(context, "context", context)
    if not isinstance(own, TextContext):
        return np.unique(context.generated_tokens, return_counts=True)
    own.token_counts.follow(own.generated_tokens, own.truncations)
    return own.token_counts.after(getattr(context, "drafted_tokens", ()))


def apply_penalties(logits: TensorValue, penalties: Sequence[TensorValue]) -> TensorValue:
    """Stages penalties on logits.

    Args:
        logits: ``[batch, vocab]``, float32.
        penalties: The values of :func:`penalty_inputs`.
    """
    return stage_declared("penalties", [logits, *penalties])[0]


def allowed_logits(logits: TensorValue, is_allowed: TensorValue) -> TensorValue:
    """Stages the mask of a grammar: the logits of tokens that may not follow become the least float.

    Args:
        logits: ``[batch, vocab]``, float32.
        is_allowed: Whether a token may follow, bool ``[batch, vocab]``.
    """
    # finite: a kernel may subtract the maximum of a row
    forbidden = ops.constant(_FORBIDDEN, DType.float32, logits.device)
    return ops.where(is_allowed, logits, forbidden)


def bias_input_types(device: DeviceRef) -> tuple[TensorType, ...]:
    """The types of :func:`bias_inputs`, in their order.

    Args:
        device: The device of the graph.
    """
    return (
        TensorType(DType.int64, ["biased", 2], device),
        TensorType(DType.float32, ["biased"], device),
        TensorType(DType.int64, ["banned", 2], device),
    )


def bias_inputs(batch: Sequence[TextGenerationContext]) -> list[Tensor]:
    """The biases of tokens, and the tokens that end a sequence below its minimum length.

    Args:
        batch: The requests in the batch's order.

    Returns:
        Row and token of each bias int64 ``[biased, 2]``; the biases float32 ``[biased]``; row and token of each logit
        that becomes -inf, int64 ``[banned, 2]``.
    """
    places: list[tuple[int, int]] = []
    biases: list[float] = []
    banned: list[tuple[int, int]] = []
    for row, context in enumerate(batch):
        for token, bias in (context.sampling_params.logit_bias or {}).items():
            places.append((row, token))
            biases.append(bias)
        (masks,) = context.get_min_token_logit_mask(1)
        banned += [(row, int(token)) for token in masks[:, 1]]
    arrays = (
        np.array(places, np.int64).reshape(-1, 2),  # [biased, 2]: row, token
        np.array(biases, np.float32),
        np.array(banned, np.int64).reshape(-1, 2),  # [banned, 2]: row, token
    )
    return [Tensor.from_numpy(array) for array in arrays]


def token_sampler(
    sampling_config: SamplingConfig,
    device: DeviceRef,
    return_logits: bool = False,
    biases: bool = False,
) -> Graph:
    """Builds the graph that samples one token per row of logits.

    Its inputs: logits ``[batch, vocab]`` of ``in_dtype``; those of
    :func:`~max.pipelines.sampling.inputs.sampling_input_types`; with ``biases`` those of
    :func:`bias_input_types`; with ``enable_penalties`` those of :func:`penalty_input_types`;
    with ``enable_structured_output`` a mask bool ``[batch, vocab]`` of the tokens that may
    follow. Its outputs: tokens int64 ``[batch]``; with ``return_logits`` the logits that they
    were sampled from, ``out_dtype``.

    Args:
        sampling_config: The features of the graph, and its dtypes.
        device: The device of the graph.
        return_logits: Whether it returns the logits too.
        biases: Whether tokens have biases, or are banned.
    """
    mask = TensorType(DType.bool, ["batch", "vocab"], device)
    types = [
        TensorType(sampling_config.in_dtype, ["batch", "vocab"], device),
        *sampling_input_types(device),
        *(bias_input_types(device) if biases else ()),
        *(penalty_input_types(device) if sampling_config.enable_penalties else ()),
        *([mask] if sampling_config.enable_structured_output else ()),
    ]
    with Graph("token_sampler", input_types=types) as graph:
        inputs = iter(value.tensor for value in graph.inputs)
        logits, *sampling = islice(inputs, 6)
        if logits.dtype != DType.float32:
            logits = ops.cast(logits, DType.float32)
        if biases:
            places, values, banned = islice(inputs, 3)
            logits = ops.scatter_nd_add(logits, values, places)
            never = ops.constant(-np.inf, DType.float32, device)
            never = ops.broadcast_to(never, banned.shape[:1])
            logits = ops.scatter_nd(logits, never, banned)
        if sampling_config.enable_penalties:
            logits = apply_penalties(logits, list(islice(inputs, 6)))
        # last: what a grammar forbids stays forbidden
        if sampling_config.enable_structured_output:
            logits = allowed_logits(logits, next(inputs))
        tokens = sample_tokens(logits, *sampling)
        if return_logits:
            graph.output(tokens, ops.cast(logits, sampling_config.out_dtype))
        else:
            graph.output(tokens)
    return graph
