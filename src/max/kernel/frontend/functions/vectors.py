"""Vectors: creation, conversion, selection, shuffles and reductions."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import builtins
from typing import Any

from max.kernel.errors import KernelIndexError
from max.kernel.frontend.conversions import (
    cast,
    coerce,
    promote_together,
    sequence,
    splat,
    widen_floats,
)
from max.kernel.frontend.functions.table import Handler, HandlerTable, as_dtype, as_value, as_vector
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import describe, is_runtime
from max.kernel.frontend.views.methods import select_view
from max.kernel.frontend.views.tiles import make_tile
from max.kernel.frontend.views.views import View, checked_width
from max.kernel.ir.nodes import Const, Ref
from max.kernel.language import lang
from max.kernel.types import BOOL, INDEX, f32, i32, scalar, u8, vector

FUNCTIONS = HandlerTable()


# ***** creation *****
@FUNCTIONS.emits(lang.splat)
def emit_splat(fe: Frontend, x: Any, width: Any) -> Any:
    x = as_value(fe, x, "k.splat")
    return x if x.type.is_vector else splat(fe, x, checked_width(fe, width))


@FUNCTIONS.emits(lang.iota)
def emit_iota(fe: Frontend, dtype: Any, width: Any) -> Any:
    dtype, width = as_dtype(fe, dtype), checked_width(fe, width)
    lanes = tuple(float(i) for i in range(width)) if dtype.is_float else tuple(range(width))
    return fe.b.const(lanes, vector(dtype, width))


@FUNCTIONS.emits(lang.tile)
def emit_tile(fe: Frontend, dtype: Any, shape: Any, width: Any = None, fill: Any = None) -> Any:
    return make_tile(fe, as_dtype(fe, dtype), shape, width, fill)


# ***** conversions *****
@FUNCTIONS.emits(lang.cast)
def emit_cast(fe: Frontend, x: Any, dtype: Any) -> Any:
    return cast(fe, x, as_dtype(fe, dtype))


@FUNCTIONS.emits(lang.cast_unchecked)
def emit_cast_unchecked(fe: Frontend, x: Any, dtype: Any) -> Any:
    return cast(fe, x, as_dtype(fe, dtype), unchecked=True)


@FUNCTIONS.emits(lang.bitcast)
def emit_bitcast(fe: Frontend, x: Any, dtype: Any) -> Any:
    """The bits of a value as elements of another dtype; a mask becomes an integer of one bit per lane."""
    x, dtype = as_value(fe, x, "k.bitcast"), as_dtype(fe, dtype)
    source = x.type
    if source.dtype is dtype:
        return x
    bits = source.dtype.bits * max(source.width, 1)
    if source.dtype.kind == "b" or dtype.kind == "b":
        if source.is_vector and source.dtype.kind == "b" and dtype.bits == bits:
            return fe.b.op("bitcast", (x,), scalar(dtype))
        fe.fail(
            f"k.bitcast: {describe(x)} to {dtype.name}; a mask becomes an integer with one bit a lane"
        )
    if bits % dtype.bits:
        fe.fail(f"k.bitcast: {describe(x)} has {bits} bits, which {dtype.name} does not divide")
    lanes = bits // dtype.bits
    if not source.is_vector and lanes != 1:
        fe.fail(f"k.bitcast: {describe(x)} and {dtype.name} differ in size")
    return fe.b.op("bitcast", (x,), vector(dtype, lanes) if source.is_vector else scalar(dtype))


# ***** lanes *****
@FUNCTIONS.emits(lang.select)
def emit_select(fe: Frontend, mask: Any, a: Any, b: Any) -> Any:
    """`a` where the mask is true, else `b`; of two views the one that a scalar condition selects."""
    # a constant for all lanes decides now; lane by lane it is a mask like any other
    if isinstance(mask, (builtins.bool, Const)) and not isinstance(
        getattr(mask, "value", None), tuple
    ):
        mask = bool(mask.value if isinstance(mask, Const) else mask)
    if isinstance(a, View) and isinstance(b, View):
        return select_view(fe, mask, a, b)
    if isinstance(mask, bool):
        if not is_runtime(a) and not is_runtime(b):
            return a if mask else b
        x, y = promote_together(fe, "k.select", a, b)
        return x if mask else y
    if not isinstance(mask, (Ref, Const)) or mask.type.dtype is not BOOL.dtype:
        fe.fail(f"k.select takes a mask first, got {describe(mask)}")
    dtypes = [v.type.dtype for v in (a, b) if isinstance(v, (Ref, Const))]
    # equal narrow floats are selected as they are, without widening
    same_dtype = len(dtypes) == 2 and dtypes[0] is dtypes[1]
    if not same_dtype and any(dtype.is_narrow_float for dtype in dtypes):
        a, b = widen_floats(fe, a), widen_floats(fe, b)
    x, y = promote_together(fe, "k.select", a, b)
    if mask.type.is_vector and not x.type.is_vector:
        x, y = splat(fe, x, mask.type.width), splat(fe, y, mask.type.width)
    if mask.type.is_vector and mask.type.width != x.type.width:
        fe.fail(f"k.select: a mask of {mask.type.width} lanes for {describe(x)}")
    return fe.b.op("select", (mask, x, y), x.type)


@FUNCTIONS.emits(lang.shuffle)
def emit_shuffle(fe: Frontend, a: Any, b: Any, indices: Any) -> Any:
    """The lanes of `a` and `b`, taken as one vector, at compile-time indices."""
    a = as_vector(fe, a, "k.shuffle")
    b = a if b is None else coerce(fe, as_vector(fe, b, "k.shuffle"), a.type)
    lanes = tuple(sequence(fe, indices, fe.node))
    total = 2 * a.type.width
    if not lanes or not all(isinstance(i, int) and 0 <= i < total for i in lanes):
        fe.fail(
            f"k.shuffle takes indices in [0, {total}) known at compile time, got {list(lanes)}",
            KernelIndexError,
        )
    return fe.b.op("shuffle", (a, b), vector(a.type.dtype, len(lanes)), lanes)


@FUNCTIONS.emits(lang.interleave)
def emit_interleave(fe: Frontend, a: Any, b: Any) -> Any:
    n = as_vector(fe, a, "k.interleave").type.width
    return emit_shuffle(fe, a, b, tuple(i for k in range(n) for i in (k, n + k)))


@FUNCTIONS.emits(lang.deinterleave)
def emit_deinterleave(fe: Frontend, x: Any) -> Any:
    n = as_vector(fe, x, "k.deinterleave").type.width
    return emit_shuffle(fe, x, None, tuple(range(0, n, 2))), emit_shuffle(
        fe, x, None, tuple(range(1, n, 2))
    )


@FUNCTIONS.emits(lang.concat)
def emit_concat(fe: Frontend, a: Any, b: Any) -> Any:
    n = as_vector(fe, a, "k.concat").type.width
    return emit_shuffle(fe, a, b, tuple(range(2 * n)))


@FUNCTIONS.emits(lang.lookup)
def emit_lookup(fe: Frontend, table: Any, index: Any) -> Any:
    """Bytes of a table of 16: an instruction of the target, or a selection for each byte of the table."""
    table, index = (as_vector(fe, x, "k.lookup") for x in (table, index))
    if table.type is not vector(u8, 16) or index.type.dtype is not u8:
        operands = f"{describe(table)} and {describe(index)}"
        fe.fail(f"k.lookup takes SIMD[u8, 16] and SIMD[u8, n], got {operands}")
    if fe.target.lookup_lanes(index.type.width):
        return fe.b.op("lookup", (table, index), index.type)
    # as the instructions: only the lower four bits of an index count
    low = fe.b.op("and", (index, coerce(fe, 15, index.type)), index.type)
    result = splat(
        fe, fe.b.op("extract", (table, fe.b.const(0, INDEX)), scalar(u8)), index.type.width
    )
    for i in range(1, 16):
        byte = fe.b.op("extract", (table, fe.b.const(i, INDEX)), scalar(u8))
        equal = fe.b.op(
            "eq", (low, coerce(fe, i, index.type)), vector(BOOL.dtype, index.type.width)
        )
        chosen = splat(fe, byte, index.type.width)
        result = fe.b.op("select", (equal, chosen, result), index.type)
    return result


@FUNCTIONS.emits(lang.permute)
def emit_permute(fe: Frontend, a: Any, b: Any, index: Any) -> Any:
    """Lanes of two vectors at indices: an instruction of the target, or a selection for each lane."""
    a, b, index = (as_vector(fe, x, "k.permute") for x in (a, b, index))
    width = a.type.width
    if (
        a.type is not b.type
        or a.type is not vector(f32, width)
        or index.type is not vector(i32, width)
        or width & (width - 1)
    ):
        operands = f"{describe(a)}, {describe(b)} and {describe(index)}"
        fe.fail(
            "k.permute takes SIMD[f32, n] twice and SIMD[i32, n], n a power of two, got " + operands
        )
    if fe.target.permutes(width):
        return fe.b.op("permute", (a, b, index), a.type)
    low = fe.b.op("and", (index, coerce(fe, 2 * width - 1, index.type)), index.type)
    result = a  # each lane is replaced below
    for i in range(2 * width):
        lane = fe.b.op(
            "extract", (a if i < width else b, fe.b.const(i % width, INDEX)), scalar(f32)
        )
        equal = fe.b.op("eq", (low, coerce(fe, i, index.type)), vector(BOOL.dtype, width))
        result = fe.b.op("select", (equal, splat(fe, lane, width), result), a.type)
    return result


def _reduction(op: str) -> Handler:
    """The handler of a reduction of a vector to a scalar."""

    def emit_reduce(fe: Frontend, x: Any) -> Any:
        x = widen_floats(fe, as_vector(fe, x, f"k.{op}"))
        if x.type.dtype.kind == "b":
            fe.fail(
                f"k.{op} does not take masks; use k.any, k.all or k.popcount(k.bitcast(mask, …))"
            )
        return fe.b.op(op, (x,), scalar(x.type.dtype))

    return emit_reduce


for _name in ("reduce_add", "reduce_mul", "reduce_max", "reduce_min"):
    FUNCTIONS[getattr(lang, _name)] = _reduction(_name)


def _mask_reduction(op: str) -> Handler:
    """The handler of `k.any` or `k.all`."""

    def emit_mask(fe: Frontend, mask: Any) -> Any:
        if isinstance(mask, tuple):
            fe.fail(f"k.{op} takes a mask, got {describe(mask)}")
        if isinstance(mask, builtins.bool):
            return mask
        if not isinstance(mask, (Ref, Const)) or mask.type.dtype is not BOOL.dtype:
            fe.fail(f"k.{op} takes a mask, got {describe(mask)}")
        return fe.b.op(op, (mask,), BOOL) if mask.type.is_vector else mask

    return emit_mask


emit_any_lane = FUNCTIONS[lang.any] = _mask_reduction("any")
emit_all_lanes = FUNCTIONS[lang.all] = _mask_reduction("all")
