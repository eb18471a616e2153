"""Lowering of arithmetic, comparisons and elementary functions."""

from __future__ import annotations

from max.kernel.ir.nodes import Const, Let, Ref
from max.kernel.lowering.lanes import join_lanes, pieces
from max.kernel.lowering.types import constants, llvm_type, mangled_suffix, vector_name
from max.kernel.lowering.writer import Writer
from max.kernel.types import Type, f64

_INT = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "shl": "shl",
}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
# ordered but for `ne`: NaN differs from everything and compares false otherwise
_COMPARE_FLOAT = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_COMPARE_SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_COMPARE_UNSIGNED = {"eq": "eq", "ne": "ne", "lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"}
_INTRINSIC = {
    "sqrt": "sqrt",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "roundeven",
    "popcount": "ctpop",
}


def lower_plain(w: Writer, s: Let) -> None:
    """Ops with a single instruction or intrinsic for the type of their operands."""
    op = s.op
    type = s.args[0].type
    dtype = type.dtype
    if op in _COMPARE_FLOAT:
        if dtype.is_float:
            binary(w, s, f"fcmp {_COMPARE_FLOAT[op]}")
        else:
            table = _COMPARE_SIGNED if dtype.kind == "i" else _COMPARE_UNSIGNED
            binary(w, s, f"icmp {table[op]}")
    elif dtype.is_float and op in _FLOAT:
        if op == "mul" and s.ref.id in w.contraction.products:
            # the sum that the product is fused into emits it
            return
        position = w.contraction.sums.get(s.ref.id)
        if position is None:
            binary(w, s, _FLOAT[op])
        else:
            _fuse_product(w, s, position)
    elif op in _INT:
        binary(w, s, f"{_INT[op]} {s.attr}" if s.attr else _INT[op])
    elif op in _INTRINSIC:
        t = llvm_type(type)
        name = f"llvm.{_INTRINSIC[op]}.{mangled_suffix(type)}"
        w.alias(s, w.call(t, name, [(t, w.atom(s.args[0]))]))
    else:
        raise ValueError(f"the kernel IR has no op {op!r}")


def binary(w: Writer, s: Let, instruction: str) -> None:
    """One instruction with two operands of one type."""
    a, b = s.args
    w.lines.append(f"  %v{s.ref.id} = {instruction} {llvm_type(a.type)} {w.atom(a)}, {w.atom(b)}")


def neg(w: Writer, s: Let) -> None:
    """``-a``."""
    a = s.args[0]
    t = llvm_type(a.type)
    if a.type.dtype.is_float:
        # 0 - a would not change the sign of 0.0
        w.out(f"%v{s.ref.id} = fneg {t} {w.atom(a)}")
    else:
        w.out(f"%v{s.ref.id} = sub {t} {'zeroinitializer' if a.type.width else '0'}, {w.atom(a)}")


def invert(w: Writer, s: Let) -> None:
    """``~a``."""
    a = s.args[0]
    ones = "true" if a.type.dtype.kind == "b" else "-1"
    element = llvm_type(Type(a.type.dtype, 0))
    text = f"splat ({element} {ones})" if a.type.width else ones
    w.out(f"%v{s.ref.id} = xor {llvm_type(a.type)} {w.atom(a)}, {text}")


def absolute(w: Writer, s: Let) -> None:
    """The magnitude."""
    a = s.args[0]
    t = llvm_type(a.type)
    if a.type.dtype.is_float:
        w.alias(s, w.call(t, f"llvm.fabs.{mangled_suffix(a.type)}", [(t, w.atom(a))]))
    else:
        w.alias(s, _call_immediate(w, t, f"llvm.abs.{mangled_suffix(a.type)}", w.atom(a)))


def _call_immediate(w: Writer, type: str, intrinsic: str, text: str) -> str:
    """Calls an intrinsic with one operand and a false flag."""
    # with true, abs of the minimum and counts of zeros in 0 would be poison
    w.declarations.add(f"{type} @{intrinsic}({type}, i1)")
    return w.temp(f"call {type} @{intrinsic}({type} {text}, i1 false)")


