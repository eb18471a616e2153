"""Dot products of neighboring lanes, with the target's instructions or an equal sequence."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from typing import Any

from max.kernel.frontend.arithmetic import binary
from max.kernel.frontend.conversions import cast, coerce
from max.kernel.frontend.functions.elementary import emit_fma
from max.kernel.frontend.functions.table import HandlerTable, as_vector
from max.kernel.frontend.functions.vectors import (
    emit_bitcast,
    emit_deinterleave,
    emit_select,
    emit_shuffle,
)
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import describe
from max.kernel.language import lang
from max.kernel.types import BOOL, bf16, f32, i8, i16, i32, u8, vector

FUNCTIONS = HandlerTable()


@FUNCTIONS.emits(lang.dot_bf16)
def emit_dot_bf16(fe: Frontend, acc: Any, a: Any, b: Any) -> Any:
    """`acc` plus products of pairs of lanes: one instruction where the target has it, else two multiply-adds."""
    acc, a, b = (as_vector(fe, x, "k.dot_bf16") for x in (acc, a, b))
    pair = vector(bf16, 2 * acc.type.width)
    if acc.type.dtype is not f32 or a.type is not pair or b.type is not pair:
        operands = f"{describe(acc)}, {describe(a)} and {describe(b)}"
        fe.fail(f"k.dot_bf16 takes SIMD[f32, n] and twice SIMD[bf16, 2n], got {operands}")
    if fe.target.dot_bf16_lanes(acc.type.width):
        return fe.b.op("dot_bf16", (acc, a, b), acc.type)
    (a0, a1), (b0, b1) = emit_deinterleave(fe, a), emit_deinterleave(fe, b)
    acc = emit_fma(fe, cast(fe, a1, f32), cast(fe, b1, f32), acc)
    return emit_fma(fe, cast(fe, a0, f32), cast(fe, b0, f32), acc)


@FUNCTIONS.emits(lang.dot_i8)
def emit_dot_i8(fe: Frontend, acc: Any, a: Any, b: Any, narrow: bool = False) -> Any:
    """`acc` plus products of four lanes (two for int16 sums), by instructions of the target or lane by lane."""
    acc, a, b = (as_vector(fe, x, "k.dot_i8") for x in (acc, a, b))
    if acc.type.dtype is i16:
        return _emit_pair_dot_i8(fe, acc, a, b)
    width = acc.type.width
    signed = a.type is vector(i8, 4 * width)
    if (
        acc.type.dtype is not i32
        or not (signed or a.type is vector(u8, 4 * width))
        or b.type is not vector(i8, 4 * width)
    ):
        operands = f"{describe(acc)}, {describe(a)} and {describe(b)}"
        fe.fail(
            "k.dot_i8 takes SIMD[i32, n] or SIMD[i16, 2n], SIMD[u8 or i8, 4n] and SIMD[i8, 4n], "
            f"got {operands}"
        )
    target = fe.target
    unsigned_lanes, signed_lanes = target.dot_i8_lanes(width), target.signed_dot_i8_lanes(width)
    if signed and signed_lanes:
        return fe.b.op("narrow_signed_dot_i8" if narrow else "signed_dot_i8", (acc, a, b), acc.type)
    if not signed and unsigned_lanes:
        return fe.b.op("dot_i8", (acc, a, b), acc.type)
    if narrow and target.narrow_dot_i8_lanes(width):
        if signed and target.narrow_signed_dot_i8_lanes(width):
            return fe.b.op("narrow_signed_dot_i8", (acc, a, b), acc.type)
        if signed:  # |a| * (sign(a) * b)
            negative = fe.b.op("lt", (a, coerce(fe, 0, a.type)), vector(BOOL.dtype, 4 * width))
            b = emit_select(fe, negative, binary(fe, "sub", 0, b), b)
            a = emit_bitcast(fe, fe.b.op("abs", (a,), a.type), u8)
        return fe.b.op("narrow_dot_i8", (acc, a, b), acc.type)
    if unsigned_lanes or signed_lanes:
        # shift a by 128 into the other signedness, and correct by 128 * sum(b)
        shifted = emit_bitcast(
            fe, binary(fe, "xor", a, -128 if signed else 128), u8 if signed else i8
        )
        ones = coerce(fe, 1, shifted.type)
        sums = emit_dot_i8(fe, coerce(fe, 0, acc.type), ones, b, narrow)
        correction = binary(fe, "shl", sums, 7)
        product = emit_dot_i8(fe, acc, shifted, b, narrow)
        return binary(fe, "sub" if signed else "add", product, correction)
    return _add_lane_products(fe, acc, a, b, 4)


def _add_lane_products(fe: Frontend, acc: Any, a: Any, b: Any, count: int) -> Any:
    """Adds the products of `count` neighbors without instructions for them."""
    for j in range(count):
        # element j of each group of neighbors
        lanes = tuple(range(j, count * acc.type.width, count))
        x, y = (cast(fe, emit_shuffle(fe, v, None, lanes), acc.type.dtype) for v in (a, b))
        acc = binary(fe, "add", acc, binary(fe, "mul", x, y))
    return acc


def _emit_pair_dot_i8(fe: Frontend, acc: Any, a: Any, b: Any) -> Any:
    """`k.dot_i8` with lanes of i16."""
    width = acc.type.width
    unsigned = a.type is vector(u8, 2 * width)
    if b.type is not vector(i8, 2 * width) or not (unsigned or a.type is b.type):
        operands = f"{describe(acc)}, {describe(a)} and {describe(b)}"
        fe.fail(
            f"k.dot_i8 takes SIMD[i16, 2n], SIMD[u8 or i8, 4n] and SIMD[i8, 4n], got {operands}"
        )
    if unsigned and width % 2 == 0 and fe.target.narrow_dot_i8_lanes(width // 2):
        return fe.b.op("pair_dot_i8", (acc, a, b), acc.type)
    return _add_lane_products(fe, acc, a, b, 2)


@FUNCTIONS.emits(lang.dot_i16)
def emit_dot_i16(fe: Frontend, acc: Any, a: Any, b: Any) -> Any:
    """`acc` plus products of pairs of int16 lanes."""
    acc, a, b = (as_vector(fe, x, "k.dot_i16") for x in (acc, a, b))
    pair = vector(i16, 2 * acc.type.width)
    if acc.type.dtype is not i32 or a.type is not pair or b.type is not pair:
        operands = f"{describe(acc)}, {describe(a)} and {describe(b)}"
        fe.fail(f"k.dot_i16 takes SIMD[i32, n] and twice SIMD[i16, 2n], got {operands}")
    if fe.target.narrow_dot_i8_lanes(acc.type.width):
        return fe.b.op("dot_i16", (acc, a, b), acc.type)
    return _add_lane_products(fe, acc, a, b, 2)
