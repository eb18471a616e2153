"""Layers of gated delta nets (https://arxiv.org/abs/2412.06464), as in Qwen 3-Next and 3.5."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import TensorValue, Weight, ops
from max.nn import RMSNorm
from max.nn.activation import softplus
from max.nn.kernels.recurrence import gated_delta_rule
from max.nn.kv_cache import RecurrentState
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.pipelines.models.blocks.causal_conv import CausalConv, conv_state
from max.pipelines.models.blocks.mixer import Mixer, Site

__all__ = ["DeltaNet", "DeltaNetForm"]


@dataclass(frozen=True)
class DeltaNetForm(Mixer):
    """The sizes of a model's gated delta nets.

    Args:
        num_heads: The number of value heads, each with a state.
        key_heads: The number of query and key heads; each serves ``heads / key_heads`` consecutive value heads.
        key_dim: The size of a key.
        value_dim: The size of a value.
        taps: The number of taps of the convolution over queries, keys and values.
        fused: Whether the input has two projections that store the rows by key head, ``in_proj_qkvz`` and
            ``in_proj_ba``.
        tiled: Whether value head ``i`` reads the keys of head ``i % key_heads`` instead.
        gguf_tiled: Whether the model's GGUF files store value heads in the order of `tiled`.
    """

    num_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool
    tiled: bool = False
    gguf_tiled: bool = False

    def in_gguf(self) -> DeltaNetForm:
        """The form of the weights in GGUF files."""
        return replace(self, fused=False, tiled=self.gguf_tiled)

    def rows_of(self, projection: str) -> dict[str, npt.NDArray[np.int64]]:
        """The rows of each part of a fused projection.

        Args:
            projection: ``in_proj_qkvz`` or ``in_proj_ba``.
        """
        group = self.num_heads // self.key_heads
        # of a key head: its query, its key, values and gates of its value heads
        widths = [self.key_dim, self.key_dim, *[group * self.value_dim] * 2]
        if projection == "in_proj_ba":
            widths = [group, group]
        # [key heads, rows of a key head]
        rows = np.arange(self.key_heads * sum(widths)).reshape(self.key_heads, -1)
        parts = [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], 1)]
        if projection == "in_proj_ba":
            return {"in_proj_b": parts[0], "in_proj_a": parts[1]}
        return {"in_proj_qkv": np.concatenate(parts[:3]), "in_proj_z": parts[3]}

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.num_heads * self.value_dim

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """The states of a sequence: the last inputs of the convolution, and the matrix of each head.

        Args:
            layers: The number of recurrent layers.
        """
        return (
            conv_state(layers, self.taps, self.channels),
            RecurrentState("delta", layers, (self.num_heads, self.key_dim, self.value_dim)),
        )

    def layer(self, site: Site) -> Module:
        """A `DeltaNet`; see `Mixer.layer`."""
        return DeltaNet(self, site)


class DeltaNet(Module):
    """A gated delta net: projections, a causal convolution, the gated delta rule, a gated norm.

    Weights: ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b``, ``in_proj_a`` (or ``in_proj_qkvz`` and ``in_proj_ba``),
    ``conv1d`` (`CausalConv`), ``A`` (the negative decay rates) and ``dt_bias`` ``[heads]``, ``norm``, ``out_proj``.

    Args:
        form: The sizes.
        site: What the layer needs from its model; its cache has the states.
    """

    def __init__(self, form: DeltaNetForm, site: Site) -> None:
        dtype, device, hidden_size = site.dtype, site.device, site.hidden_size
        self.form, self.kv_params = form, site.kv_params
        values = form.num_heads * form.value_dim
        widths = {"qkv": form.channels, "z": values, "b": form.num_heads, "a": form.num_heads}
        if form.fused:
            widths = {"qkvz": form.channels + values, "ba": 2 * form.num_heads}
        self.parts = tuple(widths)
        for part, width in widths.items():
            setattr(self, f"in_proj_{part}", site.linear_cls(hidden_size, width, dtype, device))
        self.conv1d = CausalConv(form.channels, form.taps, False, site.kv_params, device, "silu")
        self.rates = Weight("A", DType.float32, [form.num_heads], device)
        self.step_bias = Weight("dt_bias", DType.float32, [form.num_heads], device)
        self.norm = RMSNorm(form.value_dim, dtype, site.norm_eps)
        self.out_proj = site.linear_cls(values, hidden_size, dtype, device)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The layer's output ``[total_seq_len, hidden_size]``, of x's dtype.

        Args:
            layer_idx: The layer's index among the recurrent layers, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; the states of the sequences are updated.
            position_inputs: Not used.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        """
        form, total, lengths = self.form, x.shape[0], kv_collection.cache_lengths
        mixed, z, rates, steps = self._projections(x)
        # the state accumulates over the whole sequence, in float32 whatever the weights have
        mixed = ops.cast(mixed, DType.float32)
        mixed = self.conv1d(layer_idx, mixed, kv_collection, input_row_offsets)
        keys = form.key_heads * form.key_dim
        # [tokens, heads * size of a head] each
        q, k, v = ops.split(mixed, [keys, keys, form.num_heads * form.value_dim], axis=1)
        if form.tiled:
            # the rule assigns consecutive value heads to a key head, so repeat the key heads in tiled order
            q, k = (ops.concat([y] * (form.num_heads // form.key_heads), axis=1) for y in (q, k))
        # -1: the key heads, or after the repetition the value heads
        q, k = (ops.reshape(y, [total, -1, form.key_dim]) for y in (q, k))
        # [tokens, heads]: the logarithms of the decays
        decays = self.rates * softplus(ops.cast(steps, DType.float32) + self.step_bias)
        state, slots = kv_collection.state(self.kv_params, "delta")
        y = gated_delta_rule(
            q,
            k,
            ops.reshape(v, [total, form.num_heads, form.value_dim]),
            decays,
            ops.sigmoid(ops.cast(rates, DType.float32)),
            input_row_offsets,
            lengths,
            slots,
            state,
            layer_idx,
        )
        y = self.norm(y) * ops.silu(ops.cast(z, DType.float32))
        y = ops.reshape(y, [total, form.num_heads * form.value_dim])
        return ops.cast(self.out_proj(ops.cast(y, x.dtype)), x.dtype)

    def _projections(
        self, x: TensorValue
    ) -> tuple[TensorValue, TensorValue, TensorValue, TensorValue]:
        """Queries, keys and values ``[total, channels]``, gates ``[total, heads, value_dim]``, write strengths
        (``in_proj_b``) and steps (``in_proj_a``) ``[total, heads]``.
        """
        form, total = self.form, x.shape[0]
        parts = [self.sublayers[f"in_proj_{part}"](x) for part in self.parts]
        if not form.fused:
            mixed, z, rates, steps = parts
            return mixed, ops.reshape(z, [total, form.num_heads, form.value_dim]), rates, steps
        # row order of a key head: its query, its key, then the values and the gates of its value heads
        group = form.num_heads // form.key_heads
        widths = [form.key_dim, form.key_dim, group * form.value_dim, group * form.value_dim]
        # [tokens, key heads, row of a key head]
        rows = ops.reshape(parts[0], [total, form.key_heads, sum(widths)])
        q, k, v, z = ops.split(rows, widths, axis=2)
        flat = [ops.reshape(y, [total, form.key_heads * int(y.shape[2])]) for y in (q, k, v)]
        # [tokens, key heads, strengths and steps, value heads of a key head]
        both = ops.reshape(parts[1], [total, form.key_heads, 2, group])
        rates, steps = (ops.reshape(both[:, :, i], [total, form.num_heads]) for i in range(2))
        z = ops.reshape(z, [total, form.num_heads, form.value_dim])
        return ops.concat(flat, axis=1), z, rates, steps
