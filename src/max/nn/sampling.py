"""Sampling layers: min-p sampling, and rejection sampling of the tokens of a draft model."""

from __future__ import annotations

import numpy as np

from max._names import lazy_names
from max.dtype import DType
from max.graph import (
    DeviceRef,
    Dim,
    Shape,
    ShapeLike,
    TensorType,
    TensorValue,
    TensorValueLike,
    ops,
)
from max.nn.kernels.sampling import sample_rows, topk_fused_sampling
from max.nn.layer import Module

__all__ = ["MinPSampler", "RejectionSampler", "RejectionSamplerWithResiduals"]


class MinPSampler(Module):
    """Min-p sampling: samples among tokens with at least the fraction `min_p` of the greatest probability.

    Args:
        dtype: The dtype of the result, such as int64.
        shape: The shape of the result: ``[batch]``, ``[batch, 1]``, or that of the logits, whose first column then has
            the tokens and whose others are 0.
        temperature: The divisor of the logits; 0 is greedy.

    Raises:
        ValueError: The temperature is negative.
    """

    dtype: DType
    """The dtype of the result."""

    shape: Shape
    """The shape of the result."""

    min_p: float
    """The `min_p` of the last call; 0 before the first."""

    temperature: float
    """The divisor of the logits."""

    def __init__(self, dtype: DType, shape: ShapeLike, temperature: float = 1) -> None:
        self.dtype, self.shape = dtype, Shape(shape)
        self.min_p, self.temperature = 0.0, temperature
        if temperature < 0:
            raise ValueError(f"MinPSampler: the temperature is {temperature}, expected 0 or more")

    def __call__(self, input: TensorValue, min_p: TensorValueLike = 0.0) -> TensorValue:
        """Samples one token per row.

        Args:
            input: The logits ``[batch, vocab_size]``.
            min_p: The least fraction of the greatest probability, for all rows or ``[batch]``.

        Returns:
            The tokens, of the dtype and shape of the layer.

        Raises:
            ValueError: The rank of the logits is not 2, the shape has no row for each of theirs, or `min_p` is a number
                outside [0, 1].
        """
        if input.rank != 2:
            raise ValueError(f"MinPSampler: the logits are {input!r}, expected [batch, vocab_size]")
        if self.shape.rank not in (1, 2):
            raise ValueError(
                f"MinPSampler: the shape of the result is {self.shape!r}, expected [batch], [batch, 1] or that of the "
                f"logits {input!r}"
            )
        if isinstance(min_p, int | float):
            if not 0 <= min_p <= 1:
                raise ValueError(f"MinPSampler: min_p is {min_p}, expected 0 to 1")
            self.min_p = float(min_p)
        tokens = sample_rows("MinPSampler", input, temperature=self.temperature, min_p=min_p)
        rows = ops.rebind(ops.cast(ops.reshape(tokens, (-1,)), self.dtype), self.shape[:1])
        if self.shape.rank == 1:
            return rows
        column = ops.reshape(rows, (self.shape[0], 1))
        if self.shape[1] == 1:
            return column
        rest = ops.constant(0, self.dtype, input.device)
        return ops.concat([column, ops.broadcast_to(rest, (self.shape[0], self.shape[1] - 1))], 1)


def _uniform(shape: ShapeLike, device: DeviceRef, seed: int) -> TensorValue:
    """Random numbers in [0, 1) from one stream of the graph."""
    ops.random.set_seed(seed)
    return ops.random.uniform(TensorType(DType.float32, shape, device))


def _first_rejected(is_accepted: TensorValue) -> TensorValue:
    """The number of tokens before the first rejected one, int64 ``[batch, 1]``, from bools ``[batch, steps]``."""
    # positive from the first rejected token on, so the zeros are the tokens before it
    rejected = ops.cumsum(ops.cast(ops.logical_not(is_accepted), DType.int64), axis=1)
    return ops.sum(ops.cast(ops.equal(rejected, 0), DType.int64), axis=1)


def _rows_of_steps(input_row_offsets: TensorValue, batch: Dim, steps: Dim) -> TensorValue:
    """The row in the target's logits of each draft token, int64 ``[batch, steps]``."""
    first = ops.reshape(
        ops.rebind(ops.cast(input_row_offsets[:-1], DType.int64), [batch]), [batch, 1]
    )
    numbers = ops.range(
        0, TensorValue(steps), 1, out_dim=steps, dtype=DType.int64, device=input_row_offsets.device
    )
    return first + ops.reshape(numbers, [1, steps])