def count_zeros(w: Writer, s: Let, op: str) -> None:
    """Leading or trailing zeros."""
    a = s.args[0]
    w.alias(
        s, _call_immediate(w, llvm_type(a.type), f"llvm.{op}.{mangled_suffix(a.type)}", w.atom(a))
    )


def fma(w: Writer, s: Let) -> None:
    """``a * b + c``, rounded once if the target has the instruction."""
    t = llvm_type(s.ref.type)
    # without the instruction, llvm.fma is a slow library call
    name = "fma" if w.target.has_fma else "fmuladd"
    w.alias(
        s,
        w.call(t, f"llvm.{name}.{mangled_suffix(s.ref.type)}", [(t, w.atom(a)) for a in s.args]),
    )


def _fuse_product(w: Writer, s: Let, index: int) -> None:
    """Fuses a sum or difference with the product that is one of its operands."""
    product, other = s.args[index], s.args[1 - index]
    assert isinstance(product, Ref)
    x, y = (w.atom(a) for a in w.contraction.products[product.id].args)
    z, t = w.atom(other), llvm_type(s.ref.type)
    if s.op == "sub":
        if index == 0:
            z = w.temp(f"fneg {t} {z}")
        else:
            x = w.temp(f"fneg {t} {x}")
    w.alias(s, w.call(t, f"llvm.fma.{mangled_suffix(s.ref.type)}", [(t, x), (t, y), (t, z)]))


def extremum(w: Writer, s: Let) -> None:
    """Minimum or maximum; propagates NaN."""
    a, b = s.args
    if isinstance(a, Const):
        # a constant goes second, which saves the test for NaN
        a, b = b, a
    t, x, y = llvm_type(a.type), w.atom(a), w.atom(b)
    if not a.type.dtype.is_float:
        name = f"llvm.{'s' if a.type.dtype.kind != 'u' else 'u'}{s.op}.{mangled_suffix(a.type)}"
        w.alias(s, w.call(t, name, [(t, x), (t, y)]))
        return
    w.alias(s, float_extremum(w, s.op, t, x, y, a.type.width, isinstance(b, Const)))


def float_extremum(
    w: Writer, op: str, t: str, x: str, y: str, width: int, y_is_number: bool
) -> str:
    """Minimum or maximum that propagates NaN: one instruction if ``y`` is known not to be NaN."""
    if w.target.is_arm64:  # one instruction
        lanes = f"v{width}" if width else ""
        element = "f64" if "double" in t else "f32"
        return w.call(t, f"llvm.{op}imum.{lanes}{element}", [(t, x), (t, y)])
    flags, predicate = vector_name("i1", width), "ogt" if op == "max" else "olt"
    if y_is_number:  # the comparison fails on NaN, so x stays
        better = w.temp(f"fcmp {predicate} {t} {y}, {x}")
        return w.temp(f"select {flags} {better}, {t} {y}, {t} {x}")
    # test for NaN first: the comparison that follows is one instruction on x86
    nan = w.temp(f"fcmp uno {t} {x}, {x}")
    y = w.temp(f"select {flags} {nan}, {t} {x}, {t} {y}")
    better = w.temp(f"fcmp {predicate} {t} {x}, {y}")
    return w.temp(f"select {flags} {better}, {t} {x}, {t} {y}")


