"""Integer division: interval analysis of the operands, and tests of the divisor.

Each integer has an interval: sizes are not negative, a loop variable lies between its bounds. Inside a loop its bound
is positive, and so are the sizes of which it is a product. A divisor that may be 0 is tested before the division; the
test covers the rest of its body. The minimum of a signed type divided by -1 wraps.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of constants are Any

from __future__ import annotations

from max._host.process_caches import cached_results
from max.kernel.frontend.builder import Builder, Interval, KnownInterval, Scope
from max.kernel.frontend.raising import refuse
from max.kernel.frontend.state import Frontend
from max.kernel.ir.nodes import Atom, Const, Let, Ref
from max.kernel.types import BOOL, ScalarType

MAX_SIZE = 1 << 48
"""The maximum of sizes and byte counts: addresses have 48 bits."""

_DEPTH = 12  # the maximum depth of definitions that the analysis follows
_ANY_DEPTH = 1 << 30


@cached_results()
def _type_interval(dtype: ScalarType) -> Interval:
    if dtype.kind == "i":
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, (1 << dtype.bits) - 1


def interval(b: Builder, a: Atom) -> Interval:
    """The minimum and maximum of an integer; for a vector, over all lanes."""
    return _interval(b, a, _DEPTH)[:2]


def _interval(b: Builder, a: Atom, depth: int) -> KnownInterval:
    """The interval of an integer whose definitions are followed to a depth, and the depths that give the same one."""
    if isinstance(a, Const):
        if not isinstance(a.value, tuple):
            value = int(a.value)
            return value, value, 0, _ANY_DEPTH
        return min(map(int, a.value)), max(map(int, a.value)), 0, _ANY_DEPTH
    known = b.scopes[-1].known.get(a.id)
    if known is not None and known[2] <= depth <= known[3]:
        return known
    low, high = type_interval = _type_interval(a.type.dtype)
    least, most = 0, _ANY_DEPTH
    if a.id in b.intervals:
        low, high = b.intervals[a.id]
    elif (let := b.definitions.get(a.id)) is not None:
        if depth:
            spans = [_interval(b, x, depth - 1) for x in let.args if x.type.dtype.is_integer]
            low, high = _of_op(let, type_interval, spans)
            for _, _, fewest, limit in spans:
                least, most = max(least, fewest + 1), min(most, limit + 1)
        else:
            most = 0
    if low < 1:
        for scope in b.scopes:
            if a.id in scope.positive:
                low = 1
                break
    # the interval may be empty in dead code
    known = b.scopes[-1].known[a.id] = low, max(low, high), least, most
    return known


def _of_op(let: Let, type_interval: Interval, spans: list[KnownInterval]) -> Interval:
    """The interval of an op's value from those of its integers; that of its type (`type_interval`) by default."""
    op, args = let.op, let.args
    if op == "cast" and not args[0].type.dtype.is_integer:
        return type_interval
    if op in ("cast", "splat"):
        return _fit(spans[0][:2], type_interval, False)
    if op == "select":
        (a, c, _, _), (d, e, _, _) = spans[-2:]
        return min(a, d), max(c, e)
    if len(spans) != 2:
        return type_interval
    (a, c, _, _), (d, e, _, _) = spans
    nsw = let.attr == "nsw"
    if op == "add":
        return _fit((a + d, c + e), type_interval, nsw)
    if op == "sub":
        return _fit((a - e, c - d), type_interval, nsw)
    if op == "mul":
        corners = (a * d, a * e, c * d, c * e)
        return _fit((min(corners), max(corners)), type_interval, nsw)
    if op == "min":
        return min(a, d), min(c, e)
    if op == "max":
        return max(a, d), max(c, e)
    if op == "and" and (a >= 0 or d >= 0):
        # an operand without sign bit clears it, and no bit above its own is set
        return 0, min(high for low, high in ((a, c), (d, e)) if low >= 0)
    if op == "shr" and d == e and 0 <= d < args[0].type.dtype.bits:
        return a >> d, c >> d
    if op in ("floordiv", "udiv") and a >= 0 and d >= 1:
        return a // e, c // d
    if op in ("mod", "umod") and d >= 1 and (op == "mod" or a >= 0):
        return 0, min(e - 1, c) if a >= 0 else e - 1
    return type_interval


