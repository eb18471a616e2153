"""The recurrent layers of state-space models: Mamba (https://arxiv.org/abs/2312.00752) and Mamba 2
(https://arxiv.org/abs/2405.21060).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.kernels.recurrence import selective_scan_ragged, ssd_ragged
from max.nn.kv_cache import RecurrentState
from max.nn.kv_cache.cache_values import PagedCacheValues
from max.nn.layer import Module
from max.nn.layers.norm import RMSNorm
from max.pipelines.models.blocks.causal_conv import CausalConv, conv_state
from max.pipelines.models.blocks.mixer import Mixer, Site

__all__ = ["Mamba2Form", "Mamba2Layer", "MambaForm", "MambaLayer"]

SCAN = "scan"
"""The name of the scan's state."""


class GatedNorm(Module):
    """An RMS norm over groups of channels, multiplied by SiLU of a gate before or after normalizing.

    Weights: ``weight`` ``[channels]``, float32.

    Args:
        channels: The number of channels.
        groups: The number of groups.
        eps: Added to the mean square.
        gate_first: Whether the gate is applied before the norm.
        device: Where it runs.
    """

    def __init__(
        self, channels: int, groups: int, eps: float, gate_first: bool, device: DeviceRef
    ) -> None:
        self.groups, self.size = groups, channels // groups
        self.eps, self.gate_first = eps, gate_first
        self.weight = Weight("weight", DType.float32, [channels], device)

    def __call__(self, x: TensorValue, gate: TensorValue) -> TensorValue:
        """The gated norm, of x's dtype.

        Args:
            x: ``[rows, channels]``.
            gate: The same shape.
        """
        y = x * ops.silu(gate) if self.gate_first else x
        weight = ops.cast(self.weight, x.dtype)
        if self.groups == 1:
            y = ops.rms_norm(y, weight, self.eps)
        else:
            # the norm is of a group and the weight of all channels, so it is multiplied after
            ones = ops.constant(np.ones(self.size, np.float32), x.dtype, x.device)
            # [tokens, groups, channels of a group]
            parts = ops.reshape(y, [x.shape[0], self.groups, self.size])
            y = ops.reshape(ops.rms_norm(parts, ones, self.eps), x.shape) * weight
        return y if self.gate_first else y * ops.silu(gate)


@dataclass(frozen=True)
class Mamba2Form(Mixer):
    """The form of Mamba 2's layers.

    Args:
        num_heads: The number of heads.
        head_dim: The size of a head.
        groups: The number of groups of heads; the heads of a group share B and C.
        state_size: The number of states per channel.
        taps: The number of inputs that an output of the convolution depends on.
        conv_bias: Whether the convolution has a bias.
        in_bias: Whether the input projection has a bias.
        out_bias: Whether the output projection has a bias.
        limits: The minimum and maximum step size.
        norm: The place of the norm of the scan's result: after the gate, before it, or no norm.
        in_factor: The factor of the layer's input.
        factors: The factors of the projection's parts: gate, x, B, C, steps.
    """

    num_heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int = 4
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    in_factor: float = 1.0
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def parts(self) -> tuple[int, ...]:
        """The sizes of the input projection's parts: gate, x, B, C, steps."""
        inner, shared = self.num_heads * self.head_dim, self.groups * self.state_size
        return inner, inner, shared, shared, self.num_heads

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """The states that the cache keeps for each sequence.

        Args:
            layers: The number of recurrent layers.
        """
        return (
            # the convolution runs over x, B and C, which are side by side in the projection
            conv_state(layers, self.taps, sum(self.parts[1:4])),
            RecurrentState(SCAN, layers, (self.num_heads, self.state_size, self.head_dim)),
        )

    def layer(self, site: Site) -> Module:
        """A `Mamba2Layer`; see `Mixer.layer`."""
        return Mamba2Layer(self, site)


