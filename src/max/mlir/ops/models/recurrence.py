"""Ops over the states of ragged sequences: causal convolutions, the scans of Mamba, the gated delta rule.

A state is a buffer ``[slots, layers, …]``. A sequence updates the slot that the operand ``slots`` names; it begins from
zeros where its ``cache_lengths`` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare, static_dims
from max.mlir.dims import DimExpr
from max.mlir.operand import FLOATS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.ops.models.cache import LAYER, LENGTHS, OFFSETS
from max.mlir.types import TensorType

_STATES = (DType.float32, DType.bfloat16, DType.float16)
_LIMITS = {"low": float, "high": float}


def _sequence_operands(rank: int, dtypes: tuple[DType, ...] = _STATES) -> tuple[Operand, ...]:
    """The operands that describe a batch of sequences, and their states, of a rank."""
    state = Operand("state", dtypes, rank, is_buffer=True)
    return (OFFSETS, LENGTHS, Operand("slots", (DType.uint32,), 1), state, LAYER)


def _check_state(op: str, types: NamedTypes, shape: Sequence[DimExpr | int]) -> None:
    """Checks the shape of a sequence's state in a layer."""
    state = types["state"]
    dims = [DimExpr.of(dim) for dim in shape]
    if list(state.shape[2:]) != dims:
        shown = ", ".join([dim.text() for dim in dims])
        raise ValueError(f"{op}: state is {state.short}, expected [slots, layers, {shown}]")
    static_dims(op, "state", state, *range(2, state.rank))


def _check_vectors(op: str, types: NamedTypes, size: DimExpr, *names: str) -> None:
    for name in names:
        if types[name].shape[-1] != size:
            raise ValueError(
                f"{op}: {name} is {types[name].short}, expected {size} in the last axis"
            )


def _result(types: NamedTypes, name: str) -> Types:
    type_ = types[name]
    assert isinstance(type_, TensorType)
    return (type_,)


def _convolution_types(types: NamedTypes, attrs: Attrs) -> Types:
    op, x, weight = "causal_conv.ragged", types["x"], types["weight"]
    (taps,) = static_dims(op, "weight", weight, 0)
    channels = weight.shape[1]
    if taps < 2:
        raise ValueError(f"{op}: weight is {weight.short}, expected 2 taps or more in axis 0")
    if x.shape[1] != channels:
        raise ValueError(
            f"{op}: x is {x.short}, weight {weight.short}; expected a column a channel"
        )
    _check_vectors(op, types, channels, "bias")
    _check_state(op, types, [taps - 1, channels])
    if attrs["activation"] not in ("none", "silu"):
        raise ValueError(f"{op}: activation is {attrs['activation']!r}, expected silu, or none")
    return _result(types, "x")


define(
    declare(
        "mo.causal_conv.ragged",
        (
            # x: [total, channels]; weight: [taps, channels]; a state has the last taps - 1 inputs
            Operand("x", FLOATS, 2),
            Operand("weight", FLOATS, 2),
            Operand("bias", FLOATS, 1),
            *_sequence_operands(4),
        ),
        1,
        _convolution_types,
        chained=True,
        attributes={"activation": str},
        takes=(
            "x `[total, channels]`, weight `[taps, channels]`, bias `[channels]`, "
            "input_row_offsets, cache_lengths u32 `[batch]` (0: the initial state is zero),"
            " slots u32 `[batch]`, state (buffer `[slots, layers, taps - 1, channels]`), "
            "layer_idx, chain"
        ),
        gives="out (x's type), chain",
        doc=(
            "`activation`: silu, none. The state holds a sequence's last inputs; slots are "
            "all different, as in the next two"
        ),
    )
)


def _scanned_heads(types: NamedTypes, attrs: Attrs) -> Types:
    op = "ssd.ragged"
    x, b, c = types["x"], types["b"], types["c"]
    heads, size = static_dims(op, "x", x, 1, 2)
    groups, states = static_dims(op, "b", b, 1, 2)
    if b.shape[1:] != c.shape[1:]:
        raise ValueError(f"{op}: b is {b.short}, c {c.short}; expected one shape")
    if groups < 1 or heads % groups:
        raise ValueError(f"{op}: {groups} groups do not divide {heads} heads")
    _check_vectors(op, types, x.shape[1], "dt", "a", "d", "dt_bias")
    _check_state(op, types, [heads, states, size])
    return _result(types, "x")


