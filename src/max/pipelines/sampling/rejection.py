"""Graphs that compare the tokens of a draft model with a target model's logits, for speculative decoding."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType
from max.nn.sampling import RejectionSampler, RejectionSamplerWithResiduals

__all__ = ["rejection_sampler", "rejection_sampler_with_residuals"]


def _common_types(device: DeviceRef) -> tuple[TensorType, ...]:
    """Types of draft tokens, their logits, the target's logits and their offsets."""
    return (
        TensorType(DType.int64, ["batch_size", "num_steps"], device),
        TensorType(DType.float32, ["batch_size", "num_steps"], device),
        TensorType(DType.float32, ["total_output_len", "vocab_size"], device),
        TensorType(DType.int64, ["logit_offsets_len"], device),
    )


def rejection_sampler(device: DeviceRef, *, seed: int = 0) -> Graph:
    """Builds a graph that keeps draft tokens up to the first that is rejected.

    Its inputs: the draft's tokens int64 ``[batch, steps]`` and their logits float32 ``[batch, steps]``; the target's
    logits float32 ``[rows, vocab]``, for each sequence ``steps + 1`` rows; the first row of each sequence and the
    number of rows, int64 ``[batch + 1]``. Its outputs: the number of kept tokens, and the target's token after them,
    both int64 ``[batch, 1]``. See `max.nn.sampling.RejectionSampler`.

    Args:
        device: The device of the graph.
        seed: The seed of its random numbers.
    """
    with Graph("rejection_sampler", input_types=_common_types(device)) as graph:
        sampler = RejectionSampler(device, seed=seed)
        graph.output(*sampler(*(value.tensor for value in graph.inputs)))
    return graph


def rejection_sampler_with_residuals(
    device: DeviceRef, *, seed: int = 0, debug: bool = False
) -> Graph:
    """Builds a graph whose tokens are distributed as the target's: rejected ones are drawn from the residuals.

    Its inputs are those of :func:`rejection_sampler` and all logits of the draft float32 ``[steps, batch, vocab]``;
    with `debug` the random numbers of the rejections ``[batch, steps]`` and of the residuals ``[batch, steps, vocab]``.
    Its outputs: the number of kept tokens int64 ``[batch]``, the token in place of each int64 ``[batch, steps]``, and
    the token after all int64 ``[batch, 1]``. See `max.nn.sampling.RejectionSamplerWithResiduals`.

    Args:
        device: The device of the graph.
        seed: The seed of its random numbers.
        debug: Whether random numbers are inputs.
    """
    types = [
        *_common_types(device),
        TensorType(DType.float32, ["num_steps", "batch_size", "vocab_size"], device),
    ]
    if debug:
        types += [
            TensorType(DType.float32, ["batch_size", "num_steps"], device),
            TensorType(DType.float32, ["batch_size", "num_steps", "vocab_size"], device),
        ]
    with Graph("rejection_sampler_with_residuals", input_types=types) as graph:
        sampler = RejectionSamplerWithResiduals(device, seed=seed, debug=debug)
        graph.output(*sampler(*(value.tensor for value in graph.inputs)))
    return graph
