"""Ops on ragged batches without a cache: attention, and checks of counts and offsets."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.declare import NamedTypes, declare, static_dims
from max.mlir.operand import FLOATS, INTEGERS, Operand
from max.mlir.operation import Attrs, Types, define
from max.mlir.ops.models.cache import OFFSETS, SCALE, check_window
from max.mlir.types import TensorType

_MASKS = ("null", "causal", "sliding_window", "chunked_causal", "symmetric_window")


def _attention_types(types: NamedTypes, attrs: Attrs) -> Types:
    op = "attention.ragged"
    check_window(op, attrs, "null", _MASKS)
    queries, keys, values = (types[name] for name in ("q", "keys", "values"))
    heads, head_dim = static_dims(op, "q", queries, 1, 2)
    kv_heads, key_dim = static_dims(op, "keys", keys, 1, 2)
    if keys.shape[1:] != values.shape[1:] or key_dim != head_dim:
        raise ValueError(
            f"{op}: q is {queries.short}, keys {keys.short}, values {values.short}; expected heads of one size, and "
            "values of the keys' shape"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads cannot share {kv_heads} key heads")
    if "bias" in types and types["bias"].shape[0] != heads:
        raise ValueError(f"{op}: bias is {types['bias'].short}, expected [{heads}, 2 * n - 1]")
    return (queries,)


define(
    declare(
        "mo.attention.ragged",
        (
            # q: [total, heads, head_dim]; keys and values: [total, kv_heads, head_dim]
            Operand("q", FLOATS, 3),
            Operand("keys", FLOATS, 3),
            Operand("values", FLOATS, 3),
            OFFSETS,
            SCALE,
            Operand("bias", (DType.float32,), 2, optional=True),
        ),
        1,
        _attention_types,
        optional={"mask": str, "local_window_size": int},
        takes=(
            "q `[total, heads, head_dim]`, k, v `[total, kv_heads, head_dim]`, "
            "input_row_offsets, scale f32 rank 0, [bias f32 `[heads, 2 * n - 1]`]"
        ),
        gives="out (q's type)",
        doc=(
            "`mask`: null, causal, sliding_window, chunked_causal, symmetric_window "
            "(`abs(key - query) < local_window_size`); `local_window_size`. A row attends "
            "to the rows of its own text; `bias[head, key - query + n - 1]` is added to "
            "scaled scores, for texts of up to n rows"
        ),
    )
)


def _operand_type(types: NamedTypes, attrs: Attrs) -> Types:
    checked = types["checked"]
    assert isinstance(checked, TensorType)
    return (checked,)


define(
    declare(
        "mo.check.counts",
        (Operand("checked", INTEGERS, 1),),
        1,
        _operand_type,
        attributes={"what": str},
        takes="counts `[n]`",
        gives="the counts",
        doc=(
            "`what`: their name in messages; raises if one is negative, or if their sum "
            "exceeds 2^62"
        ),
    )
)
define(
    declare(
        "mo.check.offsets",
        (Operand("checked", INTEGERS, 1), Operand("rows", INTEGERS, 0, on_any_device=True)),
        1,
        _operand_type,
        attributes={"what": str},
        takes="offsets `[batch+1]`, rows (rank 0 si64, on the CPU)",
        gives="the offsets",
        doc="`what`; raises unless they begin at 0, do not decrease, and end at `rows`",
    )
)
