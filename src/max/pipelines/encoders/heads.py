"""The heads of encoders: pooled and normalized vectors, or a classifier's scores, of hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.activation import ACTIVATIONS
from max.nn.layer import LayerList, Module
from max.nn.layers.linear import Linear
from max.nn.layers.norm import LayerNorm
from max.pipelines.encoders.encoder import norm_layer
from max.pipelines.encoders.encoder_config import EncoderConfig, HeadConfig

__all__ = ["POOLINGS", "ClassifierHead", "SentenceHead", "SentenceStep"]


def _pool_first(h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
    return ops.gather(h, ops.cast(input_row_offsets[:-1], DType.int64), axis=0)


def _pool_last(h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
    return ops.gather(h, ops.cast(input_row_offsets[1:], DType.int64) - 1, axis=0)


def _rows_of_texts(
    h: TensorValue, input_row_offsets: TensorValue
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """The rows of each text (bool ``[batch, total]``), each row's number in its text from 1, and the row counts."""
    batch, total = input_row_offsets.shape[0] - 1, h.shape[0]
    bounds = ops.cast(input_row_offsets, DType.int64)
    begin, end = (ops.reshape(x, [batch, 1]) for x in (bounds[:-1], bounds[1:]))  # [batch, 1]
    row = ops.range(0, total, 1, out_dim=total, dtype=DType.int64, device=h.device)
    row = ops.reshape(row, [1, total])  # [1, total]
    inside = ops.logical_and(row >= begin, row < end)
    return inside, ops.cast(row - begin + 1, DType.float32), ops.cast(end - begin, DType.float32)


def _weighted_mean(h: TensorValue, inside: TensorValue, weights: TensorValue) -> TensorValue:
    zero = ops.constant(0.0, DType.float32, h.device)
    # [batch, total] @ [total, size]
    return ops.where(inside, ops.broadcast_to(weights, inside.shape), zero) @ h


def _pool_mean(h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
    inside, _, count = _rows_of_texts(h, input_row_offsets)
    return _weighted_mean(h, inside, 1 / count)


def _pool_mean_sqrt(h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
    inside, _, count = _rows_of_texts(h, input_row_offsets)
    return _weighted_mean(h, inside, ops.rsqrt(count))


def _pool_weighted_mean(h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
    inside, number, count = _rows_of_texts(h, input_row_offsets)
    # weights 1, 2, … of a text's tokens, over their sum
    return _weighted_mean(h, inside, number / (count * (count + 1) / 2))


def _pool_max(h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
    """The maxima of each text's rows, `[batch, size]`."""
    inside, _, _ = _rows_of_texts(h, input_row_offsets)
    batch, total = inside.shape
    shape = [batch, total, h.shape[1]]
    low = ops.constant(float("-inf"), DType.float32, h.device)
    rows = ops.where(
        ops.broadcast_to(ops.reshape(inside, [batch, total, 1]), shape),
        ops.broadcast_to(ops.reshape(h, [1, total, h.shape[1]]), shape),
        low,
    )
    return ops.reshape(ops.max(rows, axis=1), [batch, h.shape[1]])


POOLINGS: dict[str, Callable[[TensorValue, TensorValue], TensorValue]] = {
    "cls": _pool_first,
    "max": _pool_max,
    "mean": _pool_mean,
    "mean_sqrt_len_tokens": _pool_mean_sqrt,
    "weightedmean": _pool_weighted_mean,
    "lasttoken": _pool_last,
}
"""From hidden states ``[total, size]`` and input_row_offsets to one vector per text, by sentence-transformers' names.

Several are concatenated in this order.
"""


@dataclass(frozen=True)
class SentenceStep:
    """A module of sentence-transformers after the encoder.

    Args:
        kind: ``pooling``, ``dense``, ``norm`` (a layer norm) or ``normalize`` (to length 1).
        poolings: Of ``pooling`` the names in `POOLINGS`.
        inputs: Of ``dense`` and ``norm`` the size of the vectors.
        outputs: Of ``dense`` the size of its results.
        bias: Of ``dense`` whether there is a bias.
        activation: Of ``dense`` the activation; None: none.
    """

    kind: str
    poolings: tuple[str, ...] = ()
    inputs: int = 0
    outputs: int = 0
    bias: bool = True
    activation: str | None = None


class SentenceHead(Module):
    """The modules of sentence-transformers after the encoder: pooling, dense layers, normalization.

    Weights: ``steps.N.weight`` and ``steps.N.bias``, where N counts the dense layers and norms.

    Args:
        steps: The modules in their order.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(self, steps: tuple[SentenceStep, ...], dtype: DType, device: DeviceRef) -> None:
        self.modules = steps
        layers: list[Linear | LayerNorm] = []
        for step in steps:
            if step.kind == "dense":
                sizes = (step.inputs, step.outputs)
                layers.append(Linear(*sizes, dtype, device, has_bias=step.bias))
            elif step.kind == "norm":
                layers.append(LayerNorm(step.inputs, [device], dtype))
        self.steps = LayerList(layers)

    def __call__(self, h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
        """The vectors of texts, float32 ``[batch, size]``.

        Args:
            h: Hidden states, float32 ``[total, hidden_size]``.
            input_row_offsets: Where each text begins, uint32 ``[batch + 1]``.
        """
        layers = iter(self.steps)
        for step in self.modules:
            if step.kind == "pooling":
                parts = [POOLINGS[name](h, input_row_offsets) for name in step.poolings]
                h = parts[0] if len(parts) == 1 else ops.concat(parts, axis=1)
            elif step.kind == "normalize":
                # PyTorch's normalize divides by at least 1e-12
                length = ops.sqrt(ops.sum(h * h, axis=1))  # [batch, 1]
                h = h / ops.max(length, ops.constant(1e-12, DType.float32, h.device))
            else:
                h = next(layers)(h)
                if step.activation is not None:
                    h = ACTIVATIONS[step.activation](h)
        return h


class ClassifierHead(Module):
    """The head of a classifier; see `HeadConfig`.

    Weights: ``dense``, ``norm``, ``classifier``; those that the config has.

    Args:
        config: The shape of the encoder.
        head: The shape of the head.
        dtype: The dtype of the weights.
        device: Where it runs.
    """

    def __init__(
        self, config: EncoderConfig, head: HeadConfig, dtype: DType, device: DeviceRef
    ) -> None:
        self.head = head
        size = config.hidden_size
        self.dense = None
        if head.dense:
            self.dense = Linear(size, size, dtype, device, has_bias=head.dense_bias)
        self.norm = norm_layer(config, dtype) if head.norm else None
        self.classifier = Linear(size, head.outputs, dtype, device, has_bias=head.bias)

    def __call__(self, h: TensorValue, input_row_offsets: TensorValue) -> TensorValue:
        """The scores of texts, float32 ``[batch, outputs]``.

        Args:
            h: Hidden states, float32 ``[total, hidden_size]``.
            input_row_offsets: Where each text begins, uint32 ``[batch + 1]``.
        """
        pooling = "lasttoken" if self.head.pooling == "last" else self.head.pooling
        x = POOLINGS[pooling](h, input_row_offsets)
        if self.dense is not None:
            x = ACTIVATIONS[self.head.activation](self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.classifier(x)
