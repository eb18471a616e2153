"""Gated short convolutions, as in LFM 2."""

from __future__ import annotations

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import TensorValue, ops
from max.nn.kv_cache import RecurrentState
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.linear import Linear
from max.pipelines.models.blocks.causal_conv import CausalConv, conv_state
from max.pipelines.models.blocks.mixer import Mixer, Site

__all__ = ["ShortConv", "ShortConvForm"]


@dataclass(frozen=True)
class ShortConvForm(Mixer):
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

    def layer(self, site: Site) -> Module:
        """A `ShortConv`; see `Mixer.layer`."""
        return ShortConv(self, site)


class ShortConv(Module):
    """``out(c * conv(b * x))``; ``b``, ``c`` and ``x`` are the three parts of the projected input.

    Weights: ``in_proj``, ``out_proj`` (`Linear`), ``conv`` (`CausalConv`).

    Args:
        form: The form.
        site: What the layer needs from its model; its cache has the states.
    """

    def __init__(self, form: ShortConvForm, site: Site) -> None:
        self.form, self.kv_params, channels = form, site.kv_params, form.channels

        def projection(width: int) -> Linear:
            return site.linear_cls(channels, width, site.dtype, site.device, has_bias=form.bias)

        self.in_proj, self.out_proj = projection(3 * channels), projection(channels)
        self.conv = CausalConv(channels, form.taps, form.bias, site.kv_params, site.device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The layer's output ``[total_seq_len, channels]``, of x's dtype.

        Args:
            layer_idx: The layer's index among the recurrent layers, uint32, rank 0.
            x: ``[total_seq_len, channels]``.
            kv_collection: The cache; the states of the sequences are updated.
            position_inputs: Not used.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        b, c, y = ops.split(self.in_proj(x), [self.form.channels] * 3, axis=1)  # [tokens, channels]
        mixed = ops.cast(b * y, DType.float32)
        mixed = self.conv(layer_idx, mixed, kv_collection, input_row_offsets)
        return ops.cast(self.out_proj(ops.cast(mixed, c.dtype) * c), x.dtype)
