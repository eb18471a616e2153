"""Lowering of reductions over lanes: sum, product, minimum, maximum, any, all."""

from __future__ import annotations

import math

from max.kernel.ir.nodes import Const, Let
from max.kernel.lowering.arithmetic import float_extremum
from max.kernel.lowering.types import (
    const_text,
    lane_list,
    llvm_type,
    mangled_suffix,
    number_text,
    vector_name,
)
from max.kernel.lowering.writer import Writer


def reduce(w: Writer, s: Let) -> None:
    """The sum or the product of all lanes."""
    a = s.args[0]
    t, element = llvm_type(a.type), llvm_type(s.ref.type)
    op = s.op.removeprefix("reduce_")
    if a.type.dtype.is_float:
        # with 0.0 the sum of negative zeros would be positive
        start = number_text(-0.0 if op == "add" else 1.0, a.type.dtype)
        args = [(element, start), (t, w.atom(a))]
        # reassoc: the language leaves the order of a sum open, so LLVM may form a tree
        w.alias(
            s,
            w.call(element, f"llvm.vector.reduce.f{op}.{mangled_suffix(a.type)}", args, "reassoc "),
        )
    else:
        w.alias(
            s,
            w.call(element, f"llvm.vector.reduce.{op}.{mangled_suffix(a.type)}", [(t, w.atom(a))]),
        )


def reduce_extremum(w: Writer, s: Let) -> None:
    """The minimum or maximum of all lanes; propagates NaN."""
    a = s.args[0]
    t, element, width = llvm_type(a.type), llvm_type(s.ref.type), a.type.width
    op = s.op.removeprefix("reduce_")
    if not a.type.dtype.is_float:
        sign = "u" if a.type.dtype.kind == "u" else "s"
        w.alias(
            s,
            w.call(
                element, f"llvm.vector.reduce.{sign}{op}.{mangled_suffix(a.type)}", [(t, w.atom(a))]
            ),
        )
        return
    text = w.atom(a)
    if w.target.is_arm64:
        name = f"llvm.vector.reduce.f{op}imum.{mangled_suffix(a.type)}"
        w.alias(s, w.call(element, name, [(t, text)]))
        return
    # NaN is tested once for all lanes: each step below is then one comparison
    nan = w.temp(f"fcmp uno {t} {text}, {text}")
    flags = vector_name("i1", width)
    any_nan = w.call("i1", f"llvm.vector.reduce.or.v{width}i1", [(flags, nan)])
    while width > 1 and width % 2 == 0:
        full_type, half = vector_name(element, width), width // 2
        low, high = (
            w.temp(
                f"shufflevector {full_type} {text}, {full_type} poison, <{half} x i32> <{lanes}>"
            )
            for lanes in (lane_list(0, half), lane_list(half, half))
        )
        text = float_extremum(w, op, vector_name(element, half), low, high, half, True)
        width = half
    lanes_left = [
        w.temp(f"extractelement {vector_name(element, width)} {text}, i64 {i}")
        for i in range(width)
    ]
    result = lanes_left[0]
    for lane in lanes_left[1:]:
        result = float_extremum(w, op, element, result, lane, 0, True)
    number = const_text(Const(math.nan, s.ref.type))
    w.alias(s, w.temp(f"select i1 {any_nan}, {element} {number}, {element} {result}"))


def mask_reduce(w: Writer, s: Let, op: str) -> None:
    """Whether any lane, or all lanes of a mask are set."""
    a = s.args[0]
    w.alias(
        s,
        w.call(
            "i1",
            f"llvm.vector.reduce.{op}.v{a.type.width}i1",
            [(llvm_type(a.type), w.atom(a))],
        ),
    )
