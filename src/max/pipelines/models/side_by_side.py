"""Blocks with attention and a recurrent layer in parallel, and the factors of their branches (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from max._dataclass import dataclass
from max.graph import TensorValue, ops
from max.nn.activation import ACTIVATIONS
from max.nn.kv_cache import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.mlp import MLP

__all__ = ["ScaledMLP", "SideBySide", "SideBySideLayer"]


@dataclass(frozen=True)
class SideBySide:
    """The factors of blocks with attention and a recurrent layer in parallel.

    Args:
        attention_in: The factor of the attention's input.
        attention_out: The factor of the attention's output.
        recurrent_out: The factor of the recurrent layer's output.
        gate: The factor of the MLP's gate before its activation.
        down: The factor of the MLP's output.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0


class SideBySideLayer(Module):
    """The weighted sum of the outputs of an attention and a recurrent layer with the same input.

    Weights: those of ``self_attn`` and of ``mixer``.

    Args:
        attention: The attention.
        recurrent: The recurrent layer.
        factors: The factors.
    """

    def __init__(self, attention: Module, recurrent: Module, factors: SideBySide) -> None:
        self.self_attn, self.mixer, self.factors = attention, recurrent, factors
        self._attend: Callable[..., TensorValue] | None = None

    def split(self, parts: Callable[..., TensorValue]) -> None:
        """Replaces the attention by its parts on several devices.

        Args:
            parts: Takes the attention's arguments, and returns its result.
        """
        self._attend = parts

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        positional: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The weighted sum; arguments as of `max.pipelines.models.decoder_attention.DecoderAttention`.

        Args:
            layer_idx: The layer's index, both in the pages and in the states.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache.
            positional: The position-dependent inputs of the attention.
            input_row_offsets: The first row of each sequence.
        """
        factors, inputs = self.factors, (kv_collection, positional, input_row_offsets)
        attended = (self._attend or self.self_attn)(layer_idx, x * factors.attention_in, *inputs)
        moved = self.mixer(layer_idx, x, *inputs)
        return moved * factors.recurrent_out + attended * factors.attention_out


class ScaledMLP(MLP):
    """A gated MLP with factors on the gate and on the result.

    Args:
        factors: The factors.
        options: The arguments of `MLP`.
    """

    def __init__(self, factors: SideBySide, **options: Any) -> None:
        super().__init__(**options)
        self.factors = factors

    def __call__(self, x: TensorValue) -> TensorValue:
        """``factor * down(activation(factor * gate(x)) * up(x))``, of x's dtype.

        Args:
            x: ``[…, hidden_dim]``.
        """
        gate = ACTIVATIONS[self.activation_function](self.gate_proj(x) * self.factors.gate)
        return ops.cast(self.down_proj(gate * self.up_proj(x)) * self.factors.down, x.dtype)
