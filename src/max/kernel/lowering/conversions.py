"""Lowering of conversions. 8- and 16-bit floats are integers in registers; arithmetic on them is in f32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module
from max.kernel.ir.nodes import Atom, Let, Ref
from max.kernel.lowering.types import constants, llvm_type, mangled_suffix, vector_name
from max.kernel.lowering.writer import Writer
from max.kernel.types import ScalarType, Type, bf16, f16, f32, f64

if TYPE_CHECKING:
    from max.kernel.lowering import float8
else:
    # few kernels have float8 values
    float8 = lazy_module("max.kernel.lowering.float8")


def to_f32(w: Writer, a: Atom) -> str:
    """Converts a float of at most 32 bits to f32."""
    return widen(w, w.atom(a), a.type)


def widen(w: Writer, text: str, type: Type) -> str:
    """Converts the bits of an 8- or 16-bit float to f32."""
    dtype, width = type.dtype, type.width
    if dtype is bf16:
        # bf16 is the upper half of an f32
        ints = vector_name("i32", width)
        wide = w.temp(f"zext {vector_name('i16', width)} {text} to {ints}")
        sixteen = "splat (i32 16)" if width else "16"
        high = w.temp(f"shl {ints} {wide}, {sixteen}")
        return w.temp(f"bitcast {ints} {high} to {vector_name('float', width)}")
    if dtype is f16:
        return _widen_f16(w, text, width)
    if dtype.is_narrow_float:
        return float8.widen(w.temp, text, dtype, width)
    return text


def _widen_f16(w: Writer, text: str, width: int) -> str:
    """The f32 of f16 bits, by an instruction or by shifts and a product."""
    halves, floats = vector_name("half", width), vector_name("float", width)
    if w.target.has_f16_conversion:
        half = w.temp(f"bitcast {vector_name('i16', width)} {text} to {halves}")
        return w.temp(f"fpext {halves} {half} to {floats}")
    # shift exponent and mantissa into place; the product with 2^112 corrects the bias, for subnormals too
    ints = vector_name("i32", width)
    c = constants(width)
    wide = w.temp(f"zext {vector_name('i16', width)} {text} to {ints}")
    magnitude = w.temp(f"and {ints} {wide}, {c('i32', 0x7FFF)}")
    shifted = w.temp(f"shl {ints} {magnitude}, {c('i32', 13)}")
    unscaled = w.temp(f"bitcast {ints} {shifted} to {floats}")
    scaled = w.temp(f"fmul {floats} {unscaled}, {c('float', 2.0**112)}")
    bits = w.temp(f"bitcast {floats} {scaled} to {ints}")
    # infinity and NaN keep an exponent of all ones
    special = w.temp(f"icmp uge {ints} {magnitude}, {c('i32', 0x7C00)}")
    infinite = w.temp(f"or {ints} {shifted}, {c('i32', 0x7F800000)}")
    magnitude_bits = w.temp(
        f"select {vector_name('i1', width)} {special}, {ints} {infinite}, {ints} {bits}"
    )
    sign = w.temp(f"and {ints} {wide}, {c('i32', 0x8000)}")
    high = w.temp(f"shl {ints} {sign}, {c('i32', 16)}")
    result = w.temp(f"or {ints} {magnitude_bits}, {high}")
    return w.temp(f"bitcast {ints} {result} to {floats}")


def narrow(w: Writer, text: str, dtype: ScalarType, width: int) -> str:
    """Rounds f32 to a float of 8 or 16 bits."""
    if dtype.bits == 8:
        return float8.narrow(w.temp, text, dtype, width)
    floats = vector_name("float", width)
    shorts = vector_name("i16", width)
    if dtype is bf16:
        # x86's vcvtneps2bf16 is not used, as it flushes subnormals to zero
        if w.target.is_arm64 and w.target.has("bf16") and width % 4 == 0:
            short = vector_name("bfloat", width)
            rounded = w.temp(f"fptrunc {floats} {text} to {short}")
            return w.temp(f"bitcast {short} {rounded} to {shorts}")
        return _round_bf16(w, text, width)
    if w.target.has_f16_conversion:
        halves = vector_name("half", width)
        half = w.temp(f"fptrunc {floats} {text} to {halves}")
        return w.temp(f"bitcast {halves} {half} to {shorts}")
    return _round_f16(w, text, width)


def _round_bf16(w: Writer, text: str, width: int) -> str:
    """The bf16 bits of an f32, rounded to nearest, ties to even; NaN becomes one quiet NaN."""
    ints, floats = vector_name("i32", width), vector_name("float", width)
    shorts, c = vector_name("i16", width), constants(width)
    bits = w.temp(f"bitcast {floats} {text} to {ints}")
    high = w.temp(f"lshr {ints} {bits}, {c('i32', 16)}")
    odd = w.temp(f"and {ints} {high}, {c('i32', 1)}")
    # less than half of the last bit that stays, plus 1 if that bit is set: ties go to even
    bias = w.temp(f"add {ints} {odd}, {c('i32', 0x7FFF)}")
    rounded = w.temp(f"add {ints} {bits}, {bias}")
    cut = w.temp(f"lshr {ints} {rounded}, {c('i32', 16)}")
    # the carry of rounding could make a NaN infinite or change its sign
    nan = w.temp(f"fcmp uno {floats} {text}, {text}")
    chosen = w.temp(
        f"select {vector_name('i1', width)} {nan}, {ints} {c('i32', 0x7FC0)}, {ints} {cut}"
    )
    return w.temp(f"trunc {ints} {chosen} to {shorts}")


def _round_f16(w: Writer, text: str, width: int) -> str:
    """The f16 bits of an f32, rounded to nearest, ties to even."""
    ints, floats, flags = (
        vector_name("i32", width),
        vector_name("float", width),
        vector_name("i1", width),
    )
    c = constants(width)
    bits = w.temp(f"bitcast {floats} {text} to {ints}")
    magnitude = w.temp(f"and {ints} {bits}, {c('i32', 0x7FFFFFFF)}")
    # normal results: round to even at bit 13, then correct the bias
    odd = w.temp(f"and {ints} {w.temp(f'lshr {ints} {magnitude}, ' + c('i32', 13))}, {c('i32', 1)}")
    biased = w.temp(f"add {ints} {magnitude}, {c('i32', 0x0FFF - (112 << 23))}")
    rounded = w.temp(f"add {ints} {biased}, {odd}")
    normal = w.temp(f"lshr {ints} {rounded}, {c('i32', 13)}")
    # subnormal results: adding 0.5 makes the hardware round at the right bit
    positive = w.temp(f"bitcast {ints} {magnitude} to {floats}")
    sum_ = w.temp(f"fadd {floats} {positive}, {c('float', 0.5)}")
    sum_bits = w.temp(f"bitcast {floats} {sum_} to {ints}")
    subnormal = w.temp(f"sub {ints} {sum_bits}, {c('i32', 0x3F000000)}")
    # below 2^-14, the smallest normal number
    tiny = w.temp(f"icmp ult {ints} {magnitude}, {c('i32', 113 << 23)}")
    finite = w.temp(f"select {flags} {tiny}, {ints} {subnormal}, {ints} {normal}")
    # from 65520, halfway beyond the largest number
    big = w.temp(f"icmp uge {ints} {magnitude}, {c('i32', 0x477FF000)}")
    bounded = w.temp(f"select {flags} {big}, {ints} {c('i32', 0x7C00)}, {ints} {finite}")
    nan = w.temp(f"icmp ugt {ints} {magnitude}, {c('i32', 0x7F800000)}")
    chosen = w.temp(f"select {flags} {nan}, {ints} {c('i32', 0x7E00)}, {ints} {bounded}")
    sign = w.temp(
        f"and {ints} {w.temp(f'lshr {ints} {bits}, ' + c('i32', 16))}, {c('i32', 0x8000)}"
    )
    result = w.temp(f"or {ints} {chosen}, {sign}")
    return w.temp(f"trunc {ints} {result} to {vector_name('i16', width)}")


def cast(w: Writer, s: Let) -> None:
    """A conversion of elements."""
    a = s.args[0]
    source, goal, width = a.type.dtype, s.ref.type.dtype, a.type.width
    text, from_, to = w.atom(a), llvm_type(a.type), llvm_type(s.ref.type)
    if source.is_narrow_float:
        text, from_, source = widen(w, text, a.type), vector_name("float", width), f32
        if goal is f32:
            w.alias(s, text)
            return
    if goal.is_narrow_float:
        if source is f64:
            # rounding to f32 and then to 16 or 8 bits would round twice
            text = _round_to_odd(w, text, width)
        elif source is not f32:
            text = _number_cast(
                w, text, from_, source, vector_name("float", width), f32, width, s.attr
            )
        w.alias(s, narrow(w, text, goal, width))
        return
    w.alias(s, _number_cast(w, text, from_, source, to, goal, width, s.attr))


def _round_to_odd(w: Writer, text: str, width: int) -> str:
    """Converts f64 to f32 with round-to-odd: inexact results end in bit 1, so a second rounding is correct."""
    doubles, floats = vector_name("double", width), vector_name("float", width)
    ints, flags, c = vector_name("i32", width), vector_name("i1", width), constants(width)
    nearest = w.temp(f"fptrunc {doubles} {text} to {floats}")
    back = w.temp(f"fpext {floats} {nearest} to {doubles}")
    bits = w.temp(f"bitcast {floats} {nearest} to {ints}")
    inexact = w.temp(f"fcmp one {doubles} {back}, {text}")
    last = w.temp(f"and {ints} {bits}, {c('i32', 1)}")
    even = w.temp(f"icmp eq {ints} {last}, {c('i32', 0)}")
    move = w.temp(f"and {flags} {inexact}, {even}")
    # the bits of floats are ordered by magnitude: choose the odd one of the two neighbors of `text`
    name = f"llvm.fabs.{mangled_suffix(Type(f64, width))}"
    magnitudes = [w.call(doubles, name, [(doubles, x)]) for x in (back, text)]
    smaller = w.temp(f"fcmp olt {doubles} {magnitudes[0]}, {magnitudes[1]}")
    step = w.temp(f"select {flags} {smaller}, {ints} {c('i32', 1)}, {ints} {c('i32', -1)}")
    moved = w.temp(f"add {ints} {bits}, {step}")
    odd = w.temp(f"select {flags} {move}, {ints} {moved}, {ints} {bits}")
    return w.temp(f"bitcast {ints} {odd} to {floats}")


def _number_cast(
    w: Writer, text: str, from_: str, a: ScalarType, to: str, b: ScalarType, width: int, mode: Any
) -> str:
    """A conversion between native types; floats to integers saturate unless the mode is `unchecked`."""
    if b.kind == "b":
        zero = "zeroinitializer" if width else ("0.0" if a.is_float else "0")
        return w.temp(f"{'fcmp une' if a.is_float else 'icmp ne'} {from_} {text}, {zero}")
    if a.is_float and b.is_float:
        op = "fpext" if b.bits > a.bits else "fptrunc"
    elif a.is_float:
        op = "fptosi" if b.kind == "i" else "fptoui"
        if mode != "unchecked" and _is_clipped(a, b, width):
            return _clipped_cast(w, text, from_, a, to, b, width)
        if mode != "unchecked":
            lanes = f"v{width}" if width else ""
            name = f"llvm.{op}.sat.{lanes}i{b.bits}.{lanes}f{a.bits}"
            return w.call(to, name, [(from_, text)])
    elif b.is_float:
        op = "sitofp" if a.kind == "i" else "uitofp"
    elif b.bits == a.bits:
        return text
    elif b.bits < a.bits:
        op = "trunc"
    else:
        op = "sext" if a.kind == "i" else "zext"
    return w.temp(f"{op} {from_} {text} to {to}")


def _is_clipped(a: ScalarType, b: ScalarType, width: int) -> bool:
    """Whether numbers are clipped before they are converted: LLVM converts vectors lane by lane."""
    signed_32 = b.kind == "i" and b.bits == 32
    return bool(width) and a.bits in (32, 64) and (b.bits <= 16 or signed_32)


def _clipped_cast(
    w: Writer, text: str, from_: str, a: ScalarType, to: str, b: ScalarType, width: int
) -> str:
    """Floats to integers, saturated, NaN to 0: clipped to the integers' range first."""
    flags, ints, c = vector_name("i1", width), vector_name("i32", width), constants(width)
    element = "float" if a.bits == 32 else "double"
    wide = b.bits == 32
    low = -(1 << (b.bits - 1)) if b.kind == "i" else 0
    high = low + (1 << b.bits) - 1
    # the greatest float below 2^31 is less than the greatest integer
    top = (1 << 31) - 128 if wide and a.bits == 32 else high

    def number(value: int) -> str:
        return f"splat ({element} {float(value)!r})"

    ordered = w.temp(f"fcmp ord {from_} {text}, {text}")
    known = w.temp(f"select {flags} {ordered}, {from_} {text}, {from_} zeroinitializer")
    above = w.temp(f"fcmp ogt {from_} {known}, {number(low)}")
    raised = w.temp(f"select {flags} {above}, {from_} {known}, {from_} {number(low)}")
    below = w.temp(f"fcmp olt {from_} {raised}, {number(top)}")
    clipped = w.temp(f"select {flags} {below}, {from_} {raised}, {from_} {number(top)}")
    result = w.temp(f"fptosi {from_} {clipped} to {ints}")
    if not wide:
        return w.temp(f"trunc {ints} {result} to {to}")
    if top == high:
        return result
    over = w.temp(f"fcmp ogt {from_} {known}, {number(top)}")
    return w.temp(f"select {flags} {over}, {ints} {c('i32', high)}, {ints} {result}")


def bitcast(w: Writer, s: Let) -> None:
    """The same bits as another type."""
    a = s.args[0]
    from_, to = llvm_type(a.type), llvm_type(s.ref.type)
    if isinstance(a, Ref) and a.id in w.words:
        w.words[s.ref.id] = w.words[a.id]
    if from_ == to:
        w.alias(s, w.atom(a))
    else:
        w.out(f"%v{s.ref.id} = bitcast {from_} {w.atom(a)} to {to}")
