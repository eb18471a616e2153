"""Functions without a Python equivalent: vector loops, unrolling, assumptions, printing."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import builtins
from typing import Any

from max.kernel.errors import KernelValueError
from max.kernel.frontend.arithmetic import truth
from max.kernel.frontend.conversions import as_index, cast, extract, sequence
from max.kernel.frontend.division import note_condition
from max.kernel.frontend.functions.table import HandlerTable
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Index, VectorsValue, is_runtime
from max.kernel.frontend.views.views import View, checked_width
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.language import lang
from max.kernel.types import INDEX, f64, i64

FUNCTIONS = HandlerTable()


@FUNCTIONS.emits(lang.vectors)
def emit_vectors(fe: Frontend, *args: Any) -> Any:
    if len(args) not in (2, 3):
        fe.fail(f"k.vectors takes (n, width) or (start, stop, width), got {len(args)} arguments")
    start, stop, width = (0, *args) if len(args) == 2 else args
    return VectorsValue(as_index(fe, start), as_index(fe, stop), checked_width(fe, width))


@FUNCTIONS.emits(lang.static_range)
def emit_static_range(fe: Frontend, *args: Any) -> Any:
    """A range of compile-time integers, over which a loop is unrolled."""
    bounds = [as_index(fe, a) for a in args]
    integers = [b for b in bounds if isinstance(b, int)]
    if len(integers) != len(bounds):
        fe.fail(
            "k.static_range takes bounds known at compile time; use range(…) for a run-time loop"
        )
    return range(*integers)


@FUNCTIONS.emits(lang.unroll)
def emit_unroll(fe: Frontend, items: Any) -> Any:
    return sequence(fe, items, fe.node)


@FUNCTIONS.emits(lang.assume)
def emit_assume(fe: Frontend, cond: Any) -> None:
    """Adds an assumption, which also narrows the intervals of its operands."""
    cond = truth(fe, cond)
    if cond is False:
        fe.fail("k.assume: the condition does not hold", KernelValueError)
    if isinstance(cond, Ref):
        # later checks and divisions in this scope rely on it
        fe.b.effect("assume", (cond,))
        note_condition(fe.b, fe.b.scopes[-1], cond, True)


@FUNCTIONS.emits(lang.brief)
def emit_brief(fe: Frontend) -> None:
    if not fe.loop_depth:
        fe.fail("k.brief() must be in a loop: it promises that the loop ends soon")
    fe.b.effect("brief", ())


@FUNCTIONS.emits(lang.run_time)
def emit_run_time(fe: Frontend, x: Any) -> Any:
    """An index or a view without the compile-time values of its sizes and strides."""
    if not isinstance(x, View):
        return _forget_interval(fe, as_index(fe, x))
    shape = tuple([_forget_interval(fe, size) for size in x.shape])
    # vectors need a stride that is known to be 1
    strides = tuple([1 if stride == 1 else _forget_interval(fe, stride) for stride in x.strides])
    return View(x.base, x.dtype, shape, strides, x.name, x.writable, x.memory)


def _forget_interval(fe: Frontend, index: Index) -> Ref:
    """An integer whose value and interval the compiler forgets: it is read from a slot."""
    slot = fe.b.alloc(INDEX)
    fe.b.assign(slot, fe.b.index(index))
    return fe.b.read(slot, INDEX)


@FUNCTIONS.emits(lang.opaque)
def emit_opaque(fe: Frontend, x: Any) -> Any:
    return fe.b.op("opaque", (fe.b.index(as_index(fe, x)),), INDEX)


@FUNCTIONS.emits(lang.static_assert)
def emit_static_assert(
    fe: Frontend, cond: Any, message: str = "the condition does not hold"
) -> None:
    """Fails unless a compile-time condition holds."""
    if is_runtime(cond):
        fe.fail("k.static_assert takes a condition known at compile time; use raise for others")
    if not cond:
        fe.fail(f"static assertion: {message}", KernelValueError)


@FUNCTIONS.emits(lang.print, builtins.print)
def emit_print(fe: Frontend, text: Any, *xs: Any) -> None:
    """Emits a print of the text with its placeholders replaced by the values, vectors lane by lane."""
    if not isinstance(text, str):
        text, xs = "{}", (text, *xs)
    parts = text.split("{}")
    if len(parts) - 1 != len(xs):
        fe.fail(
            f"k.print: {len(parts) - 1} placeholders '{{}}' for {len(xs)} values", KernelValueError
        )
    out: list[Any] = [parts[0]]
    atoms: list[Atom] = []
    for x, following in zip(xs, parts[1:], strict=True):
        if isinstance(x, (Ref, Const)):
            lanes = [extract(fe, x, i) for i in range(x.type.width)] if x.type.is_vector else [x]
            if x.type.is_vector:
                out.append("[")
            for n, lane in enumerate(lanes):
                # printf has one conversion for floats and one for integers
                lane = cast(fe, lane, f64) if lane.type.dtype.is_float else cast(fe, lane, i64)
                if n:
                    out.append(", ")
                # an element type marks the place of a value in the text
                out.append(lane.type.dtype)
                atoms.append(lane)
            if x.type.is_vector:
                out.append("]")
        else:
            out.append(str(x))
        out.append(following)
    fe.b.effect("print", tuple(atoms), tuple(out))


@FUNCTIONS.emits(lang.target)
def emit_target(fe: Frontend) -> Any:
    return fe.target