def _check(name: str, tokens: TensorValue, of_tokens: TensorValue, logits: TensorValue) -> None:
    if tokens.rank != 2 or of_tokens.shape != tokens.shape or logits.rank != 2:
        raise ValueError(
            f"{name}: draft tokens {tokens!r}, their logits {of_tokens!r} and target logits {logits!r}; expected "
            "[batch, steps] twice, and [rows, vocab_size]"
        )


class RejectionSampler(Module):
    """Keeps the draft tokens before the first rejected one, and replaces that one by a token of the target model.

    A draft token is kept with the probability ``target logit / (draft logit + eps)``.

    Args:
        device: The device.
        top_k: The number of most probable target tokens to sample from.
        top_p: The total probability of the target tokens to sample from.
        temperature: The divisor of the target's logits.
        seed: The seed.
        eps: Added to the draft logits, which are divisors.
    """

    def __init__(
        self,
        device: DeviceRef,
        top_k: int = 1,
        top_p: float = 1,
        temperature: float = 1.0,
        seed: int = 0,
        eps: float = 1e-5,
    ) -> None:
        self.device, self.top_k, self.top_p = device, top_k, top_p
        self.temperature, self.seed, self.eps = temperature, seed, eps

    def __call__(
        self,
        draft_tokens: TensorValue,
        draft_logits_for_sampled_tokens: TensorValue,
        target_logits: TensorValue,
        target_logit_offsets: TensorValue,
    ) -> tuple[TensorValue, TensorValue]:
        """Accepts or rejects draft tokens.

        Args:
            draft_tokens: Integers ``[batch, steps]``.
            draft_logits_for_sampled_tokens: The draft's logits of these tokens, ``[batch, steps]``.
            target_logits: ``[rows, vocab_size]``, with ``steps + 1`` rows per sequence.
            target_logit_offsets: The first row of each sequence, and the number of rows, ``[batch + 1]``.

        Returns:
            The number of kept tokens, int64 ``[batch, 1]``, and the target's token that follows them, int64
            ``[batch, 1]``.

        Raises:
            ValueError: A shape does not fit.
        """
        _check("RejectionSampler", draft_tokens, draft_logits_for_sampled_tokens, target_logits)
        sampled = topk_fused_sampling(
            target_logits,
            self.top_k,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )
        batch, steps = draft_tokens.shape
        rows = _rows_of_steps(target_logit_offsets, batch, steps)
        places = ops.stack([rows, ops.cast(draft_tokens, DType.int64)], axis=2)  # [batch, steps, 2]
        of_target = ops.cast(ops.gather_nd(target_logits, places), DType.float32)
        of_draft = ops.cast(draft_logits_for_sampled_tokens, DType.float32) + self.eps
        chance = _uniform([batch, steps], self.device, self.seed)
        count = _first_rejected(ops.greater_equal(of_target / of_draft, chance))
        # the target has a row after each draft token, the last one included
        return count, ops.gather(ops.reshape(sampled, [-1]), rows[:, :1] + count, axis=0)


