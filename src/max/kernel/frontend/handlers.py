"""What the functions of the kernel language emit when a kernel is compiled."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: what they are is what these functions find out

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from max._abi import SCRATCH_ALIGNMENT, Context
from max.kernel.errors import KernelIndexError, KernelNameError, KernelSyntaxError, KernelValueError
from max.kernel.frontend.arithmetic import describe, is_number, is_runtime, plain_number
from max.kernel.frontend.division import MAX_SIZE, note_condition
from max.kernel.frontend.expressions import Expressions, Method, RangeValue
from max.kernel.frontend.loops import ChunksValue, ContextValue, ParallelValue, VectorsValue
from max.kernel.frontend.tile_handlers import METHODS as TILE_METHODS
from max.kernel.frontend.tile_handlers import TilesValue, emit_matrix_tiles
from max.kernel.frontend.views import (
    Index,
    View,
    as_mask,
    checked_width,
    make_tile,
    scratch_view,
    select_view,
)
from max.kernel.ir.nodes import Atom, Barrier, Const, Ref
from max.kernel.language import lang
from max.kernel.types import (
    BOOL,
    INDEX,
    POINTER,
    ScalarType,
    Type,
    arithmetic_dtype,
    bf16,
    f32,
    f64,
    i8,
    i32,
    i64,
    scalar,
    scalar_type,
    u8,
    vector,
)

Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}
_LIBM = frozenset(
    {
        "exp",
        "exp2",
        "log",
        "log2",
        "log1p",
        "expm1",
        "tanh",
        "sin",
        "cos",
        "pow",
        "erf",
        "acos",
        "atanh",
    }
)


def _emits(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def _value(fe: Expressions, x: Any, what: str) -> Atom:
    if isinstance(x, (Ref, Const)):
        return x
    if is_number(x):
        return fe.coerce(x, fe.type_of(x))
    fe.fail(f"{what} takes a scalar or a vector, got {describe(x)}")


def _vector(fe: Expressions, x: Any, what: str) -> Atom:
    if isinstance(x, (Ref, Const)) and x.type.is_vector:
        return x
    fe.fail(f"{what} takes a vector, got {describe(x)}")


def _dtype(fe: Expressions, dtype: Any) -> ScalarType:
    try:
        return scalar_type(dtype)
    except TypeError as error:
        fe.fail(str(error))


# ***** making vectors *****
@_emits(lang.splat)
def emit_splat(fe: Expressions, x: Any, width: Any) -> Any:
    x = _value(fe, x, "k.splat")
    return x if x.type.is_vector else fe.splat(x, checked_width(fe, width))


@_emits(lang.iota)
def emit_iota(fe: Expressions, dtype: Any, width: Any) -> Any:
    dtype, width = _dtype(fe, dtype), checked_width(fe, width)
    lanes = tuple(float(i) for i in range(width)) if dtype.is_float else tuple(range(width))
    return fe.b.const(lanes, vector(dtype, width))


@_emits(lang.tile)
def emit_tile(fe: Expressions, dtype: Any, shape: Any, width: Any = None, fill: Any = None) -> Any:
    return make_tile(fe, _dtype(fe, dtype), shape, width, fill)


HANDLERS[lang.matrix_tiles] = emit_matrix_tiles


# ***** conversions *****
@_emits(lang.cast)
def emit_cast(fe: Expressions, x: Any, dtype: Any) -> Any:
    return fe.cast(x, _dtype(fe, dtype))


@_emits(lang.cast_unchecked)
def emit_cast_unchecked(fe: Expressions, x: Any, dtype: Any) -> Any:
    return fe.cast(x, _dtype(fe, dtype), unchecked=True)


@_emits(lang.bitcast)
def emit_bitcast(fe: Expressions, x: Any, dtype: Any) -> Any:
    x, dtype = _value(fe, x, "k.bitcast"), _dtype(fe, dtype)
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
@_emits(lang.select)
def emit_select(fe: Expressions, mask: Any, a: Any, b: Any) -> Any:
    if isinstance(mask, (builtins.bool, Const)) and not isinstance(
        getattr(mask, "value", None), tuple
    ):
        mask = bool(mask.value if isinstance(mask, Const) else mask)
    if isinstance(a, View) and isinstance(b, View):
        return select_view(fe, mask, a, b)
    if isinstance(mask, bool):
        if not is_runtime(a) and not is_runtime(b):
            return a if mask else b
        x, y = fe.together("k.select", a, b)
        return x if mask else y
    if not isinstance(mask, (Ref, Const)) or mask.type.dtype is not BOOL.dtype:
        fe.fail(f"k.select takes a mask first, got {describe(mask)}")
    dtypes = [v.type.dtype for v in (a, b) if isinstance(v, (Ref, Const))]
    same = len(dtypes) == 2 and dtypes[0] is dtypes[1]
    if not same and any(dtype.is_narrow_float for dtype in dtypes):
        a, b = fe.widened(a), fe.widened(b)
    x, y = fe.together("k.select", a, b)
    if mask.type.is_vector and not x.type.is_vector:
        x, y = fe.splat(x, mask.type.width), fe.splat(y, mask.type.width)
    if mask.type.is_vector and mask.type.width != x.type.width:
        fe.fail(f"k.select: a mask of {mask.type.width} lanes for {describe(x)}")
    return fe.b.op("select", (mask, x, y), x.type)


@_emits(lang.shuffle)
def emit_shuffle(fe: Expressions, a: Any, b: Any, indices: Any) -> Any:
    a = _vector(fe, a, "k.shuffle")
    b = a if b is None else fe.coerce(_vector(fe, b, "k.shuffle"), a.type)
    lanes = tuple(fe.sequence(indices, fe.node))
    total = 2 * a.type.width
    if not lanes or not all(isinstance(i, int) and 0 <= i < total for i in lanes):
        fe.fail(
            f"k.shuffle takes indices in [0, {total}) known at compile time, got {list(lanes)}",
            KernelIndexError,
        )
    return fe.b.op("shuffle", (a, b), vector(a.type.dtype, len(lanes)), lanes)


@_emits(lang.interleave)
def emit_interleave(fe: Expressions, a: Any, b: Any) -> Any:
    n = _vector(fe, a, "k.interleave").type.width
    return emit_shuffle(fe, a, b, tuple(i for k in range(n) for i in (k, n + k)))


@_emits(lang.deinterleave)
def emit_deinterleave(fe: Expressions, x: Any) -> Any:
    n = _vector(fe, x, "k.deinterleave").type.width
    return emit_shuffle(fe, x, None, tuple(range(0, n, 2))), emit_shuffle(
        fe, x, None, tuple(range(1, n, 2))
    )


@_emits(lang.concat)
def emit_concat(fe: Expressions, a: Any, b: Any) -> Any:
    n = _vector(fe, a, "k.concat").type.width
    return emit_shuffle(fe, a, b, tuple(range(2 * n)))


def _reduction(op: str) -> Handler:
    def emit_reduce(fe: Expressions, x: Any) -> Any:
        x = fe.widened(_vector(fe, x, f"k.{op}"))
        if x.type.dtype.kind == "b":
            fe.fail(
                f"k.{op} does not take masks; use k.any, k.all or k.popcount(k.bitcast(mask, …))"
            )
        return fe.b.op(op, (x,), scalar(x.type.dtype))

    return emit_reduce


for _name in ("reduce_add", "reduce_mul", "reduce_max", "reduce_min"):
    HANDLERS[getattr(lang, _name)] = _reduction(_name)


def _mask_reduction(op: str) -> Handler:
    def emit_mask(fe: Expressions, mask: Any) -> Any:
        if isinstance(mask, tuple):
            fe.fail(f"k.{op} takes a mask, got {describe(mask)}")
        if isinstance(mask, builtins.bool):
            return mask
        if not isinstance(mask, (Ref, Const)) or mask.type.dtype is not BOOL.dtype:
            fe.fail(f"k.{op} takes a mask, got {describe(mask)}")
        return fe.b.op(op, (mask,), BOOL) if mask.type.is_vector else mask

    return emit_mask


HANDLERS[lang.any] = _mask_reduction("any")
HANDLERS[lang.all] = _mask_reduction("all")


# ***** arithmetic *****
@_emits(lang.fma)
def emit_fma(fe: Expressions, a: Any, b: Any, c: Any) -> Any:
    x, y, z = fe.together("k.fma", fe.widened(a), fe.widened(b), fe.widened(c))
    if not x.type.dtype.is_float:
        return fe.binary("add", fe.binary("mul", x, y), z)
    return fe.b.op("fma", (x, y, z), x.type)


def _extremum(op: str) -> Handler:
    def emit_extremum(fe: Expressions, *xs: Any) -> Any:
        if len(xs) == 1 and isinstance(xs[0], tuple):
            xs = xs[0]
        if not xs:
            fe.fail(f"k.{op} takes at least one operand")
        if not any(is_runtime(x) for x in xs):
            return getattr(builtins, op)(xs)
        result = xs[0]
        for x in xs[1:]:
            a, b = fe.together(f"k.{op}", fe.widened(result), fe.widened(x))
            result = fe.b.op(op, (a, b), a.type)
        return result

    return emit_extremum


HANDLERS[lang.min] = HANDLERS[builtins.min] = _extremum("min")
HANDLERS[lang.max] = HANDLERS[builtins.max] = _extremum("max")


def _float_op(op: str, integers: bool = False) -> Handler:
    def emit_unary(fe: Expressions, x: Any) -> Any:
        if integers and not is_runtime(x):
            return plain_number(getattr(builtins, op)(x))
        x = fe.widened(_value(fe, x, f"k.{op}"))
        if not x.type.dtype.is_float:
            if op in ("floor", "ceil", "trunc", "round") and x.type.dtype.is_integer:
                return x
            if not (integers and x.type.dtype.is_integer):
                fe.fail(f"k.{op} takes floats, got {describe(x)}; convert it, as in k.f32(x)")
            if x.type.dtype.kind == "u":
                return x
        return fe.b.op(op, (x,), x.type)

    return emit_unary


for _name in ("sqrt", "floor", "ceil", "trunc", "round"):
    HANDLERS[getattr(lang, _name)] = _float_op(_name)
HANDLERS[lang.abs] = HANDLERS[builtins.abs] = _float_op("abs", integers=True)


@_emits(lang.copysign)
def emit_copysign(fe: Expressions, x: Any, sign: Any) -> Any:
    a, b = fe.together("k.copysign", fe.widened(x), fe.widened(sign))
    return fe.b.op("copysign", (a, b), a.type)


@_emits(lang.scale_by_power)
def emit_scale_by_power(fe: Expressions, x: Any, n: Any) -> Any:
    a, b = fe.together("k.scale_by_power", x, n)
    return fe.b.op("scale", (a, b), a.type)


@_emits(lang.isnan)
def emit_isnan(fe: Expressions, x: Any) -> Any:
    x = fe.widened(_value(fe, x, "k.isnan"))
    mask = x.type.with_dtype(BOOL.dtype)
    return fe.b.op("ne", (x, x), mask) if x.type.dtype.is_float else fe.b.const(False, mask)


@_emits(lang.isinf)
def emit_isinf(fe: Expressions, x: Any) -> Any:
    x = fe.widened(_value(fe, x, "k.isinf"))
    mask = x.type.with_dtype(BOOL.dtype)
    if not x.type.dtype.is_float:
        return fe.b.const(False, mask)
    return fe.b.op("eq", (fe.b.op("abs", (x,), x.type), fe.literal(float("inf"), x.type)), mask)


def _bit_count(op: str) -> Handler:
    def emit_bits(fe: Expressions, x: Any) -> Any:
        x = _value(fe, x, f"k.{op}")
        if not x.type.dtype.is_integer:
            fe.fail(f"k.{op} takes integers, got {describe(x)}")
        return fe.b.op(op, (x,), x.type)

    return emit_bits


HANDLERS[lang.popcount] = _bit_count("popcount")
HANDLERS[lang.count_leading_zeros] = _bit_count("ctlz")
HANDLERS[lang.count_trailing_zeros] = _bit_count("cttz")


@_emits(lang.ceildiv)
def emit_ceildiv(fe: Expressions, a: Any, b: Any) -> Any:
    return fe.binary("floordiv", fe.binary("add", a, fe.binary("sub", b, 1)), b)


@_emits(lang.dot_bf16)
def emit_dot_bf16(fe: Expressions, acc: Any, a: Any, b: Any) -> Any:
    acc, a, b = (_vector(fe, x, "k.dot_bf16") for x in (acc, a, b))
    pair = vector(bf16, 2 * acc.type.width)
    if acc.type.dtype is not f32 or a.type is not pair or b.type is not pair:
        came = f"{describe(acc)}, {describe(a)} and {describe(b)}"
        fe.fail(f"k.dot_bf16 takes SIMD[f32, n] and twice SIMD[bf16, 2n], got {came}")
    if fe.target.dot_bf16_lanes(acc.type.width):
        return fe.b.op("dot_bf16", (acc, a, b), acc.type)
    (a0, a1), (b0, b1) = emit_deinterleave(fe, a), emit_deinterleave(fe, b)
    acc = emit_fma(fe, fe.cast(a1, f32), fe.cast(b1, f32), acc)
    return emit_fma(fe, fe.cast(a0, f32), fe.cast(b0, f32), acc)


@_emits(lang.dot_i8)
def emit_dot_i8(fe: Expressions, acc: Any, a: Any, b: Any, narrow: bool = False) -> Any:
    acc, a, b = (_vector(fe, x, "k.dot_i8") for x in (acc, a, b))
    width = acc.type.width
    signed = a.type is vector(i8, 4 * width)
    if (
        acc.type.dtype is not i32
        or not (signed or a.type is vector(u8, 4 * width))
        or b.type is not vector(i8, 4 * width)
    ):
        came = f"{describe(acc)}, {describe(a)} and {describe(b)}"
        fe.fail(f"k.dot_i8 takes SIMD[i32, n], SIMD[u8 or i8, 4n] and SIMD[i8, 4n], got {came}")
    target = fe.target
    unsigned_lanes, signed_lanes = target.dot_i8_lanes(width), target.signed_dot_i8_lanes(width)
    if signed and signed_lanes:
        return fe.b.op("narrow_signed_dot_i8" if narrow else "signed_dot_i8", (acc, a, b), acc.type)
    if not signed and unsigned_lanes:
        return fe.b.op("dot_i8", (acc, a, b), acc.type)
    if narrow and target.narrow_dot_i8_lanes(width):
        if signed:  # magnitudes, with the signs moved to b
            negative = fe.b.op("lt", (a, fe.coerce(0, a.type)), vector(BOOL.dtype, 4 * width))
            b = emit_select(fe, negative, fe.binary("sub", 0, b), b)
            a = emit_bitcast(fe, fe.b.op("abs", (a,), a.type), u8)
        return fe.b.op("narrow_dot_i8", (acc, a, b), acc.type)
    if unsigned_lanes or signed_lanes:
        # a moved by 128 into the other range; the sums of b bring that back
        moved = emit_bitcast(fe, fe.binary("xor", a, -128 if signed else 128), u8 if signed else i8)
        ones = fe.coerce(1, moved.type)
        sums = emit_dot_i8(fe, fe.coerce(0, acc.type), ones, b, narrow)
        back = fe.binary("shl", sums, 7)
        return fe.binary("sub" if signed else "add", emit_dot_i8(fe, acc, moved, b, narrow), back)
    for j in range(4):
        lanes = tuple(range(j, 4 * width, 4))
        x, y = (fe.cast(emit_shuffle(fe, v, None, lanes), i32) for v in (a, b))
        acc = fe.binary("add", acc, fe.binary("mul", x, y))
    return acc


@_emits(lang.libm)
def emit_libm(fe: Expressions, name: Any, *xs: Any) -> Any:
    if name not in _LIBM:
        fe.fail(f"k.libm knows {', '.join(sorted(_LIBM))}, got {name!r}", KernelNameError)
    atoms = fe.together("k.libm", *(fe.cast(x, f64) for x in xs))
    if not atoms[0].type.is_vector:
        return fe.b.op("libm", tuple(atoms), atoms[0].type, name)
    width = atoms[0].type.width
    result: Any = fe.b.const(0.0, atoms[0].type)
    for lane in range(width):
        at = fe.b.const(lane, INDEX)
        args = tuple(fe.b.op("extract", (a, at), scalar(f64)) for a in atoms)
        result = fe.b.op(
            "insert", (result, fe.b.op("libm", args, scalar(f64), name), at), result.type
        )
    return result


@_emits(lang.floating)
def emit_floating(fe: Expressions, x: Any) -> Any:
    if is_number(x):
        return fe.literal(float(x), scalar(f32))
    x = fe.widened(_value(fe, x, "this function"))
    if not x.type.dtype.is_float:
        fe.fail(f"expected a float, got {describe(x)}; convert it, as in k.f32(x)")
    return x


# ***** control *****
def _index(fe: Expressions, x: Any) -> Index:
    return fe.as_index(x)


@_emits(lang.vectors)
def emit_vectors(fe: Expressions, *args: Any) -> Any:
    if len(args) not in (2, 3):
        fe.fail(f"k.vectors takes (n, width) or (start, stop, width), got {len(args)} arguments")
    start, stop, width = (0, *args) if len(args) == 2 else args
    return VectorsValue(_index(fe, start), _index(fe, stop), checked_width(fe, width))


@_emits(builtins.range)
def emit_range(fe: Expressions, *args: Any) -> Any:
    if not 1 <= len(args) <= 3:
        fe.fail(f"range takes one to three arguments, got {len(args)}")
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    step = _index(fe, step)
    if not isinstance(step, int) or step == 0:
        fe.fail(f"the step of a range is known at compile time and not 0, got {describe(step)}")
    return RangeValue(_index(fe, start), _index(fe, stop), step)


@_emits(lang.static_range)
def emit_static_range(fe: Expressions, *args: Any) -> Any:
    bounds = [_index(fe, a) for a in args]
    known = [b for b in bounds if isinstance(b, int)]
    if len(known) != len(bounds):
        fe.fail(
            "k.static_range takes bounds known at compile time; use range(…) for a run-time loop"
        )
    return range(*known)


@_emits(lang.unroll)
def emit_unroll(fe: Expressions, items: Any) -> Any:
    return fe.sequence(items, fe.node)


@_emits(builtins.tuple, builtins.list)
def emit_tuple(fe: Expressions, items: Any = ()) -> Any:
    return fe.sequence(items, fe.node)


@_emits(builtins.zip)
def emit_zip(fe: Expressions, *items: Any, strict: bool = False) -> Any:
    return tuple(zip(*(fe.sequence(i, fe.node) for i in items), strict=strict))


@_emits(builtins.enumerate)
def emit_enumerate(fe: Expressions, items: Any, start: int = 0) -> Any:
    return tuple(enumerate(fe.sequence(items, fe.node), start))


@_emits(builtins.reversed)
def emit_reversed(fe: Expressions, items: Any) -> Any:
    return tuple(reversed(fe.sequence(items, fe.node)))


@_emits(builtins.len)
def emit_len(fe: Expressions, items: Any) -> Any:
    if isinstance(items, View):
        return items.shape[0]
    return len(fe.sequence(items, fe.node))


@_emits(builtins.sum)
def emit_sum(fe: Expressions, items: Any, start: Any = 0) -> Any:
    total = start
    for item in fe.sequence(items, fe.node):
        total = item if total is start and start == 0 else fe.binary("add", total, item)
    return total


@_emits(builtins.float)
def emit_float(fe: Expressions, x: Any) -> Any:
    return fe.cast(x, f32) if is_runtime(x) else _number(fe, float, x)


@_emits(builtins.int)
def emit_int(fe: Expressions, x: Any) -> Any:
    return fe.cast(x, i64) if is_runtime(x) else _number(fe, int, x)


def _number(fe: Expressions, kind: type[int] | type[float], x: Any) -> Any:
    try:
        return kind(x)
    except (TypeError, ValueError, OverflowError) as error:
        fe.fail(str(error), KernelValueError)


@_emits(builtins.bool)
def emit_bool(fe: Expressions, x: Any) -> Any:
    return fe.truth(x)


@_emits(builtins.isinstance)
def emit_isinstance(fe: Expressions, x: Any, kind: Any) -> Any:
    if is_runtime(x):
        fe.fail("isinstance is for values known at compile time; use x.dtype or x.width")
    return isinstance(x, kind)


@_emits(builtins.round)
def emit_round(fe: Expressions, x: Any, digits: Any = None) -> Any:
    return HANDLERS[lang.round](fe, x) if is_runtime(x) else round(x, digits)


@_emits(builtins.any)
def emit_any(fe: Expressions, items: Any) -> Any:
    return _over(fe, items, "or")


@_emits(builtins.all)
def emit_all(fe: Expressions, items: Any) -> Any:
    return _over(fe, items, "and")


def _over(fe: Expressions, items: Any, op: str) -> Any:
    if isinstance(items, (Ref, Const)):
        return HANDLERS[lang.any if op == "or" else lang.all](fe, items)
    result: Any = op == "and"
    for item in fe.sequence(items, fe.node):
        item = fe.truth(item)
        if not is_runtime(result) and not is_runtime(item):
            result = (result and item) if op == "and" else (result or item)
        else:
            result = fe.binary(op, result, item)
    return result


@_emits(lang.assume)
def emit_assume(fe: Expressions, cond: Any) -> None:
    cond = fe.truth(cond)
    if cond is False:
        fe.fail("k.assume: the condition does not hold", KernelValueError)
    if isinstance(cond, Ref):
        fe.b.effect("assume", (cond,))
        note_condition(fe.b, fe.b.scopes[-1], cond, True)


@_emits(lang.brief)
def emit_brief(fe: Any) -> None:
    if not fe.loop_depth:
        fe.fail("k.brief() stands in a loop: it promises that the loop ends soon")
    fe.b.effect("brief", ())


@_emits(lang.static_assert)
def emit_static_assert(
    fe: Expressions, cond: Any, message: str = "the condition does not hold"
) -> None:
    if is_runtime(cond):
        fe.fail("k.static_assert takes a condition known at compile time; use raise for others")
    if not cond:
        fe.fail(f"static assertion: {message}", KernelValueError)


@_emits(lang.print, builtins.print)
def emit_print(fe: Expressions, text: Any, *xs: Any) -> None:
    if not isinstance(text, str):
        text, xs = "{}", (text, *xs)
    parts = text.split("{}")
    if len(parts) - 1 != len(xs):
        fe.fail(
            f"k.print: {len(parts) - 1} placeholders '{{}}' for {len(xs)} values", KernelValueError
        )
    out: list[Any] = [parts[0]]
    atoms: list[Atom] = []
    for x, rest in zip(xs, parts[1:], strict=True):
        if isinstance(x, (Ref, Const)):
            lanes = [fe.extract(x, i) for i in range(x.type.width)] if x.type.is_vector else [x]
            if x.type.is_vector:
                out.append("[")
            for n, lane in enumerate(lanes):
                lane = fe.cast(lane, f64) if lane.type.dtype.is_float else fe.cast(lane, i64)
                if n:
                    out.append(", ")
                out.append(lane.type.dtype)
                atoms.append(lane)
            if x.type.is_vector:
                out.append("]")
        else:
            out.append(str(x))
        out.append(rest)
    fe.b.effect("print", tuple(atoms), tuple(out))


@_emits(lang.target)
def emit_target(fe: Expressions) -> Any:
    return fe.target


# ***** the context *****
def emit_parallel(fe: Expressions, ctx: ContextValue, shape: Any, grain: Any = 0) -> Any:
    if isinstance(shape, tuple):
        if not shape:
            fe.fail("ctx.parallel takes a size or a non-empty shape")
        return ParallelValue(tuple(_index(fe, s) for s in shape), _index(fe, grain), False)
    return ParallelValue((_index(fe, shape),), _index(fe, grain), True)


def emit_chunks(
    fe: Expressions, ctx: ContextValue, total: Any, grain: Any = 0, multiple: Any = 1
) -> Any:
    if not isinstance(multiple, int) or multiple < 1:
        fe.fail(f"multiple is a positive integer known at compile time, got {describe(multiple)}")
    return ChunksValue(_index(fe, total), _index(fe, grain), multiple)


def emit_barrier(fe: Any, ctx: ContextValue) -> None:
    if fe.parallel_depth:
        fe.fail(
            "a barrier cannot stand inside of a parallel loop: not all workers get there",
            KernelSyntaxError,
        )
    fe.b.emit(Barrier(fe.b.line))


def emit_scratch(fe: Any, ctx: ContextValue, dtype: Any, shape: Any) -> View:
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple) or not all(isinstance(s, int) and s >= 0 for s in sizes):
        fe.fail(f"the shape of scratch memory is known at compile time, got {describe(shape)}")
    dtype = _dtype(fe, dtype)
    size = dtype.size
    for s in sizes:
        size *= s
    offset = fe.scratch_bytes
    fe.scratch_bytes += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    base = fe.b.op("ctx", (), POINTER, Context.SCRATCH.value)
    return scratch_view(fe, base, offset, dtype, sizes)


_CONTEXT_METHODS: dict[str, Handler] = {
    "parallel": emit_parallel,
    "chunks": emit_chunks,
    "barrier": emit_barrier,
    "scratch": emit_scratch,
}
_CONTEXT_NUMBERS = {"worker": (Context.WORKER, 0), "num_workers": (Context.WORKERS, 1)}
"""Attributes of ``ctx``: the field, and the least value that it has."""


def context_attribute(fe: Expressions, ctx: Any, name: str) -> Any:
    """``ctx.worker`` and the like, and methods of matrix tiles; None where there is no such attribute."""
    if isinstance(ctx, TilesValue):
        if name == "shapes":
            return ctx.shapes
        return Method(TILE_METHODS[name], ctx) if name in TILE_METHODS else None
    if not isinstance(ctx, ContextValue):
        return None
    if name in _CONTEXT_METHODS:
        return Method(_CONTEXT_METHODS[name], ctx)
    if name in _CONTEXT_NUMBERS:
        field, least = _CONTEXT_NUMBERS[name]
        number = fe.b.op("ctx", (), INDEX, field.value)
        fe.b.intervals[number.id] = least, MAX_SIZE
        return number
    if name == "target":
        return fe.target
    return None


__all__ = ["HANDLERS", "Type", "arithmetic_dtype", "as_mask", "context_attribute"]
