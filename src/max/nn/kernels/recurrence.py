"""Causal convolutions and scans over ragged sequences. Their states are slots of buffers, updated in place.

A state buffer is ``[slots, layers, …]``; `slots` has the slot of each sequence. A sequence with `cache_lengths` 0
starts from a zero state, regardless of the content of its slot. See `max.nn.kv_cache.RecurrentState`.
"""

from __future__ import annotations

from typing import Any

from max.graph import BufferValue, TensorValue
from max.graph.ops.staging.stage import stage_declared

__all__ = [
    "causal_conv_ragged",
    "gated_delta_rule",
    "selective_scan_ragged",
    "ssd_ragged",
]


def causal_conv_ragged(
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slots: TensorValue,
    state: BufferValue,
    layer_idx: TensorValue,
    activation: str | None = None,
) -> TensorValue:
    """A causal convolution of each channel: ``out[t] = bias + Σ weight[j] * x[t - taps + 1 + j]``.

    Args:
        x: ``[total, channels]``, any float dtype.
        weight: ``[taps, channels]``, of 2 taps or more.
        bias: ``[channels]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        cache_lengths: The number of preceding tokens of each sequence, uint32 ``[batch]``.
        slots: The slot of each sequence, uint32 ``[batch]``, without duplicates.
        state: ``[slots, layers, taps - 1, channels]``: the last inputs of each sequence; updated in place.
        layer_idx: The index of the layer in the state buffer, uint32, rank 0.
        activation: ``"silu"``, or None for no activation.

    Returns:
        ``[total, channels]``, of x's dtype.

    Raises:
        ValueError: A shape or the activation does not fit.
        TypeError: The dtype of the state does not fit, or `input_row_offsets`, `cache_lengths` or `slots` is not
            uint32.
    """
    return stage_declared(
        "causal_conv.ragged",
        [x, weight, bias, input_row_offsets, cache_lengths, slots, state, layer_idx],
        {"activation": activation or "none"},
    )[0]


def ssd_ragged(
    x: TensorValue,
    dt: TensorValue,
    a: TensorValue,
    b: TensorValue,
    c: TensorValue,
    d: TensorValue,
    dt_bias: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slots: TensorValue,
    state: BufferValue,
    layer_idx: TensorValue,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> TensorValue:
    """The scan of Mamba 2 (https://arxiv.org/abs/2405.21060), over each head.

    ``step = clamp(softplus(dt + dt_bias))``, ``h = exp(step * a) * h + step * b ⊗ x``, ``out = c · h + d * x``.

    Args:
        x: ``[total, heads, size]``, any float dtype.
        dt: ``[total, heads]``.
        a: The decay rates, negative, ``[heads]``.
        b: ``[total, groups, states]``; ``heads / groups`` consecutive heads share a group.
        c: The output projection of the state, of the shape of `b`.
        d: ``[heads]``.
        dt_bias: ``[heads]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        cache_lengths: The number of preceding tokens of each sequence, uint32 ``[batch]``.
        slots: The slot of each sequence, uint32 ``[batch]``, without duplicates.
        state: ``[slots, layers, heads, states, size]``; updated in place.
        layer_idx: The index of the layer in the state buffer, uint32, rank 0.
        limits: The bounds (least, greatest) to which the step is clamped.

    Returns:
        ``[total, heads, size]``, of x's dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The dtype of the state does not fit, or `input_row_offsets`, `cache_lengths` or `slots` is not
            uint32.
    """
    batch = [input_row_offsets, cache_lengths, slots, state, layer_idx]
    return _scan("ssd.ragged", [x, dt, a, b, c, d, dt_bias, *batch], limits)


def selective_scan_ragged(
    x: TensorValue,
    dt: TensorValue,
    a: TensorValue,
    b: TensorValue,
    c: TensorValue,
    d: TensorValue,
    dt_bias: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slots: TensorValue,
    state: BufferValue,
    layer_idx: TensorValue,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> TensorValue:
    """The selective scan of Mamba (https://arxiv.org/abs/2312.00752), over each channel.

    ``step = clamp(softplus(dt + dt_bias))``, ``h = exp(step * a) * h + step * x * b``, ``out = c · h + d * x``.

    Args:
        x: ``[total, channels]``, any float dtype.
        dt: The step sizes before softplus, of the shape of `x`.
        a: The decay rates, negative, ``[states, channels]``.
        b: ``[total, states]``.
        c: The output projection of the state, of the shape of `b`.
        d: ``[channels]``.
        dt_bias: ``[channels]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        cache_lengths: The number of preceding tokens of each sequence, uint32 ``[batch]``.
        slots: The slot of each sequence, uint32 ``[batch]``, without duplicates.
        state: ``[slots, layers, states, channels]``; updated in place.
        layer_idx: The index of the layer in the state buffer, uint32, rank 0.
        limits: The bounds (least, greatest) to which the step is clamped.

    Returns:
        ``[total, channels]``, of x's dtype.

    Raises:
        ValueError: A shape does not fit.
        TypeError: The dtype of the state does not fit, or `input_row_offsets`, `cache_lengths` or `slots` is not
            uint32.
    """
    batch = [input_row_offsets, cache_lengths, slots, state, layer_idx]
    return _scan("selective_scan.ragged", [x, dt, a, b, c, d, dt_bias, *batch], limits)


def gated_delta_rule(
    q: TensorValue,
    keys: TensorValue,
    values: TensorValue,
    decays: TensorValue,
    rates: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slots: TensorValue,
    states: BufferValue,
    layer_idx: TensorValue,
    scale: float | None = None,
    normalized: bool = True,
) -> TensorValue:
    """Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464); updates the states of sequences.

    For each token ``S = exp(decay) · S``, ``u = rate · (v - Sᵀ k)``, ``S = S + k uᵀ``, and the result is ``scale · Sᵀ
    q``.

    Args:
        q: Queries ``[total, key_heads, key_dim]``.
        keys: Keys of the same shape. ``heads / key_heads`` consecutive value heads share a key head.
        values: Values ``[total, heads, value_dim]``.
        decays: The logarithms of the decay factors of the state, ``[total, heads]``.
        rates: The write strength: the fraction of the stored value that is replaced, ``[total, heads]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        cache_lengths: The number of preceding tokens of each sequence, uint32 ``[batch]``.
        slots: The slot of each sequence, uint32 ``[batch]``, without duplicates.
        states: float32 ``[slots, layers, heads, key_dim, value_dim]``; updated in place.
        layer_idx: The index of the layer in the state buffer, uint32, rank 0.
        scale: The factor that multiplies the queries; by default ``1 / sqrt(key_dim)``.
        normalized: Whether queries and keys are divided by their L2 norms.

    Returns:
        ``[total, heads, value_dim]``, of the dtype of values.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: The states are not float32, or `input_row_offsets`, `cache_lengths` or `slots` is not uint32.
    """
    if scale is None:
        # keys without a static size are refused when the op is staged
        scale = float(int(keys.shape[-1])) ** -0.5 if keys.rank else 1.0
    batch = [input_row_offsets, cache_lengths, slots, states, layer_idx]
    parameters: dict[str, Any] = {
        "scale": scale,
        "normalized": normalized,
    }
    return stage_declared(
        "gated_delta.ragged", [q, keys, values, decays, rates, *batch], parameters
    )[0]


def _scan(name: str, values: list[Any], limits: tuple[float, float]) -> TensorValue:
    parameters: dict[str, Any] = {"low": float(limits[0]), "high": float(min(limits[1], _MOST))}
    return stage_declared(name, values, parameters)[0]


_MOST = 3.0e38
"""Represents no limit, because parameters of ops must be finite."""