class RejectionSamplerWithResiduals(Module):
    """Speculative sampling (https://arxiv.org/abs/2211.17192): the tokens follow the distribution of the target model.

    A draft token with the probability ``p`` in the target and ``q`` in the draft is kept with the probability
    ``min(p / q, 1)``. The first rejected token is replaced by a sample of the residual distribution ``max(p - q, 0)``;
    if none is rejected, a sample of the target follows the last token.

    Args:
        device: The device.
        top_k: 1: rejected tokens are replaced by the most probable token; otherwise by a sampled one.
        temperature: The divisor of both models' logits.
        eps: The lower bound of the probability of a draft token, which is a divisor.
        seed: The seed.
        debug: Whether calls take random numbers as arguments.
    """

    def __init__(
        self,
        device: DeviceRef,
        top_k: int = 1,
        temperature: float = 1.0,
        eps: float = 1e-10,
        seed: int = 0,
        debug: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ValueError(
                f"RejectionSamplerWithResiduals: the temperature is {temperature}, expected more than 0"
            )
        self.device, self.top_k, self.temperature = device, top_k, temperature
        self.eps, self.seed, self.debug = eps, seed, debug

    def __call__(
        self,
        draft_tokens: TensorValue,
        draft_logits_for_sampled_tokens: TensorValue,
        target_logits: TensorValue,
        target_logit_offsets: TensorValue,
        all_draft_logits: TensorValue,
        rejection_rand: TensorValue | None = None,
        residual_rand: TensorValue | None = None,
    ) -> tuple[TensorValue, TensorValue, TensorValue]:
        """Accepts or rejects draft tokens; returns replacements for rejected ones.

        Args:
            draft_tokens: Integers ``[batch, steps]``.
            draft_logits_for_sampled_tokens: The draft's logits of these tokens, ``[batch, steps]``; unused, because
                `all_draft_logits` includes them.
            target_logits: ``[rows, vocab_size]``, with ``steps + 1`` rows per sequence.
            target_logit_offsets: The first row of each sequence, and the number of rows, ``[batch + 1]``.
            all_draft_logits: ``[steps, batch, vocab_size]``.
            rejection_rand: Numbers in [0, 1) that decide whether tokens are kept, ``[batch, steps]``. Requires `debug`.
            residual_rand: Numbers in (0, 1) for the residual distributions, ``[batch, steps, vocab_size]``: the token
                with the least ``-log(number) / probability`` is taken. Requires `debug`.

        Returns:
            The number of kept tokens, int64 ``[batch]``; the replacement of each draft token if it is rejected, int64
            ``[batch, steps]``; and the token that follows if all are kept, int64 ``[batch, 1]``.

        Raises:
            ValueError: A shape does not fit, or random numbers are given without `debug`.
        """
        name = "RejectionSamplerWithResiduals"
        _check(name, draft_tokens, draft_logits_for_sampled_tokens, target_logits)
        if (rejection_rand is not None or residual_rand is not None) and not self.debug:
            raise ValueError(f"{name}: random numbers are arguments of debug=True only")
        batch, steps = draft_tokens.shape
        vocab = target_logits.shape[1]
        expected = [steps, batch, vocab]
        if list(all_draft_logits.shape) != expected:
            raise ValueError(
                f"{name}: all draft logits are {all_draft_logits!r}, expected [{steps}, {batch}, {vocab}]"
            )
        rows = _rows_of_steps(target_logit_offsets, batch, steps)
        wide = ops.cast(target_logits, DType.float32) / self.temperature
        p = ops.gather(ops.softmax(wide), rows, axis=0)  # [batch, steps, vocab]
        # [steps, batch, vocab] to [batch, steps, vocab]
        draft = ops.cast(ops.permute(all_draft_logits, [1, 0, 2]), DType.float32)
        q = ops.softmax(draft / self.temperature)
        tokens = ops.unsqueeze(ops.cast(draft_tokens, DType.int64), -1)
        # the probabilities of the draft's tokens, [batch, steps]
        p_token, q_token = (ops.gather_nd(x, tokens, batch_dims=2) for x in (p, q))
        if rejection_rand is None:
            rejection_rand = _uniform([batch, steps], self.device, self.seed)
        accepted = ops.greater(p_token / ops.max(q_token, self.eps), rejection_rand)
        residual = ops.max(p - q, 0.0)
        # if both distributions are equal, no token is rejected, so any distribution is valid
        empty = ops.equal(ops.sum(residual, axis=2), 0.0)
        residual = ops.where(empty, p, residual)
        recovered = self._choose(residual, residual_rand, self.seed + 1, [batch, steps, vocab])
        # the target has one more row than there are draft tokens
        last = ops.gather(wide, ops.reshape(rows[:, -1:] + 1, [batch]), axis=0)
        bonus = self._choose(ops.softmax(last), None, self.seed + 2, [batch, vocab])
        return (
            ops.reshape(_first_rejected(accepted), [batch]),
            recovered,
            ops.reshape(bonus, [batch, 1]),
        )

    def _choose(
        self, weights: TensorValue, chance: TensorValue | None, seed: int, shape: ShapeLike
    ) -> TensorValue:
        """The argmax of the last axis, or with `top_k` other than 1 an index sampled by weight."""
        if self.top_k != 1 or chance is not None:
            if chance is None:
                chance = _uniform(shape, self.device, seed)
            least = ops.max(chance, float(np.finfo(np.float32).tiny))
            # the argmin of exponential variables with these rates is distributed by weight
            weights = weights / ops.max(-ops.log(least), 1e-20)
        chosen = ops.argmax(weights, axis=-1)
        return ops.reshape(chosen, list(chosen.shape)[:-1])


__getattr__ = lazy_names(__name__)