define(
    declare(
        "mo.ssd.ragged",
        (
            # x: [total, heads, head_dim]; dt: [total, heads]; b and c: [total, groups, states]
            Operand("x", FLOATS, 3),
            Operand("dt", FLOATS, 2),
            Operand("a", FLOATS, 1),
            Operand("b", FLOATS, 3),
            Operand("c", FLOATS, 3),
            Operand("d", FLOATS, 1),
            Operand("dt_bias", FLOATS, 1),
            *_sequence_operands(5),
        ),
        1,
        _scanned_heads,
        chained=True,
        attributes=_LIMITS,
        takes=(
            "x `[total, heads, size]`, dt `[total, heads]`, a `[heads]`, b, c `[total, "
            "groups, states]`, d, dt_bias `[heads]`, then as above with a state `[slots, "
            "layers, heads, states, size]`"
        ),
        gives="out (x's type), chain",
        doc=(
            "`low`, `high`. The scan of Mamba 2: `step = clamp(softplus(dt + dt_bias))`, `h"
            " = exp(step a) h + step b ⊗ x`, `out = c · h + d x`"
        ),
    )
)


def _scanned_channels(types: NamedTypes, attrs: Attrs) -> Types:
    op = "selective_scan.ragged"
    x, a, b, c = types["x"], types["a"], types["b"], types["c"]
    channels, states = x.shape[1], b.shape[1]
    if c.shape[1] != states:
        raise ValueError(f"{op}: b is {b.short}, c {c.short}; expected one number of states")
    if a.shape != (states, channels):
        raise ValueError(f"{op}: a is {a.short}, expected [{states}, {channels}]")
    _check_vectors(op, types, channels, "dt", "d", "dt_bias")
    _check_state(op, types, [states, channels])
    return _result(types, "x")


define(
    declare(
        "mo.selective_scan.ragged",
        (
            # x and dt: [total, channels]; a: [states, channels]; b and c: [total, states]
            Operand("x", FLOATS, 2),
            Operand("dt", FLOATS, 2),
            Operand("a", FLOATS, 2),
            Operand("b", FLOATS, 2),
            Operand("c", FLOATS, 2),
            Operand("d", FLOATS, 1),
            Operand("dt_bias", FLOATS, 1),
            *_sequence_operands(4),
        ),
        1,
        _scanned_channels,
        chained=True,
        attributes=_LIMITS,
        takes=(
            "x, dt `[total, channels]`, a `[states, channels]`, b, c `[total, states]`, d, "
            "dt_bias `[channels]`, then as above with a state `[slots, layers, states, "
            "channels]`"
        ),
        gives="out (x's type), chain",
        doc="`low`, `high`. The scan of Mamba, as above for each channel",
    )
)


def _delta(types: NamedTypes, attrs: Attrs) -> Types:
    op = "gated_delta.ragged"
    queries, keys, values = types["q"], types["keys"], types["values"]
    key_heads, key_dim = static_dims(op, "keys", keys, 1, 2)
    heads, value_dim = static_dims(op, "values", values, 1, 2)
    if queries.shape[1:] != keys.shape[1:]:
        raise ValueError(f"{op}: q is {queries.short}, keys {keys.short}; expected one shape")
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"{op}: {key_heads} key heads do not divide {heads} heads")
    if key_dim < 1:
        raise ValueError(f"{op}: keys is {keys.short}, expected 1 element or more")
    _check_vectors(op, types, values.shape[1], "decays", "rates")
    _check_state(op, types, [heads, key_dim, value_dim])
    return _result(types, "values")


define(
    declare(
        "mo.gated_delta.ragged",
        (
            # q and keys: [total, key_heads, key_dim]; values: [total, heads, value_dim]
            Operand("q", FLOATS, 3),
            Operand("keys", FLOATS, 3),
            Operand("values", FLOATS, 3),
            Operand("decays", FLOATS, 2),
            Operand("rates", FLOATS, 2),
            *_sequence_operands(5, (DType.float32,)),
        ),
        1,
        _delta,
        chained=True,
        attributes={"scale": float, "normalized": bool},
        takes=(
            "q, k `[total, key_heads, key_dim]`, v `[total, heads, value_dim]`, g, beta "
            "`[total, heads]`, input_row_offsets, cache_lengths u32 `[batch]` (0: begins "
            "from zeros), slots u32 `[batch]`, states (buffer f32 `[slots, layers, heads, "
            "key_dim, value_dim]`), layer_idx, chain"
        ),
        gives="out (v's shape, any float dtype), chain",
        doc=(
            "`scale` of q; `normalized`: q and k are divided by their lengths. For each "
            "token `S = exp(g) S`, `u = beta (v - Sᵀ k)`, `S += k uᵀ`, `out = scale Sᵀ q`; "
            "slots are all different"
        ),
    )
)