def _fit(span: Interval, type_interval: Interval, nsw: bool) -> Interval:
    """The interval of a result: that of its type if it may wrap; with `nsw` it cannot, and is clamped to it."""
    if nsw:
        return max(span[0], type_interval[0]), min(span[1], type_interval[1])
    return span if type_interval[0] <= span[0] and span[1] <= type_interval[1] else type_interval


def most_iterations(b: Builder, start: Atom, stop: Atom, step: int) -> int:
    """An upper bound of the iterations of a loop."""
    (low, first), (last, high) = interval(b, start), interval(b, stop)
    span = high - low if step > 0 else first - last
    return max(0, -(-span // abs(step)))


def is_multiple(b: Builder, a: Atom, factor: int, depth: int = _DEPTH) -> bool:
    """Whether an integer is known to be a multiple of a power of two, also if its computation wraps."""
    if isinstance(a, Const):
        return isinstance(a.value, int) and a.value % factor == 0
    let = b.definitions.get(a.id)
    if let is None or not depth:
        return False
    multiples = (is_multiple(b, x, factor, depth - 1) for x in let.args)
    if let.op == "mul":
        return any(multiples)
    return let.op in ("add", "sub", "min", "max") and all(multiples)


# ***** facts *****
def note_loop(b: Builder, scope: Scope, var: Ref, start: Atom, stop: Atom, step: int) -> None:
    """Records the interval of a loop variable, and that the bound is positive inside the body."""
    (low, first), (last, high) = interval(b, start), interval(b, stop)
    if step > 0:
        b.intervals[var.id] = low, high - 1
        if low >= 0:
            note_positive(b, scope, stop)
    else:
        b.intervals[var.id] = last + 1, first


def note_chunk(b: Builder, scope: Scope, begin: Ref, end: Ref, total: Atom) -> None:
    """Records that a chunk of a parallel loop is not empty."""
    high = interval(b, total)[1]
    b.intervals[begin.id] = 0, high - 1
    b.intervals[end.id] = 1, high
    note_positive(b, scope, total)


def note_positive(b: Builder, scope: Scope, a: Atom | int) -> None:
    """Records that a value is positive in a body, and the operands for which that follows."""
    if not isinstance(a, Ref):
        return
    b.prove_positive(scope, a.id)
    let = b.definitions.get(a.id)
    if let is None:
        return
    if let.op == "mul":
        # a positive product of non-negative factors
        if all(interval(b, x)[0] >= 0 for x in let.args):
            for x in let.args:
                note_positive(b, scope, x)
    elif let.op in ("min", "cast"):
        for x in let.args:
            if x.type.dtype.kind == "i":
                note_positive(b, scope, x)
    elif let.op in ("udiv", "floordiv", "sub", "add", "shr"):
        x, y = let.args
        low, high = interval(b, y)
        smaller = high <= 0 if let.op == "add" else low >= 0
        exact = let.op not in ("add", "sub") or let.attr == "nsw"
        if smaller and exact and interval(b, x)[0] >= 0:
            note_positive(b, scope, x)


def note_condition(b: Builder, scope: Scope, cond: Atom, holds: bool) -> None:
    """Records the operands that a condition proves positive or non-zero if it holds (or does not)."""
    let = b.definitions.get(cond.id) if isinstance(cond, Ref) else None
    if let is None:
        return
    if let.op == "not":
        note_condition(b, scope, let.args[0], not holds)
        return
    # both operands of a true `and` hold, and neither of a false `or`
    if let.op == ("and" if holds else "or"):
        for x in let.args:
            note_condition(b, scope, x, holds)
        return
    if len(let.args) != 2 or not all(a.type.dtype.is_integer for a in let.args):
        return
    x, y = let.args
    op = let.op if holds else _NEGATED.get(let.op)
    if op in ("lt", "le"):
        x, y, op = y, x, "gt" if op == "lt" else "ge"
    low = interval(b, y)[0]
    if (op == "gt" and low >= 0) or (op == "ge" and low >= 1):
        note_positive(b, scope, x)
    elif op == "ne":
        for one, other in ((x, y), (y, x)):
            if isinstance(one, Ref) and isinstance(other, Const) and other.value == 0:
                scope.nonzero.add(one.id)
                if interval(b, one)[0] >= 0:
                    note_positive(b, scope, one)


_NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


# ***** division *****
def divide(fe: Frontend, op: str, x: Atom, y: Atom) -> Atom:
    """``x // y`` (``floordiv``) or ``x % y`` (``mod``) of integers of one type."""
    b, type = fe.b, x.type
    low = interval(b, x)[0]
    divisor_min, divisor_max = interval(b, y)
    # negation wraps for the minimum, as the division must
    if (divisor_min, divisor_max) == (-1, -1):
        return b.op("neg", (x,), type) if op == "floordiv" else b.const(0, type)
    if divisor_min <= 0 <= divisor_max and not is_nonzero(b, y):
        active = fe.active_lanes(type.width)
        zero = b.op("eq", (y, b.const(0, type)), type.with_dtype(BOOL.dtype))
        counts = zero if active is None else b.op("and", (zero, active), zero.type)
        raised = b.op("any", (counts,), BOOL) if type.width else counts
        sign, operation = ("//", "division") if op == "floordiv" else ("%", "modulo")
        text = f"integer {operation} by zero"
        if type.width:
            refuse(fe, raised, "ZeroDivisionError", f"{text} in a vector", ())
        else:
            refuse(fe, raised, "ZeroDivisionError", f"{{}} {sign} 0: {text}", (x,))
        if active is not None:
            # inactive lanes divide by 1 instead of 0, and their result is 0
            one, nothing = b.const(1, type), b.const(0, type)
            safe = b.op("select", (zero, one, y), type)
            return b.op("select", (zero, nothing, _quotient(b, op, x, safe, True)), type)
        if isinstance(y, Ref):
            b.scopes[-1].nonzero.add(y.id)
            if divisor_min == 0:
                b.prove_positive(b.scopes[-1], y.id)
    wraps = divisor_min <= -1 <= divisor_max and low == _type_interval(type.dtype)[0] < 0
    # unsigned division needs no correction of the sign
    if low >= 0 and divisor_min >= 0:
        return b.op("udiv" if op == "floordiv" else "umod", (x, y), type)
    return _quotient(b, op, x, y, wraps)


def _quotient(b: Builder, op: str, x: Atom, y: Atom, wraps: bool) -> Atom:
    signed = x.type.dtype.kind == "i"
    return b.op(op, (x, y), x.type, "wrap" if wraps and signed else None)


def is_nonzero(b: Builder, y: Atom) -> bool:
    """Whether an integer is known not to be 0, apart from its interval."""
    if isinstance(y, Const):
        values = y.value if isinstance(y.value, tuple) else (y.value,)
        return all(values)
    if any(y.id in scope.nonzero for scope in b.scopes):
        return True
    let = b.definitions.get(y.id)
    if let is None or let.op != "select":
        return False
    # the guarded divisor k.select(y == 0, 1, y)
    cond, chosen, other = let.args
    test = b.definitions.get(cond.id) if isinstance(cond, Ref) else None
    if test is None or test.op != "eq" or not isinstance(test.args[1], Const):
        return False
    zero = test.args[0] is other and test.args[1].value == 0
    return zero and isinstance(chosen, Const) and is_nonzero(b, chosen)