def floordiv(w: Writer, s: Let) -> None:
    """Floor division or remainder."""
    a, b = s.args
    t, x, y = llvm_type(a.type), w.atom(a), w.atom(b)
    divide, remainder_op = ("sdiv", "srem") if a.type.dtype.kind == "i" else ("udiv", "urem")
    if a.type.dtype.kind == "u":
        binary(w, s, divide if s.op == "floordiv" else remainder_op)
        return
    flags = vector_name("i1", a.type.width)
    zero = "zeroinitializer" if a.type.width else "0"
    minus_one = ""
    if s.attr == "wrap":
        # the minimum divided by -1 traps: divide by 1, and select the wrapped quotient below
        ones = constants(a.type.width)(f"i{a.type.dtype.bits}", -1)
        minus_one = w.temp(f"icmp eq {t} {y}, {ones}")
        one = constants(a.type.width)(f"i{a.type.dtype.bits}", 1)
        y = w.temp(f"select {flags} {minus_one}, {t} {one}, {t} {y}")
    remainder = w.temp(f"{remainder_op} {t} {x}, {y}")
    # LLVM's division truncates: subtract 1 if the remainder's sign differs from the divisor's
    nonzero = w.temp(f"icmp ne {t} {remainder}, {zero}")
    signs = w.temp(f"xor {t} {remainder}, {y}")
    differ = w.temp(f"icmp slt {t} {signs}, {zero}")
    adjust = w.temp(f"and {flags} {nonzero}, {differ}")
    if s.op == "mod":
        moved = w.temp(f"add {t} {remainder}, {y}")
        w.out(f"%v{s.ref.id} = select {flags} {adjust}, {t} {moved}, {t} {remainder}")
    else:
        quotient = w.temp(f"{divide} {t} {x}, {y}")
        step = w.temp(f"sext {flags} {adjust} to {t}")
        if not minus_one:
            w.out(f"%v{s.ref.id} = add {t} {quotient}, {step}")
            return
        floor = w.temp(f"add {t} {quotient}, {step}")
        negated = w.temp(f"sub {t} {zero}, {x}")
        w.out(f"%v{s.ref.id} = select {flags} {minus_one}, {t} {negated}, {t} {floor}")


def shift(w: Writer, s: Let) -> None:
    """``<<`` and ``>>``; the amount is taken modulo the width."""
    a, b = s.args
    op = "shl" if s.op == "shl" else "ashr" if a.type.dtype.kind == "i" else "lshr"
    t, amount = llvm_type(a.type), w.atom(b)
    if not isinstance(b, Const):  # like processors; LLVM's result would be poison
        limit = constants(a.type.width)(f"i{a.type.dtype.bits}", a.type.dtype.bits - 1)
        amount = w.temp(f"and {t} {amount}, {limit}")
    w.out(f"%v{s.ref.id} = {op} {t} {w.atom(a)}, {amount}")


def copysign(w: Writer, s: Let) -> None:
    """The magnitude of one operand with the sign of the other."""
    t = llvm_type(s.ref.type)
    w.alias(
        s,
        w.call(t, f"llvm.copysign.{mangled_suffix(s.ref.type)}", [(t, w.atom(a)) for a in s.args]),
    )


def scale(w: Writer, s: Let) -> None:
    """``x * 2**n``, with the instruction of AVX-512."""
    x, n = s.args
    width, double = x.type.width, x.type.dtype is f64
    element, piece = ("double", 8) if double else ("float", 16)
    t = vector_name(element, piece)
    suffix, mask = ("pd", "i8") if double else ("ps", "i16")
    name = f"llvm.x86.avx512.mask.scalef.{suffix}.512"
    results: list[str] = []
    for a, b in zip(
        pieces(w, w.atom(x), element, width, piece),
        pieces(w, w.atom(n), element, width, piece),
        strict=True,
    ):
        w.declarations.add(f"{t} @{name}({t}, {t}, {t}, {mask}, i32)")
        results.append(
            # mask -1: all lanes; 4: the current rounding mode
            w.temp(f"call {t} @{name}({t} {a}, {t} {b}, {t} zeroinitializer, {mask} -1, i32 4)")
        )
    w.alias(s, join_lanes(w, results, element, piece))


def libm(w: Writer, s: Let) -> None:
    """A function of the C library."""
    w.alias(s, w.call("double", s.attr, [("double", w.atom(a)) for a in s.args]))
