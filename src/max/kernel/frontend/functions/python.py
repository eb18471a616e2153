"""Python's built-in functions in kernels."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import builtins
from typing import Any

from max.kernel.errors import KernelValueError
from max.kernel.frontend.arithmetic import binary, truth
from max.kernel.frontend.conversions import as_index, cast, sequence
from max.kernel.frontend.functions.elementary import emit_rounded
from max.kernel.frontend.functions.table import HandlerTable
from max.kernel.frontend.functions.vectors import emit_all_lanes, emit_any_lane
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import RangeValue, describe, is_runtime
from max.kernel.frontend.views.views import View
from max.kernel.ir.nodes import Const, Ref
from max.kernel.types import f32, i64

FUNCTIONS = HandlerTable()


@FUNCTIONS.emits(builtins.range)
def emit_range(fe: Frontend, *args: Any) -> Any:
    """`range` with run-time bounds; the step must be known at compile time."""
    if not 1 <= len(args) <= 3:
        fe.fail(f"range takes one to three arguments, got {len(args)}")
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    step = as_index(fe, step)
    if not isinstance(step, int) or step == 0:
        fe.fail(
            f"the step of a range must be known at compile time, and not 0; got {describe(step)}"
        )
    return RangeValue(as_index(fe, start), as_index(fe, stop), step)


@FUNCTIONS.emits(builtins.tuple, builtins.list)
def emit_tuple(fe: Frontend, items: Any = ()) -> Any:
    return sequence(fe, items, fe.node)


@FUNCTIONS.emits(builtins.zip)
def emit_zip(fe: Frontend, *items: Any, strict: bool = False) -> Any:
    return tuple(zip(*(sequence(fe, i, fe.node) for i in items), strict=strict))


@FUNCTIONS.emits(builtins.enumerate)
def emit_enumerate(fe: Frontend, items: Any, start: int = 0) -> Any:
    return tuple(enumerate(sequence(fe, items, fe.node), start))


@FUNCTIONS.emits(builtins.reversed)
def emit_reversed(fe: Frontend, items: Any) -> Any:
    return tuple(reversed(sequence(fe, items, fe.node)))


@FUNCTIONS.emits(builtins.len)
def emit_len(fe: Frontend, items: Any) -> Any:
    if isinstance(items, View):
        return items.shape[0]
    return len(sequence(fe, items, fe.node))


@FUNCTIONS.emits(builtins.sum)
def emit_sum(fe: Frontend, items: Any, start: Any = 0) -> Any:
    total = start
    for item in sequence(fe, items, fe.node):
        # without `0 + item`: the default start adds no instruction and keeps the item's type
        total = item if total is start and start == 0 else binary(fe, "add", total, item)
    return total


@FUNCTIONS.emits(builtins.float)
def emit_float(fe: Frontend, x: Any) -> Any:
    return cast(fe, x, f32) if is_runtime(x) else _number(fe, float, x)


@FUNCTIONS.emits(builtins.int)
def emit_int(fe: Frontend, x: Any) -> Any:
    return cast(fe, x, i64) if is_runtime(x) else _number(fe, int, x)


def _number(fe: Frontend, cls: type[int] | type[float], x: Any) -> Any:
    try:
        return cls(x)
    except (TypeError, ValueError, OverflowError) as error:
        fe.fail(str(error), KernelValueError)


@FUNCTIONS.emits(builtins.bool)
def emit_bool(fe: Frontend, x: Any) -> Any:
    return truth(fe, x)


@FUNCTIONS.emits(builtins.isinstance)
def emit_isinstance(fe: Frontend, x: Any, cls: Any) -> Any:
    if is_runtime(x):
        fe.fail("isinstance is for values known at compile time; use x.dtype or x.width")
    return isinstance(x, cls)


@FUNCTIONS.emits(builtins.round)
def emit_round(fe: Frontend, x: Any, digits: Any = None) -> Any:
    return emit_rounded(fe, x) if is_runtime(x) else round(x, digits)


@FUNCTIONS.emits(builtins.any)
def emit_any(fe: Frontend, items: Any) -> Any:
    return _over(fe, items, "or")


@FUNCTIONS.emits(builtins.all)
def emit_all(fe: Frontend, items: Any) -> Any:
    return _over(fe, items, "and")


def _over(fe: Frontend, items: Any, op: str) -> Any:
    """`any` or `all` of a mask or of several values."""
    # of one mask: over its lanes
    if isinstance(items, (Ref, Const)):
        return (emit_any_lane if op == "or" else emit_all_lanes)(fe, items)
    result: Any = op == "and"
    for item in sequence(fe, items, fe.node):
        item = truth(fe, item)
        if not is_runtime(result) and not is_runtime(item):
            result = (result and item) if op == "and" else (result or item)
        else:
            result = binary(fe, op, result, item)
    return result
