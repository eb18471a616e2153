"""Gated short convolutions, as in LFM 2."""

from __future__ import annotations

from collections.abc import Callable

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, ops
from max.nn.kv_cache import KVCacheParams, RecurrentState
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.pipelines.models.causal_conv import CausalConv, conv_state
from max.pipelines.models.recurrent_form import ModelSizes

__all__ = ["ShortConv", "ShortConvForm"]


@dataclass(frozen=True)
class ShortConvForm:
    """The form of a model's gated short convolutions.

    Args:
        channels: The size of hidden states.
        taps: The number of taps of the convolution.
        bias: Whether convolution and projections have biases.
    """

    channels: int
    taps: int
    bias: bool

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """The state of a sequence: the last inputs of the convolution.

        Args:
            layers: The number of recurrent layers.
        """
        return (conv_state(layers, self.taps, self.channels),)

    def layer(
        self,
        config: ModelSizes,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear],
    ) -> Module:
        """A `ShortConv`; see `RecurrentForm`."""
        return ShortConv(self, kv_params, dtype, device, linear_cls)


class ShortConv(Module):
    """``out(c * conv(b * x))``; ``b``, ``c`` and ``x`` are the three parts of the projected input.

    Weights: ``in_proj``, ``out_proj`` (`Linear`), ``conv`` (`CausalConv`).

    Args:
        form: The form.
        kv_params: The shape of the cache, with the states.
        dtype: The dtype of the weights.
        device: Where it runs.
        linear_cls: The constructor of the projections.
    """

    def __init__(
        self,
        form: ShortConvForm,
        kv_params: KVCacheParams,
        dtype: DType,
        device: DeviceRef,
        linear_cls: Callable[..., Linear],
    ) -> None:
        self.form, self.kv_params, channels = form, kv_params, form.channels
        self.in_proj = linear_cls(channels, 3 * channels, dtype, device, has_bias=form.bias)
        self.out_proj = linear_cls(channels, channels, dtype, device, has_bias=form.bias)
        self.conv = CausalConv(channels, form.taps, form.bias, kv_params, device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        positional: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The layer's output ``[total_seq_len, channels]``, of x's dtype.

        Args:
            layer_idx: The layer's index among the recurrent layers, uint32, rank 0.
            x: ``[total_seq_len, channels]``.
            kv_collection: The cache; the states of the sequences are updated.
            positional: Not used.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        b, c, y = ops.split(self.in_proj(x), [self.form.channels] * 3, axis=1)
        mixed = ops.cast(b * y, DType.float32)
        mixed = self.conv(layer_idx, mixed, kv_collection, input_row_offsets)
        return ops.cast(self.out_proj(ops.cast(mixed, c.dtype) * c), x.dtype)
