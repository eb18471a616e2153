"""The sampling parameters of a batch, as inputs of a model's graph.

A model that samples in its own graph (see :class:`max.pipelines.models.pipeline_model.PipelineModel`)
takes those of :func:`sampling_input_types` after its other inputs, and ends in
:func:`sample_tokens`: one execution goes from tokens to tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.dtype import DType
from max.graph import BufferValue, DeviceRef, TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.interfaces import TextGenerationContext
from max.pipelines.core.reasoning import ReasoningLimit

SEED_MASK = (1 << 64) - 1
"""Seeds have 64 bits."""

SEED_STEP = 0x9E3779B97F4A7C15
"""What a seed has more whose tokens are sampled as those of another one, each a position later."""


def step_seed(seed: int, position: int) -> int:
    """The seed of one token, a function of the request's seed and the token's position.

    Batch and preemption do not change it: with equal logits a request gets equal tokens.

    Args:
        seed: The request's seed.
        position: The position of the token in its sequence.

    Returns:
        64 mixed bits (splitmix64).
    """
    # mixed, as neighboring seeds and positions must give unrelated values
    z = (seed + (position + 1) * SEED_STEP) & SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK  # 30)) :: the finalizer of SplitMix64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return z ^ (z >> 31)


@dataclass
class SamplingInputs:
    """The sampling parameters of a batch, each of shape ``[batch]``.

    Args:
        temperature: float32; 0 is greedy.
        top_k: int64; 1 is greedy, 0 and less is all tokens.
        top_p: float32.
        min_p: float32.
        seed: uint64, see :func:`step_seed`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    _seeds: npt.NDArray[np.uint64] | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    @classmethod
    def of(
        cls,
        batch: Sequence[TextGenerationContext],
        device: Device | None = None,
        step: int | Sequence[int] = 0,
    ) -> SamplingInputs:
        """The parameters of the next token of each request.

        Args:
            batch: The requests in the batch's order.
            device: The device of the tensors; None: the CPU.
            step: The number of the step, in an execution of several; or the number of each row.
        """
        steps = [step] * len(batch) if isinstance(step, int) else step
        params = [context.sampling_params for context in batch]
        choices = [_temperature_and_top_k(context) for context in batch]
        arrays = (
            np.array([temperature for temperature, _ in choices], np.float32),
            np.array([top_k for _, top_k in choices], np.int64),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            np.array(
                [
                    step_seed(p.seed, context.active_idx + number)
                    for p, context, number in zip(params, batch, steps, strict=True)
                ],
                np.uint64,
            ),
        )
        tensors = [Tensor.from_numpy(array) for array in arrays]
        if device is not None and device != CPU():
            return cls(*[tensor.to(device) for tensor in tensors])
        inputs = cls(*tensors)
        inputs._seeds = arrays[-1]
        # on the host the tensors are the arrays themselves, so `advance` can write to them
        return inputs

    def advance(
        self, batch: Sequence[TextGenerationContext], step: int | Sequence[int] = 0
    ) -> SamplingInputs:
        """The parameters of a later token of the same requests; on the host the seeds are updated in place.

        Args:
            batch: The requests in the same order.
            step: As for :meth:`of`.
        """
        if self._seeds is None or any(map(_changes_temperature, batch)):
            return SamplingInputs.of(batch, self.seed.device, step)
        steps = [step] * len(batch) if isinstance(step, int) else step
        for row, (context, number) in enumerate(zip(batch, steps, strict=True)):
            self._seeds[row] = step_seed(context.sampling_params.seed, context.active_idx + number)
        return self


def _changes_temperature(context: TextGenerationContext) -> bool:
    """Whether tokens of reasoning have a temperature of their own."""
    limit: ReasoningLimit | None = getattr(context, "reasoning_limit", None)
    return limit is not None and limit.sets_temperature


def _temperature_and_top_k(context: TextGenerationContext) -> tuple[float, int]:
    """The temperature of the next token, and the number of tokens to sample among."""
    params = context.sampling_params
    limit: ReasoningLimit | None = getattr(context, "reasoning_limit", None)
    thinking = None if limit is None else limit.temperature
    if thinking is None:
        return params.temperature, params.top_k
    # a temperature of 0 has set top_k to 1
    return thinking, -1 if params.temperature == 0 else params.top_k


def is_greedy(context: TextGenerationContext) -> bool:
    """Whether the next token of a request is the likeliest one.

    Args:
        context: The request.
    """
    temperature, top_k = _temperature_and_top_k(context)
    return temperature == 0 or top_k == 1


def sampling_input_types(device: DeviceRef, batch: str = "batch") -> tuple[TensorType, ...]:
    """The types of :class:`SamplingInputs`, in their order.

    Args:
        device: The device of the graph.
        batch: The name of the batch dimension.
    """
    dtypes = (DType.float32, DType.int64, DType.float32, DType.float32, DType.uint64)
    return tuple(TensorType(dtype, [batch], device) for dtype in dtypes)


def sample_tokens(
    logits: TensorValue,
    temperature: TensorValue,
    top_k: TensorValue,
    top_p: TensorValue,
    min_p: TensorValue,
    seed: TensorValue,
    *,
    allowed: BufferValue | None = None,
) -> TensorValue:
    """Stages the sampling of one token per row.

    Args:
        logits: ``[batch, vocab]``, float32.
        temperature: ``[batch]``, float32.
        top_k: ``[batch]``, int64.
        top_p: ``[batch]``, float32.
        min_p: ``[batch]``, float32.
        seed: ``[batch]``, uint64.
        allowed: The tokens that may follow, int32 ``[batch, words]``: token ``t`` if bit ``t % 32`` of word ``t // 32``
            is 1; None: all. Others have the least finite logit, as by
            :func:`~max.pipelines.sampling.graph.allowed_logits`.

    Returns:
        int64 ``[batch]``; with temperature 0 or top_k 1 the likeliest token, of equal ones the lowest; -1 where all
            logits are NaN.
    """
    if logits.dtype != DType.float32:
        logits = ops.cast(logits, DType.float32)
    inputs = [logits, temperature, top_k, top_p, min_p, seed]
    if allowed is not None:
        return stage_declared("sample.allowed", [*inputs, allowed])[0]
    return stage_declared("sample.token", inputs)[0]