class Mamba2Layer(Module):
    """A layer of Mamba 2: projection, convolution, scan, gate and norm, projection.

    Weights: ``in_proj``, ``out_proj`` (`Linear`), ``conv1d`` (`CausalConv`), ``norm`` (`GatedNorm`), ``A`` (the
    negative decay rates), ``D``, ``dt_bias``; the last three ``[heads]``, float32.

    Args:
        form: The form of the layer.
        site: What the layer needs from its model; its cache has the states.
    """

    def __init__(self, form: Mamba2Form, site: Site) -> None:
        dtype, device, linear_cls = site.dtype, site.device, site.linear_cls
        self.form, self.kv_params, self.device = form, site.kv_params, device
        inner, hidden = form.parts[0], site.hidden_size
        self.in_proj = linear_cls(hidden, sum(form.parts), dtype, device, has_bias=form.in_bias)
        self.conv1d = CausalConv(
            sum(form.parts[1:4]), form.taps, form.conv_bias, site.kv_params, device, "silu"
        )
        self.A, self.D, self.dt_bias = (
            Weight(name, DType.float32, [form.num_heads], device) for name in ("A", "D", "dt_bias")
        )
        if form.norm != "none":
            gate_first = form.norm == "after_gate"
            self.norm = GatedNorm(inner, form.groups, site.norm_eps, gate_first, device)
        self.out_proj = linear_cls(inner, hidden, dtype, device, has_bias=form.out_bias)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The layer's output.

        Args:
            layer_idx: The layer's index in the states, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; the states of the sequences are updated.
            position_inputs: Not used.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.
        """
        form, rows = self.form, x.shape[0]
        inner, _, shared, _, _ = form.parts
        # [tokens, sum of the parts]: gate, x, B, C and steps side by side
        projected = self.in_proj(x if form.in_factor == 1.0 else x * form.in_factor)
        if set(form.factors) != {1.0}:
            factors = np.repeat(np.array(form.factors, np.float32), form.parts)
            projected = projected * ops.constant(factors, projected.dtype, self.device)
        gate, convolved, steps = _split(projected, [inner, sum(form.parts[1:4]), form.num_heads])
        convolved = self.conv1d(layer_idx, convolved, kv_collection, input_row_offsets)
        # [tokens, inner], and [tokens, groups * state_size] twice
        values, b, c = _split(convolved, [inner, shared, shared])
        state, slots = kv_collection.state(self.kv_params, SCAN)
        grouped = [rows, form.groups, form.state_size]
        y = ssd_ragged(
            ops.reshape(values, [rows, form.num_heads, form.head_dim]),
            steps,
            self.A,
            ops.reshape(b, grouped),
            ops.reshape(c, grouped),
            self.D,
            self.dt_bias,
            input_row_offsets,
            kv_collection.cache_lengths,
            slots,
            state,
            layer_idx,
            form.limits,
        )
        y = ops.reshape(y, [rows, inner])
        y = y * ops.silu(gate) if form.norm == "none" else self.norm(y, gate)
        return ops.cast(self.out_proj(y), x.dtype)


@dataclass(frozen=True)
class MambaForm(Mixer):
    """The form of Mamba's layers.

    Args:
        channels: The number of channels.
        state_size: The number of states per channel.
        rank: The inner size of the low-rank projection to step sizes.
        taps: The number of inputs that an output of the convolution depends on.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the input and output projections have biases.
        norms: Whether step sizes, B and C are normalized, as in Jamba.
    """

    channels: int
    state_size: int
    rank: int
    taps: int = 4
    conv_bias: bool = True
    bias: bool = False
    norms: bool = False

    def states(self, layers: int) -> tuple[RecurrentState, ...]:
        """The states that the cache keeps for each sequence.

        Args:
            layers: The number of recurrent layers.
        """
        return (
            conv_state(layers, self.taps, self.channels),
            RecurrentState(SCAN, layers, (self.state_size, self.channels)),
        )

    def layer(self, site: Site) -> Module:
        """A `MambaLayer`; see `Mixer.layer`."""
        return MambaLayer(self, site)


class MambaLayer(Module):
    """A layer of Mamba: projection, convolution, projections to steps, B and C, scan, gate, projection.

    Weights: ``in_proj``, ``x_proj``, ``dt_proj``, ``out_proj`` (`Linear`), ``conv1d`` (`CausalConv`), ``A`` (the
    negative decay rates) ``[states, channels]``, ``D``, ``dt_bias`` ``[channels]``, float32; with norms
    ``dt_layernorm``, ``b_layernorm``, ``c_layernorm``.

    Args:
        form: The form of the layer.
        site: What the layer needs from its model; its cache has the states.
    """

    def __init__(self, form: MambaForm, site: Site) -> None:
        dtype, device, linear_cls = site.dtype, site.device, site.linear_cls
        self.form, self.kv_params = form, site.kv_params
        hidden, channels = site.hidden_size, form.channels
        self.in_proj = linear_cls(hidden, 2 * channels, dtype, device, has_bias=form.bias)
        self.conv1d = CausalConv(
            channels, form.taps, form.conv_bias, site.kv_params, device, "silu"
        )
        self.x_proj = linear_cls(channels, form.rank + 2 * form.state_size, dtype, device)
        self.dt_proj = linear_cls(form.rank, channels, dtype, device)
        self.A = Weight("A", DType.float32, [form.state_size, channels], device)
        self.D, self.dt_bias = (
            Weight(name, DType.float32, [channels], device) for name in ("D", "dt_bias")
        )
        if form.norms:
            self.dt_layernorm = RMSNorm(form.rank, dtype, site.norm_eps)
            self.b_layernorm = RMSNorm(form.state_size, dtype, site.norm_eps)
            self.c_layernorm = RMSNorm(form.state_size, dtype, site.norm_eps)
        self.out_proj = linear_cls(channels, hidden, dtype, device, has_bias=form.bias)

    def __call__(
        self,
        layer_idx: TensorValue,
        x: TensorValue,
        kv_collection: PagedCacheValues,
        position_inputs: list[TensorValue],
        input_row_offsets: TensorValue,
    ) -> TensorValue:
        """The layer's output; arguments as of `Mamba2Layer`.

        Args:
            layer_idx: The layer's index in the states, uint32, rank 0.
            x: ``[total_seq_len, hidden_size]``.
            kv_collection: The cache; the states of the sequences are updated.
            position_inputs: Not used.
            input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.

        Returns:
            ``[total_seq_len, hidden_size]``, of x's dtype.
        """
        form = self.form
        # [tokens, channels] each
        values, gate = _split(self.in_proj(x), [form.channels, form.channels])
        values = self.conv1d(layer_idx, values, kv_collection, input_row_offsets)
        # [tokens, rank], and [tokens, state_size] twice
        steps, b, c = _split(self.x_proj(values), [form.rank, form.state_size, form.state_size])
        if form.norms:
            steps, b, c = self.dt_layernorm(steps), self.b_layernorm(b), self.c_layernorm(c)
        state, slots = kv_collection.state(self.kv_params, SCAN)
        y = selective_scan_ragged(
            values,
            self.dt_proj(steps),
            self.A,
            b,
            c,
            self.D,
            self.dt_bias,
            input_row_offsets,
            kv_collection.cache_lengths,
            slots,
            state,
            layer_idx,
        )
        return ops.cast(self.out_proj(y * ops.silu(gate)), x.dtype)


def _split(x: TensorValue, sizes: list[int]) -> list[TensorValue]:
    """Splits the columns of a matrix into parts of the given sizes."""
    bounds = [0, *np.cumsum(sizes).tolist()]
    return [x[:, begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
