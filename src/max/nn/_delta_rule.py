"""The gated delta rule over ragged sequences."""

from __future__ import annotations

from typing import Any

from max.dtype import DType
from max.graph import BufferValue, TensorType, TensorValue, ops

__all__ = ["gated_delta_rule"]


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
    normalised: bool = True,
) -> TensorValue:
    """Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464); updates the states of sequences.

    For each token ``S = exp(decay) · S``, ``u = rate · (v - Sᵀ k)``, ``S = S + k uᵀ``, and the result is ``scale · Sᵀ q``.

    Args:
        q: Queries ``[total, key_heads, key_dim]``.
        keys: Keys of the same shape. A key head serves ``heads / key_heads`` neighbouring heads of values.
        values: Values ``[total, heads, value_dim]``.
        decays: The logarithms of the state's decays ``[total, heads]``.
        rates: How much of the stored value is replaced, ``[total, heads]``.
        input_row_offsets: The first row of each sequence, uint32 ``[batch + 1]``.
        cache_lengths: The tokens of each sequence before these, uint32 ``[batch]``: 0 begins from a state of zeros, whatever the slot
            holds.
        slots: The slot of each sequence, uint32 ``[batch]``, all different.
        states: float32 ``[slots, layers, heads, key_dim, value_dim]``; updated.
        layer_idx: Which layer of the states, uint32, rank 0.
        scale: The factor of queries; by default ``1 / sqrt(key_dim)``.
        normalised: Whether queries and keys are divided by their lengths.

    Returns:
        ``[total, heads, value_dim]``, of the dtype of values.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: The states are not float32, or the offsets, lengths or slots not uint32.
    """
    op = "gated_delta_rule"
    if q.rank != 3 or values.rank != 3 or q.shape != keys.shape:
        raise ValueError(
            f"{op}: queries are {q!r}, keys {keys!r} and values {values!r}, expected [total, heads, size] each, queries like keys"
        )
    heads, key_heads = values.shape[1], keys.shape[1]
    if int(heads) % int(key_heads):
        raise ValueError(f"{op}: {key_heads} key heads do not divide {heads} heads")
    expected = [heads, keys.shape[2], values.shape[2]]
    if states.rank != 5 or list(states.shape[2:]) != expected:
        raise ValueError(f"{op}: states are {states!r}, expected [slots, layers, *{expected}]")
    for name, rows in (("decays", decays), ("rates", rates)):
        if list(rows.shape) != [values.shape[0], heads]:
            raise ValueError(f"{op}: {name} are {rows!r}, expected {[values.shape[0], heads]}")
    if states.dtype != DType.float32:
        raise TypeError(f"{op}: states are {states!r}, expected float32")
    for name, numbers in (
        ("input_row_offsets", input_row_offsets),
        ("slots", slots),
        ("cache_lengths", cache_lengths),
    ):
        if numbers.dtype != DType.uint32 or numbers.rank != 1:
            raise TypeError(f"{op}: {name} is {numbers!r}, expected uint32 of rank 1")
    parameters: dict[str, Any] = {
        "scale": int(keys.shape[2]) ** -0.5 if scale is None else scale,
        "normalised": normalised,
    }
    return ops.inplace_custom(
        "mo.gated_delta.ragged",
        device=values.device,
        values=[
            q,
            keys,
            values,
            decays,
            rates,
            input_row_offsets,
            cache_lengths,
            slots,
            states,
            layer_idx,
        ],
        out_types=[TensorType(values.dtype, values.shape, values.device)],
        parameters=parameters,
    )[0].tensor
